"""W8A16 for few rows (`triton_gemm`): e4m3 streamed once, widened to x's dtype in registers, where it is exact.

Scales per tensor and channel are applied once, to the float32 sums; scales of 128 × 128 blocks to the float32 sum of each block.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.fp8_linear.fragments import Fp8Fragments
from specdec.kernels.fp8_linear.weight import Fp8Weight
from specdec.kernels.tilings import FIXED, MEASURED, inner
from specdec.kernels.triton_gemm import stream

_MANY = 512  # rows from which the widened product is the better guess where nothing was measured


def rejects_fixed(x: Tensor, weight: Fp8Weight | Fp8Fragments) -> str | None:
    """Why this kernel cannot run the call, or None."""
    if isinstance(weight, Fp8Fragments):
        return "the weight is in fragments"
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"activations in {x.dtype}; it takes float32, float16 and bfloat16"
    return None if weight.data.is_contiguous() and weight.scale.is_contiguous() else "weight and scales must be contiguous"


def rejects(x: Tensor, weight: Fp8Weight | Fp8Fragments) -> str | None:
    """As `rejects_fixed`; and where the widened product (`widened.py`) is faster, that is preferred."""
    if isinstance(weight, Fp8Fragments):
        return "the weight is in fragments"
    chosen = MEASURED.choice("fp8_linear", x.shape[0], *weight.shape)
    widened = x.shape[0] > _MANY if chosen is None else chosen.backend == "widened"
    return "many rows: the widened product is faster" if widened and not weight.blocked else rejects_fixed(x, weight)


def fp8_linear(x: Tensor, weight: Fp8Weight) -> Tensor:
    """Shapes in `specdec.ops.fp8_linear`."""
    return stream(
        x, weight.data, weight.scale, None, x.dtype, MEASURED.tiling(inner("fp8_linear", weight.blocked), x.shape[0], *weight.shape)
    )


def fp8_linear_fixed(x: Tensor, weight: Fp8Weight) -> Tensor:
    """One tiling for every M: a row's bits do not depend on the others."""
    return stream(x, weight.data, weight.scale, None, x.dtype, MEASURED.tiling(inner("fp8_linear", weight.blocked), FIXED, *weight.shape))
