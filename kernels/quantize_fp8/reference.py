"""Activations to e4m3, one scale a row (token), or a row and group of columns."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.fp8_linear.weight import LARGEST


def quantize_fp8(x: Tensor, group: int | None = None) -> tuple[Tensor, Tensor]:
    """x [M,K] f32, f16 or bf16 -> (float8_e4m3fn [M,K], scale f32 [M], with `group` [M,K/group]): the row's (group's) largest magnitude
    becomes 448.

    A row of zeros has scale 0 and codes 0; a row with NaN or infinity has no finite product.
    """
    wide = x.float() if group is None else x.float().view(x.shape[0], x.shape[1] // group, group)
    largest = wide.abs().amax(-1)
    scale = largest / torch.full_like(largest, LARGEST)  # by a plain number CUDA would multiply by the rounded inverse
    numbers = torch.where(scale[..., None] == 0, 0.0, wide / scale[..., None])
    return numbers.clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn).view(x.shape), scale
