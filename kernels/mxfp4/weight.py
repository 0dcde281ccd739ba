"""MXFP4: 4-bit floating-point numbers (e2m1) in blocks of 32 columns with one power of two each (E8M0).

A nibble's low three bits are the magnitude 0, ½, 1, 1½, 2, 3, 4, 6; its top bit is the sign. A scale byte s is 2^(s - 127); 255 is NaN.

Checkpoints keep neighbouring columns in a byte, the even one low. Here, repacked once at load, a block's 16 bytes hold its first 16 columns
in their low nibbles and the other 16 in the high ones: unpacked one after the other, each half meets 16 neighbouring activations.
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
    """MXFP4 weight of any leading dimensions (experts) by N × K, K a multiple of 32. data: uint8 [.., N, K/2], byte j of block b holds
    column 32b + j in its low and column 32b + 16 + j in its high nibble; scale: uint8 [.., N, K/32], E8M0, none NaN: whoever reads a
    file refuses those."""

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
        index = index.to(self.data.device)
        return Mxfp4Weight(self.data.index_select(-2, index), self.scale.index_select(-2, index))

    def dequantize(self) -> Tensor:
        """float32 [.., N, K], exactly."""
        return unpack(self)


def repack(blocks: Tensor) -> Tensor:
    """blocks uint8 [.., N, K/32, 16] as in a checkpoint -> `Mxfp4Weight.data`."""
    return _join(torch.stack((blocks & 0x0F, blocks >> 4), dim=-1).flatten(-2))


def _join(codes: Tensor) -> Tensor:
    """codes uint8 [.., N, K/32, 32], below 16 -> `Mxfp4Weight.data`."""
    return (codes[..., :16] | codes[..., 16:] << 4).flatten(-2)


def unpack(weight: Mxfp4Weight) -> Tensor:
    """The weight in float32 [.., N, K], exactly."""
    device = weight.data.device
    numbers = torch.tensor([*MAGNITUDES, *(-m for m in MAGNITUDES)], device=device)
    powers = torch.tensor([*(2.0 ** (s - 127) for s in range(NAN)), torch.nan], device=device)
    blocks = weight.data.unflatten(-1, (-1, BLOCK // 2))
    codes = torch.cat((blocks & 0x0F, blocks >> 4), dim=-1)
    return (numbers[codes.int()] * powers[weight.scale.int()].unsqueeze(-1)).flatten(-2)


def pack(weight: Tensor) -> Mxfp4Weight:
    """weight [.., N, K] -> the nearest MXFP4 numbers, the block's scale the smallest power of two under which nothing exceeds 6."""
    blocks = weight.float().unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1, keepdim=True)
    power = torch.where(largest > 0, torch.ceil(torch.log2(largest / MAGNITUDES[-1])), 0.0).clamp_(-127.0, 127.0)
    scaled = blocks / torch.exp2(power)
    middles = torch.tensor([(a + b) / 2 for a, b in pairwise(MAGNITUDES)], device=weight.device)
    codes = torch.bucketize(scaled.abs(), middles).to(torch.uint8) | (scaled < 0).to(torch.uint8) << 3
    return Mxfp4Weight(_join(codes), (power.squeeze(-1) + 127).to(torch.uint8))
