"""Cases of `draft_layout`: chains and trees, no passes at all, nodes beyond the table, request slots in any order."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from specdec.kernels.case import Case
from specdec.kernels.inputs import generator


def _case(batch: int, depth: int, passes: int, width: int, blocks: int, block_size: int, ended: int = 3) -> Case:
    g, slots = generator(batch + depth), batch + 2
    owners = torch.randperm(slots, generator=g)[:batch, None]
    tables = torch.randint(0, 1000, (batch, blocks), generator=g)
    columns = torch.cat((owners, torch.randint(0, 99, (batch, 2), generator=g), tables), dim=1)
    length = torch.randint(1, blocks * block_size + 1, (slots,), generator=g)
    seed = torch.randint(-(2**62), 2**62, (slots,), generator=g)
    ends = torch.randint(-1, 50, (slots, ended), generator=g)
    laws = torch.rand(slots, generator=g), seed, length, torch.arange(slots) % 3, torch.arange(slots) % 2 == 0, ends
    return Case(f"{batch} of {passes}x{width}, {depth} deep", (columns, laws, depth, passes, width, block_size))


def _cases() -> Iterator[Case]:
    yield _case(0, 3, 2, 4, 5, 16)
    yield _case(1, 1, 0, 1, 1, 16)
    yield _case(1, 4, 3, 1, 40, 16)
    yield _case(3, 4, 3, 5, 7, 4)
    yield _case(5, 9, 0, 8, 33, 16, ended=1)
    yield _case(2, 8, 7, 9, 3, 4, ended=20)
    yield _case(2, 64, 63, 1, 600, 16)


CASES: dict[str, Callable[[], Iterator[Case]]] = {"draft_layout": _cases}
