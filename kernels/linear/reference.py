"""Linear layers: dense, dense with a fixed order, and over tiled weights. Accumulate in float32 or better."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec.kernels.linear.tiles import TiledWeight, unpack


def dense_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [M,K], weight [N,K] of one dtype -> [M,N]. Bits may change with M."""
    return F.linear(x, weight)


def rowwise_linear(x: Tensor, weight: Tensor) -> Tensor:
    """As `dense_linear`, one row per library call on a fresh copy: bits do not depend on M or on memory alignment. float32 is added up in
    float64, where it does not show how the library parts the work among its threads."""
    out, wide = x.new_empty(x.shape[0], weight.shape[0]), torch.float64 if x.dtype is torch.float32 else x.dtype
    weight = weight.to(wide)
    for i in range(x.shape[0]):
        out[i] = F.linear(x[i : i + 1].to(wide, copy=True), weight)[0]
    return out


def tiled_linear(x: Tensor, weight: TiledWeight) -> Tensor:
    """x [M,K] f32, weight rows × K -> [M,rows] f32."""
    return rowwise_linear(x, unpack(weight))


def tiled_embedding(ids: Tensor, weight: TiledWeight) -> Tensor:
    """ids [T] i64 -> rows of the dequantised weight, [T,cols] f32."""
    tile = TiledWeight(weight.data[ids // 16], weight.kind, ids.numel() * 16, weight.cols)
    picked = unpack(tile).view(ids.numel(), 16, weight.cols)
    return picked[torch.arange(ids.numel(), device=ids.device), ids % 16]
