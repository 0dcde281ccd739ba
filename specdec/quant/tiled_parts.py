"""Storages that no single kind of tile holds, as several tiled products: FP8 in blocks, and 4 bits with zero points of their own."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec import ops
from specdec.kernels.linear.tiles import TiledWeight, unpack


class TiledColumns:
    """Tiled weights side by side, each over its own columns: y = Σ x[:, columns] · partᵀ, added in this order."""

    fixed_order = True

    def __init__(self, columns: list[TiledWeight]):
        self.columns = columns
        self.widths = [part.cols for part in columns]
        self.in_features, self.out_features = sum(self.widths), columns[0].rows
        self.name = f"tiled {columns[0].kind} by {self.widths[0]} columns"

    @property
    def nbytes(self) -> int:
        return sum(part.data.nbytes for part in self.columns)

    def apply(self, x: Tensor) -> Tensor:
        """x [M,K] f32 -> [M,N] f32."""
        first, *others = x.split(self.widths, dim=1)
        out = ops.tiled_linear(first.contiguous(), self.columns[0])
        for part, columns in zip(self.columns[1:], others, strict=True):
            out += ops.tiled_linear(columns.contiguous(), part)
        return out

    def dequantize(self) -> Tensor:
        """float32 [N,K]."""
        return torch.cat([unpack(part) for part in self.columns], dim=1)


class TiledOffsets:
    """(code - zero) · scale as (code - 8) · scale, which tiles hold, plus (8 - zero) · scale, the same for all columns of a group:
    y = x · codesᵀ + (sums of x over groups) · offsetsᵀ. offsets: N × groups."""

    fixed_order = True

    def __init__(self, codes: TiledWeight, offsets: TiledWeight):
        self.codes, self.offsets = codes, offsets
        self.group = codes.cols // offsets.cols
        self.in_features, self.out_features = codes.cols, codes.rows
        self.name = f"tiled {codes.kind} with offsets"

    @property
    def nbytes(self) -> int:
        return self.codes.data.nbytes + self.offsets.data.nbytes

    def apply(self, x: Tensor) -> Tensor:
        """x [M,K] f32 -> [M,N] f32."""
        sums = x.unflatten(1, (-1, self.group)).sum(-1)
        return ops.tiled_linear(x, self.codes) + ops.tiled_linear(sums, self.offsets)

    def dequantize(self) -> Tensor:
        """float32 [N,K]."""
        return unpack(self.codes) + unpack(self.offsets).repeat_interleave(self.group, 1)
