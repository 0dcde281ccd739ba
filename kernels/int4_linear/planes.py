"""The layout of 4-bit weights that the streaming kernel reads: made once, at load.

A step of the kernel is a chunk of 128 columns, 16 words of a row. Natural order would put eight neighbouring columns into a word, and the
eight operands that a word tile unpacks to (one a nibble) would each meet every eighth column of x. Here nibble i of word j is column
16i + j of the chunk: operand i meets 16 neighbouring columns of x, and a group of 32 or 64 columns is two or four operands. A chunk's
words are stored row by row, so a tile of W is one run of memory. Scales and zeros lie beside the features they belong to.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.int4_linear.weight import Int4Weight, pack_words

CHUNK = 128  # columns
WORDS = CHUNK // 8


@dataclass(frozen=True, slots=True, eq=False)
class Int4Planes:
    """4-bit weight N × K (`columns`). data: int32 [chunks, N, 16], nibble i of word j of chunk c is column 128c + 16i + j, 0 past the end;
    scale: [columns/group, N]; zero: uint8 [columns/group, N]; the weight is (code - zero) * scale."""

    data: Tensor
    scale: Tensor
    zero: Tensor
    group: int
    columns: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.data.shape[1], self.columns

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes + self.zero.nbytes

    def dequantize(self) -> Tensor:
        """float32 [N,K]."""
        return unpack_planes(self).dequantize()


def rejects_group(group: int, columns: int) -> str | None:
    """Why weights in groups of this size have no planes, or None: 16 columns of a chunk, and so 16 of a group, share a scale."""
    whole = group >= columns or group % CHUNK == 0
    return None if whole or (group % 16 == 0 and CHUNK % group == 0) else f"groups of {group} columns; it takes 16, 32, 64, n · 128 and K"


def pack_planes(w: Int4Weight) -> Int4Planes:
    """The same weight in planes. A copy, as large as the weight."""
    n, columns = w.data.shape[0], w.data.shape[1] * 8
    chunks = -(-columns // CHUNK)
    padded = torch.zeros(n, chunks * CHUNK, dtype=torch.int32, device=w.data.device)
    padded[:, :columns] = w.codes()
    planes = padded.view(n, chunks, 8, WORDS)
    data = torch.zeros(n, chunks, WORDS, dtype=torch.int32, device=w.data.device)
    for i in range(8):
        data |= planes[:, :, i] << 4 * i
    return Int4Planes(data.transpose(0, 1).contiguous(), w.scale.t().contiguous(), w.zero.t().contiguous(), w.group, columns)


def unpack_planes(w: Int4Planes) -> Int4Weight:
    """The way back."""
    planes = torch.stack([(w.data >> 4 * i) & 15 for i in range(8)], 2)  # [chunks, N, 8, 16]
    natural = planes.permute(1, 0, 2, 3).reshape(w.data.shape[1], -1)[:, : w.columns]
    return Int4Weight(pack_words(natural), w.scale.t().contiguous(), w.zero.t().contiguous(), w.group)
