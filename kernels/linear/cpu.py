"""Bridges from `TiledWeight` to the compiled kernels. Importing this needs the extension `specdec._C`."""

from __future__ import annotations

from torch import Tensor

from specdec import _C
from specdec.kernels.linear.tiles import KINDS, TiledWeight

_CODE = {kind: code for code, kind in enumerate(KINDS)}


def tiled_linear(x: Tensor, weight: TiledWeight) -> Tensor:
    """x [M,K] f32 -> [M,rows] f32."""
    return _C.tiled_linear(x, weight.data, _CODE[weight.kind], weight.rows)


def tiled_embedding(ids: Tensor, weight: TiledWeight) -> Tensor:
    """ids [T] i64 -> [T,cols] f32; IndexError for an id outside the vocabulary."""
    return _C.tiled_embedding(ids, weight.data, _CODE[weight.kind], weight.rows, weight.cols)
