"""SwiGLU's elementwise half to e4m3 in one pass: a program holds whole rows, since the scale needs all of one.

Bytes a row of I in 16 bits: 4I in, I out, against 9I for product and quantisation apart. 64 rows of 28,672 are 9 MB, 2 µs at 4.2 TB/s;
a row on one SM is 143 kB at some 64 bytes a clock, 1.3 µs, so that few rows cost no more than many.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.silu_mul import triton as wide
from specdec.kernels.triton_common import row_tile
from specdec.kernels.triton_fp8_rows import quantize_rows

_WIDEST = 32768


def rejects(gate_up: Tensor) -> str | None:
    """Why this kernel cannot run the call, or None."""
    if gate_up.shape[1] // 2 > _WIDEST:
        return f"rows of {gate_up.shape[1] // 2}; it takes up to {_WIDEST}"
    return wide.rejects(gate_up)


def silu_mul_fp8(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """Shapes in `specdec.ops.silu_mul_fp8`."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    q = torch.empty((rows, inner), dtype=torch.float8_e4m3fn, device=gate_up.device)
    scale = torch.empty(rows, dtype=torch.float32, device=gate_up.device)
    if rows and inner:
        tile, columns = row_tile(inner)
        shape = {"INNER": inner, "ROWS": tile, "COLUMNS": columns, "num_warps": max(4, min(32, columns // 1024))}
        _silu_mul_fp8[(triton.cdiv(rows, tile),)](gate_up, q.view(torch.uint8), scale, rows, **shape)
    return q, scale


@triton.jit(do_not_specialize=["rows"])
def _silu_mul_fp8(gate_up, q, scale_out, rows, INNER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Grid (row tiles). Rounds where `silu_mul` rounds, then quantises what it would have written."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (row < rows)[:, None] & (column < INNER)
    own = gate_up + row.to(tl.int64)[:, None] * (2 * INNER) + column
    gate = tl.load(own, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(own + INNER, mask=mask, other=0.0).to(tl.float32)
    product = (gate / (1.0 + tl.exp(-gate)) * up).to(gate_up.dtype.element_ty).to(tl.float32)
    code, scale = quantize_rows(product)
    tl.store(q + row.to(tl.int64)[:, None] * INNER + column, code, mask=mask)
    tl.store(scale_out + row, scale, mask=row < rows)
