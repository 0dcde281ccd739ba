"""Linear layers: picks the weight's storage and method once, at load."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from specdec import ops
from specdec.errors import UnsupportedCheckpoint
from specdec.kernels.linear.tiles import FLOATS, RAW_BYTES, TiledWeight, pack_blocks, pack_dense, pack_fp8
from specdec.kernels.mxfp4.weight import Mxfp4Weight
from specdec.quant.fp8 import Fp8Rows
from specdec.quant.ggml import GgmlBlocks
from specdec.quant.method import LinearMethod
from specdec.quant.none import Dense
from specdec.quant.packed import Packed
from specdec.quant.tiled import Tiled

RawWeight = Tensor | GgmlBlocks | Fp8Rows | Mxfp4Weight


Method = Dense | Tiled | Packed


class Linear:
    """y = x Wᵀ + bias. bias [N] in the output dtype, or None. out_dtype: None = the activation dtype."""

    def __init__(self, method: LinearMethod, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None):
        self.method = method
        self.bias = bias
        self.out_dtype = out_dtype

    @property
    def in_features(self) -> int:
        return self.method.in_features

    @property
    def out_features(self) -> int:
        return self.method.out_features

    def __call__(self, x: Tensor) -> Tensor:
        """x [M,K] -> [M,N]."""
        y = self.method.apply(x)
        if self.bias is not None:
            y = y + self.bias
        return y if self.out_dtype is None else y.to(self.out_dtype)

    def dequantize(self) -> Tensor:
        """The weight, float32 [N,K]."""
        return self.method.dequantize()


def make_linear(
    shards: list[RawWeight],
    bias: Tensor | None = None,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    deterministic: bool = False,
    keep: bool = False,
) -> Linear:
    """A linear layer from shards stacked along rows (q|k|v, gate|up).

    On the CPU in float32, with the compiled extension, weights stay in their storage, in tiles; elsewhere they become dense
    in `dtype`, or with `keep` stay in a storage smaller than that. Raises UnsupportedCheckpoint when shards disagree on the
    number of columns.
    """
    device = torch.device(device)
    columns = {shard.shape[1] for shard in shards}
    if len(columns) != 1:
        raise UnsupportedCheckpoint(f"shards of one linear layer have different widths: {sorted(columns)}")
    bias = None if bias is None else bias.to(device=device, dtype=dtype)
    return Linear(make_method(shards, device, dtype, rowwise=deterministic, keep=keep), bias)


def make_method(shards: list[RawWeight], device: torch.device, dtype: torch.dtype, *, rowwise: bool, keep: bool) -> Method:
    """The storage and product of `make_linear`."""
    if use_tiles(device, dtype):
        return Tiled(tile_shards(shards))
    if keep and all(not isinstance(shard, Tensor) or shard.dtype.itemsize < dtype.itemsize for shard in shards):
        return Packed([replace(part, data=part.data.to(device)) for part in tile_shards(shards)], dtype, rowwise=rowwise)
    rows = [dense(shard, device, dtype) for shard in shards]
    weight = rows[0] if len(rows) == 1 else torch.cat(rows)
    return Dense(weight.contiguous(), rowwise=rowwise)


def use_tiles(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights are kept in tiles for the compiled CPU kernels."""
    return device.type == "cpu" and dtype is torch.float32 and ops.compiled()


def dense(raw: RawWeight, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[N,K] in `dtype` on `device`."""
    return (raw if isinstance(raw, Tensor) else raw.dequantize()).to(device=device, dtype=dtype)


def tile_shards(shards: list[RawWeight]) -> list[TiledWeight]:
    """Consecutive shards of one format become one tiled weight."""
    parts: list[TiledWeight] = []
    start = 0
    while start < len(shards):
        stop = start
        while stop < len(shards) and _format(shards[stop]) == _format(shards[start]):
            stop += 1
        parts.append(_tile(shards[start:stop]))
        start = stop
    return parts


def _format(raw: RawWeight) -> str:
    return FLOATS.get(raw.dtype, "F32") if isinstance(raw, Tensor) else raw.kind


def _tile(group: list[RawWeight]) -> TiledWeight:
    """Shards of one format."""
    data = [raw if isinstance(raw, Tensor) else raw.data for raw in group]
    rows, kind, columns = data[0] if len(data) == 1 else torch.cat(data), _format(group[0]), group[0].shape[1]
    if kind in RAW_BYTES:
        return pack_blocks(rows, kind, columns)
    return pack_fp8(rows, columns) if kind == "F8" else pack_dense(rows)
