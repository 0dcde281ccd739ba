"""Activations to e4m3 with dynamic scales: one program a tile of rows, which it reads twice, the second time out of the cache.

Ops that quantise what they make, while rows are in registers, do so by the functions at the end of this file, to the same bits.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_common import after_launches, early, row_tile
from specdec.kernels.triton_e4m3 import BIGGEST, narrow

_WIDEST = 4096  # columns a program holds at a time


def rejects(x: Tensor, group: int | None = None) -> str | None:
    """Why this kernel cannot run the call, or None."""
    return None if x.is_contiguous() and x.dtype in (torch.float32, torch.float16, torch.bfloat16) else "x must be dense, of 16 or 32 bits"


def quantize_fp8(x: Tensor, group: int | None = None) -> tuple[Tensor, Tensor]:
    """Shapes in `specdec.ops.quantize_fp8`. A group is a row of a narrower matrix."""
    width = group or x.shape[1]
    rows = x.numel() // width if width else 0
    q = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scale = torch.empty((x.shape[0], x.shape[1] // width) if group else x.shape[:1], dtype=torch.float32, device=x.device)
    if rows:
        tile, columns = row_tile(min(width, _WIDEST))
        warps = max(4, min(8, columns // 512))
        _quantize[(triton.cdiv(rows, tile),)](
            q.view(torch.uint8), scale, x, rows, WIDTH=width, ROWS=tile, COLUMNS=columns, num_warps=warps, **early(x.device)
        )  # fmt: skip
    return q, scale


@triton.jit(do_not_specialize=["rows"])
def _quantize(q, scale, x, rows, WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EARLY: tl.constexpr):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    start = row.to(tl.int64)[:, None] * WIDTH
    largest = tl.zeros([ROWS], tl.int32)
    after_launches(EARLY)
    for at in range(0, WIDTH, COLUMNS):
        column = at + tl.arange(0, COLUMNS)[None, :]
        mask = (row < rows)[:, None] & (column < WIDTH)
        part = magnitude(tl.load(x + start + column, mask=mask, other=0.0).to(tl.float32))
        largest = tl.maximum(largest, tl.max(part, 1))
    own = row_scale(largest.to(tl.float32, bitcast=True))
    tl.store(scale + row, own, mask=row < rows)
    for at in range(0, WIDTH, COLUMNS):
        column = at + tl.arange(0, COLUMNS)[None, :]
        mask = (row < rows)[:, None] & (column < WIDTH)
        wide = tl.load(x + start + column, mask=mask, other=0.0).to(tl.float32)
        tl.store(q + start + column, codes(wide, own, False), mask=mask)


@triton.jit
def magnitude(y):
    """Bits of the magnitude of y f32, i32. As integers NaN is the largest."""
    return tl.abs(y).to(tl.int32, bitcast=True)


@triton.jit
def row_scale(largest):
    """The scale of rows whose largest magnitude this is, f32."""
    return tl.div_rn(largest, tl.zeros_like(largest) + BIGGEST)


@triton.jit
def codes(y, scale, NATIVE: tl.constexpr):
    """y [R,C] f32 over scale [R], as uint8 codes; 0 where the scale is. NATIVE: see `triton_e4m3.native`."""
    zero = scale == 0.0
    if NATIVE:
        return _divided(y, scale, zero).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        number = tl.div_rn(y, tl.zeros_like(y) + tl.where(zero, 1.0, scale)[:, None])
        return narrow(tl.where(zero[:, None], 0.0, number))


@triton.jit
def _divided(y, scale, zero):
    """y / scale as IEEE division rounds it, where a code can tell, in five operations a number.

    Markstein: with the reciprocal rounded to nearest, one correction by the exact remainder rounds the quotient to nearest. Rows so
    small that the remainder might underflow are made larger by a power of two first. The sign is y's, which zeros would lose.
    """
    lift = tl.where(scale < 8.271806125530277e-25, 1.2676506002282294e30, 1.0)  # 2**-80, 2**100
    divisor = tl.where(zero, 1.0, scale * lift)
    inverse = tl.div_rn(tl.zeros_like(divisor) + 1.0, divisor)[:, None]
    lifted = y * lift[:, None]
    rough = lifted * inverse
    exact = tl.fma(tl.fma(-rough, divisor[:, None], lifted), inverse, rough)
    unsigned = tl.where(zero, -1, 0x7FFFFFFF)[:, None]
    bits = (exact.to(tl.int32, bitcast=True) & unsigned) | (y.to(tl.int32, bitcast=True) & ~unsigned)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def quantize_rows(y, NATIVE: tl.constexpr):
    """y [R,C] f32, 0 outside the row -> (codes [R,C] uint8, scales [R] f32). Zero rows get scale 0 and codes 0."""
    scale = row_scale(tl.max(magnitude(y), 1).to(tl.float32, bitcast=True))
    return codes(y, scale, NATIVE), scale
