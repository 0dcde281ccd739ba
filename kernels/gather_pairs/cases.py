"""Cases of `gather_pairs`: a batch that fills the recording and smaller ones, runs as long as there is room and shorter, chosen columns."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from specdec.kernels.case import Case, randn
from specdec.kernels.inputs import generator


def _cases() -> Iterator[Case]:
    for size, batch, most, run, width, chosen in (
        *((1, 1, 4, 4, 48, False), (4, 3, 4, 2, 100, False), (2, 2, 1, 1, 7, False)),
        *((8, 5, 6, 6, 1030, True), (4, 4, 3, 2, 64, True), (1, 1, 4, 3, 12288, False)),
    ):
        g = generator(size * 10 + run)
        nodes = 9
        said, along = torch.full((size, most + 1), 5), randn(size, most, width, seed=1)
        taps = randn(batch * nodes, 2 * width if chosen else width, seed=2)
        columns = torch.randperm(2 * width, generator=g)[:width] if chosen else None
        committed = torch.randint(0, 999, (batch, run), generator=g)
        path = torch.randint(1, nodes, (batch, run - 1), generator=g)
        args = committed, torch.randint(1, run + 1, (batch,), generator=g), path
        for dtype in (torch.float32, torch.bfloat16):
            name = f"{batch} of {size}, {run} of {most}, {width} columns{', chosen' if chosen else ''}, {dtype}"
            yield Case(name, (said, along.to(dtype), *args, taps.bfloat16(), torch.arange(batch) * nodes, columns))


CASES: dict[str, Callable[[], Iterator[Case]]] = {"gather_pairs": _cases}
