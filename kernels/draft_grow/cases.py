"""Cases of `draft_grow`: the first depth and later ones, chances of 0 and 1, candidates that end, beams as wide as there are candidates."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from specdec.kernels.case import Case
from specdec.kernels.draft_grow.reference import BUCKETS, RANKS
from specdec.kernels.inputs import generator

_CELLS = RANKS * BUCKETS


def _case(batch: int, rows: int, width: int, beam: int, start: int, seed: int, *, ended: int = 3, equal: bool = False) -> Case:
    g = generator(seed)
    count, room = rows * width, start + rows * width + 3
    tokens = torch.randint(0, 40, (batch, count), generator=g)
    chances = torch.rand(batch, count, generator=g)
    chances[torch.rand(batch, count, generator=g) < 0.2] = 0.0
    chances[:, :1] = 0.25 if equal else 1.0
    chances = torch.full_like(chances, 0.25) if equal else chances
    above = torch.rand(batch, rows, generator=g) if start else torch.ones(batch, rows)
    parents = torch.randint(0, start, (batch, rows), generator=g) if start else torch.full((batch, rows), -1)
    words = torch.randint(0, 1 << 20, (batch, rows), generator=g)
    ends = torch.where(torch.arange(ended) % 2 == 0, tokens[:, :1], -1)
    rates = torch.full((4 * _CELLS,), 0.5) if equal else torch.rand(4 * _CELLS, generator=g)
    whole = torch.zeros(batch, room, dtype=torch.int64)
    pool = whole, whole.clone(), whole.float(), whole.clone()
    noisy = torch.arange(batch) % 2 == 1
    args = (tokens, chances, above, parents, words, noisy, ends, rates, pool, start, (_CELLS, 2 * _CELLS), beam, min(start, 63 - beam))
    return Case(f"{batch} of {rows}x{width}, beam of {beam}{', equals' * equal}", args, row_args=(0, 1, 2, 3, 4, 5, 6))


def _cases() -> Iterator[Case]:
    yield _case(0, 1, 4, 2, 0, 1)
    yield _case(1, 1, 1, 1, 0, 2)
    yield _case(3, 1, 5, 4, 0, 3)
    yield _case(3, 4, 5, 4, 5, 4)
    yield _case(2, 10, 10, 10, 110, 5, ended=1)
    yield _case(2, 3, 100, 7, 40, 6)
    yield _case(1, 1, 63, 1, 0, 7)
    yield _case(2, 2, 3, 6, 20, 8)
    yield _case(4, 1, 1, 1, 3, 9)
    yield _case(2, 4, 6, 5, 30, 10, equal=True)


CASES: dict[str, Callable[[], Iterator[Case]]] = {"draft_grow": _cases}
