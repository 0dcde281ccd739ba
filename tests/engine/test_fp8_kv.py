"""`kv_dtype="fp8"` end to end on the CPU: half the bytes, the same text whatever drafts, scales from the checkpoint, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec import ops
from specdec.boot import build_engine
from specdec.config import EngineConfig, SamplingParams, SpecConfig
from specdec.engine import Engine
from specdec.errors import ConfigError, UnsupportedCheckpoint
from specdec.kernels.kv_fp8 import FP8
from specdec.layers.attention import Attention
from tests.harness import GREEDY, SHAPES, P, R, assert_same, engine, oracle_of, run
from tests.tiny import write_tiny

SAMPLED = SamplingParams(temperature=0.8, seed=5, max_tokens=24, ignore_eos=True)
REQUESTS = {"greedy": (R, GREEDY), "sampled": (P, SAMPLED), "short": (P[:1], SAMPLED)}


@pytest.mark.parametrize("kind", ["t0", "two_groups"])
@pytest.mark.parametrize("shape", ["oracle-chain", "oracle-tree", "wrong-tree", "mix-tree", "ngram-tree", "draft-tree"])
def test_speculation_changes_nothing(shape: str, kind: str) -> None:
    options = {"kv_dtype": "fp8", "deterministic": True, "kind": kind, "max_num_batched_tokens": 24}
    off = run(engine(**options), REQUESTS)
    on = run(engine(SHAPES[shape], oracle=oracle_of(off), **options), REQUESTS)
    for request_id, output in off.items():
        assert_same(on[request_id], output, tolerance=0.0)
        assert SHAPES[shape].method != "oracle" or on[request_id].metrics.accepted > 0


def test_the_cache_holds_codes_and_half_of_bfloat16() -> None:
    narrow, wide = (engine(kv_dtype=name, num_kv_blocks=40) for name in ("fp8", "bfloat16"))
    assert narrow.kv.layer(0)[0].dtype is FP8 and 2 * narrow.kv.nbytes == wide.kv.nbytes
    many, few = (engine(kv_dtype=name, kv_cache_bytes=3 << 17) for name in ("fp8", "bfloat16"))
    assert many.kv.num_blocks[0] >= 1.8 * few.kv.num_blocks[0], "the same bytes hold more sequences"


def test_prefix_hits_preemption_and_forks_copy_codes() -> None:
    """A second run finds the first one's blocks; n = 3 shares and copies a tail block; little memory preempts."""
    options = {"kv_dtype": "fp8", "deterministic": True}
    requests = {"a": (R, GREEDY), "n": (R[:13], SamplingParams(n=3, temperature=0.9, seed=3, max_tokens=20, ignore_eos=True))}
    target = engine(SHAPES["ngram-tree"], **options)
    first, again = run(target, requests), run(target, requests)
    assert again["a"].metrics.cached_tokens > 0
    tight = run(engine(num_kv_blocks=32, max_model_len=96, **options), requests)
    for request_id, output in first.items():
        assert_same(again[request_id], output, tolerance=0.0)
        assert_same(tight[request_id], output, tolerance=0.0)


def _logits(target: Engine) -> torch.Tensor:
    seen: list[torch.Tensor] = []
    forward = target.runner.forward
    target.runner.forward = lambda batch: seen.append(forward(batch)) or seen[-1]  # type: ignore[method-assign, func-returns-value]
    run(target, {"a": (R, GREEDY)})
    return torch.cat([f.logits for f in seen[:3]])


def test_codes_cost_some_precision_and_no_more() -> None:
    """Three mantissa bits a key and value: the logits (standard deviation 3) move, by a fraction of that."""
    exact, coded = (_logits(engine(kv_dtype=name)) for name in ("auto", "fp8"))
    error = (exact[0] - coded[0]).abs().max().item()
    assert 1e-3 < error < 1.0


def _with_scales(path: Path, scales: dict[str, torch.Tensor]) -> str:
    write_tiny(path)
    file = path / "model.safetensors"
    save_file({**load_file(file), **scales}, file, metadata={"format": "pt"})
    return str(path)


def _engine(model: str, **options: Any) -> Engine:
    return build_engine(EngineConfig(model=model, device="cpu", speculation=SpecConfig.of("off"), kv_cache_bytes=1 << 20, **options))


@pytest.mark.parametrize("names", [("self_attn.{}_scale", ()), ("self_attn.attn.{}_scale", (1,)), ("self_attn.{}_proj.output_scale", (1,))])
def test_scales_come_from_the_checkpoint(names: tuple[str, tuple[int, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    form, shape = names
    wanted = {(i, side): 2.0 ** (i - 4) * (1.5 if side == "v" else 1.0) for i in range(2) for side in "kv"}
    scales = {f"model.layers.{i}.{form.format(side)}": torch.full(shape, x) for (i, side), x in wanted.items()}
    model = _with_scales(tmp_path / "scaled", scales)
    target = _engine(model, kv_dtype="fp8")
    layers: list[Attention] = [layer.attention for layer in target.runner.model.stack.layers]  # type: ignore[attr-defined]
    assert [layer.kv_scales for layer in layers] == [(wanted[i, "k"], wanted[i, "v"]) for i in range(2)]
    seen: set[tuple[float, float]] = set()
    op = ops.TABLE.ops["rope_write_kv"]
    monkeypatch.setattr(type(op), "__call__", _noting(type(op).__call__, seen))
    run(target, {"a": (P, GREEDY)})
    assert seen == {layer.kv_scales for layer in layers}


def _noting(call, seen: set):  # type: ignore[no-untyped-def]
    def noted(self, *args, **kwargs):  # type: ignore[no-untyped-def]
        if self.name == "rope_write_kv":
            seen.add(kwargs["kv_scales"])
        return call(self, *args, **kwargs)

    return noted


def test_one_old_scale_is_for_both(tmp_path: Path) -> None:
    model = _with_scales(tmp_path / "old", {"model.layers.1.self_attn.kv_scale": torch.tensor(0.25)})
    layers = _engine(model, kv_dtype="fp8").runner.model.stack.layers  # type: ignore[attr-defined]
    assert [layer.attention.kv_scales for layer in layers] == [(1.0, 1.0), (0.25, 0.25)]


@pytest.mark.parametrize("value", [torch.tensor(0.0), torch.tensor(torch.nan), torch.tensor([1.0, 2.0]), torch.tensor(-1.0)])
def test_a_scale_that_is_none_is_refused(value: torch.Tensor, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match="k_scale must be one positive number"):
        _engine(_with_scales(tmp_path / "bad", {"model.layers.0.self_attn.k_scale": value}))


def test_unknown_kinds_are_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="float32, float16, bfloat16, fp8, got 'fp4'") as error:
        engine(kv_dtype="fp4")
    assert error.value.param == "kv_dtype"


def test_the_compiled_backends_say_why_they_step_back() -> None:
    cache = torch.zeros(2, 4, 2, 16).to(FP8)
    q = torch.zeros(1, 4, 16)
    attention = ops.TABLE.ops["tree_attention"].backends[0]
    assert attention.rejects is not None and "float32 only" in (attention.rejects(q, cache, cache) or "")
