"""Dense weights, multiplied by the library."""

from __future__ import annotations

from torch import Tensor

from specdec import ops


class Dense:
    """weight [N,K] in the activation dtype. `rowwise` trades speed for bits that do not depend on M."""

    def __init__(self, weight: Tensor, *, rowwise: bool = False):
        self.weight = weight
        self.out_features, self.in_features = weight.shape
        self.fixed_order = rowwise
        self._fixed_backend = ops.fixed_dense(weight.device.type)
        self.name = f"dense {str(weight.dtype).removeprefix('torch.')}" + (" rowwise" if rowwise else "")

    @property
    def nbytes(self) -> int:
        return self.weight.nbytes

    def apply(self, x: Tensor) -> Tensor:
        """x [M,K] in the weight's dtype -> [M,N]."""
        if not self.fixed_order:
            return ops.dense_linear(x, self.weight)
        with ops.override("dense_linear", self._fixed_backend):
            return ops.dense_linear(x, self.weight)

    def dequantize(self) -> Tensor:
        """float32 copy [N,K]."""
        return self.weight.float()
