"""What the Triton kernels share: the interpreter's trap with narrow operands, and small helpers for grids.

With TRITON_INTERPRET=1 Triton runs kernels in numpy, on CPU tensors. There `tl.dot` on bfloat16 operands silently returns garbage
(seen with Triton 3.6 to 3.9), so every product goes through `dot`, which widens both operands in that case only.
"""

from __future__ import annotations

import triton
import triton.language as tl

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
INTERPRET = tl.constexpr(INTERPRETED)


@triton.jit
def dot(a, b, acc):
    """acc + a @ b with float32 accumulation; float32 operands go as three TF32 products. a [M,K], b [K,N], acc [M,N] f32."""
    if INTERPRET:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc, input_precision="tf32x3")


def row_tile(width: int, elements: int = 2048) -> tuple[int, int]:
    """(rows, columns) of a tile of about `elements` that holds whole rows of `width`, both powers of two."""
    columns = triton.next_power_of_2(max(width, 1))
    return max(1, elements // columns), columns
