"""Products, experts and draft heads' candidates at the widths of real models, against float64 where a few outputs are enough to tell.
Without a card the kernels are interpreted, so weights there have all their columns, which is what is summed over, and some hundred of
their rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specdec import ops
from specdec.kernels.case import randn
from specdec.kernels.fp8_linear.cases import random_fp8
from specdec.kernels.fp8_linear.weight import Fp8Weight
from specdec.kernels.int4_linear.cases import random_int4
from specdec.kernels.int4_linear.weight import Int4Weight
from specdec.kernels.moe_experts.cases import KINDS, experts_of, routed
from tests.kernels.device import DEVICE, on
from tests.kernels.matrix import poisoned

pytestmark = pytest.mark.skipif(ops.WHY_NO_TRITON is not None, reason=str(ops.WHY_NO_TRITON))
CARD = DEVICE == "cuda"
WIDE = {  # N, K: Llama 70B, Llama 8B, Qwen3-30B-A3B, gpt-oss-120b; SmolLM2 is in the matrix
    "llama-70b qkv": (10240, 8192),
    "llama-70b gate_up": (57344, 8192),
    "llama-70b down": (8192, 28672),
    "llama-8b o": (4096, 4096),
    "llama-8b down": (4096, 14336),
    "qwen3-30b-a3b qkv": (5120, 2048),
    "qwen3-30b-a3b o": (2048, 4096),
    "gpt-oss-120b qkv": (5120, 2880),
    "gpt-oss-120b o": (2880, 4096),
}
OPS = ("dense_linear", "fp8_linear", "fp8_linear block", "fp8_fp8_linear", "fp8_fp8_linear block", "int4_linear")
EXPERTS = {  # hidden, inner, storage
    "qwen3-30b-a3b, FP8 blocks": (2048, 768, "fp8 block"),
    "qwen3-30b-a3b, int4": (2048, 768, "int4 32"),
    "gpt-oss-120b, MXFP4": (2880, 2880, "mxfp4"),
}


def quick(name: str | int, chosen: str | int) -> object:
    return pytest.param(name, marks=() if CARD or name == chosen else pytest.mark.slow)


def weight_of(op: str, n: int, k: int) -> Tensor | Fp8Weight | Int4Weight:
    if op == "dense_linear":
        return randn(n, k, seed=1, scale=k**-0.5).bfloat16()
    if op == "int4_linear":
        return random_int4(n, k, 128 if k % 128 == 0 else 32, symmetric=False, dtype=torch.bfloat16)
    return random_fp8(n, k, "block" if op.endswith("block") else "channel")


def first_rows(weight: Tensor | Fp8Weight | Int4Weight, count: int) -> Tensor:
    """In float64."""
    if isinstance(weight, Tensor):
        return weight[:count].double()
    if isinstance(weight, Int4Weight):
        part = Int4Weight(weight.data[:count], weight.scale[:count], weight.zero[:count], weight.group)
        return part.dequantize().double()
    scale = weight.scale if weight.scale.numel() == 1 else weight.scale[:1] if weight.blocked else weight.scale[:count]
    return Fp8Weight(weight.data[:count], scale).dequantize().double()


@pytest.mark.parametrize("shape", [quick(name, "qwen3-30b-a3b qkv") for name in WIDE])
@pytest.mark.parametrize("op", OPS)
@pytest.mark.parametrize("backend", ["triton", "triton_fixed"])
def test_products(op: str, shape: str, backend: str) -> None:
    """bfloat16 activations, 1 and 33 rows; the first 128 features are compared. One step of bfloat16 and what sums of float32 lose."""
    n, k = WIDE[shape]
    weight = weight_of(op, n if CARD else 192, k)
    exact, place = first_rows(weight, 128), on(DEVICE, weight)
    if isinstance(place, Int4Weight):
        place = ops.prepare_int4(place)
    for rows in (1, 33):
        x = randn(rows, k, seed=rows).bfloat16()
        call: tuple[object, ...] = (on(DEVICE, x), place)
        if op.startswith("fp8_fp8"):
            group = 128 if op.endswith("block") and k % 128 == 0 else None
            q, scale = ops.quantize_fp8(x, group)
            x = q.double() * scale.double().view(rows, -1).repeat_interleave(group or k, 1)
            call = (on(DEVICE, q), on(DEVICE, scale), place, torch.bfloat16)
        with ops.override(op.split()[0], backend), poisoned():
            found = getattr(ops, op.split()[0])(*call).cpu().double()
        wanted = x.double() @ exact.t()
        assert found.isfinite().all()
        off = (found[:, :128] - wanted).abs()
        loose = 2e-3 if op.startswith("fp8_fp8") and CARD else 1e-3  # Hopper's FP8 product keeps some 14 bits
        assert (off <= wanted.abs() * 2**-7 + loose * wanted.abs().max()).all(), f"{rows} rows: {off.max()} of {wanted.abs().max()}"


@pytest.mark.parametrize("name", [quick(name, "") for name in EXPERTS])
@pytest.mark.parametrize("backend", ["triton", "triton_fixed"])
def test_experts(name: str, backend: str) -> None:
    """Three rows among two experts, the fourth a padded one. Interpreted, experts are narrow inside."""
    hidden, inner, kind = EXPERTS[name]
    inner = inner if CARD else 192
    gpt = kind == "mxfp4"
    made = experts_of(KINDS[kind], 2, hidden, inner, cut=gpt, bias=gpt)
    ids, weights = routed(4, 1, 2)
    ids[3] = -1
    call = (randn(4, hidden, seed=1), ids, weights, made)
    with ops.override("moe_experts", "reference"):
        expected = ops.moe_experts(*call)
    with ops.override("moe_experts", backend), poisoned():
        found = ops.moe_experts(*on(DEVICE, call[:3]), ops.prepare_experts(on(DEVICE, made))).cpu()
    torch.testing.assert_close(found, expected, rtol=0.0, atol=5e-5 * expected.abs().max().item())
    assert not found[3].any()


@pytest.mark.parametrize("hidden", [quick(width, 2048) for width in (576, 2048, 2880, 4096, 8192)])
def test_candidates(hidden: int) -> None:
    """The output layer of a head of that width over 32,000 draft tokens in bfloat16. Shares decide: two candidates may tie."""
    vocab, rows, width = 32000 if CARD else 300, 3, 10
    index = torch.arange(rows)
    call = (
        *(randn(rows, hidden, seed=1).bfloat16(), randn(vocab, hidden, seed=2, scale=2 * hidden**-0.5).bfloat16(), torch.ones(rows)),
        *(torch.arange(vocab) * 4, index + (1 << 40), index, index, index != 1, 0, 0.7, width),
    )
    with ops.override("draft_topk", "reference"):
        ids, shares, lse = ops.draft_topk(*call)
    with ops.override("draft_topk", "triton"), poisoned():
        found, found_shares, found_lse = on("cpu", ops.draft_topk(*on(DEVICE, call)))
    torch.testing.assert_close(found_shares, shares, rtol=1e-3, atol=1e-6)
    torch.testing.assert_close(found_lse, lse, rtol=1e-5, atol=1e-5)
    assert (found == ids).float().mean() > 0.9 and (found % 4 == 0).all()
