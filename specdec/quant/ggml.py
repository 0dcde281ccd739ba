"""GGUF weight blocks as they come from the file: 32 columns a block, little-endian fp16 scales. Source: reference §8.9."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdec.errors import UnsupportedCheckpoint
from specdec.kernels.linear.tiles import BLOCK, RAW_BYTES, pack_blocks, unpack


@dataclass(frozen=True, slots=True, eq=False)
class GgmlBlocks:
    """Rows of packed blocks. data: uint8 [N, K/32 * bytes per block]; kind: "Q4_0" | "Q4_1" | "Q8_0"; shape (N, K)."""

    data: Tensor
    kind: str
    shape: tuple[int, int]

    def __post_init__(self) -> None:
        if self.kind not in RAW_BYTES:
            raise UnsupportedCheckpoint(f"GGUF block type {self.kind!r} is not supported; use one of {', '.join(RAW_BYTES)}")
        rows, cols = self.shape
        width = cols // BLOCK * RAW_BYTES[self.kind]
        if cols % BLOCK or tuple(self.data.shape) != (rows, width) or self.data.element_size() != 1:
            raise UnsupportedCheckpoint(
                f"{self.kind} weight of shape {self.shape} needs uint8 data of shape ({rows}, {width}) and columns in multiples of "
                f"{BLOCK}, got {tuple(self.data.shape)}; the file is damaged or its header is wrong"
            )

    def dequantize(self) -> Tensor:
        """float32 [N,K]."""
        return unpack(pack_blocks(self.data, self.kind, self.shape[1]))
