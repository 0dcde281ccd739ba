"""The CUDA fragment linear layer without a card: index functions exhaustively, and the kernel's own source, thread by thread."""

from __future__ import annotations

import ctypes

import pytest
import torch
from torch import Tensor

from specdec.kernels.case import randn
from specdec.kernels.cuda_fragments import partial_floats, prepare_call
from specdec.kernels.fp8_linear.cases import LAYOUTS, random_fp8
from specdec.kernels.fp8_linear.cuda import rejects
from specdec.kernels.fp8_linear.fragments import Fp8Fragments, pack, rejects_weight, unpack
from specdec.kernels.fp8_linear.reference import fp8_linear
from specdec.kernels.fp8_linear.weight import Fp8Weight
from specdec.kernels.tolerances import TOLERANCE
from tests.kernels.fragment_emulator import emulate, emulator

SHARED_MEMORY = {"Hopper": 232448, "Ampere": 166912, "Ada": 101376}
TOKEN_TILES = (1, 2, 3, 4, 6, 8)


def exact_weight(n: int, k: int, layout: str, seed: int = 0) -> Fp8Weight:
    """Numbers and scales whose products and sums float32 holds exactly: small integers, and powers of two."""
    g = torch.Generator().manual_seed(seed)
    data = torch.randint(-6, 7, (n, k), generator=g).float().to(torch.float8_e4m3fn)
    sizes = {"tensor": (1,), "channel": (n,), "block": (-(-n // 128), k // 128)}[layout]
    return Fp8Weight(data, torch.exp2(torch.randint(-3, 4, sizes, generator=g).float()))


def exact_rows(m: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(-4, 5, (m, k), generator=torch.Generator().manual_seed(m)).to(dtype)


def pointer(t: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(t.data_ptr())


def all_codes() -> Tensor:
    return torch.arange(256, dtype=torch.int32)


@pytest.mark.parametrize(("number", "dtype"), [(0, torch.bfloat16), (1, torch.float16)], ids=str)
def test_every_code_widens_exactly_in_every_place(number: int, dtype: torch.dtype) -> None:
    """All pairs of codes that share a half word, in both halves; NaN codes come out as ±480, which packing knows."""
    first, second = (t.flatten() for t in torch.meshgrid(all_codes(), all_codes(), indexing="ij"))
    half = (first & 0x80) << 8 | (first & 0x7F) << 4 | (second & 0x80) << 4 | (second & 0x70) << 8 | second & 0x0F
    words = (half | half.flip(0) << 16).contiguous()
    value = all_codes().to(torch.uint8).view(torch.float8_e4m3fn).float()
    value[0x7F], value[0xFF] = 480.0, -480.0
    for which, codes in ((0, first), (1, second)):
        out = torch.full((len(words), 2), torch.nan)
        emulator().widen_fp8(pointer(words), pointer(out), len(words), number, which)
        assert torch.equal(out.view(torch.int32), torch.stack((value[codes], value[codes.flip(0)]), 1).view(torch.int32))
        assert torch.equal(out.to(dtype).float(), out)


@pytest.mark.parametrize(("n", "k"), [(64, 128), (128, 256), (320, 384)])
def test_packing_follows_the_kernels_index_function_and_comes_back(n: int, k: int) -> None:
    w = random_fp8(n, k, "channel")
    words = torch.zeros(n * k // 4, dtype=torch.int32)
    emulator().pack_fp8(pointer(w.data), pointer(words), n, k)
    packed = pack(w)
    assert torch.equal(packed.words.flatten(), words) and packed.shape == w.shape
    back = unpack(packed)
    assert torch.equal(back.data.view(torch.uint8), w.data.view(torch.uint8)) and torch.equal(back.scale, w.scale)


@pytest.mark.parametrize("ctas", [1, 2, 7, 78, 108, 132])
@pytest.mark.parametrize(("n", "k"), [(64, 128), (256, 512), (576, 1536), (8192, 8192), (10240, 8192), (57344, 8192), (8192, 28672)])
def test_every_unit_has_one_owner_and_every_share_a_slot_of_its_own(n: int, k: int, ctas: int) -> None:
    blocks, tiles = k // 128, -(-n // 256)
    units = blocks * tiles
    ctas = min(ctas, units)
    first = torch.zeros(ctas + 1, dtype=torch.int32)
    owners = torch.zeros(units, dtype=torch.int32)
    slots = torch.zeros(ctas, tiles, dtype=torch.int32)
    emulator().partition(n, k, ctas, *(pointer(t) for t in (first, owners, slots)))
    counts = first.diff()
    assert first[0] == 0 and first[-1] == units and counts.min() >= 1 and counts.max() - counts.min() <= 1
    assert torch.equal(owners.long(), torch.repeat_interleave(torch.arange(ctas), counts.long()))
    shares = [(c, t) for t in range(tiles) for c in range(int(owners[t * blocks]), int(owners[(t + 1) * blocks - 1]) + 1)]
    assert {(c, t) for c, t in (slots >= 0).nonzero().tolist()} == set(shares)
    shared = [(c, t) for c, t in shares if owners[t * blocks] != owners[(t + 1) * blocks - 1]]
    taken = [int(slots[c, t]) for c, t in shared]
    assert len(set(taken)) == len(taken) and all(0 <= slot < 2 * ctas for slot in taken)


@pytest.mark.parametrize("card", SHARED_MEMORY)
def test_stages_fit_and_suffice(card: str) -> None:
    limit = SHARED_MEMORY[card]
    assert emulator().tokens(limit) == (32 if card == "Ada" else 64)
    for tiles in TOKEN_TILES:
        if 8 * tiles > emulator().tokens(limit):
            continue
        stages = emulator().stages(limit, tiles)
        assert stages >= 2 and emulator().shared_memory(stages, tiles) <= limit
        if card == "Hopper":  # the bytes in flight that the comment in fragment_layout.h counts on
            assert (stages - 1) * 32768 >= 96 << 10


def test_matrix_loads_meet_no_bank_conflicts() -> None:
    assert emulator().bank_conflicts(8) == 1


def test_partial_sums_have_the_room_that_the_kernel_uses() -> None:
    for rows in range(1, 200):
        assert 4 * partial_floats(132, rows) == emulator().partial_bytes(132, rows)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("m", [1, 9, 17, 31, 47, 64])  # one of each number of token tiles
def test_exact_where_numbers_are(m: int, layout: str) -> None:
    """A ragged tile, tiles shared by CTAs, tiles of one CTA; orders of CTAs and threads drawn anew."""
    n, k, dtype = 448, 512, torch.float16 if m in (9, 64) else torch.bfloat16
    w, x = exact_weight(n, k, layout), exact_rows(m, k, dtype)
    expected = (x.double() @ w.dequantize().double().T).to(dtype)
    for ctas, stages in ((1, 4), (3, 2), (8, 6)):
        assert torch.equal(emulate(x, pack(w), ctas=ctas, stages=stages, seed=m + ctas), expected), (ctas, stages)


@pytest.mark.parametrize(("n", "k"), [(64, 128), (64, 1280), (192, 256), (256, 128), (640, 384)])
def test_exact_at_the_edges_of_shapes(n: int, k: int) -> None:
    w, x = exact_weight(n, k, "block"), exact_rows(5, k, torch.bfloat16)
    expected = (x.double() @ w.dequantize().double().T).to(x.dtype)
    for ctas in range(1, min(10, -(-n // 256) * k // 128) + 1):
        assert torch.equal(emulate(x, pack(w), ctas=ctas, seed=ctas), expected), ctas


@pytest.mark.parametrize("layout", LAYOUTS)
def test_agrees_with_the_reference(layout: str) -> None:
    w, x = random_fp8(320, 640, layout), randn(19, 640).bfloat16()
    expected = fp8_linear(x, w).float()
    for ctas in (2, 5):
        y = emulate(x, pack(w), ctas=ctas).float()
        assert (y - expected).abs().max() <= TOLERANCE["fp8_linear"] * expected.abs().max()


@pytest.mark.parametrize("layout", LAYOUTS)
def test_bits_depend_neither_on_other_rows_nor_on_schedules(layout: str) -> None:
    w, x = pack(random_fp8(320, 640, layout)), randn(64, 640).bfloat16()
    whole = emulate(x, w, ctas=7)
    assert torch.equal(emulate(x, w, ctas=7, stages=5, seed=99), whole)
    for rows in (1, 9, 17, 30, 48):
        assert torch.equal(emulate(x[:rows], w, ctas=7, stages=2, seed=rows), whole[:rows]), rows


def test_rows_may_be_apart_and_infinite() -> None:
    w = random_fp8(128, 256, "channel")
    x = randn(6, 512).bfloat16()[:, 128:384]
    x[1, 3], x[2, 7], x[3] = torch.inf, torch.nan, 0.0
    x[4] *= 1e-30  # what would be lost if 2^120 were left to the scales
    expected, y = fp8_linear(x, w).float(), emulate(x, pack(w), ctas=2).float()
    for row in range(6):
        size = expected[row][expected[row].isfinite()].abs().max() if expected[row].isfinite().any() else 1.0
        torch.testing.assert_close(y[row], expected[row], rtol=0.0, atol=float(TOLERANCE["fp8_linear"] * size), equal_nan=True)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_nan_code_makes_its_channel_nan_and_no_other(layout: str) -> None:
    w, x = exact_weight(128, 256, layout), exact_rows(3, 256, torch.bfloat16)
    w.data.view(torch.uint8)[5, 200], w.data.view(torch.uint8)[70, 0] = 0x7F, 0xFF
    y, expected = emulate(x, pack(w), ctas=2), fp8_linear(x, w)
    assert y[:, [5, 70]].isnan().all() and y.isnan().sum() == 6
    assert torch.equal(y.nan_to_num(), expected.nan_to_num())
    assert torch.equal(pack(w).dequantize().isnan().any(1).nonzero().flatten(), torch.tensor([5, 70]))


def test_blocks_with_scale_zero_count_nothing() -> None:
    w, x = exact_weight(256, 512, "block"), exact_rows(4, 512, torch.bfloat16)
    w.scale[0, 1], w.scale[1] = 0.0, 0.0
    packed = pack(w)
    assert torch.equal(emulate(x, packed, ctas=3), (x.double() @ w.dequantize().double().T).to(x.dtype))
    assert torch.equal(packed.dequantize(), w.dequantize())


def test_what_it_cannot_hold_is_refused() -> None:
    assert "96 × 128" in str(rejects_weight(random_fp8(96, 128, "tensor")))
    assert "64 × 200" in str(rejects_weight(random_fp8(64, 200, "tensor")))
    far = exact_weight(128, 256, "block")
    far.scale[0, 0], far.scale[0, 1] = 2.0**31, 2.0**-31
    assert "2^60" in str(rejects_weight(far))
    far.scale[0, 0] = torch.inf
    assert rejects_weight(far) is not None
    with pytest.raises(ValueError, match="multiples of 64 × 128"):
        pack(random_fp8(96, 128, "tensor"))
    w = exact_weight(64, 128, "tensor")
    assert "prepare_fp8" in str(rejects(exact_rows(1, 128, torch.bfloat16), w))
    assert "float32" in str(rejects(exact_rows(1, 128, torch.float32), pack(w)))
    assert rejects(exact_rows(1, 128, torch.bfloat16), pack(w)) is None and isinstance(pack(w), Fp8Fragments)


def test_rows_that_16_byte_copies_cannot_reach_are_copied_first() -> None:
    w, whole = pack(exact_weight(64, 128, "tensor")), exact_rows(3, 256, torch.bfloat16)
    for x, copied in ((whole[:, :128], False), (whole[:, 8:136], False), (whole[:, 1:129], True), (whole[:, ::2], True)):
        call, (_, held, _) = prepare_call(x, w, 1)
        assert (held.data_ptr() != x.data_ptr()) is copied and torch.equal(held, x)
        assert call.x % 16 == 0 and call.x_stride == 2 * held.stride(0) and held.stride(1) == 1
    with pytest.raises(ValueError, match="64 × 128"):
        prepare_call(whole, w, 1)
