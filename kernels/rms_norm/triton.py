"""RMS norm, with and without a residual added first: one pass, whole rows in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_common import after_launches, early, row_tile

_WIDEST = 16384


def rejects(x: Tensor, *others: Tensor | float) -> str | None:
    """Why this kernel cannot run the call, or None."""
    if x.shape[1] > _WIDEST:
        return f"rows of {x.shape[1]}; it takes up to {_WIDEST}"
    alike = all(not isinstance(o, Tensor) or (o.dtype is x.dtype and o.is_contiguous()) for o in (x, *others))
    return (
        None
        if alike and x.is_floating_point() and x.dtype is not torch.float64
        else "tensors must be dense and of one dtype of at most 32 bits"
    )


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Shapes in `specdec.ops.rms_norm`."""
    out = torch.empty_like(x)
    _launch(x, x, weight, out, out, eps, False)
    return out


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Shapes in `specdec.ops.add_rms_norm`."""
    out, total = torch.empty_like(x), torch.empty_like(x)
    _launch(x, residual, weight, out, total, eps, True)
    return out, total


def _launch(x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, total: Tensor, eps: float, add: bool) -> None:
    """The tile depends on the width alone, so that a row's bits do not depend on the number of rows."""
    rows, width = x.shape
    tile, columns = row_tile(width)
    if rows and width:
        grid = (triton.cdiv(rows, tile),)
        warps = max(4, min(16, columns // 1024))
        _norm[grid](
            x, residual, weight, out, total, rows, eps, WIDTH=width, ROWS=tile, COLUMNS=columns, ADD=add, num_warps=warps,
            **early(x.device),
        )  # fmt: skip


@triton.jit(do_not_specialize=["rows"])
def _norm(
    x, residual, weight, out, total, rows, eps,
    WIDTH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, ADD: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Rounds where the reference rounds: after the sum, after the scaling, after the weight."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (row < rows) & (column < WIDTH)
    place = row.to(tl.int64) * WIDTH + column
    dtype = out.dtype.element_ty
    after_launches(EARLY)
    w = tl.load(weight + column, mask=column < WIDTH, other=0.0)  # asked for first: it comes from memory, the row from cache
    wide = tl.load(x + place, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        summed = (wide + tl.load(residual + place, mask=mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(total + place, summed, mask=mask)
        wide = summed.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide, 1) / WIDTH + eps)
    y = (wide * scale[:, None]).to(dtype).to(tl.float32) * w.to(tl.float32)
    tl.store(out + place, y.to(dtype), mask=mask)
