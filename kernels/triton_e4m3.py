"""e4m3 in Triton: codes to numbers and back, as exact as PyTorch's casts, NaN included. A code is its byte.

Cards from compute capability 8.9 up widen e4m3 in hardware. Elsewhere, and in the interpreter, a code's bits are moved to where float16
keeps exponent and mantissa; a factor 2⁸ then makes up for the other bias, subnormals included, and every e4m3 number is one of
float16 and of bfloat16. Narrowing is arithmetic on the bits of float32 everywhere: it is never what a kernel waits for.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from specdec.kernels.triton_common import INTERPRET, INTERPRETED


@cache
def native(device: torch.device) -> bool:
    """Whether the card converts and multiplies e4m3 itself; the interpreter does not."""
    if INTERPRETED:
        return False
    if device.type != "cuda":  # compiled without a card: for the one that the driver names
        return bool(triton.runtime.driver.active.get_current_target().arch >= 89)
    return torch.cuda.get_device_capability(device) >= (8, 9)


@triton.jit
def widen(code, dtype: tl.constexpr, NATIVE: tl.constexpr):
    """uint8 codes -> their numbers in `dtype`."""
    if NATIVE:
        return code.to(tl.float8e4nv, bitcast=True).to(dtype)
    else:
        bits = code.to(tl.int16)
        half = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
        wide = half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), wide).to(dtype)


@triton.jit
def narrow(x):
    """float32 -> uint8 codes, to nearest, even on ties, magnitudes above 448 become 448, NaN stays NaN."""
    bits = x.to(tl.int32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    clipped = tl.minimum(magnitude, 0x43E00000)  # 448
    normal = ((clipped + 0x7FFFF + ((clipped >> 20) & 1)) >> 20) - (120 << 3)
    # below 2⁻⁶ codes are multiples of 2⁻⁹, which is the last bit of a float32 just above 2¹⁴
    small = (clipped.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(clipped < 0x3C800000, small, normal)
    code = tl.where(magnitude > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def dot_codes(a, b, acc, NATIVE: tl.constexpr):
    """acc + a @ b of codes: in FP8 where the card can, else in float16, where e4m3 is exact. The FP8 product alone is not kept in float32
    throughout (some 14 bits on Hopper), so `acc` is added after it: make K of one call at most 128."""
    if NATIVE and not INTERPRET:
        return acc + tl.dot(a.to(tl.float8e4nv, bitcast=True), b.to(tl.float8e4nv, bitcast=True))
    elif INTERPRET:
        return acc + tl.dot(widen(a, tl.float32, False), widen(b, tl.float32, False), input_precision="ieee")
    else:
        return tl.dot(widen(a, tl.float16, False), widen(b, tl.float16, False), acc)
