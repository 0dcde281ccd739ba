"""Which rows an expert multiplies, found on the device, for `triton.py` (*Rows* there)."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_common import after_launches

_SORTED_AT_ONCE = 1024


def most_blocks(pairs: int, experts: int, rows: int) -> int:
    """The most blocks of `rows` pairs there can be: every expert hit has one that is not full."""
    hit = min(experts, pairs)
    return (pairs + hit * (rows - 1)) // rows


def sort_pairs(ids: Tensor, blocks: int, count: int, rows: int, launch: dict[str, Any]) -> Tensor:
    """int32 [blocks · (1 + rows)], the sort's result: a block's expert or -1, then a block's pairs, -1 past the last."""
    order, pairs = torch.empty(blocks * (1 + rows), dtype=torch.int32, device=ids.device), ids.numel()
    bins = triton.next_power_of_2(count + 1)
    _sort[(count,)](ids, order, pairs, blocks, count, BINS=bins, CHUNK=_chunk(pairs), ROWS=rows, **launch)
    return order


def _chunk(pairs: int) -> int:
    return min(_SORTED_AT_ONCE, max(32, triton.next_power_of_2(pairs)))


@triton.jit
def _bins(ids, at, pairs, count, BINS: tl.constexpr, CHUNK: tl.constexpr):
    """(pair [CHUNK], its expert, BINS - 1 where it has none or there is no such pair)."""
    pair = at + tl.arange(0, CHUNK)
    expert = tl.load(ids + pair, mask=pair < pairs, other=-1)
    return pair, tl.where((expert >= 0) & (expert < count), expert, BINS - 1)


@triton.jit(do_not_specialize=["pairs", "blocks", "count"])
def _sort(ids, order, pairs, blocks, count, BINS: tl.constexpr, CHUNK: tl.constexpr, ROWS: tl.constexpr, EARLY: tl.constexpr):
    """Grid (experts). order: as `sort_pairs` says."""
    after_launches(EARLY)
    own = tl.program_id(0)
    counts = tl.zeros([BINS], tl.int32)
    for at in range(0, pairs, CHUNK):
        pair, expert = _bins(ids, at, pairs, count, BINS, CHUNK)
        counts += tl.histogram(expert, BINS)
    each = tl.arange(0, BINS)
    needed = tl.where(each < count, (counts + ROWS - 1) // ROWS, 0)
    mine = tl.sum(tl.where(each == own, counts, 0), 0)
    first = tl.sum(tl.where(each < own, needed, 0), 0)
    place = order + blocks + first * ROWS
    for block in range(0, (mine + ROWS - 1) // ROWS):
        tl.store(order + first + block, own)
        entry = block * ROWS + tl.arange(0, ROWS)
        tl.store(place + entry, -1, mask=entry >= mine)
    for block in range(tl.sum(needed, 0) + own, blocks, count):  # unused ones, shared out
        tl.store(order + block, -1)
    if mine > 0:
        for at in range(0, pairs, CHUNK):
            pair, expert = _bins(ids, at, pairs, count, BINS, CHUNK)
            fits = (expert == own).to(tl.int32)
            tl.store(place + tl.cumsum(fits, 0) - 1, pair, mask=fits == 1)
            place += tl.sum(fits, 0)


@triton.jit
def _found(ids, block, pairs, count, PAIRS: tl.constexpr, ROWS: tl.constexpr):
    """As `find_block`, of few pairs by themselves: block i is that of pair i, if it is the first of its expert."""
    each = tl.arange(0, PAIRS)
    own = tl.load(ids + block)
    same = tl.load(ids + each, mask=each < pairs, other=-1) == own
    before = tl.sum((same & (each < block)).to(tl.int32), 0)
    rank = tl.cumsum(same.to(tl.int32), 0) - 1
    mine = same[:, None] & (rank[:, None] == tl.arange(0, ROWS)[None, :])
    pair = tl.max(tl.where(mine, each[:, None], -1), 0)
    return tl.where((before == 0) & (own >= 0) & (own < count), own, -1), pair


@triton.jit
def find_block(order, pairs, blocks, count, PAIRS: tl.constexpr, ROWS: tl.constexpr):
    """(expert or -1, pairs [ROWS], -1 past the last) of this program's block. order: ids where PAIRS says that there are few."""
    block = tl.program_id(1)
    if PAIRS:
        return _found(order, block, pairs, count, PAIRS, ROWS)
    else:
        return tl.load(order + block), tl.load(order + blocks + block * ROWS + tl.arange(0, ROWS))
