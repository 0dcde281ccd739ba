"""The dense linear layer for few rows (`triton_gemm`): W streamed once in bf16 or f16, K split so that every multiprocessor reads."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.tilings import FIXED, MEASURED
from specdec.kernels.triton_gemm import stream

_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


def rejects_fixed(x: Tensor, weight: Tensor) -> str | None:
    """Why the kernel cannot run the call, or None."""
    if x.dtype not in _DTYPES or weight.dtype is not x.dtype:
        return f"dtypes {x.dtype} and {weight.dtype}; it takes float32, float16 and bfloat16, both alike"
    return None if weight.is_contiguous() else "the weight must be contiguous"


def rejects(x: Tensor, weight: Tensor) -> str | None:
    """As `rejects_fixed`; and unless it was measured to be faster here, the library's product is preferred."""
    chosen = MEASURED.choice("dense_linear", x.shape[0], *weight.shape)
    return "not measured to be faster than the library here" if chosen is None or chosen.backend != "triton" else rejects_fixed(x, weight)


def dense_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Shapes in `specdec.ops.dense_linear`."""
    return stream(x, weight, None, None, x.dtype, MEASURED.tiling("dense_linear", x.shape[0], *weight.shape))


def dense_linear_fixed(x: Tensor, weight: Tensor) -> Tensor:
    """One tiling for every M: a row's bits do not depend on the others."""
    return stream(x, weight, None, None, x.dtype, MEASURED.tiling("dense_linear", FIXED, *weight.shape))
