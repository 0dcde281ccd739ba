"""Several methods as one: their outputs side by side."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from specdec.quant.method import LinearMethod


class Stacked:
    """Methods whose rows stand one below the other (shards of one linear layer that no single storage holds)."""

    def __init__(self, methods: Sequence[LinearMethod]):
        self.methods = methods
        self.in_features = methods[0].in_features
        self.out_features = sum(method.out_features for method in methods)
        self.fixed_order = all(method.fixed_order for method in methods)
        self.name = " + ".join(dict.fromkeys(method.name for method in methods))

    @property
    def nbytes(self) -> int:
        return sum(method.nbytes for method in self.methods)

    def apply(self, x: Tensor) -> Tensor:
        """x [M,K] -> [M,N]."""
        return torch.cat([method.apply(x) for method in self.methods], dim=1)

    def dequantize(self) -> Tensor:
        """float32 [N,K]."""
        return torch.cat([method.dequantize() for method in self.methods])
