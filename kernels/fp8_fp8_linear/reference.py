"""Linear layer over e4m3 weights and e4m3 activations."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.fp8_linear.weight import Fp8Weight
from specdec.kernels.linear.reference import rowwise_linear


def fp8_fp8_linear(q: Tensor, scale: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """q [M,K] e4m3, scale [M] f32, weight N × K -> [M,N] of `dtype`. Products and sums in float32, one row at a time."""
    return (rowwise_linear(q.float(), weight.dequantize()) * scale[:, None]).to(dtype)
