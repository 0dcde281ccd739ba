"""W8A8 (`triton_gemm`): both operands e4m3 in shared memory, FP8 tensor cores, the sum carried on in float32 every 128 columns.

For few rows it reads what W8A16 reads and converts nothing; for many it has twice the rate of bf16. Where the card has no FP8
products, both are widened to float16. Scales: of the weight as in W8A16, of x per row at the end or per 128 columns inside.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.fp8_fp8_linear import library
from specdec.kernels.fp8_linear.weight import Fp8Weight
from specdec.kernels.tilings import FIXED, MEASURED, inner
from specdec.kernels.triton_gemm import stream


def rejects_fixed(q: Tensor, scale: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> str | None:
    """Why this kernel cannot run the call, or None."""
    dense = all(t.is_contiguous() for t in (scale, weight.data, weight.scale))
    return None if dense else "weight and scales must be contiguous"


def rejects(q: Tensor, scale: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> str | None:
    """As `rejects_fixed`; and where the library was measured to be faster, that is preferred."""
    chosen = MEASURED.choice("fp8_fp8_linear", q.shape[0], *weight.shape)
    if chosen is not None and chosen.backend == "scaled_mm" and library.rejects(q, scale, weight, dtype) is None:
        return "measured: the library is faster"
    return rejects_fixed(q, scale, weight, dtype)


def fp8_fp8_linear(q: Tensor, scale: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """Shapes in `specdec.ops.fp8_fp8_linear`."""
    return _run(q, scale, weight, dtype, q.shape[0])


def fp8_fp8_linear_fixed(q: Tensor, scale: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """One tiling for every M: a row's bits do not depend on the others."""
    return _run(q, scale, weight, dtype, FIXED)


def _run(q: Tensor, scale: Tensor, weight: Fp8Weight, dtype: torch.dtype, rows: int) -> Tensor:
    name = inner("fp8_fp8_linear", weight.blocked or scale.dim() == 2)
    return stream(q, weight.data, weight.scale, scale, dtype, MEASURED.tiling(name, rows, *weight.shape))
