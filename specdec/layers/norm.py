"""RMSNorm, alone and fused with the residual addition before it."""

from __future__ import annotations

from torch import Tensor

from specdec import ops


class RMSNorm:
    """y = weight · x / √(mean(x²) + eps), statistics in float32. weight: [H]."""

    def __init__(self, weight: Tensor, eps: float):
        self.weight = weight
        self.eps = eps

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return ops.rms_norm(x, self.weight, self.eps)

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """(norm(x + residual), x + residual), both [T, H]."""
        return ops.add_rms_norm(x, residual, self.weight, self.eps)
