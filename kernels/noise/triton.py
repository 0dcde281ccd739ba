"""The noise in Triton: the same words and numbers as the reference, and an argmax that never stores the noise.

The uniform is (word + 0.5) / 2**32, so 1 - u is exact in float64 and log(1 - u) is the reference's log1p(-u) to the last bit or
two; everything is float64 until one final rounding, as there.

`gumbel_argmax`: a program owns a stretch of one row's vocabulary. It makes no noise for a tile that cannot win: none is larger than
22.88 (33 ln 2 = 22.874), so a tile whose best score plus 22.88 does not exceed the best sum so far is skipped; earlier ids win ties.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_common import INTERPRET, INTERPRETED

_TILE = 16384 if INTERPRETED else 1024  # in the interpreter a tile costs the same, however wide
MOST = tl.constexpr(22.88)
_PROGRAMS = 1024  # about what fills a large card


def rejects_argmax(scores: Tensor, *_: Tensor | int) -> str | None:
    """Why `gumbel_argmax` cannot run the call, or None."""
    return None if scores.dtype is torch.float32 and scores.stride(1) == 1 else "scores must be float32 with dense rows"


def rejects_ids(seeds: Tensor, positions: Tensor, choices: Tensor, ids: Tensor, purpose: int) -> str | None:
    """Why the elementwise draws cannot run the call, or None."""
    return None if ids.stride(-1) == 1 or ids.shape[1] <= 1 else "rows of ids must be dense"


def philox_uniform(seeds: Tensor, positions: Tensor, choices: Tensor, ids: Tensor, purpose: int) -> Tensor:
    """Shapes in `specdec.ops.philox_uniform`."""
    return _draws(seeds, positions, choices, ids, purpose, False)


def gumbel_noise(seeds: Tensor, positions: Tensor, choices: Tensor, ids: Tensor, purpose: int) -> Tensor:
    """Shapes in `specdec.ops.gumbel_noise`."""
    return _draws(seeds, positions, choices, ids, purpose, True)


def _draws(seeds: Tensor, positions: Tensor, choices: Tensor, ids: Tensor, purpose: int, gumbel: bool) -> Tensor:
    rows, width = ids.shape
    out = torch.empty(rows, width, dtype=torch.float32, device=ids.device)
    if out.numel():
        tile = min(_TILE, triton.next_power_of_2(width))
        grid = (rows, triton.cdiv(width, tile))
        keys = (t.contiguous() for t in (seeds, positions, choices))
        _named_draws[grid](out, *keys, ids, purpose, width, ids.stride(0), GUMBEL=gumbel, TILE=tile)
    return out


def gumbel_argmax(scores: Tensor, seeds: Tensor, positions: Tensor, choices: Tensor, noisy: Tensor, purpose: int) -> Tensor:
    """Shapes in `specdec.ops.gumbel_argmax`."""
    rows, vocab = scores.shape
    if rows == 0:
        return torch.empty(0, dtype=torch.int64, device=scores.device)
    tiles = triton.cdiv(vocab, _TILE)
    share = triton.cdiv(tiles, max(1, min(tiles, _PROGRAMS // rows)))  # tiles a program takes
    parts = triton.cdiv(tiles, share)
    best = torch.empty(rows, parts, dtype=torch.float32, device=scores.device)
    index = torch.empty(rows, parts, dtype=torch.int64, device=scores.device)
    keys = (t.contiguous() for t in (seeds, positions, choices, noisy))
    _noisy_argmax[(rows, parts)](scores, *keys, best, index, purpose, vocab, scores.stride(0), share, TILE=_TILE)
    return index.gather(1, best.argmax(1, keepdim=True)).squeeze(1) if parts > 1 else index.squeeze(1)


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Philox4x32-10 (Salmon et al., SC 2011). All uint32, c0 a block of counters, the rest alike or scalar."""
    c1 = c1 + tl.zeros_like(c0)
    c2 = c2 + tl.zeros_like(c0)
    c3 = c3 + tl.zeros_like(c0)
    for _ in tl.static_range(10):  # one wide multiplication gives both halves of a product
        product_a, product_b = c0.to(tl.uint64) * 0xD2511F53, c2.to(tl.uint64) * 0xCD9E8D57
        high_a, low_a = (product_a >> 32).to(tl.uint32), product_a.to(tl.uint32)
        high_b, low_b = (product_b >> 32).to(tl.uint32), product_b.to(tl.uint32)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0 = k0 + tl.full([], 0x9E3779B9, tl.uint32)
        k1 = k1 + tl.full([], 0xBB67AE85, tl.uint32)
    return c0, c1, c2, c3


@triton.jit
def words(counter, seed, position, choice, purpose):
    """The four words of each counter. counter [n] uint32; the others are scalars, seed in two's complement."""
    k0, k1 = seed.to(tl.uint32), (seed >> 32).to(tl.uint32)
    return _philox(counter, position.to(tl.uint32), choice.to(tl.uint32), purpose.to(tl.uint32), k0, k1)


@triton.jit
def gumbel(word):
    """g of a uint32 word, float64 rounded once."""
    u = (word.to(tl.float64) + 0.5) * 2.3283064365386963e-10
    return (-tl.log(-tl.log(1.0 - u))).to(tl.float32)


@triton.jit
def named_word(ids, seed, position, choice, purpose):
    """The word of each id [n] i64; the others are scalars."""
    w0, w1, w2, w3 = words((ids >> 2).to(tl.uint32), seed, position, choice, purpose)
    lane = ids & 3
    return tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3)))


@triton.jit
def uniform(word):
    """u of a uint32 word rounded to float32, never 1."""
    u = ((word.to(tl.float64) + 0.5) * 2.3283064365386963e-10).to(tl.float32)
    return tl.minimum(u, 0.999999940395355224609375)  # the largest float32 below 1


@triton.jit
def log2(x):
    """Of a normal number by the hardware, good to 2**-22: absolute between a half and two, elsewhere relative."""
    if INTERPRET:
        return tl.log2(x)
    else:
        return tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def near_gumbel(word):
    """g of a uint32 word in float32 alone, within 3e-6 of 1 or |g|, the larger: for races that decide nothing but a draft.

    E = -log(1 - u) is a series below 1/8, where 1 - u would round too much of u away.
    """
    u = word.to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    rest = (word ^ 0xFFFFFFFF).to(tl.float32) * 2.3283064365386963e-10 + 1.1641532182693481e-10
    tail = 0.25 + u * (0.2 + u * (0.16666666666666666 + u * (0.14285714285714285 + u * 0.125)))
    series = u * (1.0 + u * (0.5 + u * (0.3333333333333333 + u * tail)))
    return log2(tl.where(u < 0.125, series, log2(rest) * -0.6931471805599453)) * -0.6931471805599453


@triton.jit(do_not_specialize=["purpose", "width"])
def _named_draws(out, seeds, positions, choices, ids, purpose, width, ids_row, GUMBEL: tl.constexpr, TILE: tl.constexpr):
    """Grid (rows, tiles): one draw per id."""
    row = tl.program_id(0)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < width
    token = tl.load(ids + row.to(tl.int64) * ids_row + column, mask=mask, other=0)
    seed, position, choice = tl.load(seeds + row), tl.load(positions + row), tl.load(choices + row)
    word = named_word(token, seed, position, choice, purpose)
    value = gumbel(word) if GUMBEL else uniform(word)
    tl.store(out + row.to(tl.int64) * width + column, value, mask=mask)


@triton.jit(do_not_specialize=["purpose", "share"])  # a vocabulary of many fours is read in fours
def _noisy_argmax(scores, seeds, positions, choices, noisy, best_out, index_out, purpose, vocab, scores_row, share, TILE: tl.constexpr):
    """Grid (rows, parts): best sum and its lowest id in `share` tiles of one row."""
    row = tl.program_id(0)
    part = tl.program_id(1)
    own = scores + row.to(tl.int64) * scores_row
    seed, position, choice = tl.load(seeds + row), tl.load(positions + row), tl.load(choices + row)
    with_noise = tl.load(noisy + row) != 0
    lowest = part * share * TILE
    best = tl.full([], float("-inf"), tl.float32)
    index = lowest
    for at in range(lowest, tl.minimum(lowest + share * TILE, vocab), TILE):
        token = at + tl.arange(0, TILE)
        total = tl.load(own + token, mask=token < vocab, other=float("-inf"))
        total = tl.where(total == total, total, float("-inf"))  # NaN
        bound = tl.max(total, 0)
        if with_noise:
            bound = bound + MOST
        if bound > best:
            if with_noise:
                counter = (at // 4 + tl.arange(0, TILE // 4)).to(tl.uint32)
                w0, w1, w2, w3 = words(counter, seed, position, choice, purpose)
                total = total + gumbel(tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3)))
            top = tl.max(total, 0)
            if top > best:
                best = top
                index = tl.min(tl.where(total == top, token, 2147483647), 0)
    place = row * tl.num_programs(1) + part
    tl.store(best_out + place, best)
    tl.store(index_out + place, index.to(tl.int64))
