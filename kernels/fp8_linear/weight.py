"""The storage of FP8 weights: e4m3 numbers and float32 scales by tensor, by row, or by block of 128 × 128."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

BLOCK = 128  # rows and columns that share a scale
LARGEST = 448.0  # of e4m3


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Weight:
    """e4m3 weight N × K. data: float8_e4m3fn [N,K], K contiguous. scale f32: [1] (per tensor), [N] (per output channel) or
    [ceil(N/128), ceil(K/128)] (blocks of 128 × 128); the weight is data * scale. No NaN codes: whoever reads a file refuses them,
    since kernels that widen the bits of a number would take them for 480."""

    data: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.data.shape[0], self.data.shape[1]

    @property
    def kind(self) -> str:
        """Of the CPU tiles that hold it exactly; blocks have none and become plain numbers."""
        return "F32" if self.blocked else "F8"

    @property
    def blocked(self) -> bool:
        """Whether scales belong to blocks."""
        return self.scale.dim() == 2

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def row_scales(self) -> Tensor:
        """f32 [N]: the scale of each row, for weights that are not blocked."""
        return self.scale.expand(self.data.shape[0])

    def rows(self, start: int, stop: int) -> Fp8Weight:
        """Rows [start, stop); `start` must begin a block where scales belong to blocks."""
        if self.blocked:
            return Fp8Weight(self.data[start:stop], self.scale[start // BLOCK : -(-stop // BLOCK)])
        return Fp8Weight(self.data[start:stop], self.scale if self.scale.numel() == 1 else self.scale[start:stop])

    def to(self, device: torch.device) -> Fp8Weight:
        return Fp8Weight(self.data.to(device), self.scale.to(device))

    def dequantize(self) -> Tensor:
        """float32 [N,K]."""
        if not self.blocked:
            return self.data.float() * self.row_scales()[:, None]
        rows, cols = self.data.shape
        wide = self.scale.repeat_interleave(BLOCK, 0)[:rows].repeat_interleave(BLOCK, 1)[:, :cols]
        return self.data.float() * wide
