"""GPT-OSS's SwiGLU. Neighbours are loaded as one stretch and parted in registers: strided loads would fetch every sector twice.

Bytes: 4I in, 2I out a row in 16 bits; 64 rows of 2880 are 1.1 MB, 0.3 µs at 4.2 TB/s, less than a launch.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.silu_mul import triton as plain

_TILE = 1024


def rejects(gate_up: Tensor, alpha: float, limit: float) -> str | None:
    """Why this kernel cannot run the call, or None."""
    return plain.rejects(gate_up)


def clamped_swiglu(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """Shapes in `specdec.ops.clamped_swiglu`."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, inner)
    if out.numel():
        _clamped_swiglu[(rows, triton.cdiv(inner, _TILE))](gate_up, out, alpha, limit, INNER=inner, TILE=_TILE)
    return out


@triton.jit
def _clamped_swiglu(gate_up, out, alpha, limit, INNER: tl.constexpr, TILE: tl.constexpr):
    """Grid (rows, column tiles)."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.program_id(1) * TILE
    both = 2 * first + tl.arange(0, 2 * TILE)
    pairs = tl.load(gate_up + row * (2 * INNER) + both, mask=both < 2 * INNER, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(pairs, [TILE, 2]))
    gate = tl.where(gate > limit, limit, gate)  # not minimum: NaN stays NaN
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    value = (up + 1.0) * (gate / (1.0 + tl.exp(-alpha * gate)))
    column = first + tl.arange(0, TILE)
    tl.store(out + row * INNER + column, value.to(out.dtype.element_ty), mask=column < INNER)
