"""Coupled verification in one launch that reads the logits once, with hardly any of the noise made exactly.

The noise is defined in float64 (`kernels/noise`), whose logs cost more than reading the logits does: 64 rows of 128k logits are 33.5 MB,
8 µs at 4.2 TB/s, but 8.4 million pairs of logs of some 100 float64 instructions are 58 µs at 14.4 T of those a second (132 SMs of 64
lanes at 1.7 GHz). The pass therefore uses the hardware's float32 logs (`rough_gumbel`, within `_SLACK` of the noise). Of every row and
tile it leaves the best sum and the id that has it, and whether another id comes so close that the exact sums might be in another order.
The program of a tile that arrives last compares the tiles of its rows. Exact sums are made only where that leaves a doubt, for about one
row in some thousands. The token is that of the exact sums, bit for bit.

Rows that share (seed, position, choice), the nodes of one depth of a tree, share their noise: a program takes up to 8 rows over one tile,
neighbours when the rows of a window are sorted by a hash of that key, and makes noise where the key changes. The logits of the next two
rows are on their way while a row is worked on. Words cost 10 multiplications and as many xors for each id when made for 4 ids at a time.

Keys and temperatures lie by request slot; a row names its slot and its depth, so no launch gathers them first.

Scratch: eight bytes per row and tile, sixteen with the log-sum-exp.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.noise.triton import gumbel, log2, words
from specdec.kernels.triton_common import INTERPRETED
from specdec.kernels.triton_gemm import zeroed

_MEMBERS = 8  # rows of a program at most: beyond that, sharing noise saves less than more programs do
_WINDOW = 64  # rows among which those that share keys are looked for
_EXACT = 512  # ids whose exact sums are made at a time
_SLACK = tl.constexpr(1e-4)  # rough against exact noise: 1.6e-5 at worst (u = 2**-6, logs good to 2**-22), the rest is margin
_ROUNDING = tl.constexpr(3e-7)  # four float32 roundings, of 1 / temperature, of the quotient and of both sums, relative


def rejects(logits: Tensor, *_: object, **__: object) -> str | None:
    """Why this kernel cannot run the call, or None."""
    return None if logits.dtype is torch.float32 and logits.stride(1) == 1 else "logits must be float32 with dense rows"


def _shape(rows: int, vocab: int, noise: bool, lse: bool) -> tuple[int, int]:
    """(ids of a tile, rows of a program): some 500 programs with noise, which is work for all lanes, else about 2,000.

    The bits of a log-sum-exp depend on the tile, so there it is the same for any rows.
    """
    if INTERPRETED:  # a tile costs the same, however wide
        return 16384, min(_MEMBERS, triton.next_power_of_2(rows)) if noise else 1
    if rows < 8 and not lse:
        return 1024, 1
    if not noise:
        return 2048 if lse else 4096, 1
    return 2048, max(1, min(_MEMBERS, triton.next_power_of_2(rows * triton.cdiv(vocab, 2048) // 500 + 1) // 2))


def coupled_verify(
    logits: Tensor,
    slots: Tensor,
    depths: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    lengths: Tensor,
    choices: Tensor,
    noisy: Tensor | None,
    purpose: int,
    *,
    lse: bool = False,
    shape: tuple[int, int] | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Shapes in `specdec.ops.coupled_verify`. shape: (ids of a tile, rows of a program) in place of the usual."""
    (rows, vocab), device = logits.shape, logits.device
    token = torch.empty(rows, dtype=torch.int64, device=device)
    mass = torch.empty(rows, dtype=torch.float32, device=device) if lse else None
    if rows == 0:
        return token, mass
    tile, members = shape or _shape(rows, vocab, noisy is not None, lse)
    tile = min(tile, max(16, triton.next_power_of_2(vocab)))
    tiles, chunks = triton.cdiv(vocab, tile), triton.cdiv(rows, members)
    scratch = torch.empty(3 if lse else 1, rows, tiles, dtype=torch.float32, device=device)
    ids = torch.empty(rows, tiles, dtype=torch.int32, device=device)
    keys = slots.contiguous(), depths.contiguous(), temperature, seeds, lengths, choices, seeds if noisy is None else noisy
    _verify[(tiles, chunks)](
        logits, *keys, scratch, ids, zeroed(chunks, device), token, token if mass is None else mass,
        purpose, vocab, rows, logits.stride(0),
        NOISE=noisy is not None, LSE=lse, TILE=tile, MEMBERS=members, WINDOW=_WINDOW, TILES=triton.next_power_of_2(tiles),
        EXACT=min(_EXACT, tile), maxnreg=128 if members > 1 else 64,
    )  # fmt: skip
    return token, mass


@triton.jit
def rough_gumbel(word):
    """g of a uint32 word within _SLACK. E = -log(1 - u) is a short series where 1 - u would round too much of u away."""
    u = word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    rest = (word ^ 0xFFFFFFFF).to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    series = u * (1.0 + u * (0.5 + u * 0.3333333333333333))
    return log2(tl.where(u < 0.015625, series, log2(rest) * -0.6931471805599453)) * -0.6931471805599453


@triton.jit
def _tile_words(first, seed, position, choice, purpose, TILE: tl.constexpr):
    """The words of ids first … first + TILE - 1; first is a multiple of 4."""
    counter = (first // 4 + tl.arange(0, TILE // 4)).to(tl.uint32)
    w0, w1, w2, w3 = words(counter, seed, position, choice, purpose)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def _within(top, exact):
    """The least rough sum whose exact sum may reach that of `top`; top itself where sums are exact. Infinities stay."""
    return tl.where(exact, top, top - 2.0 * _SLACK - tl.minimum(tl.abs(top), 1e30) * (2.0 * _ROUNDING))


@triton.jit
def _key(slots, depths, seeds, lengths, choices, row, mask=None):
    """(seed, position, choice) of rows: a row's request slot has its seed, its choice and its length, its node the depth below that."""
    other = None if mask is None else 0
    slot = tl.load(slots + row, mask=mask, other=other)
    position = tl.load(lengths + slot, mask=mask, other=other) + tl.load(depths + row, mask=mask, other=other)
    return tl.load(seeds + slot, mask=mask, other=other), position, tl.load(choices + slot, mask=mask, other=other)


@triton.jit
def _members(slots, depths, seeds, lengths, choices, start, rows, NOISE: tl.constexpr, MEMBERS: tl.constexpr, WINDOW: tl.constexpr):
    """Rows [MEMBERS] of a program: of places start … of its window's rows sorted by a hash of their keys, those past the end last."""
    if not NOISE or MEMBERS == 1:
        return start + tl.arange(0, MEMBERS)
    else:
        row = start // WINDOW * WINDOW + tl.arange(0, WINDOW)
        inside = row < rows
        seed, position, choice = _key(slots, depths, seeds, lengths, choices, row, inside)
        mixed = position.to(tl.uint32) * 0x9E3779B1
        mixed += choice.to(tl.uint32) * 0x85EBCA77
        mixed += seed.to(tl.uint32) * 0xC2B2AE3D + (seed >> 32).to(tl.uint32) * 0xA7D4EB2F
        code = tl.where(inside, (mixed >> 8).to(tl.int32), 1 << 24) * WINDOW + tl.arange(0, WINDOW)
        # A sum that changes nothing: Triton repeats any other way to the codes in every layout that it wants them in, 99 loads a thread.
        code = tl.sum(tl.where(tl.arange(0, 2)[None, :] == 0, code[:, None], 0), 1)
        rank = tl.sum((code[:, None] < code[None, :]).to(tl.int32), 0)  # down the columns, which threads do by themselves
        place = start % WINDOW + tl.arange(0, MEMBERS)
        return tl.sum(tl.where(rank[:, None] == place[None, :], row[:, None], 0), 0)


@triton.jit
def _pick(values, index):
    """Entry `index` of a vector."""
    return tl.sum(tl.where(tl.arange(0, values.shape[0]) == index, values, 0), 0)


@triton.jit(do_not_specialize=["purpose", "rows"])
def _verify(
    logits, slots, depths, temperatures, seeds, lengths, choices, noisy, scratch, ids, counters, tokens, masses, purpose, vocab, rows,
    logits_row, NOISE: tl.constexpr, LSE: tl.constexpr, TILE: tl.constexpr, MEMBERS: tl.constexpr, WINDOW: tl.constexpr,
    TILES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, chunks of MEMBERS rows). Per row and tile: scratch [1 or 3, R, tiles]: best rough sum; largest logit, sum of
    exponentials above it. ids: the one that has the best sum, the lowest of equals; -1 where several may have it."""
    tile, tiles = tl.program_id(0), tl.num_programs(0)
    start = tl.program_id(1) * MEMBERS
    first = tile * TILE
    column = first + tl.arange(0, TILE)
    members = _members(slots, depths, seeds, lengths, choices, start, rows, NOISE, MEMBERS, WINDOW)
    plane = rows.to(tl.int64) * tiles
    noise = tl.zeros([TILE], tl.float32)
    made = False
    seed_made, position_made, choice_made = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    count = tl.minimum(MEMBERS, rows - start) if MEMBERS > 1 else 1
    row = _pick(members, 0)
    x = _logits_of(logits, row, column, vocab, logits_row)
    after, ahead = row, x
    if MEMBERS > 1:  # noqa: SIM102 - one is known to the compiler, the other not
        if count > 1:
            after = _pick(members, 1)
            ahead = _logits_of(logits, after, column, vocab, logits_row)
    for i in range(count):
        then, beyond = after, ahead
        if i + 2 < count:
            then = _pick(members, i + 2)
            beyond = _logits_of(logits, then, column, vocab, logits_row)
        slot = tl.load(slots + row)
        temperature = tl.load(temperatures + slot)
        exact = temperature == 1.0  # and no noise
        if NOISE:
            mine = tl.load(noisy + slot) != 0
            seed, position, choice = _key(slots, depths, seeds, lengths, choices, row)
            exact = exact & (mine == 0)
            if mine:
                if not (made & (seed == seed_made) & (position == position_made) & (choice == choice_made)):
                    noise = rough_gumbel(_tile_words(first, seed, position, choice, purpose, TILE))
                    made = True
                    seed_made, position_made, choice_made = seed, position, choice
            elif made:
                noise = tl.zeros([TILE], tl.float32)
                made = False
        own = (start + i).to(tl.int64) * tiles + tile
        if LSE:
            _keep_mass(scratch + plane + own, x, plane)
        top, best = _best_of_tile(x * tl.div_rn(1.0, temperature) + noise, exact, first, TILE)
        tl.store(scratch + own, top)
        tl.store(ids + own, best)
        row, after, x, ahead = after, then, ahead, beyond
    tl.debug_barrier()  # every thread's stores before the one thread's release
    if tl.atomic_add(counters + tl.program_id(1), 1, sem="acq_rel") == tiles - 1:
        tl.store(counters + tl.program_id(1), 0)  # as it was found
        if LSE:
            _sum_up(scratch + plane, masses, members, start, count, tiles, plane, TILES)
        _settle(
            logits, slots, depths, temperatures, seeds, lengths, choices, noisy, scratch, ids, tokens, purpose, vocab, logits_row,
            members, start, count, tiles, NOISE, TILE, MEMBERS, TILES, EXACT,
        )  # fmt: skip


@triton.jit
def _logits_of(logits, row, column, vocab, logits_row):
    """One row's logits of a tile, -inf past the last."""
    return tl.load(logits + row.to(tl.int64) * logits_row + column, mask=column < vocab, other=float("-inf"))


@triton.jit
def _keep_mass(place, x, plane):
    """A tile's largest logit to `place`, the sum of exponentials above it a plane further. NaN counts as -inf."""
    finite = tl.where(x == x, x, float("-inf"))
    peak = tl.max(finite, 0)
    tl.store(place, peak)
    shift = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
    tl.store(place + plane, tl.sum(tl.exp(finite - shift), 0))


@triton.jit
def _best_of_tile(total, exact, first, TILE: tl.constexpr):
    """(best of the rough sums, the id that has it, the lowest of equals, or -1 where several may). exact: the sums are not rough."""
    top = tl.max(total, 0)  # passes over NaN, unless there is nothing else
    top = tl.where(top == top, top, float("-inf"))
    near = total >= _within(top, exact)
    if exact:
        best = tl.min(tl.where(near, first + tl.arange(0, TILE), 2147483647), 0)
    else:
        coded = tl.sum(tl.where(near, 65536 + tl.arange(0, TILE), 0), 0)  # how many, and where it is if one
        best = tl.where(coded < 131072, first + coded - 65536, -1)
    return top, best


@triton.jit
def _sum_up(peaks, masses, members, start, count, tiles, plane, TILES: tl.constexpr):
    """The log-sum-exp of the members from that of their tiles, one by one: in an order that does not depend on how many there are."""
    slot = tl.arange(0, TILES)
    for i in range(count):
        own = (start + i).to(tl.int64) * tiles + slot
        peak = tl.load(peaks + own, mask=slot < tiles, other=float("-inf"), cache_modifier=".cg")
        mass = tl.load(peaks + plane + own, mask=slot < tiles, other=0.0, cache_modifier=".cg")
        top = tl.max(peak, 0)
        shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
        total = tl.sum(mass * tl.exp(tl.where(tl.abs(peak) == float("inf"), 0.0, peak) - shift), 0)
        result = tl.where(total > 0.0, tl.log(tl.maximum(total, 1e-30)) + shift, float("-inf"))
        tl.store(masses + _pick(members, i), result)


@triton.jit
def _settle(
    logits, slots, depths, temperatures, seeds, lengths, choices, noisy, scratch, ids, tokens, purpose, vocab, logits_row,
    members, start, count, tiles,
    NOISE: tl.constexpr, TILE: tl.constexpr, MEMBERS: tl.constexpr, TILES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The members' tokens from the best of their tiles; by exact sums where these may be in another order."""
    member, slot = tl.arange(0, MEMBERS), tl.arange(0, TILES)
    there = (member < count)[:, None] & (slot < tiles)[None, :]
    own = (start + member).to(tl.int64)[:, None] * tiles + slot[None, :]
    rough = tl.load(scratch + own, mask=there, other=float("-inf"), cache_modifier=".cg")
    found = tl.load(ids + own, mask=there, other=0, cache_modifier=".cg")
    whose = tl.load(slots + members, mask=member < count, other=0)
    exact = tl.load(temperatures + whose, mask=member < count, other=1.0) == 1.0
    if NOISE:
        exact = exact & (tl.load(noisy + whose, mask=member < count, other=0) == 0)
    top = tl.max(rough, 1)
    may = (rough >= _within(top, exact)[:, None]) & (rough > float("-inf"))
    lowest = tl.min(tl.where(may, slot[None, :], TILES), 1)
    highest = tl.max(tl.where(may, slot[None, :], -1), 1)
    token = tl.sum(tl.where(slot[None, :] == lowest[:, None], found, 0), 1)
    doubt = ((token < 0) | ((lowest < highest) & (exact == 0))).to(tl.int32)
    tl.store(tokens + members, token.to(tl.int64), mask=(member < count) & (doubt == 0))
    if tl.max(doubt, 0) != 0:
        for i in range(count):
            if _pick(doubt, i) != 0:
                row = _pick(members, i)
                _settle_exactly(
                    logits + row.to(tl.int64) * logits_row, slots, depths, temperatures, seeds, lengths, choices, noisy,
                    scratch + (start + i).to(tl.int64) * tiles, tokens, purpose, vocab, row, tiles, NOISE, TILE, TILES, EXACT,
                )  # fmt: skip


@triton.jit
def _settle_exactly(
    own_logits, slots, depths, temperatures, seeds, lengths, choices, noisy, own_scratch, tokens, purpose, vocab, row, tiles,
    NOISE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """The exact sums of the tiles that may hold the best, in rising order, so that the lowest id wins ties."""
    slot = tl.arange(0, TILES)
    rough = tl.load(own_scratch + slot, mask=slot < tiles, other=float("-inf"), cache_modifier=".cg")
    may = (rough >= _within(tl.max(rough, 0), False)) & (rough > float("-inf"))
    whose = tl.load(slots + row)
    temperature = tl.load(temperatures + whose)
    with_noise = False
    if NOISE:
        with_noise = tl.load(noisy + whose) != 0
    best = tl.full([], float("-inf"), tl.float32)
    index = tl.full([], 0, tl.int32)
    at = tl.min(tl.where(may, slot, TILES), 0)
    while at < TILES:
        for first in range(at * TILE, at * TILE + TILE, EXACT):
            column = first + tl.arange(0, EXACT)
            x = tl.load(own_logits + column, mask=column < vocab, other=float("-inf"))
            x = tl.where(x == x, x, float("-inf"))
            score = tl.div_rn(x, tl.zeros_like(x) + temperature)
            if with_noise:
                seed, position, choice = _key(slots, depths, seeds, lengths, choices, row)
                score += gumbel(_tile_words(first, seed, position, choice, purpose, EXACT))
            most = tl.max(score, 0)
            if most > best:
                best = most
                index = tl.min(tl.where(score == most, column, 2147483647), 0)
        at = tl.min(tl.where(may & (slot > at), slot, TILES), 0)
    tl.store(tokens + row, index.to(tl.int64))
