"""SwiGLU's elementwise half to e4m3 in one pass: a program holds whole rows, since the scale needs all of one.

Bytes a row of I in 16 bits: 4I in, I out, against 9I for product and quantisation apart. 64 rows of 28,672 are 9 MB, 2 µs at 4.2 TB/s.
A row comes in chunks of 4096 columns, 16 bytes a load and thread; the products wait for the scale packed as they would have been
written, 57 kB at 28,672 of 16 bits, so that two programs fit on a multiprocessor and one reads while the other divides. Where rows
are fewer than multiprocessors several programs take a row: each makes all products, and writes a part.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.quantize_fp8.triton import codes, magnitude, row_scale
from specdec.kernels.silu_mul import triton as wide
from specdec.kernels.triton_common import INTERPRET, after_launches, early, row_tile
from specdec.kernels.triton_e4m3 import native

_WIDEST = 32768
_CHUNK = 4096
_PROGRAMS = 132  # of few rows: one a multiprocessor of a large card


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
        tile, columns = row_tile(min(inner, _CHUNK))
        chunks = triton.cdiv(inner, columns)
        programs = triton.cdiv(rows, tile)
        parts = max(1, min(chunks, _PROGRAMS // programs))
        warps = max(4, columns // (512 if parts == 1 else 256))  # many rows: two programs a multiprocessor; few: each as fast as can be
        shape = {"INNER": inner, "ROWS": tile, "COLUMNS": columns, "CHUNKS": chunks, "NATIVE": native(gate_up.device)}
        _silu_mul_fp8[(programs, parts)](
            gate_up, q.view(torch.uint8), scale, rows, **shape, num_warps=warps, **early(gate_up.device)
        )  # fmt: skip
    return q, scale


@triton.jit
def _widened(x):
    """x in float32. bfloat16 by halves of a register, which takes half the operations that extracting each number would."""
    if INTERPRET or x.dtype != tl.bfloat16:
        return x.to(tl.float32)
    else:
        low_high: tl.constexpr = "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;"
        return tl.inline_asm_elementwise(low_high, "=&r,=r,r", [x], dtype=tl.float32, is_pure=True, pack=2)


@triton.jit
def _raised(top, x):
    """The larger of top and the magnitude of x, element by element, NaN the largest. Two numbers at a time in bfloat16."""
    if INTERPRET or x.dtype != tl.bfloat16:
        return tl.maximum(top, tl.abs(x), propagate_nan=tl.PropagateNan.ALL)
    else:
        larger: tl.constexpr = "{ .reg .b32 plain; abs.bf16x2 plain, $2; max.NaN.bf16x2 $0, $1, plain; }"
        return tl.inline_asm_elementwise(larger, "=r,r,r", [top, x], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit(do_not_specialize=["rows"])
def _silu_mul_fp8(
    gate_up, q, scale_out, rows,
    INNER: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, CHUNKS: tl.constexpr, NATIVE: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (row tiles, parts). Rounds where `silu_mul` rounds, then quantises what it would have written."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, COLUMNS)[None, :]
    own = gate_up + row.to(tl.int64)[:, None] * (2 * INNER) + column
    dtype = gate_up.dtype.element_ty
    top = tl.zeros([ROWS, COLUMNS], dtype)
    held = ()
    after_launches(EARLY)
    for chunk in tl.static_range(CHUNKS):
        mask = (row < rows)[:, None] & (chunk * COLUMNS + column < INNER)
        gate = _widened(tl.load(own + chunk * COLUMNS, mask=mask, other=0.0))
        up = _widened(tl.load(own + (chunk * COLUMNS + INNER), mask=mask, other=0.0))
        product = (gate / (1.0 + tl.exp(-gate)) * up).to(dtype)
        top = _raised(top, product)
        held = held + (product,)  # type: ignore[assignment]  # noqa: RUF005 - Triton: no star
    most = tl.max(magnitude(top.to(tl.float32)), 1)
    scale = row_scale(most.to(tl.float32, bitcast=True))
    tl.store(scale_out + row, scale, mask=row < rows)
    place = q + row.to(tl.int64)[:, None] * INNER + column
    for chunk in tl.static_range(CHUNKS):
        if chunk % tl.num_programs(1) == tl.program_id(1):
            mask = (row < rows)[:, None] & (chunk * COLUMNS + column < INNER)
            tl.store(place + chunk * COLUMNS, codes(_widened(held[chunk]), scale, NATIVE), mask=mask)
