"""RMSNorm, alone and fused with the residual addition before it and the quantisation behind it."""

from __future__ import annotations

from torch import Tensor

from specdec import ops
from specdec.layers.linear import Activations, Linear
from specdec.quant.fp8 import Codes


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

    def before(self, reader: Linear | None, stream: Tensor, branch: Tensor | None = None) -> tuple[Activations, Tensor]:
        """(norm of the stream with `branch` added, that stream) for the one linear layer that reads the norm: as e4m3 codes where it takes
        them. reader: None = others read it too, or none does."""
        if reader is None or not reader.takes_codes:
            return (self(stream), stream) if branch is None else self.add(branch, stream)
        if branch is None:
            return Codes(*ops.rms_norm_fp8(stream, self.weight, self.eps), stream.dtype), stream
        numbers, scale, total = ops.add_rms_norm_fp8(branch, stream, self.weight, self.eps)
        return Codes(numbers, scale, stream.dtype), total
