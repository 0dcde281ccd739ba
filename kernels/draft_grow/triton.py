"""A depth of a beam search as one launch: a program per sequence, its candidates in registers.

A key of score bits above inverted column orders them without ties; the beam is that many rounds of a maximum over the keys, in one warp
where they are few. Products and sums round one by one (no fused multiply-add), so a score has the same bits whoever makes it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.draft_grow import reference
from specdec.kernels.draft_grow.reference import NextBeam

_MOST = 4096  # candidates of a sequence
_RANKS, _BUCKETS = tl.constexpr(reference.RANKS), tl.constexpr(reference.BUCKETS)
_BELOW, _TIE, _REST = tl.constexpr(reference.BELOW), tl.constexpr(reference.TIE), tl.constexpr(1 - reference.TIE)


def rejects(tokens: Tensor, chances: Tensor, *rest: object) -> str | None:
    """Why this kernel cannot run the call, or None."""
    if tokens.shape[1] > _MOST:
        return f"{tokens.shape[1]} candidates; it takes {_MOST}"
    dense = all(t.is_contiguous() for t in (tokens, chances, *rest[:6]) if isinstance(t, Tensor))
    return None if dense else "candidates and beam must be dense"


def draft_grow(
    tokens: Tensor,
    chances: Tensor,
    above: Tensor,
    parents: Tensor,
    words: Tensor,
    noisy: Tensor,
    ends: Tensor,
    rates: Tensor,
    pool: tuple[Tensor, Tensor, Tensor, Tensor],
    start: int,
    cells: tuple[int, int],
    beam: int,
    bit: int,
) -> NextBeam:
    """Shapes in `specdec.ops.draft_grow`."""
    (batch, rows), count = above.shape, tokens.shape[1]
    scores = torch.empty((batch, beam), dtype=torch.float32, device=tokens.device)
    places, picked, row, word = (torch.empty((batch, beam), dtype=torch.int64, device=tokens.device) for _ in range(4))
    if batch:
        lanes = triton.next_power_of_2(count)
        _grow[(batch,)](
            tokens, chances, above, parents, words, noisy, ends, rates, *pool, scores, places, picked, row, word,
            rows, count, count // rows, ends.shape[1], pool[0].shape[1], start, *cells, beam, bit,
            LANES=lanes, SLOTS=triton.next_power_of_2(beam), num_warps=1 if lanes <= 256 else 4, enable_fp_fusion=False,
        )  # fmt: skip
    return NextBeam(scores, places, picked, row, word)


@triton.jit
def _best(keys, beam, SLOTS: tl.constexpr):
    """[SLOTS] i64: the `beam` largest of the keys, none of which are alike, in falling order."""
    slot = tl.arange(0, SLOTS)
    found = tl.full([SLOTS], 0, tl.int64)
    for i in range(beam):
        top = tl.max(keys, 0)
        found = tl.where(slot == i, top, found)
        keys = tl.where(keys == top, -1, keys)
    return found


@triton.jit(do_not_specialize=["rows", "count", "width", "ended", "room", "start", "cell", "noisy_cells", "beam", "bit"])
def _grow(
    tokens, chances, above, parents, words, noisy, ends, rates, pool_tokens, pool_parents, pool_scores, pool_cells,
    scores_out, places_out, tokens_out, rows_out, words_out,
    rows, count, width, ended, room, start, cell, noisy_cells, beam, bit, LANES: tl.constexpr, SLOTS: tl.constexpr,
):  # fmt: skip
    """Grid (sequences). count = rows * width = C, ended = E, room: columns of the pool."""
    sequence = tl.program_id(0).to(tl.int64)
    lane = tl.arange(0, LANES)
    there = lane < count
    token = tl.load(tokens + sequence * count + lane, mask=there, other=0)
    chance = tl.load(chances + sequence * count + lane, mask=there, other=0.0)
    at_row = sequence * rows + lane // width
    score_above = tl.load(above + at_row, mask=there, other=0.0)
    place_above = tl.load(parents + at_row, mask=there, other=0)
    rank = tl.minimum(lane % width, _RANKS - 1) * _BUCKETS
    first = cell + (tl.load(noisy + sequence) != 0).to(tl.int32) * noisy_cells
    own_cell = (chance * _BELOW).to(tl.int32) + rank + first
    worth = tl.load(rates + own_cell, mask=there, other=0.0) * (chance * _TIE + _REST)
    score = tl.where(chance > 0.0, score_above * worth, 0.0)
    place = sequence * room + start + lane
    tl.store(pool_tokens + place, token, mask=there)
    tl.store(pool_parents + place, place_above, mask=there)
    tl.store(pool_scores + place, score, mask=there)
    tl.store(pool_cells + place, own_cell.to(tl.int64), mask=there)
    for i in range(ended):
        score = tl.where(token == tl.load(ends + sequence * ended + i), 0.0, score)
    keys = (score.to(tl.int32, bitcast=True).to(tl.int64) << 32) | (0x7FFFFFFF - lane).to(tl.int64)
    best = _best(tl.where(there, keys, -1), beam, SLOTS)
    slot = tl.arange(0, SLOTS)
    wanted = slot < beam
    column = tl.where(wanted, 0x7FFFFFFF - (best & 0x7FFFFFFF).to(tl.int32), 0)
    parent = sequence * rows + column // width
    word = tl.load(words + parent, mask=wanted, other=0) | (tl.full([SLOTS], 1, tl.int64) << (slot + bit).to(tl.int64))
    out = sequence * beam + slot
    tl.store(scores_out + out, (best >> 32).to(tl.int32).to(tl.float32, bitcast=True), mask=wanted)
    tl.store(places_out + out, (column + start).to(tl.int64), mask=wanted)
    tl.store(tokens_out + out, tl.load(tokens + sequence * count + column, mask=wanted, other=0), mask=wanted)
    tl.store(rows_out + out, parent, mask=wanted)
    tl.store(words_out + out, word, mask=wanted)
