"""Weights in 16-row tiles for the compiled CPU kernels (numbers or blocks), float32 activations, one K order for all M."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from specdec import memory, ops
from specdec.kernels.linear.tiles import TiledWeight, unpack


class Tiled:
    """One or more tiled weights stacked along rows (more than one when shards differ in format)."""

    fixed_order = True

    def __init__(self, parts: list[TiledWeight]):
        self.parts = parts
        self.in_features = parts[0].cols
        self.out_features = sum(p.rows for p in parts)
        self.name = "tiled " + "+".join(dict.fromkeys(p.kind for p in parts))

    @property
    def nbytes(self) -> int:
        return sum(p.data.nbytes for p in self.parts)

    def apply(self, x: Tensor) -> Tensor:
        """x [M,K] f32 -> [M,N] f32."""
        if len(self.parts) == 1:
            return ops.tiled_linear(x, self.parts[0])
        out = x.new_empty(x.shape[0], self.out_features)
        start = 0
        for part in self.parts:
            out[:, start : start + part.rows] = ops.tiled_linear(x, part)
            start += part.rows
        return out

    def dequantize(self) -> Tensor:
        """float32 [N,K]."""
        return torch.cat([unpack(p) for p in self.parts])


def gather(methods: Iterable[object]) -> None:
    """Move the weights of the tiled ones among `methods` into one allocation in huge pages, in this order.

    Before anybody keeps a pointer to them. Old storage is freed one by one, so there is little more than one copy at any time.
    """
    tiled = [method for method in methods if isinstance(method, Tiled)]
    arena = memory.zeros([sum(_room(p.data) for m in tiled for p in m.parts)], torch.uint8, torch.device("cpu"))
    start = 0
    for method in tiled:
        for i, part in enumerate(method.parts):
            data = arena[start : start + part.data.nbytes].view(part.data.dtype).view(part.data.shape)
            method.parts[i] = replace(part, data=data.copy_(part.data))
            start += _room(data)


def _room(data: Tensor) -> int:
    """Bytes in the arena: whole cache lines."""
    return -(-data.nbytes // 64) * 64
