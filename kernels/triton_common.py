"""What the Triton kernels share: the interpreter's trap with narrow operands, and small helpers for grids.

With TRITON_INTERPRET=1 Triton runs kernels in numpy, on CPU tensors. There `tl.dot` on bfloat16 operands silently returns garbage
(seen with Triton 3.6 to 3.9), so every product goes through `dot`, which widens both operands in that case only.
"""

from __future__ import annotations

from functools import cache

import torch
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


@triton.jit
def apart(x):
    """x, float32; hides from Triton that it is a product, which it would add to the next sum inside the tensor core."""
    if INTERPRET:
        return x
    else:
        return tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def ordered(x):
    """Integers in the order of the floats, f32 -> i32; both zeros are one."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@cache
def capability(device: torch.device) -> int:
    """Of the card, 90 for 9.0; 0 in the interpreter. Compiled without a card: of the one that the driver names."""
    if INTERPRETED:
        return 0
    if device.type != "cuda":
        return int(triton.runtime.driver.active.get_current_target().arch)
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


def row_tile(width: int, elements: int = 2048) -> tuple[int, int]:
    """(rows, columns) of a tile of about `elements` that holds whole rows of `width`, both powers of two."""
    columns = triton.next_power_of_2(max(width, 1))
    return max(1, elements // columns), columns
