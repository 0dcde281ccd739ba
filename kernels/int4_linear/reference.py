"""Linear layer over 4-bit weights, activations as they come."""

from __future__ import annotations

from torch import Tensor

from specdec.kernels.int4_linear.fragments import Int4Fragments
from specdec.kernels.int4_linear.planes import Int4Planes
from specdec.kernels.int4_linear.weight import Int4Weight
from specdec.kernels.linear.reference import rowwise_linear


def int4_linear(x: Tensor, weight: Int4Weight | Int4Planes | Int4Fragments) -> Tensor:
    """x [M,K] f32, f16 or bf16, weight N × K -> [M,N] of x's dtype. Products and sums in float32, one row at a time."""
    return rowwise_linear(x.float(), weight.dequantize()).to(x.dtype)
