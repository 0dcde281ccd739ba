"""The layout of 4-bit weights that the CUDA kernel reads (`csrc/cuda/fragment_layout.h`): made once, at load, to replace the weight."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specdec.kernels.cuda_fragments import COLUMNS, DEPTH, NUMBERS, ROWS, STRIP, counters, rejects_shape
from specdec.kernels.int4_linear.weight import Int4Weight, pack_words, unpack_words

_BASE = {torch.bfloat16: 128, torch.float16: 1024}  # what a code of zero reads as (`widen.h`)


@dataclass(frozen=True, slots=True, eq=False)
class Int4Fragments:
    """4-bit weight N × K in fragments. words: int32 [N/64, K/128, 1024]. groups: int32 [K/group, N], the scale in the lower half,
    -(base + zero point) in the upper, both the bits of a number of `dtype`. arrived: as `Fragments`."""

    FORMAT: ClassVar[int] = 1

    words: Tensor
    groups: Tensor
    group: int
    dtype: torch.dtype
    arrived: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.words.shape[0] * STRIP, self.words.shape[1] * DEPTH

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.groups.nbytes + self.arrived.nbytes

    def dequantize(self) -> Tensor:
        """float32 [N,K]."""
        return unpack(self).dequantize()

    def operands(self) -> dict[str, Tensor]:
        return {"codes": self.words, "groups": self.groups}


def rejects_weight(w: Int4Weight) -> str | None:
    """Why this weight has no fragments, or None."""
    if w.scale.dtype not in NUMBERS:
        return f"scales in {w.scale.dtype}; it takes bfloat16 and float16"
    if w.group < 32 or (w.group % DEPTH and DEPTH % w.group):
        return f"groups of {w.group} columns; it takes 32, 64 and multiples of {DEPTH}"
    return rejects_shape(*w.shape)


def pack(w: Int4Weight) -> Int4Fragments:
    """The same weight in fragments. A copy, as large as the weight. ValueError where `rejects_weight` has something to say."""
    if reason := rejects_weight(w):
        raise ValueError(reason)
    zero = -(w.zero.to(w.scale.dtype) + _BASE[w.scale.dtype])  # exact in both
    bits = torch.stack((w.scale, zero), -1).view(torch.int32).squeeze(-1)
    return Int4Fragments(_pack_words(w.codes()), bits.t().contiguous(), w.group, w.scale.dtype, counters(w.shape[0], w.data.device))


# strip, block, half, pair, channel tile / 2, lane (2), channel tile % 2, step; then the nibbles of a word: half word, register (2)
_SPLIT_ROWS = (ROWS[0], 2, 2, ROWS[2])
_ORDER = (0, 5, 6, 7, 2, 1, 10, 3, 8, 11, 9, 4)


def _pack_words(codes: Tensor) -> Tensor:
    """codes uint8 [N,K] -> int32 [N/64, K/128, 1024]."""
    strips, blocks = codes.shape[0] // STRIP, codes.shape[1] // DEPTH
    nibbles = codes.view(strips, *_SPLIT_ROWS, blocks, *COLUMNS).permute(_ORDER).reshape(-1, 8)
    return pack_words(nibbles).view(strips, blocks, 1024)


def unpack(w: Int4Fragments) -> Int4Weight:
    """The way back."""
    strips, blocks, _ = w.words.shape
    sizes = (strips, *_SPLIT_ROWS, blocks, *COLUMNS)
    nibbles = unpack_words(w.words.view(-1, 1)).view([sizes[axis] for axis in _ORDER])
    codes = nibbles.permute([_ORDER.index(axis) for axis in range(len(sizes))]).reshape(w.shape)
    scale, zero = w.groups.t().contiguous().view(w.dtype).unflatten(1, (-1, 2)).unbind(-1)
    return Int4Weight(pack_words(codes), scale.contiguous(), (-zero - _BASE[w.dtype]).to(torch.uint8), w.group)
