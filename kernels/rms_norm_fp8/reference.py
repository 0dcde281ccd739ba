"""RMS norm whose only reader is an FP8 linear layer: the norm, then e4m3 with a scale per token."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from specdec.kernels.quantize_fp8.reference import quantize_fp8
from specdec.kernels.rms_norm import reference as norm


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float, *, norm: Callable[..., Tensor] = norm.rms_norm) -> tuple[Tensor, Tensor]:
    """x [T,H], weight [H] -> `quantize_fp8` of the norm: (e4m3 [T,H], scale f32 [T])."""
    return quantize_fp8(norm(x, weight, eps))


def add_rms_norm_fp8(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, norm: Callable[..., Any] = norm.add_rms_norm
) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual [T,H] -> (*`rms_norm_fp8` of the sum, the sum)."""
    normed, total = norm(x, residual, weight, eps)
    return *quantize_fp8(normed), total
