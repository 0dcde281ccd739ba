"""Models that normalise queries and keys (Qwen3): one op does it together with RoPE and the KV write, for every kind of cache."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec import ops
from specdec.kernels.registry import Op
from specdec.models.load import load_model
from tests.harness import GREEDY, SHAPES, R, assert_same, engine, oracle_of, run
from tests.oracle import run_logits
from tests.tiny import QWEN3_MOE, write_tiny

TOKENS = [(7 * i * i + 13 * i + 5) % 400 for i in range(40)]


def test_each_layer_calls_one_op_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_model(write_tiny(tmp_path, seed=4, **QWEN3_MOE)).model
    calls: list[str] = []
    run_op = Op.__call__
    monkeypatch.setattr(Op, "__call__", lambda op, *args, **kwargs: calls.append(op.name) or run_op(op, *args, **kwargs))
    run_logits(model, TOKENS, chunks=[])
    assert calls.count("norm_rope_write_kv") == model.config.num_layers
    assert "rope_write_kv" not in calls


@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_speculation_changes_nothing(kv_dtype: str) -> None:
    options = {"kind": "qwen3_moe", "kv_dtype": kv_dtype, "deterministic": True, "max_num_batched_tokens": 24}
    off = run(engine(**options), {"r": (R, GREEDY)})
    on = run(engine(SHAPES["oracle-tree"], oracle=oracle_of(off), **options), {"r": (R, GREEDY)})
    assert_same(on["r"], off["r"], tolerance=0.0)
    assert on["r"].metrics.accepted > 0


@pytest.mark.skipif(not ops.compiled(), reason=str(ops.WHY_NOT))
def test_compiled_halves_agree_with_the_reference(tmp_path: Path) -> None:
    model = load_model(write_tiny(tmp_path, seed=4, **QWEN3_MOE)).model
    found = run_logits(model, TOKENS, chunks=[])
    with ops.override("norm_rope_write_kv", "reference"):
        torch.testing.assert_close(found, run_logits(model, TOKENS, chunks=[]), atol=1e-4, rtol=1e-4)
