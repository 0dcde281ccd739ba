"""SwiGLU's elementwise half for an FP8 down projection: the product, then e4m3 with a scale per token."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from specdec.kernels.quantize_fp8.reference import quantize_fp8
from specdec.kernels.silu_mul import reference as swiglu


def silu_mul_fp8(gate_up: Tensor, *, product: Callable[[Tensor], Tensor] = swiglu.silu_mul) -> tuple[Tensor, Tensor]:
    """gate_up [T,2I], gate first -> `quantize_fp8` of silu(gate) * up: (e4m3 [T,I], scale f32 [T])."""
    return quantize_fp8(product(gate_up))
