"""Activations to e4m3, one scale a row (token)."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.fp8_linear.weight import LARGEST


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M,K] f32, f16 or bf16 -> (float8_e4m3fn [M,K], scale f32 [M]): the row's largest magnitude becomes 448.

    A row of zeros has scale 0 and codes 0; a row with NaN or infinity has no finite product.
    """
    wide = x.float()
    scale = wide.abs().amax(1) / LARGEST
    numbers = torch.where(scale[:, None] > 0, wide / scale[:, None], 0.0)
    return numbers.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn), scale
