"""The layout of e4m3 weights that the CUDA kernel reads (`csrc/cuda/fragment_layout.h`): made once, at load, to replace the weight.

16 bytes hold what one lane feeds to two mma instructions, so weights go from memory to the tensor cores in whole vectors and without
a transposition.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from specdec.kernels.cuda_fragments import COLUMNS, DEPTH, ROWS, STRIP, counters, rejects_shape
from specdec.kernels.fp8_linear.weight import BLOCK, Fp8Weight

_NAN = 0x7F
_SPREAD = 2.0**60  # of a row of blocks' scales: sums are kept in units of the current block's


@dataclass(frozen=True, slots=True, eq=False)
class Fp8Fragments:
    """e4m3 weight N × K in fragments. words: int32 [N/64, K/128, 2048]. channel f32 [N]: the scale of each row, or 1 where scales belong
    to blocks; NaN where the row has a NaN code. block f32 [ceil(N/128), K/128], none zero, or None. arrived: as `Fragments`."""

    FORMAT: ClassVar[int] = 0

    words: Tensor
    channel: Tensor
    block: Tensor | None
    arrived: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """(N, K)."""
        return self.words.shape[0] * STRIP, self.words.shape[1] * DEPTH

    @property
    def group(self) -> int:
        return 0

    def operands(self) -> dict[str, Tensor]:
        scales = {"channel_scale": self.channel} | ({} if self.block is None else {"block_scale": self.block})
        return {"codes": self.words, **scales}

    @property
    def blocked(self) -> bool:
        """Whether scales belong to blocks."""
        return self.block is not None

    @property
    def nbytes(self) -> int:
        return self.words.nbytes + self.channel.nbytes + self.arrived.nbytes + (0 if self.block is None else self.block.nbytes)

    def dequantize(self) -> Tensor:
        """float32 [N,K]."""
        return unpack(self).dequantize()


def rejects_weight(w: Fp8Weight) -> str | None:
    """Why this weight has no fragments, or None. Reads the scales: for load time."""
    if reason := rejects_shape(*w.data.shape):
        return reason
    if not w.blocked:
        return None
    sizes = w.scale.abs().where(w.scale != 0, torch.nan)
    spread = sizes.nan_to_num(0.0).amax(1) / sizes.nan_to_num(torch.inf).amin(1)
    if not w.scale.isfinite().all() or (spread > _SPREAD).any():
        return "scales of one row of blocks that are infinite, NaN or more than 2^60 apart"
    return None


def pack(w: Fp8Weight) -> Fp8Fragments:
    """The same weight in fragments. A copy, as large as the weight. ValueError where `rejects_weight` has something to say."""
    if reason := rejects_weight(w):
        raise ValueError(reason)
    n, k = w.data.shape
    codes = w.data.view(torch.uint8)
    poor = (codes & _NAN) == _NAN
    channel = torch.ones(n, device=codes.device) if w.blocked else w.scale.expand(n).contiguous()
    channel = channel.masked_fill(poor.any(1), torch.nan)
    codes = codes.masked_fill(poor, 0)
    block = None
    if w.blocked:
        zero = w.scale == 0
        wide = zero.repeat_interleave(BLOCK, 0)[:n].repeat_interleave(BLOCK, 1)[:, :k]
        codes, block = codes.masked_fill(wide, 0), w.scale.masked_fill(zero, 1.0).contiguous()
    return Fp8Fragments(_pack_words(codes), channel, block, counters(n, codes.device))


_ORDER = (0, 4, 5, 6, 2, 1, 9, 7, 3, 10, 8)  # strip, block, half, pair, channel tile, lane (2), step, row / 8, half word, second code


def _pack_words(codes: Tensor) -> Tensor:
    """codes uint8 [N,K] -> int32 [N/64, K/128, 2048]."""
    strips, blocks = codes.shape[0] // STRIP, codes.shape[1] // DEPTH
    quads = codes.view(strips, *ROWS, blocks, *COLUMNS).permute(_ORDER).reshape(strips, blocks, 2048, 2, 2)
    first, second = quads[..., 0].int(), quads[..., 1].int()
    halves = (first & 0x80) << 8 | (first & 0x7F) << 4 | (second & 0x80) << 4 | (second & 0x70) << 8 | (second & 0x0F)
    return halves[..., 0] | halves[..., 1] << 16


def unpack(w: Fp8Fragments) -> Fp8Weight:
    """The way back; codes of NaN and of blocks with scale zero are not what they were, their products are."""
    strips, blocks, _ = w.words.shape
    halves = torch.stack((w.words, w.words >> 16), -1)
    first = halves >> 8 & 0x80 | halves >> 4 & 0x7F
    second = halves >> 4 & 0x80 | halves >> 8 & 0x70 | halves & 0x0F
    sizes = (strips, *ROWS, blocks, *COLUMNS)
    packed = torch.stack((first, second), -1).to(torch.uint8).view([sizes[axis] for axis in _ORDER])
    inverse = [_ORDER.index(axis) for axis in range(len(sizes))]
    codes = packed.permute(inverse).reshape(w.shape)
    if w.block is None:
        return Fp8Weight(codes.view(torch.float8_e4m3fn), w.channel)
    return Fp8Weight(codes.masked_fill(w.channel.isnan()[:, None], _NAN).view(torch.float8_e4m3fn), w.block)
