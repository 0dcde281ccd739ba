"""SwiGLU's elementwise half for an FP8 down projection: the product, then e4m3 with a scale per token."""

from __future__ import annotations

from torch import Tensor

from specdec.kernels.quantize_fp8.reference import quantize_fp8
from specdec.kernels.silu_mul.reference import silu_mul


def silu_mul_fp8(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """gate_up [T,2I], gate first -> `quantize_fp8` of silu(gate) * up: (e4m3 [T,I], scale f32 [T])."""
    return quantize_fp8(silu_mul(gate_up))
