"""What the matrix does not show of the experts' kernels: narrow activations, blocks, and the bit recipes that only a card runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from specdec.kernels.moe_experts import reference, triton
from specdec.kernels.moe_experts.cases import KINDS, experts_of, routed
from specdec.kernels.moe_experts.weight import dense_expert, storage
from specdec.kernels.mxfp4.weight import MAGNITUDES, pack, repack, unpack
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
    if kind == "mxfp4" and dtype is torch.float16:
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
        found = triton._run(*call, rows).cpu()
    torch.testing.assert_close(found, expected, rtol=0.0, atol=2e-5 * expected.abs().max().item())


def test_the_number_of_blocks_has_a_bound_that_is_reached() -> None:
    for pairs, experts, rows in ((1, 8, 16), (8, 128, 16), (512, 128, 16), (33, 2, 16), (7, 3, 4), (65536, 128, 64)):
        bound, most = triton._blocks(pairs, experts, rows), 0
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


def execute(asm: str, source: int) -> int:
    """The first output register of a recipe whose input register holds `source`. prmt, shifts, and, lop3 on 32-bit words."""
    registers = {"$1": source, "$0": 0}

    def value(operand: str) -> int:
        return registers[operand] if operand in registers else int(operand, 0)

    def prmt(a: int, b: int, selector: int) -> int:
        joined = (a | b << 32).to_bytes(8, "little")
        return int.from_bytes(bytes(joined[selector >> 4 * i & 7] for i in range(4)), "little")

    def lop3(a: int, b: int, c: int, table: int) -> int:
        return sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | (c >> i & 1)) & 1) << i for i in range(32))

    run: dict[str, Callable[..., int]] = {
        "prmt": prmt,
        "lop3": lop3,
        "shl": lambda a, n: a << n & 0xFFFFFFFF,
        "shr": lambda a, n: a >> n,
        "and": lambda a, b: a & b,
    }
    steps = re.findall(r"(\w+)\.b32 ([^;]+);", asm.replace(".reg .b32 t, u;", ""))
    assert len(steps) >= 4
    for name, operands in steps:
        target, *sources = (part.strip() for part in operands.split(","))
        registers[target] = run[name](*(value(s) for s in sources))
    return registers["$0"]


def two_codes(asm: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, what the recipe makes of them) in both places of a pair, the rest of the register filled with ones."""
    first, second = torch.arange(256), torch.arange(256).flip(0)
    words = [execute(asm, a | b << 8 | 0xFFFF0000) for a, b in zip(first.tolist(), second.tolist(), strict=True)]
    halves = torch.tensor([[w & 0xFFFF, w >> 16] for w in words]).to(torch.uint16).view(torch.bfloat16)
    return torch.cat((first, second)), halves.T.flatten().double()


def test_e4m3_recipe() -> None:
    codes, found = two_codes(triton._FROM_E4M3.value)
    numbers = codes.to(torch.uint8).view(torch.float8_e4m3fn).double()
    real = ~numbers.isnan()
    assert real.sum() == 2 * 254
    assert torch.equal(found[real] * 2.0**120, numbers[real])


@pytest.mark.parametrize("high", [False, True])
def test_e2m1_recipes(high: bool) -> None:
    codes, found = two_codes((triton._FROM_HIGH_E2M1 if high else triton._FROM_LOW_E2M1).value)
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)]).double()
    assert torch.equal(found * 2.0**126, table[codes >> 4 if high else codes & 15])


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


def storage_of(seed: int) -> object:
    """One expert, blocks of which each uses its largest number, so that `pack` finds the same scale."""
    weight = KINDS["mxfp4"](1, 4, 64, seed)
    weight.data[..., ::16] = 0x77
    return weight


def test_repacking_keeps_every_number() -> None:
    blocks = torch.randint(0, 256, (2, 3, 2, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scale = torch.full((2, 3, 2), 127, dtype=torch.uint8)
    found = unpack(type(storage_of(0))(repack(blocks), scale))
    table = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)])
    for column in range(64):
        nibble = blocks[:, :, column // 32, column % 32 // 2] >> 4 * (column % 2) & 15
        assert torch.equal(found[:, :, column], table[nibble.int()])


def test_one_expert_is_taken_out_of_the_stack() -> None:
    for kind, make in KINDS.items():
        weight = make(3, 40, 96, 1)
        assert dense_expert(weight, 2).shape == (40, 96), kind
        assert not torch.equal(dense_expert(weight, 2), dense_expert(weight, 1)), kind
