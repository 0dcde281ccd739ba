"""W4A16 for few rows: 4-bit codes streamed once in planes (`planes.py`), unpacked in registers to integers of x's dtype.

A code less its zero is an integer between -15 and 15, exact in bf16 and f16; the float32 sum of each group is multiplied by its scale. So
nothing is rounded that the reference does not round, whatever the group. Unpacking is what could cost more than memory: at 4.5 TB/s a
multiprocessor gets 40 codes a cycle and issues 128 lanes of instructions, so `_unpack` works on pairs: per two codes one mask-and-or that
makes 128 + code (bf16) or 1024 + code (f16) out of the bits, one fused multiply-add that takes 128 + zero off, and most of a shift.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.int4_linear.fragments import Int4Fragments
from specdec.kernels.int4_linear.planes import CHUNK, Int4Planes, pack_planes, rejects_group
from specdec.kernels.int4_linear.weight import Int4Weight
from specdec.kernels.tilings import FIXED, MEASURED, Tiling, inner
from specdec.kernels.triton_common import INTERPRETED, dot
from specdec.kernels.triton_gemm import Workspace, cell, finish, row_chunks, steps


def pair_asm(kind: str) -> str:
    """PTX from two words ($8, $9) and a pair of -(bias + zero) ($10) to eight pairs $0 to $7: pair i holds nibble i of both words.

    kind: "bf16" or "f16". Low halves of the words hold nibbles 0 to 3, high halves 4 to 7. lop3's table 0xea is (a & b) | c.
    """
    bias, one = {"bf16": ("0x43004300", "0x3f803f80"), "f16": ("0x64006400", "0x3c003c00")}[kind]
    lines = [".reg .b32 lo, hi, biased, one;", f"mov.b32 one, {one};", "prmt.b32 lo, $8, $9, 0x5410;", "prmt.b32 hi, $8, $9, 0x7632;"]
    for half, first in (("lo", 0), ("hi", 4)):
        for i in range(first, first + 4):
            lines += [f"shr.u32 {half}, {half}, 4;"] if i > first else []
            lines += [f"lop3.b32 biased, {half}, 0x000f000f, {bias}, 0xea;", f"fma.rn.{kind}x2 ${i}, biased, one, $10;"]
    return "{\n" + "\n".join(lines) + "\n}"


_BF16 = tl.constexpr(pair_asm("bf16"))
_F16 = tl.constexpr(pair_asm("f16"))
_EIGHT_BF16 = tl.constexpr((tl.bfloat16,) * 8)
_EIGHT_F16 = tl.constexpr((tl.float16,) * 8)
_OPERANDS = tl.constexpr(",".join(["=&r"] * 8 + ["r"] * 3))


def rejects(x: Tensor, w: Int4Weight | Int4Planes | Int4Fragments) -> str | None:
    """Why this kernel cannot run the call, or None."""
    if isinstance(w, Int4Fragments):
        return "the weight is in fragments"
    if x.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"activations in {x.dtype}; it takes float32, float16 and bfloat16"
    return rejects_group(w.group, x.shape[1])


def int4_linear(x: Tensor, w: Int4Weight | Int4Planes) -> Tensor:
    """Shapes in `specdec.ops.int4_linear`. A weight that is not in planes yet is rearranged for this call alone."""
    return _run(x, w, x.shape[0])


def int4_linear_fixed(x: Tensor, w: Int4Weight | Int4Planes) -> Tensor:
    """One tiling for every M: a row's bits do not depend on the others."""
    return _run(x, w, FIXED)


def _run(x: Tensor, w: Int4Weight | Int4Planes, rows: int) -> Tensor:
    planes = pack_planes(w) if isinstance(w, Int4Weight) else w
    tiling = MEASURED.tiling(inner("int4_linear", w.group < min(CHUNK, planes.columns)), rows, *planes.shape)
    out = x.new_empty(x.shape[0], planes.shape[0])
    x = x if x.stride(1) == 1 else x.contiguous()
    for chunk in row_chunks(x.shape[0], tiling):
        _launch(x[chunk], planes, out[chunk], tiling)
    return out


def _launch(x: Tensor, w: Int4Planes, out: Tensor, tiling: Tiling) -> None:
    rows, (features, columns) = x.shape[0], w.shape
    row_tiles, feature_tiles = triton.cdiv(rows, tiling.rows), triton.cdiv(features, tiling.features)
    space = Workspace(tiling, row_tiles * feature_tiles, x.device)
    _stream_int4[(feature_tiles * tiling.splits * row_tiles,)](
        out,
        x,
        w.data,
        w.scale,
        w.zero,
        space.partial,
        space.counters,
        rows,
        features,
        columns,
        row_tiles,
        tiling.splits,
        x.stride(0),
        min(w.group, columns),
        FEATURES=tiling.features,
        ROWS=tiling.rows,
        SPLIT=tiling.splits > 1,
        RUN=8 if w.group >= min(CHUNK, columns) else w.group // 16,
        EVEN=columns % CHUNK == 0,
        PAIRS=not INTERPRETED and x.dtype is not torch.float32,
        num_warps=tiling.warps,
        num_stages=tiling.stages,
    )


@triton.jit
def _group(scale, zero, group, groups, features, feature, dtype: tl.constexpr, PAIRS: tl.constexpr):
    """Of group `group`, both [F]: scales in float32, and what `_unpack` adds to codes, -zero or with the bias of pairs."""
    inside = feature * 0 + group < groups
    place = group * features + feature
    minus = -tl.load(zero + place, mask=inside, other=0).to(tl.float32)
    if PAIRS:
        minus -= 128.0 if dtype == tl.bfloat16 else 1024.0
    return tl.load(scale + place, mask=inside, other=0.0).to(tl.float32), minus


@triton.jit
def _unpack(words, minus, dtype: tl.constexpr, PAIRS: tl.constexpr):
    """words int32 [F,16], minus float32 [F] -> the eight operands [F,16] in `dtype`; sums of integers below 2⁸, exact in all of them."""
    if PAIRS:
        spread = tl.broadcast_to(minus.to(dtype)[:, None], words.shape)
        if dtype == tl.bfloat16:
            return tl.inline_asm_elementwise(_BF16, _OPERANDS, [words, spread], dtype=_EIGHT_BF16, is_pure=True, pack=2)
        else:
            return tl.inline_asm_elementwise(_F16, _OPERANDS, [words, spread], dtype=_EIGHT_F16, is_pure=True, pack=2)
    else:
        own = minus[:, None]
        return (
            _code(words, 0, own, dtype),
            _code(words, 1, own, dtype),
            _code(words, 2, own, dtype),
            _code(words, 3, own, dtype),
            _code(words, 4, own, dtype),
            _code(words, 5, own, dtype),
            _code(words, 6, own, dtype),
            _code(words, 7, own, dtype),
        )


@triton.jit
def _code(words, place: tl.constexpr, minus, dtype: tl.constexpr):
    return (((words >> (4 * place)) & 15).to(tl.float32) + minus).to(dtype)


@triton.jit(do_not_specialize=["rows", "row_tiles", "splits"])
def _stream_int4(
    out, x, w, scale, zero, partial, counters, rows, features, columns, row_tiles, splits, x_row, group,
    FEATURES: tl.constexpr, ROWS: tl.constexpr, SPLIT: tl.constexpr, RUN: tl.constexpr, EVEN: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    """One tile of FEATURES × ROWS over one split of K, a chunk of 128 columns a step. RUN: operands (16 columns) that share a scale."""
    dtype: tl.constexpr = x.dtype.element_ty
    RUNS: tl.constexpr = 8 // RUN
    feature_tile, split, row_tile = cell(row_tiles, splits)
    feature = feature_tile * FEATURES + tl.arange(0, FEATURES)
    clamped = tl.minimum(feature, features - 1)
    row = row_tile * ROWS + tl.arange(0, ROWS)
    word = tl.arange(0, 16)
    w_own = w + clamped[:, None] * 16 + word[None, :]
    x_own = x + row.to(tl.int64)[None, :] * x_row + word[:, None]
    present = (row < rows)[None, :]
    groups = tl.cdiv(columns, group)
    first, stop = steps(columns, split, splits, 128)
    factor, minus = _group(scale, zero, first * 128 // group, groups, features, clamped, dtype, PAIRS)
    acc = tl.zeros([FEATURES, ROWS], tl.float32)
    for step in range(first, stop):
        words = tl.load(w_own + step * features * 16)
        for run in tl.static_range(RUNS):
            # the next run's scale and zero come while this one is multiplied
            after = (step * 128 + (run + 1) * RUN * 16) // group
            next_factor, next_minus = _group(scale, zero, after, groups, features, clamped, dtype, PAIRS)
            operands = _unpack(words, minus, dtype, PAIRS)
            part = tl.zeros([FEATURES, ROWS], tl.float32)
            for j in tl.static_range(RUN):
                column = step * 128 + (run * RUN + j) * 16
                mask = present if EVEN else present & (column + word < columns)[:, None]
                part = dot(operands[run * RUN + j], tl.load(x_own + column, mask=mask, other=0.0), part)
            acc += part * factor[:, None]
            factor, minus = next_factor, next_minus
    tile = feature_tile * row_tiles + row_tile
    finish(
        acc, out, partial, counters, feature, row, features, rows, rows - row_tile * ROWS, tile, split, splits, scale, scale,
        SPLIT, "none", "none",
    )  # fmt: skip
