"""SwiGLU's elementwise half."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_common import after_launches, early

_TILE = 1024


def rejects(gate_up: Tensor) -> str | None:
    """Why this kernel cannot run the call, or None."""
    usable = gate_up.is_contiguous() and gate_up.dtype in (torch.float32, torch.float16, torch.bfloat16)
    return None if usable else "the tensor must be dense, of float32, float16 or bfloat16"


def silu_mul(gate_up: Tensor) -> Tensor:
    """Shapes in `specdec.ops.silu_mul`."""
    rows, inner = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty(rows, inner)
    if out.numel():
        _silu_mul[(rows, triton.cdiv(inner, _TILE))](gate_up, out, INNER=inner, TILE=_TILE, **early(out.device))
    return out


@triton.jit
def _silu_mul(gate_up, out, INNER: tl.constexpr, TILE: tl.constexpr, EARLY: tl.constexpr):
    """Grid (rows, column tiles)."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    mask = column < INNER
    after_launches(EARLY)
    gate = tl.load(gate_up + row * (2 * INNER) + column, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * (2 * INNER) + INNER + column, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * INNER + column, (gate / (1.0 + tl.exp(-gate)) * up).to(out.dtype.element_ty), mask=mask)
