"""Cases of `tree_layout`: one tree and several, of one node to 64, fewer that count, fillers with token -1, one KV group and two."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from specdec.kernels.case import Case
from specdec.kernels.inputs import generator


def _cases() -> Iterator[Case]:
    for batch, nodes, groups, block in (
        (0, 4, 1, 16),
        (1, 1, 1, 16),
        (1, 4, 1, 16),
        (3, 4, 2, 4),
        (5, 64, 2, 16),
        (2, 33, 1, 1),
        (9, 7, 3, 5),
    ):
        g = generator(batch * 100 + nodes)
        tokens = torch.randint(-1, 1000, (batch, nodes), generator=g)
        depth = torch.randint(0, 9, (batch, nodes), generator=g)
        count = torch.randint(1, nodes + 1, (batch,), generator=g)
        lengths = torch.randint(1, 60, (batch + 3,), generator=g)
        slots = torch.randperm(batch + 3, generator=g)[:batch]
        tables = torch.randint(0, 500, (groups, batch, (60 + nodes) // block + 1), generator=g, dtype=torch.int32)
        yield Case(f"{batch} of {nodes}, {groups} groups, blocks of {block}", (tokens, depth, count, lengths, slots, tables, block))


CASES: dict[str, Callable[[], Iterator[Case]]] = {"tree_layout": _cases}
