"""The runner's timing probe: what it reads and what it leaves alone."""

from __future__ import annotations

import pytest
import torch

from specdec.types import Batch
from tests.harness import engine


@pytest.mark.parametrize("kind", ["t0", "two_groups"])
def test_a_timed_pass_reads_a_context_of_distinct_blocks_and_changes_nothing(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = engine(kind=kind).runner
    content = [torch.randn(cache.shape) for i in range(runner.model.config.num_layers) for cache in runner.kv.layer(i)]
    caches = [cache for i in range(runner.model.config.num_layers) for cache in runner.kv.layer(i)]
    for cache, values in zip(caches, content, strict=True):
        cache.copy_(values)
    seen: list[Batch] = []
    forward = runner.forward
    monkeypatch.setattr(runner, "forward", lambda batch: seen.append(batch) or forward(batch))
    assert runner.measure(4, 40, repeats=1) > 0.0
    assert runner.measure(150, 40, repeats=1) > 0.0  # three sequences

    size = runner.kv.block_size
    for tables, num_blocks in zip(seen[0].block_tables, runner.kv.num_blocks, strict=True):
        [table] = tables.tolist()
        assert len(table) == -(-44 // size) and set(table) <= set(range(1, num_blocks))
        assert len(set(table)) == min(len(table), num_blocks - 1)
    assert all(torch.equal(cache, values) for cache, values in zip(caches, content, strict=True))


def test_a_timed_pass_wraps_round_a_pool_that_is_too_small() -> None:
    runner = engine(num_kv_blocks=13, max_model_len=48, max_num_seqs=1).runner
    assert runner.measure(2, 200, repeats=1) > 0.0
