"""W8A8: norms and SwiGLU write the e4m3 codes that the layer behind them multiplies, to the bit those of quantising their results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec import ops
from specdec.kernels.registry import Op
from specdec.layers.decoder import Layer
from specdec.layers.linear import Linear, make_linear
from specdec.layers.norm import RMSNorm
from specdec.models.llama import LlamaModel
from specdec.models.load import load_model
from specdec.quant.fp8 import Codes, to_fp8
from specdec.quant.stacked import Stacked
from tests.models.tiny_quantized import FORMATS, write_quantized
from tests.oracle import run_logits
from tests.tiny import QWEN3_MOE, write_tiny

IDS = [(7 * i * i + 13 * i + 5) % 400 for i in range(23)]
CHUNKS = [11, 1, 4, 7]
FUSED = ("rms_norm_fp8", "add_rms_norm_fp8", "silu_mul_fp8")


def linears(model: LlamaModel) -> Iterator[Linear]:
    for layer in model.layers:
        yield from layer.linears


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """How often each op is called, those inside others included."""
    calls: Counter[str] = Counter()
    call = Op.__call__

    def noted(self: Op, *args: Any, **kwargs: Any) -> Any:
        calls[self.name] += 1
        return call(self, *args, **kwargs)

    Op.__call__ = noted  # type: ignore[method-assign]
    try:
        yield calls
    finally:
        Op.__call__ = call  # type: ignore[method-assign]


@contextmanager
def backends(kind: str) -> Iterator[None]:
    """ "chosen" as on this machine, or every op's "reference" or "triton" (with a fixed order) that it has."""
    with ExitStack() as stack:
        for name, op in ops.TABLE.ops.items():
            wanted = [b.name for b in op.backends if b.missing is None and b.fixed_order and b.name.startswith(kind)]
            if wanted:
                stack.enter_context(ops.override(name, wanted[0]))
        yield


def both_ways(model: LlamaModel) -> tuple[Tensor, Tensor]:
    """Logits of the text in shares, quantised upstream, and by an op of its own before each product."""
    upstream = run_logits(model, IDS, CHUNKS)
    for linear in linears(model):
        linear.takes_codes = False
    return upstream, run_logits(model, IDS, CHUNKS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["chosen", "reference", pytest.param("triton", marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", ["ct fp8 dynamic", "fp8 blocks"])
def test_logits_have_the_bits_of_quantising_separately(tmp_path: Path, form: str, kind: str, dtype: str) -> None:
    if kind == "triton" and (ops.WHY_NO_TRITON is not None or torch.cuda.is_available()):
        pytest.skip("interpreted: a card's norm sums in another order in the kernel that stores bytes (test_fused_fp8.py)")
    write_quantized(tmp_path / "q", FORMATS[form])
    model = load_model(tmp_path / "q", dtype=dtype, act_dtype="fp8", deterministic=True, device="cpu").model
    with backends(kind), ops.deterministic("cpu"):
        upstream, apart = both_ways(model)
    assert upstream.isfinite().all() and torch.equal(upstream, apart)


def test_only_the_output_of_attention_has_a_quantisation_of_its_own(tmp_path: Path) -> None:
    write_quantized(tmp_path / "q", FORMATS["ct fp8 dynamic"])
    model = load_model(tmp_path / "q", act_dtype="fp8", device="cpu").model
    layers = len(model.layers)
    with counted() as calls:
        run_logits(model, IDS)
    assert [calls[name] for name in FUSED] == [1, 2 * layers - 1, layers]
    assert calls["quantize_fp8"] == layers and calls["fp8_fp8_linear"] == 4 * layers
    assert calls["rms_norm"] == 0 and calls["add_rms_norm"] == 1, "the final norm, whose reader is lm_head"


def test_wide_activations_stay_wide(tmp_path: Path) -> None:
    """W8A16, and the experts of a W8A8 model, whose router reads the norm too."""
    write_quantized(tmp_path / "q", FORMATS["ct fp8 dynamic"])
    with counted() as calls:
        run_logits(load_model(tmp_path / "q", device="cpu").model, IDS)
    assert not any(calls[name] for name in (*FUSED, "quantize_fp8"))
    write_tiny(tmp_path / "moe", **QWEN3_MOE)
    model = load_model(tmp_path / "moe", quantization="fp8", act_dtype="fp8", device="cpu").model
    layers, dense = len(model.layers), sum(isinstance(layer, Layer) for layer in model.layers)
    with counted() as calls:
        run_logits(model, IDS)
    assert [calls[name] for name in FUSED] == [1, layers - 1 + dense, dense] and dense < layers
    assert calls["add_rms_norm"] == layers - dense + 1 and calls["quantize_fp8"] == layers
    upstream, apart = both_ways(model)
    assert torch.equal(upstream, apart)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_layer_of_several_weights_takes_codes_if_all_of_them_do(dtype: torch.dtype) -> None:
    g = torch.Generator().manual_seed(0)
    rows, x = torch.randn(48, 128, generator=g), torch.randn(5, 128, generator=g).to(dtype)
    shards, bias = [to_fp8(rows[:40]), to_fp8(rows[40:])], torch.randn(48, generator=g)
    blocked = type(shards[0])(shards[0].data, torch.ones(1, 1))
    for parts in (shards, [blocked, shards[1]]):
        layer = make_linear(parts, bias, device="cpu", dtype=dtype, act_fp8=True)
        assert layer.takes_codes and isinstance(layer.method, Stacked) == (parts is not shards)
        assert torch.equal(layer(Codes(*ops.quantize_fp8(x), dtype)), layer(x)) and layer(x).dtype is dtype
    assert not make_linear(shards, device="cpu", dtype=dtype).takes_codes
    assert not make_linear([shards[0], rows[40:]], device="cpu", dtype=dtype, act_fp8=True).takes_codes


def test_a_norm_asks_its_reader() -> None:
    g = torch.Generator().manual_seed(1)
    norm = RMSNorm(torch.randn(64, generator=g), 1e-5)
    stream, branch = torch.randn(2, 3, 64, generator=g)
    reader = make_linear([to_fp8(torch.randn(8, 64, generator=g))], device="cpu", dtype=torch.float32, act_fp8=True)
    codes, total = norm.before(reader, stream, branch)
    assert isinstance(codes, Codes) and torch.equal(total, stream + branch)
    wide, same = norm.before(None, stream, branch)
    assert isinstance(wide, Tensor) and torch.equal(same, total)
    assert torch.equal(reader(codes), reader(wide)) and torch.equal(reader(norm.before(reader, stream)[0]), reader(norm(stream)))
