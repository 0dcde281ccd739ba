"""Cases of `pad_batch`: inputs that still hold another batch; a batch as large as they are, and smaller in every direction."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from specdec.kernels.case import Case
from specdec.kernels.inputs import generator
from specdec.kernels.pad_batch.reference import Fields, zeroed


def fields(rows: int, sequences: int, groups: int, blocks: int, *, first_key: bool, seed: int) -> Fields:
    """Any numbers, but for ends of sequences that share the rows."""
    made = zeroed(rows, sequences, groups, blocks, torch.device("cpu"), first_key=first_key)
    for field in made:
        field.copy_(torch.randint(-(1 << 30), 1 << 30, field.shape, generator=generator(seed), dtype=field.dtype))
    made[6].copy_(torch.arange(sequences + 1) * rows // max(sequences, 1))
    return made


def _cases() -> Iterator[Case]:
    small = ((1, 1, 3), (1, 1, 3)), ((4, 1, 2), (8, 2, 9)), ((6, 3, 5), (8, 4, 5))
    shapes = (*small, ((1, 1, 1), (256, 128, 2)), ((250, 100, 70), (256, 128, 80)))
    for i, ((rows, sequences, width), (own_rows, own_sequences, own_width)) in enumerate(shapes):
        for groups, first_key in ((1, False), (2, True)):
            own = fields(own_rows, own_sequences, groups, own_width, first_key=first_key, seed=i)
            given = fields(rows, sequences, groups, width, first_key=first_key, seed=i + 50)
            yield Case(f"{rows} rows of {sequences} into {own_rows} of {own_sequences}, {groups} groups", (own, given))
    long = fields(2, 2, 1, 3000, first_key=False, seed=7), fields(2, 2, 1, 2500, first_key=False, seed=8)
    yield Case("long tables", long)


CASES: dict[str, Callable[[], Iterator[Case]]] = {"pad_batch": _cases}
