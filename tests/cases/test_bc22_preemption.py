"""BC-22 with ORACLE and heads: preempted requests come back with clean state."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.config import SamplingParams
from tests.harness import SHAPES, VOCAB, Log, R, assert_same, engine, oracle_of, run
from tests.spec import heads

LIMIT = 92  # tokens that 23 blocks of 4 hold; a request needs 88


ALL = SHAPES | heads.SHAPES


@pytest.mark.parametrize("shape", ["oracle-chain", "oracle-tree", "mix-tree", "ngram-chain", "suffix-tree", *heads.SHAPES])
@pytest.mark.parametrize(("temperature", "caching"), [(0.0, True), (1.0, True), (1.0, False)])
def test_bc22_four_requests_do_not_fit(shape: str, temperature: float, caching: bool) -> None:
    """Six requests of R, 40 tokens, in a pool of 24 blocks × 4 tokens, with the ids checked before each forward."""
    requests = {
        f"r{i}": (R if i % 2 else R[i:], SamplingParams(temperature=temperature, seed=i, max_tokens=40, ignore_eos=True)) for i in range(6)
    }
    expected = {name: run(engine(deterministic=True), {name: request})[name] for name, request in requests.items()}
    target = engine(
        ALL[shape], oracle=oracle_of(expected), deterministic=True, num_kv_blocks=24, max_model_len=LIMIT, enable_prefix_caching=caching
    )
    _assert_rows(target)
    log = Log()
    found = run(target, requests, log=log)
    for name in requests:
        assert_same(found[name], expected[name], tolerance=0)
    if caching:  # without sharing the second request waits outside until the first is done
        assert log.preempted > 0
        assert sum(output.metrics.preemptions for output in found.values()) == log.preempted == target.preemptions


def test_bc22_preempted_before_the_first_token() -> None:
    """A request that loses its blocks while it is still prefilling starts again from nothing."""
    old = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)
    requests = {"old": (R[:20], old), "young": ([7, *R], SamplingParams(temperature=0, max_tokens=20, ignore_eos=True, prompt_logprobs=1))}
    expected = {name: run(engine(deterministic=True), {name: request})[name] for name, request in requests.items()}
    target = engine(
        SHAPES["oracle-chain"], oracle=oracle_of(expected), deterministic=True, num_kv_blocks=25, max_model_len=80, max_num_batched_tokens=8
    )
    _assert_rows(target)
    found = run(target, requests)
    for name in requests:
        assert_same(found[name], expected[name], tolerance=0)


def _assert_rows(target: Any) -> None:
    """Every id that reaches the embedding is a real one, at a real position."""
    forward = target.runner.forward

    def checked(batch: Any) -> Any:
        ids, positions = batch.input_ids, batch.positions
        assert ((ids >= 0) & (ids < VOCAB)).all() and ((positions >= 0) & (positions < LIMIT)).all()
        return forward(batch)

    target.runner.forward = checked
