"""What the Triton kernels share: the interpreter's trap with narrow operands, launches that begin early, and small helpers for grids.

With TRITON_INTERPRET=1 Triton runs kernels in numpy, on CPU tensors. There `tl.dot` on bfloat16 operands silently returns garbage
(seen with Triton 3.6 to 3.9), so every product goes through `dot`, which widens both operands in that case only.

*Launches that begin early* (programmatic dependent launch, Hopper and later). A kernel of a decode pass takes 1 to 6 µs, and the card some
0.5 to 1 µs more from the end of one to the first instruction of the next. A kernel launched with the keywords of `early` may start
before the one before it has ended, and calls `after_launches`, in which it waits for that end. Every program must call it, on every
path, and before that must touch no memory: what a launch has written may not be there yet, and what is used again is still read by it.
As each waits, all launches before the last one have ended too. Kernels launched without the keywords begin when all is done.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from specdec.kernels import cuda_fragments

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
INTERPRET = tl.constexpr(INTERPRETED)

early_launches = True  # whether the kernels of a decode pass are launched so from here on; recorded passes stay as they are


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
    return cuda_fragments.capability(device)


def early(device: torch.device, wanted: bool | None = None) -> dict[str, Any]:
    """Keywords of a launch whose kernel calls `after_launches(EARLY)`. wanted: None = `early_launches`. Not before Hopper."""
    begins = (early_launches if wanted is None else wanted) and capability(device) >= 90
    return {"EARLY": True, "launch_pdl": True} if begins else {"EARLY": False}


@triton.jit
def after_launches(EARLY: tl.constexpr):
    """What the launches before have written is there from here on, and may be overwritten; the launch after may begin."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@triton.jit
def send_for(places):
    """Asks for the lines at `places` to come into the second-level cache."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [places], dtype=tl.int32, is_pure=False, pack=1)


def row_tile(width: int, elements: int = 2048) -> tuple[int, int]:
    """(rows, columns) of a tile of about `elements` that holds whole rows of `width`, both powers of two."""
    columns = triton.next_power_of_2(max(width, 1))
    return max(1, elements // columns), columns
