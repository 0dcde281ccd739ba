"""Cases of the two ops of a mixture of experts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from specdec.kernels.case import Case, randn
from specdec.kernels.fp8_linear.weight import BLOCK as FP8_BLOCK
from specdec.kernels.fp8_linear.weight import Fp8Weight
from specdec.kernels.inputs import generator
from specdec.kernels.int4_linear.weight import Int4Weight
from specdec.kernels.moe_experts.weight import Experts, ExpertWeight, storage
from specdec.kernels.mxfp4.units import pack_units
from specdec.kernels.mxfp4.weight import BLOCK, Mxfp4Weight


def _codes(*shape: int, seed: int, top: int = 256) -> Tensor:
    return torch.randint(0, top, shape, dtype=torch.uint8, generator=generator(seed))


def dense(experts: int, rows: int, columns: int, seed: int) -> Tensor:
    return randn(experts, rows, columns, seed=seed, scale=columns**-0.5)


def fp8(experts: int, rows: int, columns: int, seed: int, scales: str = "block") -> Fp8Weight:
    """scales: "tensor", "channel" or "block"."""
    blocks = (experts, -(-rows // FP8_BLOCK), -(-columns // FP8_BLOCK))
    shape = {"tensor": (experts, 1), "channel": (experts, rows), "block": blocks}[scales]
    codes = _codes(experts, rows, columns, seed=seed)
    codes = torch.where(codes & 0x7F == 0x7F, codes - 1, codes)  # all numbers, no NaN
    return Fp8Weight(codes.view(torch.float8_e4m3fn), randn(*shape, seed=seed + 1, scale=0.01 * columns**-0.5))


def int4(experts: int, rows: int, columns: int, seed: int, group: int = 32) -> Int4Weight:
    groups = columns // group
    data = _codes(experts, rows, columns // 2, seed=seed).view(torch.int32)
    scale = randn(experts, rows, groups, seed=seed + 1, scale=0.2 * columns**-0.5)
    return Int4Weight(data, scale, _codes(experts, rows, groups, seed=seed + 2, top=17), group)


def mxfp4(experts: int, rows: int, columns: int, seed: int) -> Mxfp4Weight:
    scale = _codes(experts, rows, columns // BLOCK, seed=seed + 1, top=5) + 120
    return Mxfp4Weight(_codes(experts, rows, columns // 2, seed=seed), scale)


Make = Callable[[int, int, int, int], ExpertWeight]
KINDS: dict[str, Make] = {
    "dense": dense,
    "fp8 tensor": partial(fp8, scales="tensor"),
    "fp8 channel": partial(fp8, scales="channel"),
    "fp8 block": fp8,
    "int4 32": int4,
    "int4 whole": lambda experts, rows, columns, seed: int4(experts, rows, columns, seed, columns),
    "mxfp4": mxfp4,
    "mxfp4 units": lambda experts, rows, columns, seed: pack_units(mxfp4(experts, rows, columns, seed)),
}


def experts_of(make: Make, count: int, hidden: int, inner: int, *, cut: bool = False, bias: bool = False, seed: int = 0) -> Experts:
    """Random experts; cut: GPT-OSS's activation."""
    made = Experts(make(count, 2 * inner, hidden, seed + 10), make(count, hidden, inner, seed + 20))
    if bias:
        made = replace(made, gate_up_bias=randn(count, 2 * inner, seed=seed + 30), down_bias=randn(count, hidden, seed=seed + 31))
    return replace(made, limit=1.5, alpha=1.702) if cut else made


def routed(rows: int, k: int, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """(ids [rows,k] i32, distinct in a row, weights [rows,k] f32)."""
    g = generator(seed)
    ids = torch.stack([torch.randperm(count, generator=g)[:k] for _ in range(rows)]) if rows else torch.empty(0, k)
    return ids.int(), torch.rand(rows, k, generator=g)


def _experts() -> Iterator[Case]:
    for kind, make in KINDS.items():
        made = experts_of(make, 3, 96, 64, cut=True, bias=True)
        each = (0, 1, 2) if kind in ("dense", "fp8 block", "int4 32", "mxfp4") else ()
        yield Case(f"{kind} 5 rows", (randn(5, 96, seed=1), *routed(5, 2, 3), made), row_args=each)
    for rows in (0, 1):
        for kind in ("dense", "fp8 block", "mxfp4"):
            made = experts_of(KINDS[kind], 6, 64, 32)
            yield Case(f"{kind} {rows} rows", (randn(rows, 64, seed=1), *routed(rows, 3, 6), made))
    yield from _crowds()
    yield from _odd_numbers()


def _crowds() -> Iterator[Case]:
    """Where the rows go: all to one expert (several blocks), padded rows, experts nobody chose, one expert in all."""
    made = experts_of(dense, 5, 48, 40, bias=True)  # no multiple of a tile
    x, ids, weights = randn(19, 48, seed=2), torch.full((19, 1), 3, dtype=torch.int32), torch.rand(19, 1)
    yield Case("one expert for all", (x, ids, weights, made))
    ids, weights = routed(19, 2, 5, seed=3)
    ids[5], ids[18], ids[9, 1] = -1, -1, -1
    yield Case("padded rows", (x, ids, weights, made), row_args=(0, 1, 2))
    yield Case("padded rows only", (x[:3], torch.full((3, 2), -1, dtype=torch.int32), torch.rand(3, 2), made))
    yield Case("one expert there is", (x[:4], *routed(4, 1, 1), experts_of(dense, 1, 48, 40)))
    yield Case("every expert", (x[:2], *routed(2, 5, 5), made))


def _odd_numbers() -> Iterator[Case]:
    """NaN rows, scales at their ends, groups of zeros, gates beyond the limit."""
    x, (ids, weights) = randn(3, 64, seed=4), routed(3, 2, 3)
    made = experts_of(fp8, 3, 64, 32)
    storage(made.down)[1][2] = 0.0
    yield Case("fp8 zero scale", (x, ids, weights, made))
    made = experts_of(mxfp4, 3, 64, 32)
    scale = storage(made.gate_up)[1]
    scale[1], scale[2] = 0, 254 - 127
    storage(made.down)[0][0] = 0
    yield Case("mxfp4 smallest scale, zeros", (x, ids, weights, made))
    x = x * 40.0
    x[1, 0] = torch.nan
    yield Case("beyond the limit, NaN row", (x, ids, weights, experts_of(dense, 3, 64, 32, cut=True)))


def _routes() -> Iterator[Case]:
    for rows, count, k in ((0, 8, 2), (1, 8, 2), (7, 128, 8), (33, 32, 4), (3, 5, 5), (2, 1, 1), (4, 60, 6)):
        for renormalise in (False, True):
            yield Case(f"{rows}x{count} {k} {renormalise}", (randn(rows, count, seed=count, scale=3.0), k, renormalise), row_args=(0,))
    odd = torch.zeros(6, 9)
    odd[1, ::2] = -0.0  # ties with 0.0
    odd[2, 3:] = -torch.inf
    odd[3, 4] = torch.nan
    odd[4] = torch.arange(9) * -1e4
    odd[5] = torch.tensor([1.0, 3.0, 3.0, 2.0, 3.0, 1.0, 2.0, 2.0, 1.0])
    for renormalise in (False, True):
        yield Case(f"ties, infinities, NaN {renormalise}", (odd, 4, renormalise), row_args=(0,))
        yield Case(f"all NaN {renormalise}", (torch.full((2, 6), torch.nan), 3, renormalise), row_args=(0,))


CASES: dict[str, Callable[[], Iterator[Case]]] = {"moe_route": _routes, "moe_experts": _experts}
