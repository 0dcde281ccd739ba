"""Cases of GPT-OSS's SwiGLU."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from specdec.kernels.case import Case, randn


def _cases() -> Iterator[Case]:
    for rows, inner in ((0, 2880), (1, 2880), (5, 2880), (3, 1), (2, 17), (4, 1024)):
        yield Case(f"{rows}x{inner}", (randn(rows, 2 * inner, scale=5.0), 1.702, 7.0), row_args=(0,))
    edge = torch.tensor(
        [[-1e4, 1e4, 7.0, -7.0, 7.1, -7.1, torch.inf, -torch.inf, -torch.inf, torch.inf, torch.nan, 1.0, 1.0, torch.nan, -0.0, 0.0]]
    )
    yield Case("limits, infinities, NaN", (edge, 1.702, 7.0), row_args=(0,))
    yield Case("other constants", (randn(3, 40, scale=9.0), 1.0, 3.5), row_args=(0,))


CASES: dict[str, Callable[[], Iterator[Case]]] = {"clamped_swiglu": _cases}
