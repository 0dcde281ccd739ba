"""Dense weights into blocks of 32 columns: Q8_0 (8 bits and a scale) and Q4_1 (4 bits, a scale and a minimum), round to nearest."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.errors import ConfigError, UnsupportedCheckpoint
from specdec.kernels.linear.tiles import BLOCK
from specdec.quant.ggml import GgmlBlocks

BLOCK_KINDS = {"int8": "Q8_0", "int4": "Q4_1"}  # what users ask for -> block format


def quantize(weight: Tensor, kind: str) -> GgmlBlocks:
    """weight [N, K] -> "Q8_0" or "Q4_1" blocks. ConfigError when K is not a multiple of 32 or the kind is another one."""
    rows, cols = weight.shape
    if cols % BLOCK:
        raise ConfigError(f"cannot quantise a weight of shape {[rows, cols]} to {kind}: columns must be a multiple of {BLOCK}")
    grouped = weight.float().view(rows, cols // BLOCK, BLOCK)
    if kind == "Q8_0":
        scale = (grouped.abs().amax(-1, keepdim=True) / 127.0).half()
        return pack_q8(_rounded(grouped, scale, -127, 127).to(torch.int8).view(rows, cols), scale.squeeze(-1))
    if kind != "Q4_1":
        raise ConfigError(f"cannot quantise to {kind!r}; known: {', '.join(BLOCK_KINDS.values())}")
    low = grouped.amin(-1, keepdim=True)
    scale, low = ((grouped.amax(-1, keepdim=True) - low) / 15.0).half(), low.half()
    quants = _rounded(grouped - low.float(), scale, 0, 15).to(torch.uint8)
    packed = quants[..., :16] | (quants[..., 16:] << 4)
    data = torch.cat((scale.view(torch.uint8), low.view(torch.uint8), packed), dim=-1)
    return GgmlBlocks(data.view(rows, -1), kind, (rows, cols))


def _rounded(values: Tensor, scale: Tensor, low: int, high: int) -> Tensor:
    """values / scale to the nearest integer in [low, high]; 0 where the scale is 0."""
    wide = scale.float()
    return torch.where(wide > 0, values / wide, 0.0).round_().clamp_(low, high)


def pack_q8(quants: Tensor, scales: Tensor) -> GgmlBlocks:
    """quants int8 [N, K], scales fp16 [N, K/32] -> Q8_0 blocks, exactly. UnsupportedCheckpoint when the shapes do not fit."""
    rows, cols = quants.shape
    if cols % BLOCK or tuple(scales.shape) != (rows, cols // BLOCK):
        raise UnsupportedCheckpoint(f"int8 weight {[rows, cols]} needs scales {[rows, cols // BLOCK]}, got {list(scales.shape)}")
    bytes_of = scales.half().contiguous().view(torch.uint8).view(rows, -1, 2)
    data = torch.cat((bytes_of, quants.contiguous().view(torch.uint8).view(rows, -1, BLOCK)), dim=-1)
    return GgmlBlocks(data.view(rows, -1), "Q8_0", (rows, cols))


def unpack_q8(blocks: GgmlBlocks) -> tuple[Tensor, Tensor]:
    """The inverse of `pack_q8`: (quants int8 [N, K], scales fp16 [N, K/32])."""
    rows, cols = blocks.shape
    grouped = blocks.data.view(rows, cols // BLOCK, BLOCK + 2)
    quants = grouped[..., 2:].contiguous().view(torch.int8).view(rows, cols)
    return quants, grouped[..., :2].contiguous().view(torch.float16).view(rows, -1)
