"""Cases of `draft_topk`: weights as heads have them, draft vocabularies with holes in them, rows that sample beside rows that do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from specdec.kernels.case import Case, randn
from specdec.kernels.fp8_linear.weight import LARGEST, Fp8Weight
from specdec.kernels.inputs import generator


def _case(rows: int, vocab: int, hidden: int, width: int, *, mapped: bool, sampled: bool, scale: float = 1.0) -> Case:
    index = torch.arange(rows)
    keys = index * 0x1234567_89ABCDEF - (1 << 61), index * 1001, index % 3
    table = torch.randperm(3 * vocab, generator=generator(1))[:vocab].sort().values if mapped else None
    noisy = index % 4 != 3 if sampled else None
    weight = randn(vocab, hidden, seed=1, scale=scale * hidden**-0.5)
    args = (randn(rows, hidden), weight, torch.linspace(0.5, 1.3, max(rows, 1))[:rows], table, *keys, noisy, 0, 0.7, width)
    name = f"{rows}x{vocab}x{hidden}, {width}{' mapped' * mapped}{' sampled' * sampled}"
    return Case(name, args, row_args=(0, 2, 4, 5, 6, 7) if sampled else (0, 2, 4, 5, 6))


def _quantised(case: Case, *, each: bool) -> Case:
    """With the weight in e4m3, a scale EACH row or one for all."""
    weight = case.args[1]
    scale = weight.abs().amax(dim=1 if each else (0, 1)).reshape(-1) / LARGEST
    weight = Fp8Weight((weight / scale[:, None]).to(torch.float8_e4m3fn), scale)
    return Case(f"{case.name}, e4m3", (case.args[0], weight, *case.args[2:]), row_args=case.row_args)


def _cases() -> Iterator[Case]:
    for rows, vocab, hidden, width in (
        (0, 100, 64, 4),
        (1, 100, 64, 4),
        (5, 1000, 576, 10),
        (19, 129, 40, 3),
        (2, 64, 33, 64),
        (1, 7, 16, 1),
    ):
        for mapped, sampled in ((False, False), (True, True)):
            yield _case(rows, vocab, hidden, width, mapped=mapped, sampled=sampled, scale=4.0)
    for rows in (33, 70, 131):  # each its own tile of rows, the last two of them
        yield _case(rows, 200, 72, 5, mapped=True, sampled=True, scale=4.0)
    yield _case(3, 500, 64, 8, mapped=False, sampled=True, scale=0.1)
    for rows, vocab, each in ((1, 200, True), (6, 300, True), (40, 130, False)):
        yield _quantised(_case(rows, vocab, 72, 5, mapped=True, sampled=True, scale=4.0), each=each)
    shared = _case(9, 300, 40, 4, mapped=True, sampled=True, scale=4.0)  # three rows of each sequence
    yield Case("9 rows of 3", tuple(a[:3] if i in (2, 4, 5, 6, 7) else a for i, a in enumerate(shared.args)))


CASES: dict[str, Callable[[], Iterator[Case]]] = {"draft_topk": _cases}
