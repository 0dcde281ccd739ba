"""What the streaming GEMMs share: how a grid covers (features, splits of K, rows), and a sum over splits in a fixed order.

y [M,N] = x [M,K] Wᵀ for few rows is bound by reading W once. Tiles are features × depth of W (features on the M side of the tensor
core, which wants 64 of them on Hopper, rows of x on its N side, which is content with 16), and K is split until every
multiprocessor holds programs. Partial sums are float32 tiles in a workspace; the last program of a tile to arrive adds all of them in
the order of the splits, its own included, so the bits do not depend on who came last.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.tilings import Tiling
from specdec.kernels.triton_common import after_launches, apart, capability, dot, early
from specdec.kernels.triton_e4m3 import dot_codes, native, widen_finite

_STAGED = 160 << 10  # bytes of shared memory the stages of a program may take
_RING = 1 << 20  # counters a device has: more than the tiles of every GEMM that can be in flight together


@triton.jit
def cell(row_tiles, splits):
    """(feature tile, split, row tile) of this program. Row tiles are neighbours: they read the same part of W, once from memory."""
    program = tl.program_id(0)
    rest = program // row_tiles
    return rest // splits, rest % splits, program % row_tiles


@triton.jit
def steps(columns, split, splits, DEPTH: tl.constexpr):
    """[first, stop) of the steps of DEPTH columns that belong to `split`."""
    count = tl.cdiv(columns, DEPTH)
    share = tl.cdiv(count, splits)
    return split * share, tl.minimum(split * share + share, count)


@triton.jit
def arrive(acc, partial, counters, tile, split, splits, rows_here):
    """Stores this split's sums [F,R] and counts it in; True for the program that finds all the others there."""
    tl.store(_slot(partial, acc, tile * splits + split), acc, mask=_used(acc, rows_here))
    tl.debug_barrier()  # every thread's sums before the one thread's release
    return tl.atomic_add(counters + tile, 1, sem="acq_rel") == splits - 1


@triton.jit
def collect(acc, partial, counters, tile, splits, rows_here):
    """The sum over all splits in their order; leaves the counter as it was found, for the next launch. acc gives the shape."""
    total = tl.zeros(acc.shape, tl.float32)
    for split in range(splits):
        total += tl.load(_slot(partial, acc, tile * splits + split), mask=_used(acc, rows_here), other=0.0, cache_modifier=".cg")
    tl.store(counters + tile, 0)
    return total


@triton.jit
def _slot(partial, acc, index):
    feature = tl.arange(0, acc.shape[0])[:, None]
    return partial + index.to(tl.int64) * (acc.shape[0] * acc.shape[1]) + feature * acc.shape[1] + tl.arange(0, acc.shape[1])[None, :]


@triton.jit
def _used(acc, rows_here):
    return (tl.arange(0, acc.shape[0]) >= 0)[:, None] & (tl.arange(0, acc.shape[1]) < rows_here)[None, :]


@triton.jit
def _factors(w_scale, x_scale, feature, row, rows, blocks, block, W_SCALE: tl.constexpr, X_SCALE: tl.constexpr):
    """Of block `block` of 128 columns: what its product has to be multiplied by, features [F] and rows [R]; 1 where that is nothing."""
    inside = feature * 0 + block < blocks
    of_features = inside.to(tl.float32)
    of_rows = (row < rows).to(tl.float32)
    if W_SCALE == "block":
        of_features = tl.load(w_scale + feature // 128 * blocks + block, mask=inside, other=0.0)
    if X_SCALE == "block":
        of_rows = tl.load(x_scale + row.to(tl.int64) * blocks + block, mask=(row < rows) & (row * 0 + block < blocks), other=0.0)
    return of_features, of_rows


@triton.jit
def _write(out, acc, feature, row, features, rows, w_scale, x_scale, W_SCALE: tl.constexpr, X_SCALE: tl.constexpr):
    """acc [F,R], times the scales that are constant over K, to out [rows, features]."""
    if W_SCALE == "tensor":
        acc = acc * tl.load(w_scale)
    if W_SCALE == "channel":
        acc = acc * tl.load(w_scale + feature, mask=feature < features, other=0.0)[:, None]
    if X_SCALE == "row":
        acc = acc * tl.load(x_scale + row, mask=row < rows, other=0.0)[None, :]
    place = out + row.to(tl.int64)[None, :] * features + feature[:, None]
    tl.store(place, acc.to(out.dtype.element_ty), mask=(feature < features)[:, None] & (row < rows)[None, :])


@triton.jit
def finish(
    acc, out, partial, counters, feature, row, features, rows, rows_here, tile, split, splits, w_scale, x_scale,
    SPLIT: tl.constexpr, W_SCALE: tl.constexpr, X_SCALE: tl.constexpr,
):  # fmt: skip
    """Writes a tile once all its splits are in. tile: its number among the tiles; rows_here: rows of x it has."""
    if not SPLIT:
        _write(out, acc, feature, row, features, rows, w_scale, x_scale, W_SCALE, X_SCALE)
    elif arrive(acc, partial, counters, tile, split, splits, rows_here):
        total = collect(acc, partial, counters, tile, splits, rows_here)
        _write(out, total, feature, row, features, rows, w_scale, x_scale, W_SCALE, X_SCALE)


@triton.jit(do_not_specialize=["rows", "row_tiles", "splits"])
def _stream(
    out, x, w, w_scale, x_scale, partial, counters, rows, features, columns, row_tiles, splits, x_row,
    FEATURES: tl.constexpr, DEPTH: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr,
    W_CODES: tl.constexpr, X_CODES: tl.constexpr, W_SCALE: tl.constexpr, X_SCALE: tl.constexpr,
    EVEN: tl.constexpr, NATIVE: tl.constexpr, PACK: tl.constexpr, STAGES: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One tile of FEATURES × ROWS over one split of K. W_CODES, X_CODES: e4m3 bytes. EVEN: K is a multiple of DEPTH.

    Features past the end read the last one again, which needs no mask; rows past the end read nothing.
    """
    feature_tile, split, row_tile = cell(row_tiles, splits)
    feature = feature_tile * FEATURES + tl.arange(0, FEATURES)
    clamped = tl.minimum(feature, features - 1)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    w_own = w + clamped.to(tl.int64)[:, None] * columns
    x_own = x + row.to(tl.int64)[None, :] * x_row
    present = (row < rows)[None, :]
    first, stop = steps(columns, split, splits, DEPTH)
    blocks = tl.cdiv(columns, 128)
    after_launches(EARLY)
    of_features, of_rows = _factors(w_scale, x_scale, clamped, row, rows, blocks, first * DEPTH // 128, W_SCALE, X_SCALE)
    acc = tl.zeros([FEATURES, ROWS], tl.float32)
    for step in range(first, stop):
        column = step * DEPTH + tl.arange(0, DEPTH)
        if EVEN:
            w_tile = tl.load(w_own + column[None, :])
            x_tile = tl.load(x_own + column[:, None], mask=present, other=0)
        else:
            inside = column < columns
            w_tile = tl.load(w_own + column[None, :], mask=inside[None, :], other=0)
            x_tile = tl.load(x_own + column[:, None], mask=present & inside[:, None], other=0)
        if W_SCALE == "block" or X_SCALE == "block":  # the next block's scales come while this one is multiplied
            ahead, ahead_rows = _factors(w_scale, x_scale, clamped, row, rows, blocks, (step + 1) * DEPTH // 128, W_SCALE, X_SCALE)
            part = _multiply(w_tile, x_tile, tl.zeros([FEATURES, ROWS], tl.float32), W_CODES, X_CODES, NATIVE, PACK)
            if X_SCALE == "block":
                part = part * of_rows[None, :]
            acc += part * of_features[:, None]
            of_features, of_rows = ahead, ahead_rows
        elif W_CODES and not X_CODES:
            # a sum of its own for each step: Hopper runs products that continue a loop's sum from registers one at a time
            acc += apart(_multiply(w_tile, x_tile, tl.zeros([FEATURES, ROWS], tl.float32), W_CODES, X_CODES, NATIVE, PACK))
        else:
            acc = _multiply(w_tile, x_tile, acc, W_CODES, X_CODES, NATIVE, PACK)
    tile = feature_tile * row_tiles + row_tile
    finish(
        acc, out, partial, counters, feature, row, features, rows, rows - row_tile * ROWS, tile, split, splits, w_scale, x_scale,
        SPLIT, W_SCALE, X_SCALE,
    )  # fmt: skip


@triton.jit
def _multiply(w, x, acc, W_CODES: tl.constexpr, X_CODES: tl.constexpr, NATIVE: tl.constexpr, PACK: tl.constexpr):
    if X_CODES:
        return dot_codes(w, x, acc, NATIVE)
    elif W_CODES:
        return dot(widen_finite(w, x.dtype, NATIVE, PACK), x, acc)
    else:
        return dot(w, x, acc)


def stream(x: Tensor, w: Tensor, w_scale: Tensor | None, x_scale: Tensor | None, dtype: torch.dtype, tiling: Tiling) -> Tensor:
    """x [M,K] times w [N,K] transposed, [M,N] in `dtype`; e4m3 tensors are multiplied as such. Scales as in `Fp8Weight` and of x [M] or
    [M, K/128]. Bits of a row depend on the tiling, not on M."""
    out = torch.empty(x.shape[0], w.shape[0], dtype=dtype, device=x.device)
    if not x.shape[1]:
        return out.zero_()
    x = x if x.stride(1) == 1 else x.contiguous()
    tiling = fitted(tiling, w.element_size(), x.element_size())
    for rows in row_chunks(x.shape[0], tiling):
        _launch(x[rows], w, w_scale, None if x_scale is None else x_scale[rows], out[rows], tiling)
    return out


def fitted(tiling: Tiling, w_bytes: int, x_bytes: int) -> Tiling:
    """The tiling with no more stages than shared memory holds: the lists are for x of 16 bits, float32 takes twice the room."""
    stage = tiling.depth * (tiling.features * w_bytes + tiling.rows * x_bytes)
    return replace(tiling, stages=max(1, min(tiling.stages, _STAGED // stage)))


def row_chunks(rows: int, tiling: Tiling) -> list[slice]:
    """Rows a launch. Split sums take `splits` times the output in float32, so a launch that splits has 512 rows at most."""
    most = 512 if tiling.splits > 1 else max(rows, 1)
    return [slice(start, min(start + most, rows)) for start in range(0, rows, most)]


def _launch(x: Tensor, w: Tensor, w_scale: Tensor | None, x_scale: Tensor | None, out: Tensor, tiling: Tiling) -> None:
    (rows, columns), features = x.shape, w.shape[0]
    codes = [t.dtype is torch.float8_e4m3fn for t in (w, x)]
    w, x = (t.view(torch.uint8) if code else t for t, code in zip((w, x), codes, strict=True))
    row_tiles, feature_tiles = triton.cdiv(rows, tiling.rows), triton.cdiv(features, tiling.features)
    space = Workspace(tiling, row_tiles * feature_tiles, x.device)
    w_kind = "none" if w_scale is None else "block" if w_scale.dim() == 2 else "tensor" if w_scale.numel() == 1 else "channel"
    x_kind = "none" if x_scale is None else "block" if x_scale.dim() == 2 else "row"
    _stream[(feature_tiles * tiling.splits * row_tiles,)](
        out,
        x,
        w,
        space.counters if w_scale is None else w_scale,
        space.counters if x_scale is None else x_scale,
        space.partial,
        space.counters,
        rows,
        features,
        columns,
        row_tiles,
        tiling.splits,
        x.stride(0),
        FEATURES=tiling.features,
        DEPTH=tiling.depth,
        ROWS=tiling.rows,
        SPLIT=tiling.splits > 1,
        W_CODES=codes[0],
        X_CODES=codes[1],
        W_SCALE=w_kind,
        X_SCALE=x_kind,
        EVEN=columns % tiling.depth == 0,
        NATIVE=native(x.device),
        PACK=2 if warpgroups(tiling, x.device) else 4,  # e4m3 codes of W a register holds
        STAGES=tiling.stages,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
        **early(x.device),
    )


def warpgroups(tiling: Tiling, device: torch.device) -> bool:
    """Whether the product runs on Hopper's warpgroup instructions; else each warp multiplies for itself."""
    return capability(device) == 90 and tiling.warps % 4 == 0 and tiling.features % 64 == 0


class Workspace:
    """Partial sums and counters of one launch.

    Counters are zero before and after a launch and come from a ring, so launches that overlap have their own. A capture that finds no
    ring makes counters of its own, which its graph clears.
    """

    def __init__(self, tiling: Tiling, tiles: int, device: torch.device):
        size = tiles * tiling.splits * tiling.features * tiling.rows if tiling.splits > 1 else 0
        self.partial = torch.empty(size, dtype=torch.float32, device=device)
        self.counters = zeroed(tiles, device) if tiling.splits > 1 else torch.empty(0, dtype=torch.int32, device=device)


def zeroed(tiles: int, device: torch.device) -> Tensor:
    """Counters of one launch, which leaves them as it finds them: zero."""
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing() and _ring.cache_info().currsize == 0:
        return torch.zeros(tiles, dtype=torch.int32, device=device)
    return _ring(device).take(tiles)


class _Ring:
    def __init__(self, device: torch.device):
        self.counters = torch.zeros(_RING, dtype=torch.int32, device=device)
        self.next = 0

    def take(self, count: int) -> Tensor:
        if self.next + count > _RING:
            self.next = 0
        self.next += count
        return self.counters[self.next - count : self.next]


@cache
def _ring(device: torch.device) -> _Ring:
    return _Ring(device)
