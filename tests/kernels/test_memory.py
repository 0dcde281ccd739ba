"""Huge pages: zeroed memory of any shape, and weights gathered into one allocation."""

from __future__ import annotations

import gc

import pytest
import torch

from specdec import memory, ops
from specdec.kernels.cases import random_weight
from specdec.quant.none import Dense
from specdec.quant.tiled import Tiled, gather

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(0,), (3, 5), (2, 0, 7), (1 << 20, 3), (5, 1000, 1001)])
def test_zeros_are_zeros_that_can_be_written(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    for _ in range(2):  # the second time perhaps in memory the first one gave back
        made = memory.zeros(shape, dtype, CPU)
        assert made.shape == shape and made.dtype is dtype and made.is_contiguous() and not made.any()
        made.fill_(7)
        assert (made == 7).all()


def test_memory_lives_as_long_as_its_last_view() -> None:
    view = memory.zeros((4, 1 << 20), torch.float32, CPU)[3, -5:]
    gc.collect()
    view += 1
    assert view.tolist() == [1.0] * 5


def test_a_negative_size_is_refused() -> None:
    with pytest.raises(RuntimeError):
        memory.zeros((-1,), torch.uint8, CPU)


def test_gathered_weights_are_the_same_in_one_place() -> None:
    parts = [random_weight(n, 64, kind, seed=n) for n, kind in ((17, "Q4_1"), (40, "F32"), (16, "Q8_0"), (33, "Q4_0"))]
    before = [part.data.clone() for part in parts]
    methods = [Tiled(parts[:2]), Dense(torch.ones(2, 2)), Tiled(parts[2:3]), Tiled(parts[3:])]
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(1))
    outputs = [ops.tiled_linear(x, part) for part in parts]
    gather(methods)
    after = [part for method in methods if isinstance(method, Tiled) for part in method.parts]
    assert len({part.data.untyped_storage().data_ptr() for part in after}) == 1
    for old, part, y in zip(before, after, outputs, strict=True):
        assert torch.equal(old, part.data) and old.shape == part.data.shape and part.data.data_ptr() % 64 == 0
        assert torch.equal(ops.tiled_linear(x, part), y)
    gather([])
