"""The CUDA decoder segment against the ops it takes the place of: its very source on an emulated machine, and on a card."""

from __future__ import annotations

import ctypes
import math
from dataclasses import fields, replace
from typing import cast

import pytest
import torch
from torch import Tensor

from specdec.kernels.decoder_stack import cuda as stack_cuda
from specdec.kernels.decoder_stack import reference as stack_reference
from specdec.kernels.decoder_stack import segment as seg
from specdec.kernels.fp8_linear.weight import Fp8Weight
from specdec.kernels.inputs import Rows, chain, random_tree
from specdec.kernels.rms_norm.reference import add_rms_norm
from specdec.kernels.rope.reference import rope_write_kv
from specdec.kernels.silu_mul.reference import silu_mul
from specdec.layers.decoder import DecoderStack, Layer
from specdec.layers.linear import Linear, make_linear
from specdec.layers.norm import RMSNorm
from specdec.layers.rotary import Rotary
from specdec.models.config import RopeConfig
from specdec.quant.fp8 import to_fp8
from specdec.types import Batch
from tests.kernels.fragment_emulator import emulated
from tests.kernels.stack_cases import Shape, arguments
from tests.kernels.stack_cases import stack as stack_of

LIMIT = 232448  # bytes of shared memory of a block on Hopper


def emulator() -> ctypes.CDLL:
    return emulated("emulated_segment.cpp")


def weight(rows: int, columns: int, fp8: bool) -> Tensor | Fp8Weight:
    dense = torch.randn(rows, columns) / columns**0.5
    return to_fp8(dense) if fp8 else dense.bfloat16()


def example(
    rows: int, hidden: int, inner: int, q: int, qkv: int | None, *, fp8: bool, device: str = "cpu"
) -> tuple[seg.Segment, Tensor, Tensor]:
    """(weights, mixed, residual)."""
    shapes = [(hidden, q), (2 * inner, hidden), (hidden, inner), *([] if qkv is None else [(qkv, hidden)])]
    made = [weight(*shape, fp8) for shape in shapes]
    weights = [seg.Weight.of(w.to(torch.device(device)) if isinstance(w, Fp8Weight) else w.to(device)) for w in made]
    norms = [seg.Scaling((1 + 0.1 * torch.randn(hidden)).bfloat16().to(device), eps) for eps in (1e-5, 1e-6)]
    segment = seg.Segment(*weights[:3], norms[0], *([] if qkv is None else [weights[3], norms[1]]))
    return segment.measured(), torch.randn(rows, q).bfloat16().to(device), torch.randn(rows, hidden).bfloat16().to(device)


def product(x: Tensor, w: seg.Weight) -> Tensor:
    y = x.float() @ w.data.float().T
    return (y if w.scale is None else y * w.scale).bfloat16()


def expected(segment: seg.Segment, mixed: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
    """By the reference ops."""
    x, mid = add_rms_norm(product(mixed, segment.out), residual, segment.post_norm.weight, segment.post_norm.eps)
    branch = product(silu_mul(product(x, segment.gate_up)), segment.down)
    if segment.qkv is None or segment.next_norm is None:
        return branch + mid, None
    x, last = add_rms_norm(branch, mid, segment.next_norm.weight, segment.next_norm.eps)
    return last, product(x, segment.qkv)


def check(found: tuple[Tensor, Tensor | None], want: tuple[Tensor, Tensor | None]) -> None:
    """Roundings to bf16 may fall either way and travel on, so numbers are near and only a few of them apart."""
    for a, b in zip(found, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None and b is not None:
            torch.testing.assert_close(a.float(), b.float(), rtol=0.02, atol=0.04)
            assert (a.float() - b.float()).abs().mean() < 2e-3


CASES = {
    "one row": (1, 128, 256, 384, 160),
    "eight rows, odd numbers of tiles": (8, 256, 384, 128, 224),
    "eleven rows": (11, 128, 256, 128, 96),
    "sixteen rows, the last layer": (16, 128, 256, 128, None),
    "fewer tiles than CTAs": (3, 128, 128, 128, 32),
}


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", CASES)
def test_emulated(name: str, fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(len(name))
    rows, hidden, inner, q, qkv = CASES[name]
    segment, mixed, residual = example(rows, hidden, inner, q, qkv, fp8=fp8)
    assert seg.rejects(segment.weights) is None
    for ctas, chunk in ((1, 2048), (3, 128)):
        if ctas > 1:  # down reads its tokens window by window
            monkeypatch.setattr(seg, "window_of", lambda columns, rows, chunk: min(columns, 2 * chunk))
        counters = torch.zeros(seg.COUNTERS, dtype=torch.int64)
        call, outputs = seg.prepare_call(segment, mixed, residual, counters, limit=LIMIT, chunk=chunk)
        call.stages = 3
        for seed in range(2):  # the counters go on rising
            for tensor in outputs:
                if tensor is not None:
                    tensor.fill_(torch.nan)
            emulator().emulate_segment(ctypes.byref(call), int(fp8), ctas, ctypes.c_uint64(ctas + seed))
            check(outputs[:2], expected(segment, mixed, residual))


def test_emulated_tokens_of_any_size() -> None:
    """Tokens are multiplied in f16 with a power of two each: neither huge nor tiny ones, nor one huge number among small ones, suffer."""
    torch.manual_seed(0)
    segment, mixed, residual = example(3, 128, 256, 128, 96, fp8=True)
    mixed *= torch.tensor([1e-30, 1e6, 1.0]).bfloat16()[:, None]
    mixed[2, 7] = 3e5
    counters = torch.zeros(seg.COUNTERS, dtype=torch.int64)
    call, outputs = seg.prepare_call(segment, mixed, residual, counters, limit=LIMIT)
    call.stages = 3
    emulator().emulate_segment(ctypes.byref(call), 1, 2, ctypes.c_uint64(5))
    want = (residual + product(mixed, segment.out)).float()
    torch.testing.assert_close(outputs[2].float(), want, rtol=0.01, atol=1e-2)


@pytest.mark.parametrize("window", [None, 128])
def test_emulated_numbers_that_are_none(window: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A token with NaN or infinity spoils itself alone."""
    torch.manual_seed(1)
    if window is not None:
        monkeypatch.setattr(seg, "window_of", lambda columns, rows, chunk: window)
    segment, mixed, residual = example(4, 128, 256, 128, 96, fp8=True)
    mixed[1, 5], mixed[3, 9] = torch.nan, torch.inf
    counters = torch.zeros(seg.COUNTERS, dtype=torch.int64)
    call, outputs = seg.prepare_call(segment, mixed, residual, counters, limit=LIMIT, chunk=128)
    call.stages = 3
    emulator().emulate_segment(ctypes.byref(call), 1, 2, ctypes.c_uint64(5))
    want = expected(segment, mixed, residual)
    for found, wanted in zip(outputs[:2], want, strict=True):
        assert found is not None and wanted is not None
        assert not found[[1, 3]].isfinite().any()
        check((found[[0, 2]], None), (wanted[[0, 2]], None))


@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("size", [32, 64])
def test_emulated_rotation(size: int, fp8: bool) -> None:
    """Queries come back turned, keys and values lie in their slots, and nothing else of the caches is touched."""
    torch.manual_seed(size)
    rows, heads, kv_heads = 5, 3, 2
    segment, mixed, residual = example(rows, 128, 128, 128, (heads + 2 * kv_heads) * size, fp8=fp8)
    k_cache, v_cache = torch.randn(2, 6, 4, kv_heads, size).bfloat16().unbind()
    cos, sin = torch.rand(2, 40, size // 2).unbind()
    positions, slots = torch.tensor([7, 39, 0, 12, 3]), torch.tensor([9, -1, 23, 0, 14])
    turn = seg.Turn(cos.contiguous(), sin.contiguous(), positions, slots, k_cache.clone(), v_cache.clone())
    assert turn.rejects() is None
    counters = torch.zeros(seg.COUNTERS, dtype=torch.int64)
    call, outputs = seg.prepare_call(segment, mixed, residual, counters, turn, limit=LIMIT)
    call.stages = 3
    emulator().emulate_segment(ctypes.byref(call), int(fp8), 2, ctypes.c_uint64(size))
    _, projected = expected(segment, mixed, residual)
    assert projected is not None and outputs[1] is not None
    q = rope_write_kv(projected, positions, cos, sin, k_cache, v_cache, slots)
    for found, want in ((outputs[1].view(q.shape), q), (turn.k_cache, k_cache), (turn.v_cache, v_cache)):
        torch.testing.assert_close(found.float(), want.float(), rtol=0.02, atol=0.04)
        assert (found.float() - want.float()).abs().mean() < 2e-3


def test_growth_leaves_f16_room_for_whatever_a_token_can_make() -> None:
    """Tokens along the longest rows of gate and up, where a product is as large as can be."""
    torch.manual_seed(3)
    segment, _, _ = example(1, 128, 256, 128, None, fp8=True)
    rows = segment.gate_up.data.float() * cast("Tensor", segment.gate_up.scale)[:, None]
    gate, up = rows.chunk(2)
    token = segment.post_norm.peak * 128**0.5 * torch.nn.functional.normalize(rows, dim=1)  # one along every row, as long as any
    largest = ((token @ gate.T).abs().amax(1) * (token @ up.T).abs().amax(1)).max()
    assert math.frexp(segment.inner_grown)[0] == 0.5
    assert largest * segment.inner_grown < 2**15


def test_chunks_divide_rows() -> None:
    assert [seg.chunk_bytes(row) for row in (4096, 14336, 28672, 1152, 3072, 5120, 96)] == [2048, 2048, 2048, 1152, 1536, 1280, 0]


SHAPES = {  # and the most rows that shared memory holds
    "SmolLM2-135M": (576, 1536, 576, 960, 16),
    "Llama-3.1-8B": (4096, 14336, 4096, 6144, 8),
    "Llama-3.3-70B": (8192, 28672, 8192, 10240, 8),
}


ON_A_CARD = [
    pytest.param(name, rows, fp8, id=f"{name}-{rows}-{'fp8' if fp8 else 'bf16'}")
    for name, (hidden, *_, most) in SHAPES.items()
    for rows in (1, 5, 8, 16)
    for fp8 in (False, True)
    if rows <= most and hidden * (1 if fp8 else 2) % seg.PIECE == 0
]


@pytest.mark.gpu
@pytest.mark.parametrize("name, rows, fp8", ON_A_CARD)
def test_on_a_card(name: str, rows: int, fp8: bool) -> None:
    torch.manual_seed(rows)
    hidden, inner, q, qkv, _ = SHAPES[name]
    segment, mixed, residual = example(rows, hidden, inner, q, qkv, fp8=fp8, device="cuda:0")
    counters = torch.zeros(seg.COUNTERS, dtype=torch.int64, device="cuda:0")
    assert seg.prepare_call(segment, mixed, residual, counters, limit=LIMIT)[0].stages >= 2
    want = expected(segment, mixed, residual)
    for _ in range(3):
        check(seg.run(segment, mixed, residual, counters), want)


STACKS = {
    "one row": [Rows(100)],
    "a chain": [Rows(70, tree=tuple(chain(5)))],
    "a tree and others": [Rows(63, tree=tuple(random_tree(9, 1))), Rows(31), Rows(15, 2)],
}


def narrow(stack: DecoderStack, fp8: bool, device: torch.device) -> DecoderStack:
    """The same layers in bf16 on `device`, weights as they are or in FP8."""

    def linear(one: Linear) -> Linear:
        raw = to_fp8(one.dequantize()) if fp8 else one.dequantize()
        return make_linear([raw], device=device, dtype=torch.bfloat16)

    def norm(one: RMSNorm) -> RMSNorm:
        return RMSNorm(one.weight.to(device, torch.bfloat16), one.eps)

    first = stack.layers[0].attention.rotary
    rotary = Rotary(RopeConfig(), 2 * first.cos.shape[1], len(first.cos), device=device)
    layers = []
    for layer in stack.layers:
        assert isinstance(layer, Layer)
        attention = replace(layer.attention, qkv=linear(layer.attention.qkv), out=linear(layer.attention.out), rotary=rotary)
        layers.append(
            replace(
                layer,
                input_norm=norm(layer.input_norm),
                attention=attention,
                post_norm=norm(layer.post_norm),
                gate_up=linear(layer.gate_up),
                down=linear(layer.down),
            )
        )
    return DecoderStack(layers, norm(stack.norm))


@pytest.mark.parametrize("fp8, reason", [(False, "not FP8"), (True, "less than 64 MB")], ids=["bf16", "fp8"])
def test_layers_that_gain_nothing_are_known_without_a_compiler(fp8: bool, reason: str) -> None:
    shape = Shape(hidden=128, inner=256, heads=2, kv_heads=1, head_dim=64, kinds=("F32",))
    made = narrow(stack_of(shape), fp8, torch.device("cpu"))
    assert stack_cuda.cut(made.layers, made.norm)[1] is None
    plan, why_not = stack_cuda.prepare_layers(made.layers, made.norm)
    assert plan is None and reason in str(why_not)


@pytest.mark.gpu
@pytest.mark.parametrize("fp8", [False, True], ids=["bf16", "fp8"])
@pytest.mark.parametrize("name", STACKS)
def test_a_stack_on_a_card(name: str, fp8: bool) -> None:
    """Segments and attention give what the layers' own ops give, taps included, and the same K and V."""
    shape = Shape(hidden=512, inner=1536, heads=8, kv_heads=4, head_dim=64, kinds=("F32",), windows=(None, 24, 24))
    (x, stack, batch, caches, groups), kwargs = arguments(shape, STACKS[name], (3, 0, 1), padding=2)
    on_card = narrow(cast("DecoderStack", stack), fp8, torch.device("cuda:0"))
    made, reason = stack_cuda.cut(on_card.layers, on_card.norm)
    assert reason is None
    on_card.plan, reason = stack_cuda.build(made)
    assert on_card.plan is not None, reason
    moved = Batch(**{f.name: value.cuda() if isinstance(value := getattr(batch, f.name), Tensor) else value for f in fields(Batch)})
    found = []
    for run in (stack_cuda.decoder_stack, stack_reference.decoder_stack):
        own = [(k.cuda().bfloat16(), v.cuda().bfloat16()) for k, v in cast("list[tuple[Tensor, Tensor]]", caches)]
        start = cast("Tensor", x).cuda().bfloat16()
        hidden, tapped = run(start, on_card, moved, own, cast("list[int]", groups), **kwargs)
        found.append((hidden, tapped, own[2][0].nan_to_num(0.0), own[2][1].nan_to_num(0.0)))
    for a, b in zip(*found, strict=True):
        assert a is not None and b is not None
        torch.testing.assert_close(a[:-2].float(), b[:-2].float(), rtol=0.03, atol=0.06)
        assert (a[:-2].float() - b[:-2].float()).abs().mean() < 5e-3
