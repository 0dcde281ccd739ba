"""Compaction of accepted tree nodes for all layers at once: gather into a buffer, scatter from it.

Two launches, because every slot must be read before any is written, and nothing orders the programs of one launch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.kv_fp8 import raw

_TILE = 1024


def rejects(k_caches: list[Tensor], v_caches: list[Tensor], src: Tensor, dst: Tensor) -> str | None:
    """Why this kernel cannot run the call, or None."""
    return None if all(c.is_contiguous() for c in (*k_caches, *v_caches)) else "caches must be dense"


def move_kv(k_caches: list[Tensor], v_caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Shapes in `specdec.ops.move_kv`. Layers at equal distances in memory (one allocation) share the launches."""
    if src.shape[0] == 0:
        return
    k_caches, v_caches = ([raw(c) for c in caches] for caches in (k_caches, v_caches))
    step = _distance(k_caches, v_caches)
    if step is None:
        for k, v in zip(k_caches, v_caches, strict=True):
            _move(k, v, 1, 0, src, dst)
    else:
        _move(k_caches[0], v_caches[0], len(k_caches), step, src, dst)


def _distance(k_caches: list[Tensor], v_caches: list[Tensor]) -> int | None:
    """Elements from each layer to the next, K and V alike, or None where they differ."""
    k, v = ([c.data_ptr() for c in caches] for caches in (k_caches, v_caches))
    step = k[1] - k[0] if len(k) > 1 else 0
    even = all(a == k[0] + i * step and b == v[0] + i * step for i, (a, b) in enumerate(zip(k, v, strict=True)))
    return step // k_caches[0].element_size() if even else None


def _move(k: Tensor, v: Tensor, layers: int, step: int, src: Tensor, dst: Tensor) -> None:
    width, moves = k.shape[2] * k.shape[3], src.shape[0]
    buffer = k.new_empty(2, layers, moves, width)
    grid = (moves, layers, 2 * triton.cdiv(width, _TILE))
    for slots, scatter in ((src, False), (dst, True)):
        _copy[grid](k, v, buffer, slots, step, WIDTH=width, TILE=_TILE, SCATTER=scatter)


@triton.jit
def _copy(k, v, buffer, slots, step, WIDTH: tl.constexpr, TILE: tl.constexpr, SCATTER: tl.constexpr):
    """Grid (moves, layers, K tiles then V tiles). step: elements from a layer to the next."""
    move = tl.program_id(0)
    layer = tl.program_id(1)
    tiles = tl.num_programs(2) // 2
    is_v = tl.program_id(2) // tiles
    column = tl.program_id(2) % tiles * TILE + tl.arange(0, TILE)
    mask = column < WIDTH
    own = (is_v * tl.num_programs(1) + layer).to(tl.int64) * tl.num_programs(0) + move
    inside = layer.to(tl.int64) * step + tl.load(slots + move) * WIDTH + column
    slot = (v if is_v else k) + inside
    if SCATTER:
        tl.store(slot, tl.load(buffer + own * WIDTH + column, mask=mask), mask=mask)
    else:
        tl.store(buffer + own * WIDTH + column, tl.load(slot, mask=mask), mask=mask)
