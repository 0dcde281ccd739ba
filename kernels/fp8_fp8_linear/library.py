"""W8A8 by `torch._scaled_mm`: for scales per tensor or channel, taken where it was measured to be faster (`triton.rejects`)."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.fp8_linear.weight import Fp8Weight


def rejects(q: Tensor, scale: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> str | None:
    """Why the library cannot run the call, or None."""
    if weight.blocked or scale.dim() == 2:
        return "it takes one scale a row and a channel"
    if weight.data.shape[0] % 16 or weight.data.shape[1] % 16:
        return "N and K must be multiples of 16"
    return None if dtype is torch.bfloat16 and q.shape[0] else "it writes bfloat16 and wants a row"


def fp8_fp8_linear(q: Tensor, scale: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """Shapes in `specdec.ops.fp8_fp8_linear`. Scales per row; a scale of the whole tensor is spread over the channels."""
    channels = weight.scale.expand(weight.data.shape[0]).contiguous()
    return torch._scaled_mm(q, weight.data.t(), scale[:, None], channels[None], out_dtype=dtype)
