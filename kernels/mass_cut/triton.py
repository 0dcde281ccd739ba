"""The cut without a sort: two passes over the row, one that lists the tokens that can matter, one that writes what is kept.

Tokens of less than (1 - p) / V, all together, weigh less than 1 - p: the cut lies above them. So `_list` gathers the others (some
hundreds of a language model's law, whatever V is) with their masses, `_find` bisects on that list, and `_keep` compares. Nothing rests
on the argument: `_find` takes its own result only if the list's mass reaches p and nothing outside the list ranks as high (`ceiling`);
otherwise, or when the list is full, it bisects on the rows themselves, exactly, but slowly: one program reads the row some 30 times.

Masses are the reference's integers, so the order of the list, which depends on who came first, changes nothing.

Time: the reads of log_p and rank, once in `_list`, rank again in `_keep`; one float64 exp per token of a tile that has a listed one.
A list of up to 4096 stays in registers, where a step of the bisection is a sum over 16 entries a thread, by estimate 250 cycles, and
some 30 of them depend on each other: 4 µs on one SM per row, all rows side by side. A longer one is read from the cache every step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_common import INTERPRETED

_TILE = 65536 if INTERPRETED else 2048
_LIST_TILE = 65536 if INTERPRETED else 4096  # entries of a list that stay in registers
_MOST_LISTED = 32768
_ONE = tl.constexpr(1023 << 52)  # the bits of 1.0


def rejects(log_p: Tensor, rank: Tensor, p: Tensor) -> str | None:
    """Why this kernel cannot run the call, or None."""
    return (
        None
        if log_p.dtype is rank.dtype is torch.float32 and log_p.is_contiguous() and rank.is_contiguous()
        else "rows must be dense float32"
    )


def mass_cut(log_p: Tensor, rank: Tensor, p: Tensor) -> Tensor:
    """Shapes in `specdec.ops.mass_cut`."""
    rows, vocab = log_p.shape
    kept = torch.empty((rows, vocab), dtype=torch.bool, device=log_p.device)
    if kept.numel() == 0:
        return kept
    room, device = min(vocab, _MOST_LISTED), log_p.device
    keys, ids = (torch.empty((rows, room), dtype=torch.int32, device=device) for _ in range(2))
    masses = torch.empty((rows, room), dtype=torch.int64, device=device)
    state = torch.zeros((2, rows), dtype=torch.int64, device=device)  # tokens listed, and 1 + how high the others rank
    cut = torch.empty((2, rows), dtype=torch.int32, device=device)
    widest = triton.next_power_of_2(vocab)
    tile, list_tile = min(_TILE, widest), min(_LIST_TILE, widest)
    grid = (rows, triton.cdiv(vocab, tile))
    lists, p = (keys, ids, masses), p.contiguous()
    _list[grid](log_p, rank, p, *lists, *state, vocab, room, TILE=tile)
    _find[(rows,)](log_p, rank, p, *lists, *state, *cut, vocab, room, TILE=list_tile, num_warps=8)
    _keep[grid](rank, *cut, kept, vocab, TILE=tile)
    return kept


@triton.jit
def _ordered(rank):
    """Integers in the order of the ranks, f32 -> i32; both zeros are one."""
    bits = (rank + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _fixed_point(x):
    """x f64 in [0, 1] in units of 2**-52, i64."""
    return (1.0 + x).to(tl.int64, bitcast=True) - _ONE


@triton.jit
def _masses(log_p):
    mass = tl.exp(log_p.to(tl.float64))
    return _fixed_point(tl.where(mass == mass, mass, 0.0))


@triton.jit
def _floor(p, vocab):
    """log-probability below which a token cannot matter: e times less than (1 - p) / V, and what rounds to no mass."""
    return tl.maximum(tl.log(tl.maximum(1.0 - p, 1e-30) / vocab.to(tl.float32)) - 1.0, -37.0)


@triton.jit(do_not_specialize=["vocab", "room"])
def _list(log_p, rank, p, keys, ids, masses, listed, ceiling, vocab, room, TILE: tl.constexpr):
    """Grid (rows, tiles)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = column < vocab
    own = row * vocab + column
    law = tl.load(log_p + own, mask=real, other=float("-inf"))
    key = _ordered(tl.load(rank + own, mask=real, other=float("-inf")))
    chosen = real & (law >= _floor(tl.load(p + row), vocab))
    others = tl.max(tl.where(real & (chosen == 0), key, -2147483648), 0)
    tl.atomic_max(ceiling + row, others.to(tl.int64) + 2147483649, sem="relaxed")
    count = tl.sum(chosen.to(tl.int32), 0)
    if count > 0:
        first = tl.atomic_add(listed + row, count.to(tl.int64), sem="relaxed")
        place = first + tl.cumsum(chosen.to(tl.int32), 0) - 1
        mask = chosen & (place < room)
        tl.store(keys + row * room + place, key, mask=mask)
        tl.store(ids + row * room + place, column, mask=mask)
        tl.store(masses + row * room + place, _masses(law), mask=mask)


@triton.jit
def _entries(keys, ids, masses, log_p, rank, count, at, TILE: tl.constexpr, LISTED: tl.constexpr):
    """(key, id, mass, there) of entries at … at + TILE - 1 of a list, or of a whole row, of `count`."""
    place = at + tl.arange(0, TILE)
    there = place < count
    if LISTED:
        key = tl.load(keys + place, mask=there, other=-2147483648)
        token = tl.load(ids + place, mask=there, other=2147483647)
        mass = tl.load(masses + place, mask=there, other=0)
    else:
        key = _ordered(tl.load(rank + place, mask=there, other=float("-inf")))
        token = place.to(tl.int32)
        mass = _masses(tl.load(log_p + place, mask=there, other=float("-inf")))
    return key, token, mass, there


@triton.jit
def _mass(keys, ids, masses, log_p, rank, count, least, last, TILE: tl.constexpr, LISTED: tl.constexpr):
    """Mass of the entries above key `least`, and of those at it with ids up to `last`."""
    total = tl.zeros([TILE], tl.int64)
    for at in range(0, count, TILE):
        key, token, mass, _ = _entries(keys, ids, masses, log_p, rank, count, at, TILE, LISTED)
        total += tl.where((key > least) | ((key == least) & (token <= last)), mass, 0)
    return tl.sum(total, 0)


@triton.jit
def _bounds(keys, ids, masses, log_p, rank, count, tied, among, TILE: tl.constexpr, LISTED: tl.constexpr):
    """(least, largest) key of all entries, or id of those at key `tied` where `among`."""
    low, high = tl.full([TILE], 2147483647, tl.int32), tl.full([TILE], -2147483648, tl.int32)
    for at in range(0, count, TILE):
        key, token, _, there = _entries(keys, ids, masses, log_p, rank, count, at, TILE, LISTED)
        there = there & ((key == tied) | (among == 0))
        value = tl.where(among != 0, token, key)
        low = tl.minimum(low, tl.where(there, value, 2147483647))
        high = tl.maximum(high, tl.where(there, value, -2147483648))
    return tl.min(low, 0).to(tl.int64), tl.max(high, 0).to(tl.int64)


@triton.jit
def _bisect(keys, ids, masses, log_p, rank, count, vocab, target, TILE: tl.constexpr, LISTED: tl.constexpr):
    """(key, last id at that key) of the last entry that is kept; (-2**31, V - 1), all there is, where the target is never reached."""
    low, high = _bounds(keys, ids, masses, log_p, rank, count, 0, 0, TILE, LISTED)
    first, last = tl.full([], 0, tl.int64), vocab.to(tl.int64) - 1
    if _mass(keys, ids, masses, log_p, rank, count, low, vocab, TILE, LISTED) < target:
        low = tl.full([], -2147483648, tl.int64)
    else:
        while low < high:  # the highest key whose mass, with all above it, reaches the target
            middle = (low + high + 1) >> 1
            reached = _mass(keys, ids, masses, log_p, rank, count, middle, vocab, TILE, LISTED) >= target
            low, high = tl.where(reached, middle, low), tl.where(reached, high, middle - 1)
        first, last = _bounds(keys, ids, masses, log_p, rank, count, low, 1, TILE, LISTED)
        while first < last:  # the lowest id up to which its tokens are wanted
            middle = (first + last) >> 1
            reached = _mass(keys, ids, masses, log_p, rank, count, low, middle, TILE, LISTED) >= target
            first, last = tl.where(reached, first, middle + 1), tl.where(reached, middle, last)
    return low, last


@triton.jit
def _bisect_held(key, token, mass, target):
    """As `_bisect`, of entries in registers; those with the largest id are none, and have no mass."""
    low = tl.min(tl.where(token < 2147483647, key, 2147483647), 0).to(tl.int64)
    high = tl.max(key, 0).to(tl.int64)
    last = tl.full([], 2147483647, tl.int64)
    if tl.sum(mass, 0) < target:
        low = tl.full([], -2147483648, tl.int64)
    else:
        while low < high:
            middle = (low + high + 1) >> 1
            reached = tl.sum(tl.where(key >= middle, mass, 0), 0) >= target
            low, high = tl.where(reached, middle, low), tl.where(reached, high, middle - 1)
        tied = key == low
        target -= tl.sum(tl.where(key > low, mass, 0), 0)
        first = tl.min(tl.where(tied, token, 2147483647), 0).to(tl.int64)
        last = tl.max(tl.where(tied, token, 0), 0).to(tl.int64)
        while first < last:
            middle = (first + last) >> 1
            reached = tl.sum(tl.where(tied & (token <= middle), mass, 0), 0) >= target
            first, last = tl.where(reached, first, middle + 1), tl.where(reached, middle, last)
    return low, last


@triton.jit(do_not_specialize=["vocab", "room"])
def _find(log_p, rank, p, keys, ids, masses, listed, ceiling, cut_key, cut_id, vocab, room, TILE: tl.constexpr):
    """Grid (rows)."""
    row = tl.program_id(0).to(tl.int64)
    target = tl.maximum(_fixed_point(tl.load(p + row).to(tl.float64)), 1)
    count = tl.load(listed + row)
    own = row * room
    log_p += row * vocab
    rank += row * vocab
    key, last = tl.full([], -2147483648, tl.int64), vocab.to(tl.int64) - 1
    if count <= TILE:
        held_key, held_id, held_mass, _ = _entries(keys + own, ids + own, masses + own, log_p, rank, count, 0, TILE, True)
        key, last = _bisect_held(held_key, held_id, held_mass, target)
    elif count <= room:
        key, last = _bisect(keys + own, ids + own, masses + own, log_p, rank, count, vocab, target, TILE, True)
    if (count > room) | ((count < vocab) & (key + 2147483649 <= tl.load(ceiling + row))):
        key, last = _bisect(keys + own, ids + own, masses + own, log_p, rank, vocab, vocab, target, TILE, False)
    tl.store(cut_key + row, key.to(tl.int32))
    tl.store(cut_id + row, last.to(tl.int32))


@triton.jit(do_not_specialize=["vocab"])
def _keep(rank, cut_key, cut_id, kept, vocab, TILE: tl.constexpr):
    """Grid (rows, tiles)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < vocab
    key = _ordered(tl.load(rank + row * vocab + column, mask=mask, other=float("-inf")))
    least = tl.load(cut_key + row)
    tl.store(kept + row * vocab + column, (key > least) | ((key == least) & (column <= tl.load(cut_id + row))), mask=mask)
