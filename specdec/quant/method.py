"""What a linear layer needs from its weight format."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class LinearMethod(Protocol):
    """A weight of `out_features` × `in_features` in some storage, and how to multiply by it.

    name: what `specdec env` prints. fixed_order: result bits of a row do not depend on the other rows or on M.
    """

    name: str
    in_features: int
    out_features: int
    fixed_order: bool

    @property
    def nbytes(self) -> int:
        """Memory the weight occupies."""
        ...

    def apply(self, x: Tensor) -> Tensor:
        """x [M, in_features] -> x @ weight.T, [M, out_features]."""
        ...

    def dequantize(self) -> Tensor:
        """The weight as float32 [out_features, in_features], on its device."""
        ...
