"""Activations to e4m3 with dynamic scales: one program a tile of rows, which it reads twice, the second time out of the cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_common import after_launches, early, row_tile
from specdec.kernels.triton_e4m3 import narrow

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
        magnitude = tl.abs(tl.load(x + start + column, mask=mask, other=0.0).to(tl.float32))
        largest = tl.maximum(largest, tl.max(magnitude.to(tl.int32, bitcast=True), 1))  # as integers NaN is the largest
    own = tl.div_rn(largest.to(tl.float32, bitcast=True), tl.full([ROWS], 448.0, tl.float32))
    tl.store(scale + row, own, mask=row < rows)
    divisor = tl.where(own == 0.0, 1.0, own)[:, None]
    for at in range(0, WIDTH, COLUMNS):
        column = at + tl.arange(0, COLUMNS)[None, :]
        mask = (row < rows)[:, None] & (column < WIDTH)
        wide = tl.load(x + start + column, mask=mask, other=0.0).to(tl.float32)
        divided = tl.div_rn(wide, tl.broadcast_to(divisor, wide.shape))
        tl.store(q + start + column, narrow(tl.where(own[:, None] == 0.0, 0.0, divided)), mask=mask)
