"""4-bit weights in the CUDA fragment linear layer, on the emulator: packing, every size of group, exact products."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from specdec.kernels.case import randn
from specdec.kernels.int4_linear.cases import random_int4
from specdec.kernels.int4_linear.cuda import rejects
from specdec.kernels.int4_linear.fragments import pack, rejects_weight, unpack
from specdec.kernels.int4_linear.reference import int4_linear
from specdec.kernels.int4_linear.weight import Int4Weight
from specdec.kernels.tolerances import TOLERANCE
from tests.kernels.fragment_emulator import emulate, emulator


def exact_weight(n: int, k: int, group: int, dtype: torch.dtype) -> Int4Weight:
    """All codes, all zero points, scales that are powers of two."""
    w = random_int4(n, k, group, symmetric=False, dtype=dtype, seed=n + group)
    exponents = torch.randint(-2, 3, w.scale.shape, generator=torch.Generator().manual_seed(k))
    return Int4Weight(w.data, torch.exp2(exponents.float()).to(dtype), w.zero, group)


def exact_rows(m: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-3, 4, (m, k), generator=torch.Generator().manual_seed(m)).to(dtype)


@pytest.mark.parametrize(("n", "k"), [(64, 128), (192, 384)])
def test_packing_follows_the_kernels_index_function_and_comes_back(n: int, k: int) -> None:
    w = random_int4(n, k, 128, symmetric=False, dtype=torch.bfloat16)
    words, codes = torch.zeros(n * k // 8, dtype=torch.int32), w.codes()
    emulator().pack_int4(ctypes.c_void_p(codes.data_ptr()), ctypes.c_void_p(words.data_ptr()), n, k)
    packed = pack(w)
    assert torch.equal(packed.words.flatten(), words) and packed.shape == (n, k)
    back = unpack(packed)
    assert all(torch.equal(getattr(back, name), getattr(w, name)) for name in ("data", "scale", "zero")) and back.group == w.group
    assert torch.equal(packed.dequantize(), w.dequantize())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("group", [32, 64, 128, 256, 512])
def test_exact_where_numbers_are(group: int, dtype: torch.dtype) -> None:
    w = exact_weight(320, 512, group, dtype)
    for m, ctas, stages in ((1, 1, 3), (17, 3, 2), (48, 8, 6), (64, 7, 4)):
        x = exact_rows(m, 512, dtype)
        expected = (x.double() @ w.dequantize().double().T).to(dtype)
        assert torch.equal(emulate(x, pack(w), ctas=ctas, stages=stages, seed=m), expected), (m, ctas)


@pytest.mark.parametrize("symmetric", [True, False])
def test_agrees_with_the_reference(symmetric: bool) -> None:
    """Besides the result, (code - zero) * scale is rounded to x's dtype; the reference does not."""
    for dtype in (torch.bfloat16, torch.float16):
        w = random_int4(192, 640, 32, symmetric=symmetric, dtype=dtype)
        x = randn(9, 640).to(dtype)
        expected, y = int4_linear(x, w).float(), emulate(x, pack(w), ctas=4).float()
        assert (y - expected).abs().max() <= TOLERANCE["int4_linear"] * expected.abs().max()


def test_bits_depend_neither_on_other_rows_nor_on_schedules() -> None:
    w, x = pack(random_int4(320, 640, 64, symmetric=False, dtype=torch.bfloat16)), randn(64, 640).bfloat16()
    whole = emulate(x, w, ctas=7)
    for rows in (1, 9, 30, 48):
        assert torch.equal(emulate(x[:rows], w, ctas=7, stages=2, seed=rows), whole[:rows]), rows


def test_what_it_cannot_hold_is_refused() -> None:
    def weight(n: int, k: int, group: int, dtype: torch.dtype = torch.bfloat16) -> Int4Weight:
        return random_int4(n, k, group, symmetric=True, dtype=dtype)

    assert "96 × 128" in str(rejects_weight(weight(96, 128, 128)))
    assert "groups of 24" in str(rejects_weight(weight(64, 384, 24)))
    assert "groups of 192" in str(rejects_weight(weight(64, 384, 192)))
    assert "float32" in str(rejects_weight(weight(64, 128, 64, torch.float32)))
    w = weight(64, 128, 32)
    assert "fragments" in str(rejects(exact_rows(1, 128, torch.bfloat16), w))
    assert "scales in torch.bfloat16" in str(rejects(exact_rows(1, 128, torch.float16), pack(w)))
    assert rejects(exact_rows(1, 128, torch.bfloat16), pack(w)) is None
