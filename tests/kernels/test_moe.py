"""What the matrix does not show of the experts' kernels: narrow activations, blocks, and the bit recipes that only a card runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from specdec.kernels.moe_experts import reference, triton, triton_rows, triton_unpack
from specdec.kernels.moe_experts.cases import KINDS, experts_of, routed
from specdec.kernels.moe_experts.weight import dense_expert, storage, streamed
from specdec.kernels.mxfp4.units import PLACES, Mxfp4Units, unpack_units
from specdec.kernels.mxfp4.weight import MAGNITUDES, Mxfp4Weight, pack, repack, unpack
from tests.kernels.device import DEVICE, on
from tests.kernels.matrix import poisoned


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_activations(kind: str, dtype: torch.dtype) -> None:
    """Both round the activation and the result to `dtype`; where a sum lies between two numbers they may round it to either, and
    what that changes in a result is below one step of the largest."""
    made = experts_of(KINDS[kind], 3, 64, 32)
    if kind == "dense":
        made = replace(made, gate_up=storage(made.gate_up)[0].to(dtype), down=storage(made.down)[0].to(dtype))
    x, (ids, weights) = torch.randn(4, 64, generator=torch.Generator().manual_seed(0)).to(dtype), routed(4, 2, 3)
    if kind.startswith("mxfp4") and dtype is torch.float16:
        assert triton.rejects(x, ids, weights, made) == "MXFP4 scales do not fit float16"
        return
    assert triton.rejects(x, ids, weights, made) is None
    expected = reference.moe_experts(x, ids, weights, made)
    call = on(DEVICE, (x, ids, weights, made))
    with poisoned():
        found = triton.moe_experts(*call).cpu()
    assert found.dtype is dtype
    torch.testing.assert_close(found, expected, rtol=0.0, atol=2 * torch.finfo(dtype).eps * expected.abs().max().item())


@pytest.mark.parametrize("rows", [32, 64])
def test_wider_blocks(rows: int) -> None:
    """Blocks as for prompts: more pairs an expert than one holds, and an expert with one more than fits."""
    made = experts_of(KINDS["dense"], 3, 48, 40, bias=True)
    x, (ids, weights) = torch.randn(rows + 1, 48, generator=torch.Generator().manual_seed(0)), routed(rows + 1, 2, 3)
    ids[:, 0], ids[:, 1] = 1, torch.arange(rows + 1) % 2 * 2
    expected = reference.moe_experts(x, ids, weights, made)
    call = on(DEVICE, (x, ids, weights, made))
    with poisoned():
        found = triton.run(*call, triton.Plan(rows)).cpu()
    torch.testing.assert_close(found, expected, rtol=0.0, atol=2e-5 * expected.abs().max().item())


def test_the_number_of_blocks_has_a_bound_that_is_reached() -> None:
    for pairs, experts, rows in ((1, 8, 16), (8, 128, 16), (512, 128, 16), (33, 2, 16), (7, 3, 4), (65536, 128, 64)):
        bound, most = triton_rows.most_blocks(pairs, experts, rows), 0
        for hit in range(1, min(pairs, experts) + 1):
            spare = pairs - hit  # one pair for each of `hit` experts, the rest to the first in whole blocks
            most = max(most, hit + spare // rows)
        assert most <= bound <= most + 1


def test_experts_a_storage_cannot_be_read_in_are_refused_by_name() -> None:
    x, (ids, weights) = torch.zeros(2, 48), routed(2, 1, 2)
    made = experts_of(lambda e, n, k, s: KINDS["int4 whole"](e, n, k, s), 2, 48, 40)
    assert triton.rejects(x, ids, weights, made) == "groups of 48; it takes 32, 64 and multiples of 128"
    made = experts_of(KINDS["dense"], 2, 48, 40)
    assert triton.rejects(x.bfloat16(), ids, weights, made) == "weights of torch.float32 with rows of torch.bfloat16"


# -- the recipes in PTX, which the interpreter cannot run: executed here, instruction by instruction


def execute(asm: str, source: int, inputs: str) -> dict[str, int]:
    """The registers after a recipe whose register `inputs` holds `source`. prmt, shifts, and, lop3 on 32-bit words."""
    registers = {inputs: source}

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    def prmt(a: int, b: int, selector: int) -> int:
        joined = (a | b << 32).to_bytes(8, "little")
        picked = [(joined[selector >> 4 * i & 7], selector >> 4 * i & 8) for i in range(4)]
        return int.from_bytes(bytes((0xFF if byte >> 7 else 0) if sign else byte for byte, sign in picked), "little")

    def lop3(a: int, b: int, c: int, table: int) -> int:
        return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32))

    run: dict[str, Callable[..., int]] = {"prmt": prmt, "lop3": lop3, "shl": lambda a, n: a << n & 0xFFFFFFFF, "and": lambda a, b: a & b}
    steps = re.findall(r"(\w+)\.b32 ([^;]+);", re.sub(r"\.reg[^;]+;", "", asm))
    assert len(steps) >= 3
    for name, operands in steps:
        target, *sources = (part.strip() for part in operands.split(","))
        registers[target] = run[name](*(value(s) for s in sources))
    return registers


def halves(word: int) -> list[int]:
    return [word & 0xFFFF, word >> 16]


def bfloat16(bits: list[int]) -> torch.Tensor:
    return torch.tensor(bits).to(torch.uint16).view(torch.bfloat16).double()


def test_e2m1_recipe() -> None:
    """All words of 16 bits, each in both halves of a register, beside another: what the four outputs hold is what unpacking says."""
    words = torch.cat((torch.randint(0, 1 << 16, (2000,), generator=torch.Generator().manual_seed(0)), 1 << torch.arange(16)))
    other = words.flip(0)
    found = [execute(triton_unpack.E2M1_ASM, a | b << 16, "$4") for a, b in zip(words.tolist(), other.tolist(), strict=True)]
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)]).double()
    for place, bits in enumerate(PLACES):
        for half, source in enumerate((words, other)):
            code = sum((source >> bit & 1) << (3 - i) for i, bit in enumerate(bits))
            values = bfloat16([halves(registers[f"${place}"])[half] for registers in found])
            assert torch.equal(values * 2.0**126, table[code])


def test_units_keep_every_number_and_the_bits_have_one_place_each() -> None:
    assert sorted(bit for place in PLACES for bit in place) == list(range(16))
    for columns in (32, 64, 96, 256):
        weight = KINDS["mxfp4"](3, 40, columns, 1)
        [units] = [streamed(replace(experts_of(KINDS["dense"], 3, 32, 32), gate_up=weight)).gate_up]
        assert isinstance(units, Mxfp4Units) and units.shape == weight.shape and units.nbytes > 0
        back = unpack_units(units)
        assert torch.equal(back.data, weight.data) and torch.equal(back.scale, weight.scale)
        assert torch.equal(units.dequantize(), unpack(weight))


# -- how a call is cut into launches changes nothing but the order of sums


@pytest.mark.parametrize("kind", ["fp8 block", "mxfp4 units"])
@pytest.mark.parametrize("change", [{"splits": (2, 2)}, {"splits": (3, 1), "features": 128, "early": True}])
@pytest.mark.parametrize("rows", [3, 9])
def test_plans_agree(kind: str, change: dict[str, object], rows: int) -> None:
    """Splits, which leave sums to whoever comes last, taller tiles, other blocks; 3 rows find their experts alone, 9 are sorted."""
    made = experts_of(KINDS[kind], 3, 384, 160, cut=True, bias=True)
    x, (ids, weights) = torch.randn(rows, 384, generator=torch.Generator().manual_seed(0)), routed(rows, 2, 3)
    ids[1, 0] = -1
    expected = reference.moe_experts(x, ids, weights, made)
    call = on(DEVICE, (x, ids, weights, made))
    with poisoned():
        found = [triton.run(*call, replace(triton.Plan(8), **change)).cpu() for _ in range(2)]  # the second finds the counters as left
    torch.testing.assert_close(found[0], expected, rtol=0.0, atol=2e-5 * expected.abs().max().item())
    assert torch.equal(found[0], found[1])


def test_fixed_bits_do_not_depend_on_how_rows_find_their_experts() -> None:
    made = experts_of(KINDS["mxfp4 units"], 3, 128, 64, bias=True)
    x, (ids, weights) = torch.randn(20, 128, generator=torch.Generator().manual_seed(0)), routed(20, 2, 3)
    together = triton.moe_experts_fixed(*on(DEVICE, (x, ids, weights, made))).cpu()
    alone = triton.moe_experts_fixed(*on(DEVICE, (x[:4], ids[:4], weights[:4], made))).cpu()
    assert torch.equal(together[:4], alone)


def test_mxfp4_rounds_to_the_nearest_number() -> None:
    """Numbers of the format survive; others come out as the nearest one; zeros stay."""
    exact = unpack(storage_of(3))
    assert torch.equal(unpack(pack(exact)), exact)
    x = torch.randn(5, 96, generator=torch.Generator().manual_seed(1))
    x[2] = 0.0
    packed = pack(x)
    grid = torch.tensor(MAGNITUDES) * 2.0 ** (packed.scale[..., None, None].float() - 127)
    nearest = (x.view(5, 3, 32, 1).abs() - grid).abs().amin(-1).flatten(1)
    torch.testing.assert_close((unpack(packed) - x).abs(), nearest, rtol=0.0, atol=1e-7)


def storage_of(seed: int) -> Mxfp4Weight:
    """One expert, blocks of which each uses its largest number, so that `pack` finds the same scale."""
    weight = KINDS["mxfp4"](1, 4, 64, seed)
    weight.data[..., ::16] = 0x77
    return weight


def test_repacking_keeps_every_number() -> None:
    blocks = torch.randint(0, 256, (2, 3, 2, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scale = torch.full((2, 3, 2), 127, dtype=torch.uint8)
    found = unpack(Mxfp4Weight(repack(blocks), scale))
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])
    for column in range(64):
        nibble = blocks[:, :, column // 32, column % 32 // 2] >> 4 * (column % 2) & 15
        assert torch.equal(found[:, :, column], table[nibble.int()])


def test_one_expert_is_taken_out_of_the_stack() -> None:
    for kind, make in KINDS.items():
        weight = make(3, 40, 96, 1)
        assert dense_expert(weight, 2).shape == (40, 96), kind
        assert not torch.equal(dense_expert(weight, 2), dense_expert(weight, 1)), kind
