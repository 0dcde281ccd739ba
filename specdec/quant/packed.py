"""Weights kept in tiles and made dense for every product: the memory of their storage on any device, without a kernel for it."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.linear.tiles import TiledWeight, unpack
from specdec.quant.none import Dense


class Packed:
    """Tiled weights stacked along rows, multiplied in `dtype`, that of the activations. `rowwise` as in `Dense`."""

    def __init__(self, parts: list[TiledWeight], dtype: torch.dtype, *, rowwise: bool = False):
        self.stored, self.dtype = parts, dtype
        self.in_features = parts[0].cols
        self.out_features = sum(p.rows for p in parts)
        self.fixed_order = rowwise
        self.name = "packed " + "+".join(dict.fromkeys(p.kind for p in parts))

    @property
    def nbytes(self) -> int:
        """Bytes held; a product needs the dense weight for its duration on top."""
        return sum(p.data.nbytes for p in self.stored)

    def apply(self, x: Tensor) -> Tensor:
        """x [M,K] in the activation dtype -> [M,N]."""
        return Dense(self.dequantize().to(x.dtype), rowwise=self.fixed_order).apply(x)

    def dequantize(self) -> Tensor:
        """float32 [N,K]."""
        return torch.cat([unpack(p) for p in self.stored])
