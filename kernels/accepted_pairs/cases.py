"""Cases of `accepted_pairs`: one token to all that a verdict can commit, with and without masks, rows beyond the table."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from specdec.kernels.case import Case
from specdec.kernels.inputs import generator


def _case(batch: int, most: int, masks: int, blocks: int, block_size: int) -> Case:
    g = generator(batch + most)
    count = torch.randint(1, most + 1, (batch, 1), generator=g)
    said = torch.cat((torch.randint(1, 99, (batch, most), generator=g), count), dim=1)
    newest = torch.randint(most, blocks * block_size, (batch,), generator=g)
    newest[:1] = blocks * block_size - 1
    tables = torch.randint(0, 1000, (batch, blocks), generator=g, dtype=torch.int32)
    args = said, newest, tables, masks, 7, block_size
    return Case(f"{batch} of up to {most} and {masks} masks", args, row_args=(0, 1, 2))


def _cases() -> Iterator[Case]:
    for batch, most, masks in ((0, 4, 0), (1, 1, 0), (1, 4, 0), (5, 4, 0), (4, 6, 5), (3, 64, 63)):
        yield _case(batch, most, masks, 20, 8)


CASES: dict[str, Callable[[], Iterator[Case]]] = {"accepted_pairs": _cases}
