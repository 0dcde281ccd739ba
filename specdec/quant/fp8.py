"""FP8 weights: e4m3 numbers with one float32 scale a row (output channel)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.linear.tiles import pack_fp8, unpack

LARGEST = 448.0  # of e4m3


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Rows:
    """A weight of `shape` (N, K). data: uint8 [N, 4 + K], each row its scale's four bytes and then its numbers."""

    data: Tensor
    shape: tuple[int, int]

    @property
    def kind(self) -> str:
        """Of the tiles it is packed into."""
        return "F8"

    def dequantize(self) -> Tensor:
        """float32 [N,K]."""
        return unpack(pack_fp8(self.data, self.shape[1]))


def to_fp8(weight: Tensor) -> Fp8Rows:
    """weight [N,K], each row scaled so that its largest magnitude is e4m3's, then rounded to nearest; a row of zeros has scale 0."""
    scale = weight.float().abs().amax(1, keepdim=True) / LARGEST
    numbers = torch.where(scale > 0, weight.float() / scale, 0.0).clamp_(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    data = torch.cat((scale.view(torch.uint8), numbers.view(torch.uint8)), dim=1)
    return Fp8Rows(data, (weight.shape[0], weight.shape[1]))
