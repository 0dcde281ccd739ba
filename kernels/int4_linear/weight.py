"""The storage of 4-bit weights in groups of columns, each with a scale and a zero point."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

PER_WORD = 8  # codes in an int32


@dataclass(frozen=True, slots=True, eq=False)
class Int4Weight:
    """4-bit weight N × K in groups of `group` columns. data: int32 [N, K/8], eight codes a word, code i of word w is column 8w + i in bits
    [4i, 4i+4); scale: [N, K/group] in the activation dtype (f32, f16 or bf16); zero: uint8 [N, K/group], 8 everywhere where symmetric;
    the weight is (code - zero) * scale. group divides K; group -1 of a checkpoint is group = K."""

    data: Tensor
    scale: Tensor
    zero: Tensor
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.data.shape[0], self.data.shape[1] * PER_WORD

    @property
    def kind(self) -> str:
        """What stores it where 4 bits are not kept: plain numbers."""
        return "F32"

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + self.scale.nbytes + self.zero.nbytes

    def rows(self, start: int, stop: int) -> Int4Weight:
        """Rows [start, stop)."""
        return Int4Weight(self.data[start:stop], self.scale[start:stop], self.zero[start:stop], self.group)

    def to(self, device: torch.device, dtype: torch.dtype) -> Int4Weight:
        """On `device`, scales in `dtype`, that of the activations."""
        return Int4Weight(self.data.to(device), self.scale.to(device, dtype), self.zero.to(device), self.group)

    def codes(self) -> Tensor:
        """uint8 [N,K], 0 to 15."""
        return unpack_words(self.data)

    def dequantize(self) -> Tensor:
        """float32 [N,K]."""
        grouped = self.codes().unflatten(1, (-1, self.group)).float()
        return ((grouped - self.zero[..., None].float()) * self.scale[..., None].float()).flatten(1)


def pack_words(codes: Tensor) -> Tensor:
    """codes uint8 [R,C], 0 to 15, C a multiple of 8 -> int32 [R,C/8], column 8w + i in bits [4i, 4i+4) of word w."""
    grouped = codes.unflatten(1, (-1, PER_WORD))
    words = grouped[..., 0].int()
    for i in range(1, PER_WORD):
        words |= grouped[..., i].int() << 4 * i
    return words


def unpack_words(words: Tensor) -> Tensor:
    """The inverse of `pack_words`."""
    codes = words.new_empty((*words.shape, PER_WORD), dtype=torch.uint8)
    for i in range(PER_WORD):
        codes[..., i] = words >> 4 * i & 15
    return codes.flatten(1)
