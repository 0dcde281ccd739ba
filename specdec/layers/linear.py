"""Linear layers: picks the weight's storage and method once, at load."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import cast

import torch
from torch import Tensor

from specdec import ops
from specdec.errors import UnsupportedCheckpoint
from specdec.kernels.fp8_linear.weight import Fp8Weight
from specdec.kernels.int4_linear.weight import Int4Weight
from specdec.kernels.linear.tiles import FLOATS, RAW_BYTES, TiledWeight, pack_blocks, pack_dense, pack_fp8
from specdec.kernels.mxfp4.weight import Mxfp4Weight
from specdec.quant.fp8 import Codes, Fp8Linear, by_columns, stack_fp8
from specdec.quant.ggml import GgmlBlocks
from specdec.quant.int4 import Int4Linear, as_q4_0, is_symmetric, offsets, stack_int4
from specdec.quant.method import LinearMethod
from specdec.quant.none import Dense
from specdec.quant.packed import Packed
from specdec.quant.stacked import Stacked
from specdec.quant.tiled import Tiled
from specdec.quant.tiled_parts import TiledColumns, TiledOffsets

RawWeight = Tensor | GgmlBlocks | Fp8Weight | Int4Weight | Mxfp4Weight

Method = Dense | Tiled | Packed


Activations = Tensor | Codes


class Linear:
    """y = x Wᵀ + bias. bias [N] in the output dtype, or None. out_dtype: None = the activation dtype.

    takes_codes: it multiplies e4m3 activations, which may come as such: what makes them can write half the bytes.
    """

    def __init__(self, method: LinearMethod, bias: Tensor | None = None, *, out_dtype: torch.dtype | None = None):
        self.method = method
        self.bias = bias
        self.out_dtype = out_dtype
        self.takes_codes = _takes_codes(method)

    @property
    def in_features(self) -> int:
        return self.method.in_features

    @property
    def out_features(self) -> int:
        return self.method.out_features

    def __call__(self, x: Activations) -> Tensor:
        """x [M,K] -> [M,N]."""
        y = self.method.apply(x) if isinstance(x, Tensor) else _of_codes(self.method, x)
        if self.bias is not None:
            y = y + self.bias
        return y if self.out_dtype is None else y.to(self.out_dtype)

    def dequantize(self) -> Tensor:
        """The weight, float32 [N,K]."""
        return self.method.dequantize()


def _takes_codes(method: LinearMethod) -> bool:
    parts = method.methods if isinstance(method, Stacked) else [method]
    return all(isinstance(part, Fp8Linear) and part.act_fp8 for part in parts)


def _of_codes(method: LinearMethod, x: Codes) -> Tensor:
    if isinstance(method, Stacked):
        return torch.cat([_of_codes(part, x) for part in method.methods], dim=1)
    return cast("Fp8Linear", method).apply_codes(x)


def make_linear(
    shards: Sequence[RawWeight],
    bias: Tensor | None = None,
    *,
    device: torch.device | str,
    dtype: torch.dtype,
    deterministic: bool = False,
    keep: bool = False,
    act_fp8: bool = False,
) -> Linear:
    """A linear layer from shards stacked along rows (q|k|v, gate|up).

    On the CPU in float32, with the compiled extension, weights stay in their storage, in tiles; what tiles cannot hold exactly becomes
    float32 there (4 bits in groups that 32 does not divide, or with scales that float16 rounds).
    Elsewhere FP8 and 4-bit weights stay as they are, with an op for each; others become dense in `dtype`, or with `keep` stay in a
    storage smaller than that. act_fp8: FP8 weights are multiplied by FP8 activations. Raises UnsupportedCheckpoint when shards
    disagree on the number of columns.
    """
    device = torch.device(device)
    columns = {shard.shape[1] for shard in shards}
    if len(columns) != 1:
        raise UnsupportedCheckpoint(f"shards of one linear layer have different widths: {sorted(columns)}")
    bias = None if bias is None else bias.to(device=device, dtype=dtype)
    if needs_ops(shards, device, dtype, act_fp8):
        return Linear(_stack(shards, device, dtype, rowwise=deterministic, keep=keep, act_fp8=act_fp8), bias)
    in_parts = tile_parts(shards) if use_tiles(device, dtype) else None
    return Linear(in_parts or make_method(shards, device, dtype, rowwise=deterministic, keep=keep), bias)


def needs_ops(shards: Sequence[RawWeight], device: torch.device, dtype: torch.dtype, act_fp8: bool) -> bool:
    """Whether some shard has an op of its own here, `fp8_linear` or `int4_linear`."""
    fp8 = any(isinstance(shard, Fp8Weight) for shard in shards)
    if use_tiles(device, dtype):
        return fp8 and act_fp8
    return dtype in FLOATS and (fp8 or any(isinstance(shard, Int4Weight) for shard in shards))


def _stack(
    shards: Sequence[RawWeight], device: torch.device, dtype: torch.dtype, *, rowwise: bool, keep: bool, act_fp8: bool
) -> LinearMethod:
    """Neighbours of one storage in one method, where it holds them."""
    methods: list[LinearMethod] = []
    for kind, group in groupby(shards, key=type):
        if kind is Fp8Weight:
            weights = stack_fp8([shard.to(device) for shard in cast("Iterator[Fp8Weight]", group)])
            methods += [Fp8Linear(weight, act_fp8=act_fp8, fixed_order=rowwise, dtype=dtype) for weight in weights]
        elif kind is Int4Weight:
            packed = stack_int4([shard.to(device, dtype) for shard in cast("Iterator[Int4Weight]", group)])
            methods += [Int4Linear(weight, fixed_order=rowwise) for weight in packed]
        else:
            methods.append(make_method(list(group), device, dtype, rowwise=rowwise, keep=keep))
    return methods[0] if len(methods) == 1 else Stacked(methods)


def make_method(shards: Sequence[RawWeight], device: torch.device, dtype: torch.dtype, *, rowwise: bool, keep: bool) -> Method:
    """Storage and product in tiles or dense, of any device."""
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


def tile_shards(shards: Sequence[RawWeight]) -> list[TiledWeight]:
    """Consecutive shards of one format become one tiled weight."""
    held = [_tileable(shard) for shard in shards]
    return [_tile(list(group)) for _, group in groupby(held, key=_format)]


def tile_parts(shards: Sequence[RawWeight]) -> TiledColumns | TiledOffsets | None:
    """Several tiled products, where the storage of all shards needs them; else None."""
    if all(isinstance(shard, Fp8Weight) and shard.blocked for shard in shards):
        columns = zip(*(by_columns(shard) for shard in shards if isinstance(shard, Fp8Weight)), strict=True)
        return TiledColumns([_tile(list(column)) for column in columns])
    packed = [shard for shard in shards if isinstance(shard, Int4Weight)]
    if len(packed) < len(shards) or len({shard.group for shard in packed}) > 1 or all(map(is_symmetric, packed)):
        return None
    blocks = [block for shard in packed if (block := as_q4_0(shard)) is not None]
    return TiledOffsets(_tile(blocks), pack_dense(torch.cat([offsets(s) for s in packed]))) if len(blocks) == len(packed) else None


def _tileable(raw: RawWeight) -> Tensor | GgmlBlocks | Fp8Weight:
    """The same numbers in a storage that tiles hold: itself if there is one, else float32."""
    if isinstance(raw, Int4Weight):
        return (as_q4_0(raw) if is_symmetric(raw) else None) or raw.dequantize()
    if isinstance(raw, Mxfp4Weight):
        return raw.dequantize()
    return raw.dequantize() if isinstance(raw, Fp8Weight) and raw.blocked else raw


def _format(raw: Tensor | GgmlBlocks | Fp8Weight) -> str:
    return FLOATS.get(raw.dtype, "F32") if isinstance(raw, Tensor) else raw.kind


def _bytes(raw: Tensor | GgmlBlocks | Fp8Weight) -> Tensor:
    """What the packers of tiles read: numbers as they are, blocks and scaled rows as bytes."""
    if isinstance(raw, Fp8Weight):
        return torch.cat((raw.row_scales()[:, None].contiguous().view(torch.uint8), raw.data.view(torch.uint8)), dim=1)
    return raw if isinstance(raw, Tensor) else raw.data


def _tile(group: Sequence[Tensor | GgmlBlocks | Fp8Weight]) -> TiledWeight:
    """Shards of one format."""
    data = [_bytes(raw) for raw in group]
    rows, kind, columns = data[0] if len(data) == 1 else torch.cat(data), _format(group[0]), group[0].shape[1]
    if kind in RAW_BYTES:
        return pack_blocks(rows, kind, columns)
    return pack_fp8(rows, columns) if kind == "F8" else pack_dense(rows)
