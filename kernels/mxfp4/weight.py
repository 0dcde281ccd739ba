"""MXFP4: 4-bit floating-point numbers (e2m1) in blocks of 32 columns with one power of two each (E8M0).

A nibble's low three bits are the magnitude 0, ½, 1, 1½, 2, 3, 4, 6; its top bit is the sign. A scale byte s is 2^(s - 127); 255 is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

BLOCK = 32  # columns a scale
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
NAN = 255  # scale byte


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Weight:
    """MXFP4 weight of any leading dimensions (experts) by N × K, K a multiple of 32. data: uint8 [.., N, K/2], byte b of a row holds
    column 2b in its low and column 2b + 1 in its high nibble; scale: uint8 [.., N, K/32], E8M0."""

    data: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """(.., N, K)."""
        return *self.data.shape[:-1], self.data.shape[-1] * 2

    @property
    def kind(self) -> str:
        """What stores it where 4 bits are not kept: plain numbers."""
        return "F32"

    def to(self, device: torch.device) -> Mxfp4Weight:
        return Mxfp4Weight(self.data.to(device), self.scale.to(device))

    def rows(self, index: Tensor) -> Mxfp4Weight:
        """The rows of that order: index [n] i64."""
        return Mxfp4Weight(self.data.index_select(-2, index), self.scale.index_select(-2, index))

    def dequantize(self) -> Tensor:
        """float32 [.., N, K], exactly."""
        return unpack(self)


def unpack(weight: Mxfp4Weight) -> Tensor:
    """The weight in float32 [.., N, K], exactly."""
    device = weight.data.device
    numbers = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], device=device)
    powers = torch.tensor([*(2.0 ** (s - 127) for s in range(NAN)), torch.nan], device=device)
    codes = torch.stack((weight.data & 0x0F, weight.data >> 4), dim=-1).flatten(-2)
    return (numbers[codes.int()].unflatten(-1, (-1, BLOCK)) * powers[weight.scale.int()].unsqueeze(-1)).flatten(-2)


def pack(weight: Tensor) -> Mxfp4Weight:
    """weight [.., N, K] -> the nearest MXFP4 numbers, the block's scale the smallest power of two under which nothing exceeds 6."""
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    power = torch.where(largest > 0, torch.ceil(torch.log2(largest / MAGNITUDES[-1])), 0.0).clamp_(-127.0, 127.0)
    scaled = blocks / torch.exp2(power)
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(MAGNITUDES)], device=weight.device)
    codes = torch.bucketize(scaled.abs(), middles).to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3
    codes = codes.flatten(-2)
    return Mxfp4Weight(codes[..., 0::2] | codes[..., 1::2] << 4, (power.squeeze(-1) + 127).to(torch.uint8))
