"""The CUDA product of e4m3 matrices against float64: its very source on an emulated machine, and on a card."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from specdec.kernels.fp8_fp8_linear.cuda import Cut, cut, prepare_call, product, rejects
from specdec.kernels.fp8_linear.weight import Fp8Weight
from tests.kernels.fragment_emulator import emulated, guarded

PROCESSORS = 132  # of an H200
CARD_SHAPES = [(10240, 8192), (8192, 8192), (57344, 1024), (6144, 4096), (4096, 14336), (576, 1536), (1000, 384), (8, 128)]


def example(m: int, n: int, k: int, channels: bool = True) -> tuple[Tensor, Tensor, Fp8Weight]:
    """Random codes, subnormals and the largest numbers among them."""
    codes = [torch.randint(0, 256, shape, dtype=torch.uint8) for shape in ((m, k), (n, k))]
    q, data = (c.where((c & 0x7F) != 0x7F, 0).view(torch.float8_e4m3fn) for c in codes)
    return q, torch.rand(m) + 0.5, Fp8Weight(data, torch.rand(n if channels else 1) + 0.5)


def check(found: Tensor, q: Tensor, scale: Tensor, weight: Fp8Weight, leeway: float = 1e-5) -> None:
    """Rounded once to bfloat16; the leeway of float32 sums (less exact on the card) is of the sum of magnitudes."""
    left, right = q.double() * scale[:, None].double(), weight.data.double() * weight.row_scales()[:, None].double()
    exact, magnitude = left @ right.T, left.abs() @ right.abs().T
    assert ((found.double() - exact).abs() <= exact.abs() * 2**-8 + leeway * magnitude).all()


def emulate(q: Tensor, scale: Tensor, weight: Fp8Weight, how: Cut, stages: int = 3, seed: int = 0) -> Tensor:
    y, beside = guarded(torch.empty(q.shape[0], weight.shape[0], dtype=torch.bfloat16))
    call = prepare_call(y, q, scale, weight, how.cluster)
    call.stages = stages
    numbers = how.width, how.pieces, how.cluster, how.blocks, ctypes.c_uint64(seed)
    emulated("emulated_e4m3_linear.cpp").emulate_e4m3_linear(ctypes.byref(call), *numbers)
    assert all(margin.isnan().all() for margin in beside), "a write outside the results"
    return y


@pytest.mark.parametrize(
    ("m", "n", "k", "how"),
    [
        (16, 96, 512, Cut(32, 1, 1, 2)),  # several rounds, the last one of one block
        (9, 64, 256, Cut(32, 2, 1, 2)),
        (33, 120, 384, Cut(48, 2, 2, 2)),  # the last unit and the last tile are cut; a tile of nothing
        (128, 112, 256, Cut(112, 1, 1, 1)),
        (100, 40, 640, Cut(32, 2, 4, 4)),  # blocks without rows of the weight fetch for the others
    ],
)
def test_on_the_emulated_machine(m: int, n: int, k: int, how: Cut) -> None:
    call = example(m, n, k, channels=m != 9)
    check(emulate(*call, how, seed=m), *call)


def test_bits_of_a_row_depend_on_nothing_but_the_row_and_the_weight() -> None:
    q, scale, weight = example(70, 48, 512)
    whole = emulate(q, scale, weight, Cut(48, 2, 2, 2), seed=1)
    assert torch.equal(whole[:20], emulate(q[:20], scale[:20], weight, Cut(32, 1, 1, 2), seed=2))


def test_a_code_that_is_not_a_number_spoils_its_row_alone() -> None:
    q, scale, weight = example(12, 32, 128)
    q.view(torch.uint8)[3, 77] = 0x7F
    found = emulate(q, scale, weight, Cut(32, 1, 1, 1))
    assert found[3].isnan().all() and found[[*range(3), *range(4, 12)]].isfinite().all()


@pytest.mark.parametrize("n", [8, 576, 4096, 6144, 8192, 10240, 28672, 57344, 128256])
@pytest.mark.parametrize("m", [9, 16, 17, 33, 64, 65, 128])
def test_blocks_share_the_weight_evenly_and_the_rows_wholly(m: int, n: int) -> None:
    """Of the shapes of Llama no block has more than 6 % above an even share."""
    how = cut(m, n, PROCESSORS)
    rounds = -(-n // (how.width * how.blocks))
    assert how.blocks <= PROCESSORS and how.blocks % how.cluster == 0
    if 4096 <= n <= 57344:
        assert rounds * how.width <= 1.06 * n / PROCESSORS
    call = prepare_call(torch.empty(m, n, dtype=torch.bfloat16), *example(m, n, 128), how.cluster)
    assert call.share % 8 == 0 and m <= call.share * how.cluster <= (64 if m <= 64 else 128)


@pytest.mark.gpu
@pytest.mark.parametrize(("n", "k"), CARD_SHAPES)
@pytest.mark.parametrize("m", [9, 16, 24, 32, 48, 64, 65, 96, 127, 128])
def test_on_a_card(m: int, n: int, k: int) -> None:
    """A row has the same bits beside any others."""
    q, scale, weight = example(m, n, k, channels=n != 576)
    card = q.cuda(), scale.cuda(), weight.to(torch.device("cuda"))
    found = product(*card, cut(m, n, PROCESSORS))
    check(found, *card, leeway=5e-4)
    first = product(card[0][:9], card[1][:9], card[2], cut(9, n, PROCESSORS))
    assert torch.equal(found[:9], first)


@pytest.mark.gpu
def test_more_or_fewer_rows_and_other_scales_go_elsewhere() -> None:
    q, scale, weight = example(64, 128, 256)
    card = q.cuda(), scale.cuda(), weight.to(torch.device("cuda"))
    assert rejects(*card, torch.bfloat16) is None
    assert rejects(*card, torch.float32) and rejects(card[0][:8], card[1][:8], card[2], torch.bfloat16)
