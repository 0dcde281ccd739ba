"""Linear layers: picks the weight's storage and method once, at load."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec import ops
from specdec.errors import UnsupportedCheckpoint
from specdec.kernels.linear.tiles import TiledWeight, pack_dense, pack_many
from specdec.quant.ggml import GgmlBlocks
from specdec.quant.method import LinearMethod
from specdec.quant.none import Dense
from specdec.quant.tiled import Tiled

RawWeight = Tensor | GgmlBlocks


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
    shards: list[RawWeight], bias: Tensor | None = None, *, device: torch.device | str, dtype: torch.dtype, deterministic: bool = False
) -> Linear:
    """A linear layer from shards stacked along rows (q|k|v, gate|up).

    On the CPU in float32, with the compiled extension, weights stay packed in tiles; elsewhere they become dense in
    `dtype`. Raises UnsupportedCheckpoint when shards disagree on the number of columns.
    """
    device = torch.device(device)
    columns = {shard.shape[1] for shard in shards}
    if len(columns) != 1:
        raise UnsupportedCheckpoint(f"shards of one linear layer have different widths: {sorted(columns)}")
    bias = None if bias is None else bias.to(device=device, dtype=dtype)
    if use_tiles(device, dtype):
        return Linear(Tiled(tile_shards(shards)), bias)
    rows = [dense(shard, device, dtype) for shard in shards]
    weight = rows[0] if len(rows) == 1 else torch.cat(rows)
    return Linear(Dense(weight.contiguous(), rowwise=deterministic), bias)


def use_tiles(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether weights are kept in tiles for the compiled CPU kernels."""
    return device.type == "cpu" and dtype is torch.float32 and ops.compiled()


def dense(raw: RawWeight, device: torch.device, dtype: torch.dtype) -> Tensor:
    """[N,K] in `dtype` on `device`."""
    return (raw.dequantize() if isinstance(raw, GgmlBlocks) else raw).to(device=device, dtype=dtype)


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
    return raw.kind if isinstance(raw, GgmlBlocks) else "F32"


def _tile(group: list[RawWeight]) -> TiledWeight:
    blocks = [raw for raw in group if isinstance(raw, GgmlBlocks)]
    if blocks:
        return pack_many([raw.data for raw in blocks], blocks[0].kind, blocks[0].shape[1])
    tensors = [raw.float() for raw in group if isinstance(raw, Tensor)]
    return pack_dense(tensors[0] if len(tensors) == 1 else torch.cat(tensors))
