"""Weights repacked in tiles of 16 output rows: the layout the CPU GEMM reads, and its inverse.

A tile holds 16 rows (SIMD lane = row; the last tile is padded with zero rows). Per tile and block of 32 columns:

- Q4_1: 4 × 64 bytes of quants, 16 × fp16 d, 16 × fp16 m   (320 bytes)
- Q4_0: 4 × 64 bytes of quants, 16 × fp16 d                (288 bytes), value d * (q - 8)
- Q8_0: 8 × 64 bytes of quants + 128, 16 × fp16 d          (544 bytes), value d * (u - 128)

In a 64-byte vector lane r is the 32-bit word of row r. For 4 bits, byte b of vector v holds column 8v+b in its low and
column 8v+4+b in its high nibble, so masking yields four consecutive columns as bytes, the shape byte dot products want.
For 8 bits byte b of vector v is column 4v+b, biased to unsigned.

Plain numbers have no blocks and any K: F32, F16 and BF16 tiles are float32, float16 and bfloat16 [tiles, K, 16]; an F8 tile
is K × 16 bytes of e4m3 (no NaN), then 16 × float32 scales, one a row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

TILE = 16
BLOCK = 32
KINDS = ("F32", "Q4_0", "Q4_1", "Q8_0", "F16", "BF16", "F8")  # position = the kind's number in csrc
FLOATS = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
RAW_BYTES = {"Q4_0": 18, "Q4_1": 20, "Q8_0": 34}  # per block of 32 in a GGUF row
HEADER = {"Q4_0": 2, "Q4_1": 4, "Q8_0": 2}  # bytes of fp16 scales before the quants in a raw block


@dataclass(frozen=True, slots=True, eq=False)
class TiledWeight:
    """`rows` × `cols` weight in tiles. data: [tiles, K, 16] of the kind's dtype for F32, F16 and BF16, uint8 [tiles, K·16 + 64]
    for F8, else uint8 [tiles, K/32, bytes]."""

    data: Tensor
    kind: str
    rows: int
    cols: int


def _pad_rows(t: Tensor) -> Tensor:
    """[N, ...] -> [tiles, 16, ...], zero rows appended."""
    tiles = -(-t.shape[0] // TILE)
    padded = t.new_zeros(tiles * TILE, *t.shape[1:])
    padded[: t.shape[0]] = t
    return padded.view(tiles, TILE, *t.shape[1:])


def pack_dense(weight: Tensor) -> TiledWeight:
    """weight [N,K] -> tiles of its own dtype, float32 for any that has no tiles."""
    rows, cols = weight.shape
    weight = weight if weight.dtype in FLOATS else weight.float()
    return TiledWeight(_pad_rows(weight).transpose(1, 2).contiguous(), FLOATS[weight.dtype], rows, cols)


def pack_fp8(raw: Tensor, cols: int) -> TiledWeight:
    """raw uint8 [N, 4 + K]: a row's float32 scale, then its e4m3 bytes -> F8 tiles."""
    rows = _pad_rows(raw)  # [tiles, 16, 4 + K]
    data = torch.cat((rows[..., 4:].transpose(1, 2).flatten(1), rows[..., :4].flatten(1)), dim=1)
    return TiledWeight(data, "F8", raw.shape[0], cols)


def pack_blocks(raw: Tensor, kind: str, cols: int) -> TiledWeight:
    """raw uint8 [N, bytes per row] as stored in a GGUF file -> tiles of that kind."""
    rows, blocks = raw.shape[0], cols // BLOCK
    grouped = _pad_rows(raw.view(rows, blocks, RAW_BYTES[kind])).transpose(1, 2)  # [tiles, blocks, 16, bytes]
    head = HEADER[kind]
    scales = grouped[..., :head].unflatten(-1, (head // 2, 2)).transpose(2, 3)  # [tiles, blocks, scale, 16, 2]
    quants = grouped[..., head:]
    if kind == "Q8_0":
        lanes = (quants ^ 0x80).unflatten(-1, (8, 4))  # two's complement -> biased: flip the sign bit
    else:
        columns = torch.cat((quants & 0x0F, quants >> 4), dim=-1).unflatten(-1, (4, 2, 4))
        lanes = columns[..., 0, :] | (columns[..., 1, :] << 4)
    words = lanes.transpose(2, 3)  # [tiles, blocks, vector, 16, 4]
    data = torch.cat((words.flatten(2), scales.flatten(2)), dim=-1)
    return TiledWeight(data.contiguous(), kind, rows, cols)


def unpack(weight: TiledWeight) -> Tensor:
    """The dequantised weight, float32 [rows, cols], exact in float32 up to the one rounding of d*q+m."""
    data, kind = weight.data, weight.kind
    if kind in FLOATS.values():
        return data.transpose(1, 2).flatten(0, 1)[: weight.rows].float()
    if kind == "F8":
        numbers = data[:, :-64].contiguous().view(torch.float8_e4m3fn).view(-1, weight.cols, TILE).float()
        scales = data[:, -64:].contiguous().view(torch.float32)  # [tiles, 16]
        return (numbers * scales[:, None]).transpose(1, 2).flatten(0, 1)[: weight.rows]
    tiles, blocks, _ = data.shape
    size = 512 if kind == "Q8_0" else 256
    words = data[..., :size].reshape(tiles, blocks, size // 64, TILE, 4)
    scales = data[..., size:].contiguous().view(torch.float16).view(tiles, blocks, HEADER[kind] // 2, TILE).float()
    if kind == "Q8_0":
        quants = words.permute(0, 3, 1, 2, 4).float() - 128.0
    else:
        split = torch.stack((words & 0x0F, words >> 4), dim=-2)  # [tiles, blocks, 4, 16, 2, 4]
        quants = split.permute(0, 3, 1, 2, 4, 5).float() - (8.0 if kind == "Q4_0" else 0.0)
    values = quants.reshape(tiles, TILE, blocks, BLOCK) * scales[:, :, 0].transpose(1, 2).unsqueeze(-1)
    if kind == "Q4_1":
        values = values + scales[:, :, 1].transpose(1, 2).unsqueeze(-1)
    return values.reshape(tiles * TILE, blocks * BLOCK)[: weight.rows]
