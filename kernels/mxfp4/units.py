"""The layout of MXFP4 weights that the experts' kernel reads: made once, at load.

A step of the kernel is a unit of 128 columns of a row: 32 words of 16 bits. Word e holds the columns e, 32 + e, 64 + e and 96 + e of its
unit, so the four operands that a tile of words unpacks to (one a place in the word) are the unit's four blocks, each with one scale
a row, and each meets 32 neighbouring columns of x. A unit's words are stored row by row: a tile is one run of memory.

The 16 bits of a word are dealt so that two words, in one register, become a pair of bfloat16 with few instructions. Sign and
magnitude belong into the bits 15 and 8 to 6, which makes 2^-126 times the number. The first code has all but its last bit there,
the last one there once the word's bytes are swapped; the second and third get there by one shift, the fourth by one shift of the swapped
bytes (`PLACES`; nine instructions for eight numbers, where nibbles take fifteen).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.mxfp4.weight import BLOCK, Mxfp4Weight

UNIT = 128  # columns
WORDS = 32  # of a row's unit
PLACES = ((15, 8, 7, 14), (13, 6, 5, 4), (9, 2, 1, 0), (3, 12, 11, 10))
"""Bits of the word that hold the sign and the magnitude, its high bit first, of the code at each place."""


@dataclass(frozen=True, slots=True, eq=False)
class Mxfp4Units:
    """MXFP4 weight of any leading dimensions (experts) by N × K (`columns`). data: int16 [.., units, N, 32]; scale: int32 [.., units, N],
    byte b of a word is the E8M0 scale of block b of the unit. Columns past the end are zeros of scale 1."""

    data: Tensor
    scale: Tensor
    columns: int

    @property
    def shape(self) -> tuple[int, ...]:
        """(.., N, K)."""
        return *self.data.shape[:-3], self.data.shape[-2], self.columns

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes

    def dequantize(self) -> Tensor:
        """float32 [.., N, K], exactly."""
        return unpack_units(self).dequantize()


def _dealt(device: torch.device) -> Tensor:
    """int16 [4, 16]: the word's bits of each code at each place."""
    bits = [[sum((code >> (3 - i) & 1) << place[i] for i in range(4)) for code in range(16)] for place in PLACES]
    return torch.tensor(bits, dtype=torch.int32, device=device).to(torch.int16)


def pack_units(weight: Mxfp4Weight) -> Mxfp4Units:
    """The same weight in units. A copy, as large as the weight; made expert by expert, which keeps what it needs besides small."""
    *lead, rows, columns = weight.shape
    units = -(-columns // UNIT)
    data = torch.empty(*lead, units, rows, WORDS, dtype=torch.int16, device=weight.data.device)
    scale = torch.empty(*lead, units, rows, dtype=torch.int32, device=weight.data.device)
    numbers, powers = weight.data.flatten(0, -3) if lead else weight.data[None], weight.scale.flatten(0, -3) if lead else weight.scale[None]
    for i, (into, into_scale) in enumerate(zip(data.view(-1, units, rows, WORDS), scale.view(-1, units, rows), strict=True)):
        into.copy_(_words(numbers[i], units).transpose(0, 1))
        padded = torch.full((rows, units * (UNIT // BLOCK)), 127, dtype=torch.uint8, device=scale.device)
        padded[:, : columns // BLOCK] = powers[i]
        into_scale.copy_(padded.view(torch.int32).t())
    return Mxfp4Units(data, scale, columns)


def _words(numbers: Tensor, units: int) -> Tensor:
    """`Mxfp4Weight.data` [N, K/2] of one expert -> int16 [N, units, 32]."""
    rows, dealt = numbers.shape[0], _dealt(numbers.device)
    padded = torch.zeros(rows, units * (UNIT // 2), dtype=torch.uint8, device=numbers.device)
    padded[:, : numbers.shape[1]] = numbers
    blocks = padded.view(rows, units, UNIT // BLOCK, BLOCK // 2)
    words = torch.zeros(rows, units, WORDS, dtype=torch.int16, device=numbers.device)
    for place in range(len(PLACES)):
        codes = torch.cat((blocks[:, :, place] & 15, blocks[:, :, place] >> 4), dim=-1)
        words |= dealt[place][codes.int()]
    return words


def unpack_units(weight: Mxfp4Units) -> Mxfp4Weight:
    """The way back."""
    words = weight.data.transpose(-3, -2).int()  # [.., N, units, 32]
    codes = [sum((words >> bit & 1) << (3 - i) for i, bit in enumerate(place)) for place in PLACES]
    blocks = torch.stack([torch.as_tensor(c) for c in codes], dim=-2)  # [.., N, units, 4, 32]
    data = (blocks[..., :16] | blocks[..., 16:] << 4).to(torch.uint8).flatten(-3)
    scale = weight.scale.transpose(-2, -1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
    return Mxfp4Weight(data[..., : weight.columns // 2].contiguous(), scale[..., : weight.columns // BLOCK].contiguous())
