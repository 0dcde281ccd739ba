"""A depth of a beam search: what its candidates are worth, where they lie in the pool, and the likeliest as the next beam.

What a candidate is worth given its parent is defined here for every search, recorded or op by op: a calibrated rate by the cell that it
falls in, and a little of its own chance. A node's score is the product along its path.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

RANKS, BUCKETS = 4, 10  # cells of a depth: of a candidate's rank in its row, then of its chance
TIE = 0.02  # of a rate, what the chance itself decides
BELOW = BUCKETS * (1 - 1e-6)  # a chance of 1 belongs to the last bucket


class NextBeam(NamedTuple):
    """The n nodes of each of B sequences that run next, the likeliest first, equals by rising place."""

    scores: Tensor  # [B, n] f32
    places: Tensor  # [B, n] i64 in the pool
    tokens: Tensor  # [B, n] i64
    rows: Tensor  # [B, n] i64: which row of the pass they came from, counted over all sequences
    words: Tensor  # [B, n] i64 ancestor words, the own bit included


def rated(chances: Tensor, base: Tensor, rates: Tensor) -> tuple[Tensor, Tensor]:
    """(rates f32, cells i64), like chances f32: of candidates whose rank's first cell is `base`. rates: by cell."""
    cells = (chances * BELOW).long() + base
    # within a cell the likelier candidate goes first; a tie would be decided by how the batch is laid out
    return rates[cells] * (chances * TIE + (1 - TIE)), cells


def likeliest(scores: Tensor, tokens: Tensor, ends: Tensor, beam: int) -> tuple[Tensor, Tensor]:
    """(scores, columns) [B, beam] of the best of scores [B, C], equals by rising column; tokens [B, C] among ends [B, E] count as 0."""
    ended = (tokens[:, :, None] == ends[:, None, :]).any(dim=-1)
    top = scores.masked_fill(ended, 0.0).sort(dim=1, descending=True, stable=True)
    return top.values[:, :beam], top.indices[:, :beam]


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
    batch, rows = above.shape
    width = tokens.shape[1] // rows
    rank = torch.arange(width, device=tokens.device).clamp(max=RANKS - 1) * BUCKETS
    base = (rank + cells[0] + noisy[:, None] * cells[1])[:, None, :]  # [B, 1, width]
    each = chances.view(batch, rows, width)
    worth, cell = rated(each, base, rates)
    scores = torch.where(each > 0, above[:, :, None] * worth, 0.0).flatten(1)
    columns = tokens, parents[:, :, None].expand_as(cell).flatten(1), scores, cell.flatten(1)
    for own, values in zip(pool, columns, strict=True):
        own[:batch, start : start + tokens.shape[1]] = values
    best, column = likeliest(scores, tokens, ends, beam)
    row = column // width
    bits = torch.ones_like(column) << (torch.arange(beam, device=tokens.device) + bit)
    first = torch.arange(0, batch * rows, rows, device=tokens.device)[:, None]
    return NextBeam(best, column + start, tokens.gather(1, column), row + first, words.gather(1, row) | bits)
