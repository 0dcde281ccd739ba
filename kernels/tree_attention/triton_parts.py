"""What the two Triton kernels of tree attention share: whose rows a tile holds, which keys they see, and the merge of the splits.

Packed row m of a tile is row m // GROUP of the tile and query head m % GROUP of the KV head. Tiles of R rows are numbered without gaps
through the sequences and then the padding rows; T // R + B + 1 always are enough, so the grid needs no look at the device. The tile is
the slowest index of a program: those without rows come last, for the card deals programs out to its processors by number, and gaps at
regular distances left some processors without work.

Splits leave (acc, max, sum) per row and head in a float32 workspace; those without keys leave max = -inf and no acc.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import driver

from specdec.kernels.kv_fp8 import FP8
from specdec.kernels.tree_attention.tiling import power_of_two

LOG2E = tl.constexpr(1.4426950408889634)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16)
MERGED = 4096  # numbers a program of the merge holds at a time, spread over 128 threads


def rejects(q: Tensor, k_cache: Tensor, v_cache: Tensor, *_: object, **__: object) -> str | None:
    """Why the kernels cannot run the call, or None."""
    hd = q.shape[2]
    if hd % 16 or hd > 256:
        return f"head size {hd}; it takes multiples of 16 up to 256"
    if q.dtype not in _DTYPES or k_cache.dtype not in (*_DTYPES, FP8) or v_cache.dtype != k_cache.dtype:
        return f"dtypes {q.dtype} and {k_cache.dtype}; it takes float32, float16 and bfloat16, for K and V alike also FP8"
    if q.stride(2) != 1 or k_cache.stride(3) != 1 or k_cache.stride() != v_cache.stride():
        return "strides: the last dimension must be dense, K and V laid out alike"
    return None


@cache
def card(device: torch.device) -> tuple[int, int]:
    """(bytes of shared memory a program may have, processors); as on Hopper for the interpreter."""
    if device.type != "cuda":
        return 232448, 132
    found = driver.active.utils.get_device_properties(device.index)
    return found["max_shared_mem"], found["multiprocessor_count"]


def workspace(q: Tensor, splits: int, rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """(acc [splits, rows·nh, hd], max and sum [splits, rows·nh]), float32, not initialised."""
    pairs = rows * q.shape[1]
    sizes = splits * pairs * q.shape[2], splits * pairs, splits * pairs
    acc, top, norm = torch.empty(sum(sizes), dtype=torch.float32, device=q.device).split(sizes)
    return acc, top, norm


def merge(
    out: Tensor,
    parts: tuple[Tensor, Tensor, Tensor],
    cu_query: Tensor,
    positions: Tensor,
    sinks: Tensor | None,
    heads: int,
    splits: int,
    v_scale: float,
    *,
    base: int = 0,
    keys_a_split: int = 0,
) -> None:
    """out [T, nh·hd] rows base, base + 1, … from their partial results, sinks counted once; padding rows become 0.

    keys_a_split: where splits are fixed ranges of positions, so that a row needs no look at those after its own; the splits are then
    taken in chunks whose size does not depend on their number.
    """
    hd = out.shape[1] // heads
    pairs = parts[1].shape[0] // splits
    pairs = min(pairs, (out.shape[0] - base) * heads)
    chunk = 8 if keys_a_split else power_of_two(splits)
    part = max(1, MERGED // (chunk * power_of_two(hd)))  # (row, head) pairs a program takes
    _merge[(triton.cdiv(pairs, part),)](
        out, *parts, cu_query, positions, out if sinks is None else sinks, pairs, parts[1].shape[0] // splits, base,
        cu_query.shape[0] - 1, splits, v_scale,
        HEADS=heads, HD=hd, CHUNK=chunk, PART=part, SPAN=keys_a_split, SINKS=sinks is not None,
        enable_fp_fusion=False,
    )  # fmt: skip


@triton.jit(do_not_specialize=["pairs", "stride", "base", "sequences", "splits"])
def _merge(
    out, acc_parts, top_parts, norm_parts, cu_query, positions, sinks, pairs, stride, base, sequences, splits, v_scale,
    HEADS: tl.constexpr, HD: tl.constexpr, CHUNK: tl.constexpr, PART: tl.constexpr, SPAN: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Grid (pairs / PART): (row, head) pairs from row `base` on, `stride` apart from split to split. Sums run over the splits in order."""
    pair = tl.program_id(0) * PART + tl.arange(0, PART)
    row = base + pair // HEADS
    head = pair % HEADS
    column = tl.arange(0, triton.next_power_of_2(HD))
    inside = column < HD
    own = (pair < pairs) & (row < tl.load(cu_query + sequences))
    used = splits
    if SPAN > 0:
        used = tl.minimum(splits, tl.max(tl.load(positions + row, mask=own, other=0), 0).to(tl.int32) // SPAN + 1)
    top = tl.full([PART], float("-inf"), tl.float32)
    if SINKS:
        top = tl.load(sinks + head, mask=own, other=0.0).to(tl.float32) * LOG2E
    sink = top
    for first in range(0, used, CHUNK):
        split = first + tl.arange(0, CHUNK)
        at = split[:, None] * stride + pair[None, :]
        top = tl.maximum(top, tl.max(tl.load(top_parts + at, mask=(split < used)[:, None] & own[None, :], other=float("-inf")), 0))
    base_of = tl.where(top == float("-inf"), 0.0, top)
    norm = tl.exp2(sink - base_of)
    acc = tl.zeros([PART, column.shape[0]], tl.float32)
    for first in range(0, used, CHUNK):
        split = first + tl.arange(0, CHUNK)
        at = split[:, None] * stride + pair[None, :]
        there = (split < used)[:, None] & own[None, :]
        weight = tl.exp2(tl.load(top_parts + at, mask=there, other=float("-inf")) - base_of[None, :])
        there = there & (weight > 0.0)
        norm += tl.sum(tl.load(norm_parts + at, mask=there, other=0.0) * weight, 0)
        place = at.to(tl.int64)[:, :, None] * HD + column[None, None, :]
        part = tl.load(acc_parts + place, mask=there[:, :, None] & inside[None, None, :], other=0.0)
        acc += tl.sum(part * weight[:, :, None], 0)
    acc = acc / tl.where(own, norm, 1.0)[:, None] * v_scale
    place = (row.to(tl.int64) * HEADS + head)[:, None] * HD + column[None, :]
    tl.store(out + place, acc.to(out.dtype.element_ty), mask=(pair < pairs)[:, None] & inside[None, :])


@triton.jit
def locate(tile, packed, cu_query, rows, sequences, ROWS: tl.constexpr, GROUP: tl.constexpr, SEQUENCES: tl.constexpr):
    """(sequence of the tile, `sequences` for padding rows; its packed rows' rows; which of them there are): none past the last tile.

    All sequences are looked at together. SEQUENCES > sequences.
    """
    index = tl.arange(0, SEQUENCES)
    starts = tl.load(cu_query + index, mask=index <= sequences, other=0)
    ends = tl.load(cu_query + index + 1, mask=index < sequences, other=rows)
    tiles = tl.where(index <= sequences, (ends - starts + ROWS - 1) // ROWS, 0)
    past = tl.cumsum(tiles, 0)
    b = tl.sum((past <= tile).to(tl.int32), 0)
    start, end = tl.sum(tl.where(index == b, starts, 0), 0), tl.sum(tl.where(index == b, ends, 0), 0)
    row = start + (tile - tl.sum(tl.where(index == b, past - tiles, 0), 0)) * ROWS + packed // GROUP
    return b, row, (packed < ROWS * GROUP) & (row < end)


@triton.jit
def _bits_set(x):
    """Number of set bits of int32 words."""
    v = x.to(tl.uint32, bitcast=True)
    v = v - ((v >> 1) & 0x55555555)
    v = (v & 0x33333333) + ((v >> 2) & 0x33333333)
    v = (v + (v >> 4)) & 0x0F0F0F0F
    v = v + (v >> 8)
    v = v + (v >> 16)
    return (v & 0x3F).to(tl.int32)


@triton.jit
def ancestor(low, high, node):
    """(whether the word, in two int32 halves, has bit `node`, how many lower bits it has); node 0…63, shapes broadcast."""
    in_high = node >= 32
    below = (1 << (node & 31)) - 1
    has = ((tl.where(in_high, high, low) >> (node & 31)) & 1) == 1
    return has, _bits_set(low & tl.where(in_high, -1, below)) + _bits_set(high & tl.where(in_high, below, 0))


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def any_of(words):
    """The bits that some of the int32 words [M] have."""
    return tl.reduce(words, 0, _either)


@triton.jit
def load_query(q_base, row, head, mask, q_row, q_head, column, HALF: tl.constexpr):
    """q [M, WIDTH]; HALF: for products with FP8 keys in float16, which holds every code exactly. |q| beyond its range is cut."""
    place = row.to(tl.int64)[:, None] * q_row + head[:, None] * q_head + column[None, :]
    q = tl.load(q_base + place, mask=mask, other=0.0)
    if HALF:
        wide = q.to(tl.float32)
        return tl.where(wide > 65504.0, 65504.0, tl.where(wide < -65504.0, -65504.0, wide)).to(tl.float16)
    else:
        return q


@triton.jit
def load_cache(pointers, inside, wanted, WHOLE: tl.constexpr, MASKED: tl.constexpr):
    """What is inside the head (all of it where WHOLE) at the slots wanted (all of them unless MASKED), else 0."""
    if MASKED:
        return tl.load(pointers, mask=inside & wanted, other=0.0)
    elif WHOLE:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=inside & wanted, other=0.0)
