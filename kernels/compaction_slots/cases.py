"""Cases of `compaction_slots`: paths that are accepted whole, in part and not at all; one KV group and several."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from specdec.kernels.case import Case
from specdec.kernels.inputs import generator


def _cases() -> Iterator[Case]:
    for batch, deepest, groups, block in ((0, 3, 1, 16), (1, 1, 1, 16), (3, 5, 2, 4), (8, 63, 2, 16), (2, 0, 1, 8), (5, 12, 3, 1)):
        g = generator(batch * 100 + deepest)
        path = torch.randint(1, 64, (batch, deepest), generator=g)
        accepted = torch.randint(0, deepest + 1, (batch,), generator=g)
        lengths = torch.randint(70, 99, (batch + 2,), generator=g)  # with what was committed
        slots = torch.randperm(batch + 2, generator=g)[:batch]
        tables = torch.randint(0, 500, (groups, batch, 200 // block + 1), generator=g, dtype=torch.int32)
        args = path, accepted, accepted + 1, lengths, slots, tables, block
        yield Case(f"{batch} of depth {deepest}, {groups} groups, blocks of {block}", args)


CASES: dict[str, Callable[[], Iterator[Case]]] = {"compaction_slots": _cases}
