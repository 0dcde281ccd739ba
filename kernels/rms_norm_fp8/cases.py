"""Cases of the norms to e4m3."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from specdec.kernels.case import Case, randn


def _cases(residual: bool) -> Iterator[Case]:
    shapes = ((0, 576), (1, 576), (5, 576), (3, 1), (2, 17), (33, 100), (2, 2048), (2, 2880), (2, 4096), (2, 8192))
    for rows, hidden in shapes:
        for dtype in (torch.float32, torch.bfloat16):
            x, r, weight = (randn(*shape, seed=i).to(dtype) for i, shape in enumerate(((rows, hidden), (rows, hidden), (hidden,))))
            args = (x, r, weight, 1e-5) if residual else (x, weight, 1e-5)
            yield Case(f"{rows}x{hidden} {dtype}", args, row_args=(0, 1) if residual else (0,))
    odd = randn(4, 64)
    odd[0] = 0.0
    odd[1, 3] = torch.nan
    odd[2, 3] = 1e4
    weight = randn(64, seed=9)
    weight[5] = 0.0
    yield Case(
        "zeros, NaN, outlier", (odd, odd * 0, weight, 1e-5) if residual else (odd, weight, 1e-5), row_args=(0, 1) if residual else (0,)
    )


CASES: dict[str, Callable[[], Iterator[Case]]] = {"rms_norm_fp8": lambda: _cases(False), "add_rms_norm_fp8": lambda: _cases(True)}
