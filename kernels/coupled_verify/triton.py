"""Coupled verification in one pass over the logits, with little of the noise made exactly.

The noise is defined in float64 (`kernels/noise`), whose logs cost more than reading the logits does: 64 rows of 128k logits are 33.5 MB,
8 µs at 4.2 TB/s, but 8.4 million pairs of logs of some 100 float64 instructions are 58 µs at 14.4 T of those a second (132 SMs of 64
lanes at 1.7 GHz). The pass therefore uses float32 logs (`rough_gumbel`, within `_SLACK` of the noise; some 35 instructions with the
random word, 10 µs at 28.7 T a second, beside the reading), and only leaves the best sum of every tile. The exact sums are then made
where that leaves a doubt: in tiles whose best may reach the best of the row, nearly always one. The token is that of the exact sums,
bit for bit. These are counts, not measurements.

Rows that share (seed, position, choice), the nodes of one depth of a tree, share their noise: `_order` sorts the rows by that key, a
program takes up to `_MOST_ROWS` neighbours in the order over one tile and makes noise where the key changes. It makes none
where the tile's best score plus the largest noise there is cannot reach what the row already has (`best`, raised by every program;
when the others get there decides how much is skipped, never the token).

Three launches with noise, two without; the scratch is four bytes per row and tile, twelve with the log-sum-exp.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.noise.triton import MOST, gumbel, words
from specdec.kernels.triton_common import INTERPRETED

_TILE = 16384 if INTERPRETED else 1024  # in the interpreter a tile costs the same, however wide
_PROGRAMS = 2 if INTERPRETED else 1024  # about what fills a large card; interpreted, few, so that rows do share programs
_MOST_ROWS = 16  # of a program: beyond that, sharing noise saves less than a fuller card does
_PEERS = 32  # rows compared at a time by `_order`
_SLACK = tl.constexpr(1e-4)  # rough against exact noise: 1.6e-5 at worst (u = 2**-6, logs good to 2**-22), the rest is margin
_ROUNDING = tl.constexpr(3e-7)  # two float32 roundings of a sum, relative


def rejects(logits: Tensor, *_: object, **__: object) -> str | None:
    """Why this kernel cannot run the call, or None."""
    return None if logits.dtype is torch.float32 and logits.stride(1) == 1 else "logits must be float32 with dense rows"


def coupled_verify(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    choices: Tensor,
    noisy: Tensor | None,
    purpose: int,
    *,
    lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Shapes in `specdec.ops.coupled_verify`."""
    rows, vocab = logits.shape
    token = torch.empty(rows, dtype=torch.int64, device=logits.device)
    mass = torch.empty(rows, dtype=torch.float32, device=logits.device) if lse else None
    if rows == 0:
        return token, mass
    tile = min(_TILE, max(16, triton.next_power_of_2(vocab)))
    tiles = triton.cdiv(vocab, tile)
    scratch = torch.empty(3 if lse else 1, rows, tiles, dtype=torch.float32, device=logits.device)
    noise = noisy is not None
    keys = [t.contiguous() for t in (temperature, seeds, positions, choices)] + [seeds if noisy is None else noisy.contiguous()]
    order = torch.empty(rows if noise else 0, dtype=torch.int64, device=logits.device)
    best = torch.empty(rows if noise else 0, dtype=torch.float32, device=logits.device)
    if noise:
        _order[(triton.cdiv(rows, _PEERS),)](*keys[1:4], order, best, rows, PEERS=_PEERS)
    chunk = max(1, min(_MOST_ROWS, rows * tiles // _PROGRAMS))
    sizes = purpose, vocab, rows, logits.stride(0)
    flags = {"NOISE": noise, "LSE": lse, "TILE": tile}
    _maxima[(tiles, triton.cdiv(rows, chunk))](logits, *keys, order, best, scratch, *sizes, chunk, **flags)
    _settle[(rows,)](logits, *keys, scratch, token, token if mass is None else mass, *sizes, TILES=triton.next_power_of_2(tiles), **flags)
    return token, mass


@triton.jit(do_not_specialize=["rows"])
def _order(seeds, positions, choices, order, best, rows, PEERS: tl.constexpr):
    """Grid (row tiles). order [R]: the rows sorted by key, equals by rising row; best [R] = -inf."""
    row = tl.program_id(0) * PEERS + tl.arange(0, PEERS)
    inside = row < rows
    seed = tl.load(seeds + row, mask=inside, other=0)[:, None]
    position = tl.load(positions + row, mask=inside, other=0)[:, None]
    choice = tl.load(choices + row, mask=inside, other=0)[:, None]
    ahead = tl.zeros([PEERS], tl.int32)
    for at in range(0, rows, PEERS):
        peer = at + tl.arange(0, PEERS)
        there = peer < rows
        p = tl.load(positions + peer, mask=there, other=0)[None, :]
        s = tl.load(seeds + peer, mask=there, other=0)[None, :]
        c = tl.load(choices + peer, mask=there, other=0)[None, :]
        earlier = (c < choice) | ((c == choice) & (peer[None, :] < row[:, None]))
        earlier = (s < seed) | ((s == seed) & earlier)
        earlier = ((p < position) | ((p == position) & earlier)) & there[None, :]
        ahead += tl.sum(earlier.to(tl.int32), 1)
    tl.store(order + ahead, row.to(tl.int64), mask=inside)
    tl.store(best + row, tl.full([PEERS], float("-inf"), tl.float32), mask=inside)


@triton.jit
def rough_gumbel(word):
    """g of a uint32 word within _SLACK. E = -log(1 - u) is a short series where 1 - u would round too much of u away."""
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10
    series = u * (1.0 + u * (0.5 + u * 0.3333333333333333))
    return -tl.log(tl.where(u < 0.015625, series, -tl.log(rest)))


@triton.jit
def _tile_words(first, seed, position, choice, purpose, TILE: tl.constexpr):
    """The words of ids first … first + TILE - 1; first is a multiple of 4."""
    counter = (first // 4 + tl.arange(0, TILE // 4)).to(tl.uint32)
    w0, w1, w2, w3 = words(counter, seed, position, choice, purpose)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def _least(rough):
    """What the exact sum is at least. Infinities stay."""
    return rough - _SLACK - tl.minimum(tl.abs(rough), 1e30) * _ROUNDING


@triton.jit
def _most(rough):
    """What the exact sum is at most."""
    return rough + _SLACK + tl.minimum(tl.abs(rough), 1e30) * _ROUNDING


@triton.jit
def _scores(logits, temperature):
    """logits / temperature rounded as IEEE division does, NaN at -inf. logits: of the tile."""
    x = tl.where(logits == logits, logits, float("-inf"))
    return tl.div_rn(x, tl.zeros_like(x) + temperature)


@triton.jit(do_not_specialize=["purpose", "vocab", "rows", "chunk"])
def _maxima(
    logits, temperatures, seeds, positions, choices, noisy, order, best, scratch, purpose, vocab, rows, logits_row, chunk,
    NOISE: tl.constexpr, LSE: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (tiles, row chunks). scratch [1 or 3, R, tiles]: best rough sum; largest logit and sum of exponentials above it."""
    tile = tl.program_id(0)
    tiles = tl.num_programs(0)
    first = tile * TILE
    column = first + tl.arange(0, TILE)
    noise = tl.zeros([TILE], tl.float32)
    made = False
    seed_made, position_made, choice_made = tl.full([], 0, tl.int64), tl.full([], 0, tl.int64), tl.full([], 0, tl.int64)
    start = tl.program_id(1).to(tl.int64) * chunk
    for place in range(start, tl.minimum(start + chunk, rows)):
        row = tl.load(order + place) if NOISE else place
        x = tl.load(logits + row * logits_row + column, mask=column < vocab, other=float("-inf"))
        out = scratch + row * tiles + tile
        if LSE:
            finite = tl.where(x == x, x, float("-inf"))
            peak = tl.max(finite, 0)
            shift = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
            tl.store(out + rows.to(tl.int64) * tiles, peak)
            tl.store(out + rows.to(tl.int64) * (2 * tiles), tl.sum(tl.exp(finite - shift), 0))
        score = _scores(x, tl.load(temperatures + row))
        top = tl.max(score, 0)
        if NOISE:  # noqa: SIM102 - one is known to the compiler, the other not
            if tl.load(noisy + row) != 0:
                if (top > float("-inf")) & (top + MOST >= tl.load(best + row)):
                    seed, position, choice = tl.load(seeds + row), tl.load(positions + row), tl.load(choices + row)
                    if not (made & (seed == seed_made) & (position == position_made) & (choice == choice_made)):
                        noise = rough_gumbel(_tile_words(first, seed, position, choice, purpose, TILE))
                        made = True
                        seed_made, position_made, choice_made = seed, position, choice
                    top = tl.max(score + noise, 0)
                    tl.atomic_max(best + row, _least(top), sem="relaxed")
                else:
                    top = float("-inf")
        tl.store(out, top)


@triton.jit(do_not_specialize=["purpose", "vocab", "rows"])
def _settle(
    logits, temperatures, seeds, positions, choices, noisy, scratch, tokens, masses, purpose, vocab, rows, logits_row,
    NOISE: tl.constexpr, LSE: tl.constexpr, TILE: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Grid (rows): the exact sums of the tiles that may hold the best, in rising order, so that the lowest id wins ties."""
    row = tl.program_id(0).to(tl.int64)
    tiles = (vocab + TILE - 1) // TILE
    slot = tl.arange(0, TILES)
    own = scratch + row * tiles + slot
    rough = tl.load(own, mask=slot < tiles, other=float("-inf"))
    if LSE:
        peak = tl.load(own + rows.to(tl.int64) * tiles, mask=slot < tiles, other=float("-inf"))
        mass = tl.load(own + rows.to(tl.int64) * (2 * tiles), mask=slot < tiles, other=0.0)
        top = tl.max(peak, 0)
        shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
        own_shift = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
        total = tl.sum(mass * tl.exp(own_shift - shift), 0)
        tl.store(masses + row, tl.where(total > 0.0, tl.log(tl.maximum(total, 1e-30)) + shift, float("-inf")))
    with_noise = False
    if NOISE:
        with_noise = tl.load(noisy + row) != 0
    top = tl.max(rough, 0)
    reach = rough
    if with_noise:
        reach = _most(rough)
        top = _least(top)
    may = (reach >= top) & (reach > float("-inf"))
    temperature = tl.load(temperatures + row)
    best = tl.full([], float("-inf"), tl.float32)
    index = tl.full([], 0, tl.int32)
    at = tl.min(tl.where(may, slot, TILES), 0)
    while at < TILES:
        column = at * TILE + tl.arange(0, TILE)
        x = tl.load(logits + row * logits_row + column, mask=column < vocab, other=float("-inf"))
        score = _scores(x, temperature)
        if with_noise:
            seed, position, choice = tl.load(seeds + row), tl.load(positions + row), tl.load(choices + row)
            score += gumbel(_tile_words(at * TILE, seed, position, choice, purpose, TILE))
        most = tl.max(score, 0)
        if most > best:
            best = most
            index = tl.min(tl.where(score == most, column, 2147483647), 0)
        at = tl.min(tl.where(may & (slot > at), slot, TILES), 0)
    tl.store(tokens + row, index.to(tl.int64))
