"""Experts out of single weights: stacked in the storage they came in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specdec.kernels.fp8_linear.weight import BLOCK, Fp8Weight
from specdec.kernels.int4_linear.weight import Int4Weight
from specdec.kernels.moe_experts.weight import ExpertWeight


class Packed(Protocol):
    """A weight N × K in any storage."""

    def dequantize(self) -> Tensor:
        """float32 [N,K]."""
        ...


Single = Tensor | Packed


def stack_experts(shards: Sequence[Sequence[Single]], device: torch.device, dtype: torch.dtype) -> ExpertWeight:
    """E lists of shards, each N_i × K and stacked along rows (gate|up) -> E × N × K on `device`.

    FP8 and 4-bit weights stay what they are where one storage holds all of them exactly: FP8 scales per tensor become scales per
    row; blocks need shards of whole blocks; 4-bit groups must be of one size. Anything else becomes dense in `dtype`.
    """
    flat = [shard for expert in shards for shard in expert]
    if all(isinstance(s, Fp8Weight) for s in flat):
        stacked = _stack_fp8(shards)  # type: ignore[arg-type]
        if stacked is not None:
            return Fp8Weight(stacked.data.to(device), stacked.scale.to(device))
    if all(isinstance(s, Int4Weight) for s in flat) and len({s.group for s in flat if isinstance(s, Int4Weight)}) == 1:
        return _stack_int4(shards, device, dtype)  # type: ignore[arg-type]
    return torch.stack([torch.cat([place(_dense(s), device, dtype) for s in expert]) for expert in shards])


def place(weight: Tensor, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Dense weights as the ops take them: in `dtype`, but on the CPU, which widens as it multiplies, in their own if that is narrower."""
    keep = device.type == "cpu" and weight.dtype.itemsize < dtype.itemsize
    return weight.to(device, weight.dtype if keep else dtype)


def _dense(weight: Single) -> Tensor:
    return weight if isinstance(weight, Tensor) else weight.dequantize()


def _stack_fp8(shards: Sequence[Sequence[Fp8Weight]]) -> Fp8Weight | None:
    """Every scale as it is or by row; None where blocks do not line up."""
    flat = [shard for expert in shards for shard in expert]
    blocked = flat[0].blocked
    if any(s.blocked != blocked for s in flat) or (blocked and any(s.shape[0] % BLOCK for expert in shards for s in expert[:-1])):
        return None
    data = torch.stack([torch.cat([s.data.view(torch.uint8) for s in expert]) for expert in shards])
    scale = torch.stack([torch.cat([s.scale if blocked else s.row_scales() for s in expert]) for expert in shards])
    return Fp8Weight(data.view(torch.float8_e4m3fn), scale)


def _stack_int4(shards: Sequence[Sequence[Int4Weight]], device: torch.device, dtype: torch.dtype) -> Int4Weight:
    moved = [[shard.to(device, dtype) for shard in expert] for expert in shards]
    data, scale, zero = (torch.stack([torch.cat([getattr(s, part) for s in e]) for e in moved]) for part in ("data", "scale", "zero"))
    return Int4Weight(data, scale, zero, moved[0][0].group)
