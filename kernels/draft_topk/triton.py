"""lm_head and candidates: each program keeps the best few of its tile of the product, a second kernel merges them.

The product of R <= 16 rows with 32,000 × 4096 weights in bf16 is 262 MB, 62 µs at 4.2 TB/s, and 4 GFLOP, 5 µs at 791 TFLOP/s: only the
reading of the weight counts, so the rows are one tensor-core tile of 16 (more rows: more programs beside each other, which share the
weight in L2) and the weight tile is narrow, 64 rows, for some 500 programs. In the 16 µs that a program waits for its tile, the exact
noise of 16 × 64 tokens, about 1 µs of float64, is free. A row of logits would be 128 kB against those 262 MB: not writing it saves no
time worth naming; what is saved are the ten launches that a top-k, a gather, noise, a softmax and another top-k are.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.noise.triton import gumbel, words
from specdec.kernels.triton_common import dot

_ROWS, _COLUMNS, _DEPTH = 16, 64, 64
_MOST = 64  # candidates a row, and
_POOL = 32768  # what the merging program holds


def rejects(hidden: Tensor, weight: Tensor, *rest: object) -> str | None:
    """Why this kernel cannot run the call, or None."""
    width = rest[-1]
    assert isinstance(width, int)
    if hidden.dtype is not weight.dtype or hidden.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"{hidden.dtype} by {weight.dtype}; it takes equal floats of 16 or 32 bits"
    if not (hidden.is_contiguous() and weight.is_contiguous()):
        return "hidden and weight must be dense"
    tiles = triton.cdiv(weight.shape[0], _COLUMNS)
    too_many = not 1 <= width <= min(_MOST, weight.shape[0]) or tiles * min(width, _COLUMNS) > _POOL
    return f"{width} of {weight.shape[0]} candidates; it takes up to {_MOST}, {_POOL} over all tiles" if too_many else None


def draft_topk(
    hidden: Tensor,
    weight: Tensor,
    temperature: Tensor,
    target_ids: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    choices: Tensor,
    noisy: Tensor | None,
    purpose: int,
    share: float,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Shapes in `specdec.ops.draft_topk`."""
    rows, depth = hidden.shape
    vocab, device = weight.shape[0], hidden.device
    ids = torch.empty((rows, width), dtype=torch.int64, device=device)
    chances = torch.empty((rows, width), dtype=torch.float32, device=device)
    mass = torch.empty(rows, dtype=torch.float32, device=device)
    if rows == 0:
        return ids, chances, mass
    tiles = triton.cdiv(vocab, _COLUMNS)
    values = torch.empty((rows, tiles, width), dtype=torch.float32, device=device)
    columns = torch.empty((rows, tiles, width), dtype=torch.int32, device=device)
    sums = torch.empty((4, rows, tiles), dtype=torch.float32, device=device)  # race: largest, sum; scores: largest, sum
    noise, mapped = noisy is not None, target_ids is not None
    keys = [t.contiguous() for t in (seeds, positions, choices)] + [seeds if noisy is None else noisy.contiguous()]
    table = target_ids if mapped else columns
    _race[(triton.cdiv(rows, _ROWS), tiles)](
        hidden, weight, temperature.contiguous(), table, *keys, values, columns, sums, purpose, share, rows, vocab,
        DEPTH=depth, WIDTH=width, NOISE=noise, MAPPED=mapped, ROWS=_ROWS, COLUMNS=_COLUMNS, STEP=_DEPTH, num_stages=4,
    )  # fmt: skip
    _merge[(rows,)](
        values, columns, sums, table, ids, chances, mass, rows, tiles,
        WIDTH=width, MAPPED=mapped, POOL=triton.next_power_of_2(tiles * width), TILES=triton.next_power_of_2(tiles), num_warps=8,
    )  # fmt: skip
    return ids, chances, mass


@triton.jit
def _sum_of_exp(x, axis: tl.constexpr):
    """(largest, sum of exp(x - largest)) along the axis; infinities are not shifted."""
    top = tl.max(x, axis)
    shift = tl.where(tl.abs(top) == float("inf"), 0.0, top)
    return top, tl.sum(tl.exp(x - tl.expand_dims(shift, axis)), axis)


@triton.jit(do_not_specialize=["purpose", "rows", "vocab"])
def _race(
    hidden, weight, temperatures, target_ids, seeds, positions, choices, noisy, values, columns, sums, purpose, share, rows, vocab,
    DEPTH: tl.constexpr, WIDTH: tl.constexpr, NOISE: tl.constexpr, MAPPED: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, vocabulary tiles)."""
    tile, tiles = tl.program_id(1), tl.num_programs(1)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tile * COLUMNS + tl.arange(0, COLUMNS)
    real, known = row < rows, column < vocab
    at_row = row.to(tl.int64)[:, None] * DEPTH
    at_column = column.to(tl.int64)[None, :] * DEPTH
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(0, DEPTH, STEP):
        place = k + tl.arange(0, STEP)
        a = tl.load(hidden + at_row + place[None, :], mask=real[:, None] & (place < DEPTH)[None, :], other=0.0)
        b = tl.load(weight + at_column + place[:, None], mask=known[None, :] & (place < DEPTH)[:, None], other=0.0)
        total = dot(a, b, total)
    score = total / tl.load(temperatures + row, mask=real, other=1.0)[:, None]
    score = tl.where(known[None, :] & (score == score), score, float("-inf"))
    race = score
    if NOISE:
        token = tl.load(target_ids + column, mask=known, other=0) if MAPPED else column.to(tl.int64)
        seed = tl.load(seeds + row, mask=real, other=0)[:, None]
        position = tl.load(positions + row, mask=real, other=0)[:, None]
        choice = tl.load(choices + row, mask=real, other=0)[:, None]
        counter = (token >> 2).to(tl.uint32)[None, :] + tl.zeros([ROWS, COLUMNS], tl.uint32)
        w0, w1, w2, w3 = words(counter, seed, position, choice, purpose)
        lane = (token & 3)[None, :]
        g = gumbel(tl.where(lane == 0, w0, tl.where(lane == 1, w1, tl.where(lane == 2, w2, w3))))
        race = score + tl.where((tl.load(noisy + row, mask=real, other=0) != 0)[:, None], share * g, 0.0)

    own = row.to(tl.int64) * tiles + tile
    plane = rows.to(tl.int64) * tiles
    top, mass = _sum_of_exp(race, 1)
    tl.store(sums + own, top, mask=real)
    tl.store(sums + plane + own, mass, mask=real)
    top, mass = _sum_of_exp(score, 1)
    tl.store(sums + 2 * plane + own, top, mask=real)
    tl.store(sums + 3 * plane + own, mass, mask=real)
    left = known[None, :] & (race == race)  # all of the tile's columns, in every row
    for place in range(WIDTH):
        best = tl.max(tl.where(left, race, float("-inf")), 1)
        index = tl.min(tl.where(left & (race == best[:, None]), column[None, :], 2147483647), 1)
        tl.store(values + own * WIDTH + place, best, mask=real)
        tl.store(columns + own * WIDTH + place, index, mask=real)
        left = left & (column[None, :] != index[:, None])


@triton.jit
def _log_mass(tops, masses, tile, tiles, TILES: tl.constexpr):
    """log of the sum over tiles of exp(top) * mass."""
    top = tl.load(tops + tile, mask=tile < tiles, other=float("-inf"))
    mass = tl.load(masses + tile, mask=tile < tiles, other=0.0)
    peak = tl.max(top, 0)
    shift = tl.where(tl.abs(peak) == float("inf"), 0.0, peak)
    total = tl.sum(mass * tl.exp(tl.where(tl.abs(top) == float("inf"), 0.0, top) - shift), 0)
    return tl.where(total > 0.0, tl.log(tl.maximum(total, 1e-30)) + shift, float("-inf"))


@triton.jit(do_not_specialize=["rows", "tiles"])
def _merge(
    values, columns, sums, target_ids, ids, chances, masses, rows, tiles,
    WIDTH: tl.constexpr, MAPPED: tl.constexpr, POOL: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Grid (rows): the best of the tiles' best, equals by rising draft id."""
    row = tl.program_id(0).to(tl.int64)
    tile = tl.arange(0, TILES)
    own = sums + row * tiles
    plane = rows.to(tl.int64) * tiles
    whole = _log_mass(own, own + plane, tile, tiles, TILES)
    tl.store(masses + row, _log_mass(own + 2 * plane, own + 3 * plane, tile, tiles, TILES))
    entry = tl.arange(0, POOL)
    there = entry < tiles * WIDTH
    value = tl.load(values + row * tiles * WIDTH + entry, mask=there, other=float("-inf"))
    column = tl.load(columns + row * tiles * WIDTH + entry, mask=there, other=2147483647)
    for place in range(WIDTH):
        left = column < 2147483647
        best = tl.max(tl.where(left, value, float("-inf")), 0)
        index = tl.min(tl.where(left & (value == best), column, 2147483647), 0)
        chance = tl.exp(best - whole)
        token = tl.load(target_ids + index) if MAPPED else index.to(tl.int64)
        tl.store(ids + row * WIDTH + place, token)
        tl.store(chances + row * WIDTH + place, tl.where(chance == chance, chance, 0.0))
        column = tl.where(column == index, 2147483647, column)
