"""Linear layer over e4m3 weights and e4m3 activations."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.fp8_linear.weight import BLOCK, Fp8Weight
from specdec.kernels.linear.reference import rowwise_linear


def fp8_fp8_linear(q: Tensor, scale: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """q [M,K] e4m3, scale f32 [M] or [M,K/128], weight N × K -> [M,N] of `dtype`. Products and sums in float32, one row at a time."""
    if scale.dim() == 1:
        return (rowwise_linear(q.float(), weight.dequantize()) * scale[:, None]).to(dtype)
    return rowwise_linear(q.float() * scale.repeat_interleave(BLOCK, 1), weight.dequantize()).to(dtype)
