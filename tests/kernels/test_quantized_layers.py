"""Storages of FP8 and 4-bit weights: their values by hand, the references against float64, stacking, tiles, methods."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from specdec import ops
from specdec.kernels.fp8_linear.cases import LAYOUTS, random_fp8
from specdec.kernels.fp8_linear.weight import Fp8Weight
from specdec.kernels.int4_linear.cases import random_int4
from specdec.kernels.int4_linear.weight import Int4Weight, pack_words, unpack_words
from specdec.layers.linear import make_linear
from specdec.quant.fp8 import stack_fp8
from specdec.quant.int4 import as_q4_0, stack_int4
from tests.kernels.matrix import needs_extension

CPU = {"device": "cpu", "dtype": torch.float32}


def exact(weight: Fp8Weight | Int4Weight) -> Tensor:
    """float64 [N,K], element by element from the definition."""
    rows, cols = weight.shape
    out = torch.empty(rows, cols, dtype=torch.float64)
    numbers = weight.data.double() if isinstance(weight, Fp8Weight) else None
    for n in range(rows):
        for k in range(cols):
            if isinstance(weight, Int4Weight):
                code = (int(weight.data[n, k // 8]) >> 4 * (k % 8)) & 15
                out[n, k] = (code - int(weight.zero[n, k // weight.group])) * float(weight.scale[n, k // weight.group])
            else:
                place = (n // 128, k // 128) if weight.blocked else (0 if len(weight.scale) == 1 else n)
                out[n, k] = numbers[n, k] * float(weight.scale[place])
    return out


WEIGHTS = {
    **{layout: random_fp8(130, 140, layout) for layout in LAYOUTS},
    "int4": random_int4(20, 96, 32, symmetric=False),
    "int4, one group": random_int4(20, 96, 96, symmetric=True),
}


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_references_against_float64(name: str, dtype: torch.dtype) -> None:
    weight = WEIGHTS[name]
    values = exact(weight)
    torch.testing.assert_close(weight.dequantize().double(), values, rtol=1e-6, atol=0.0)
    x = torch.randn(5, weight.shape[1]).to(dtype)
    found = ops.fp8_linear(x, weight) if isinstance(weight, Fp8Weight) else ops.int4_linear(x, weight)
    expected = x.double() @ values.T
    assert found.dtype is dtype
    error = float((found.double() - expected).abs().max() / expected.abs().max())
    assert error < (2**-8 if dtype is torch.bfloat16 else 1e-6)


@pytest.mark.parametrize("name", LAYOUTS)
def test_w8a8_against_float64(name: str) -> None:
    weight, x = WEIGHTS[name], torch.randn(6, 140) * torch.logspace(-3, 3, 6)[:, None]
    x[2] = 0.0
    q, scale = ops.quantize_fp8(x)
    assert torch.equal(scale, x.abs().amax(1) / 448) and not q[2].float().any()
    step = torch.maximum(x.abs() * 2**-4, scale[:, None] * 2**-10)  # half a unit in the last place, or half the least number
    assert bool(((q.float() * scale[:, None] - x).abs() <= step * (1 + 1e-6)).all())
    expected = (q.double() * scale.double()[:, None]) @ exact(weight).T
    found = ops.fp8_fp8_linear(q, scale, weight, torch.float32).double()
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6 * float(expected.abs().max()))


def test_a_row_with_nan_or_infinity_stays_so_in_w8a8() -> None:
    x = torch.randn(4, 140)
    x[1, 3], x[2, 7] = torch.nan, torch.inf
    out = ops.fp8_fp8_linear(*ops.quantize_fp8(x), WEIGHTS["channel"], torch.float32)
    assert out[[0, 3]].isfinite().all() and not out[[1, 2]].isfinite().any()


def test_words_round_trip() -> None:
    codes = torch.randint(0, 16, (7, 40), dtype=torch.uint8)
    assert torch.equal(unpack_words(pack_words(codes)), codes)
    assert pack_words(torch.arange(8, dtype=torch.uint8)[None]).item() == 0x76543210
    assert pack_words(torch.tensor([[0] * 7 + [15]], dtype=torch.uint8)).item() == -0x10000000


@pytest.mark.parametrize("name", WEIGHTS)
def test_rows_of_a_weight(name: str) -> None:
    weight, start = WEIGHTS[name], 128 if name == "block" else 7
    assert torch.equal(weight.rows(start, weight.shape[0]).dequantize(), weight.dequantize()[start:])
    assert torch.equal(weight.rows(0, 11).dequantize(), weight.dequantize()[:11])


def test_scales_per_tensor_that_differ_become_scales_per_channel() -> None:
    a, b = (random_fp8(n, 64, "tensor", seed=n) for n in (20, 30))
    (stacked,) = stack_fp8([a, b, b])
    assert stacked.scale.shape == (80,) and torch.equal(stacked.dequantize(), torch.cat([w.dequantize() for w in (a, b, b)]))
    (same,) = stack_fp8([b, b])
    assert same.scale.shape == (1,) and torch.equal(same.dequantize(), torch.cat([b.dequantize()] * 2))
    (mixed,) = stack_fp8([a, random_fp8(9, 64, "channel")])
    assert mixed.scale.shape == (29,)


def test_blocks_are_stacked_where_they_end_whole() -> None:
    whole, part = random_fp8(256, 200, "block"), random_fp8(100, 200, "block", seed=1)
    assert [w.shape[0] for w in stack_fp8([whole, part])] == [356]
    assert [w.shape[0] for w in stack_fp8([part, whole, part])] == [100, 356]
    assert [w.shape[0] for w in stack_fp8([whole, random_fp8(5, 200, "channel")])] == [256, 5]
    (stacked,) = stack_fp8([whole, part])
    assert torch.equal(stacked.dequantize(), torch.cat((whole.dequantize(), part.dequantize())))


def test_groups_of_one_size_are_stacked() -> None:
    a, b, c = (random_int4(10, 96, group, symmetric=False, seed=group) for group in (32, 32, 48))
    assert [(w.shape[0], w.group) for w in stack_int4([a, b, c])] == [(20, 32), (10, 48)]
    assert torch.equal(stack_int4([a, b])[0].dequantize(), torch.cat((a.dequantize(), b.dequantize())))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kinds", [("tensor", "tensor"), ("block", "block"), ("tensor", "int4", "dense"), ("int4", "int4"), ("block",)])
def test_shards_of_any_storages_make_one_layer(kinds: tuple[str, ...], dtype: torch.dtype) -> None:
    """Tiles in float32 where the extension is there, ops otherwise; either way the layer of the values."""
    made = {"dense": lambda i: torch.randn(24, 64) * 0.05, "int4": lambda i: random_int4(24, 64, 32, symmetric=i > 0, seed=i)}
    shards = [made[k](i) if k in made else random_fp8(24, 64, k, seed=i) for i, k in enumerate(kinds)]
    values = torch.cat([s if isinstance(s, Tensor) else s.dequantize() for s in shards])
    bias, x = torch.randn(len(values)), torch.randn(5, 64).to(dtype)
    layer = make_linear(shards, bias, device="cpu", dtype=dtype)
    assert layer.method.name.startswith("tiled") == (dtype is torch.float32 and ops.compiled())
    assert (layer.in_features, layer.out_features) == (64, len(values))
    expected = x.float() @ values.T + bias
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}[dtype]
    torch.testing.assert_close(layer(x).float(), expected, rtol=0.0, atol=tolerance * float(expected.abs().max()))
    torch.testing.assert_close(layer.dequantize(), values, rtol=1e-2, atol=1e-4)  # scales of int4 in the activation dtype


def test_q4_0_only_where_it_is_exact() -> None:
    good = random_int4(20, 128, 64, symmetric=True, dtype=torch.float16)
    blocks = as_q4_0(good)
    assert blocks is not None and torch.equal(blocks.dequantize(), good.dequantize())
    assert as_q4_0(random_int4(20, 128, 64, symmetric=True, dtype=torch.float32)) is None, "float16 would round the scales"
    assert as_q4_0(random_int4(20, 96, 48, symmetric=True, dtype=torch.float16)) is None, "blocks of 32 would span groups"
    assert make_linear([good], **CPU).method.name == ("tiled Q4_0" if ops.compiled() else "int4 group 64, W4A16")


SMALL = {  # storage on the CPU -> (shards, method, bytes a weight, without padding)
    "blocks": ([random_fp8(160, 300, "block", seed=i) for i in range(2)], "tiled F8 by 128 columns", 1.04),
    "zero points": (
        [random_int4(160, 256, 64, symmetric=i > 0, dtype=torch.float16, seed=i) for i in range(2)],
        "tiled Q4_0 with offsets",
        0.63,
    ),
    "zero points, one group": ([random_int4(160, 256, 256, symmetric=False, dtype=torch.float16)], "tiled Q4_0 with offsets", 0.58),
    "float32 scales": ([random_int4(160, 256, 64, symmetric=False)], "tiled F32", 4.0),
}


@needs_extension
@pytest.mark.parametrize("name", SMALL)
def test_storages_in_several_tiled_products(name: str) -> None:
    shards, method, size = SMALL[name]
    layer, values = make_linear(shards, **CPU), torch.cat([shard.dequantize() for shard in shards])
    assert layer.method.name == method and layer.method.nbytes <= size * values.numel()
    torch.testing.assert_close(layer.dequantize(), values, rtol=1e-6, atol=1e-9)
    x = torch.randn(9, values.shape[1]) * torch.logspace(-3, 3, 9)[:, None]
    expected = x.double() @ values.double().T
    error = (layer(x).double() - expected).abs().amax(1) / expected.abs().amax(1)
    assert float(error.max()) < 3e-6
    for rows in (1, 2, 8):
        assert torch.equal(layer(x)[:rows], layer(x[:rows]))
    before = torch.get_num_threads()
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            assert torch.equal(layer(x), layer(x.clone()))
            found = layer(x)
        finally:
            torch.set_num_threads(before)
        assert torch.equal(found, layer(x))


def test_activation_precision_does_not_depend_on_the_rows() -> None:
    for act_fp8 in (False, True):
        layer = make_linear([WEIGHTS["channel"]], device="cpu", dtype=torch.bfloat16, act_fp8=act_fp8, deterministic=True)
        x = torch.randn(70, 140).bfloat16()
        assert layer.method.fixed_order and torch.equal(layer(x)[:3], layer(x[:3])) and ("W8A8" in layer.method.name) == act_fp8
