"""Cases of SwiGLU's elementwise half to e4m3."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from specdec.kernels.case import Case, randn


def _cases() -> Iterator[Case]:
    for rows, inner in ((0, 1536), (1, 1536), (7, 1536), (3, 1), (2, 17), (5, 100), (2, 14336), (1, 28672)):
        for dtype in (torch.float32, torch.bfloat16):
            yield Case(f"{rows}x{inner} {dtype}", (randn(rows, 2 * inner, scale=3.0).to(dtype),), row_args=(0,))
    odd = randn(4, 64)
    odd[0] = 0.0
    odd[1, 3] = torch.nan
    odd[2, 32:] = 0.0
    odd[3, 40] = 1e6
    yield Case("zeros, NaN, no up, outlier", (odd,), row_args=(0,))


CASES: dict[str, Callable[[], Iterator[Case]]] = {"silu_mul_fp8": _cases}
