"""e4m3 in Triton: codes to numbers and back, as exact as PyTorch's casts, NaN included, and what FP8 caches hold. A code is its byte.

Cards from compute capability 8.9 up widen e4m3 in hardware. Elsewhere, and in the interpreter, a code's bits are moved to where float16
keeps exponent and mantissa; a factor 2⁸ then makes up for the other bias, subnormals included, and every e4m3 number is one of
float16 and of bfloat16. Narrowing is arithmetic on the bits of float32; where a kernel would wait for that (fused quantisation, writes
to a cache), a card that can converts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.fp8_linear.weight import LARGEST
from specdec.kernels.kv_fp8 import FP8
from specdec.kernels.triton_common import INTERPRET, capability

BIGGEST = tl.constexpr(LARGEST)


def native(device: torch.device) -> bool:
    """Whether the card converts and multiplies e4m3 itself; the interpreter does not."""
    return capability(device) >= 89


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


# Two codes to a pair of bf16. prmt doubles each code's byte, the upper one filled with its sign; shifted by 4, exponent and mantissa are
# where bf16 has them, and a factor 2^120 makes up for the bias. The card's own converter takes one number at a time, 16 a cycle and
# multiprocessor, which is less than memory delivers.
def bf16_asm(codes: int, whole: bool) -> str:
    """PTX from `codes` codes, 2 or 4 in one register, to as many bf16, two a register: their numbers, or in one instruction less a pair
    2^-120 times them, where the caller makes up for it."""
    pairs = codes // 2
    lines = [".reg .b32 pair, factor, zero;", "mov.b32 factor, 0x7b807b80;", "mov.b32 zero, 0x80008000;"] if whole else [".reg .b32 pair;"]
    for i, selector in enumerate(("0x9180", "0xb3a2")[:pairs]):
        lines += [f"prmt.b32 pair, ${pairs}, 0, {selector};", "shl.b32 pair, pair, 4;"]
        if whole:
            lines += ["and.b32 pair, pair, 0x87f087f0;", f"fma.rn.bf16x2 ${i}, pair, factor, zero;"]
        else:
            lines += [f"and.b32 ${i}, pair, 0x87f087f0;"]
    return "{\n" + "\n".join(lines) + "\n}"


_TWO, _FOUR = tl.constexpr(bf16_asm(2, True)), tl.constexpr(bf16_asm(4, True))
_TWO_SMALL, _FOUR_SMALL = tl.constexpr(bf16_asm(2, False)), tl.constexpr(bf16_asm(4, False))


@triton.jit
def widen_finite(code, dtype: tl.constexpr, NATIVE: tl.constexpr, PACK: tl.constexpr, WHOLE: tl.constexpr = True):  # type: ignore[assignment]
    """As `widen` of codes none of which is NaN: bf16, where the conversion is a matter of speed, makes such a code 480.

    PACK: neighbouring codes that lie in one register, 2 or 4; the other number is right too, but costs moves. Not WHOLE: bf16 on a card
    is 2^-120 times the numbers.
    """
    if dtype != tl.bfloat16 or INTERPRET:
        return widen(code, dtype, NATIVE)
    elif PACK == 2:
        two: tl.constexpr = _TWO if WHOLE else _TWO_SMALL
        return tl.inline_asm_elementwise(two, "=r,r", [code], dtype=tl.bfloat16, is_pure=True, pack=2)
    else:
        four: tl.constexpr = _FOUR if WHOLE else _FOUR_SMALL
        return tl.inline_asm_elementwise(four, "=&r,=&r,r", [code], dtype=tl.bfloat16, is_pure=True, pack=4)


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


def handed(cache: Tensor) -> Tensor:
    """An FP8 cache as a kernel is to see it: bytes where Triton does not know the type, in the interpreter (which reads it wrongly) or
    before compute capability 8.9. Which of the two it is follows from the pointer's type."""
    return cache.view(torch.uint8) if cache.dtype is FP8 and not native(cache.device) else cache


@triton.jit
def from_cache(x, dtype: tl.constexpr):
    """Numbers (of codes: not yet scaled) in `dtype` from what was loaded. Every e4m3 number is exact in float16."""
    if x.dtype == tl.uint8:
        return widen(x, dtype, False)
    elif x.dtype == tl.float8e4nv:
        return x.to(tl.float16).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def to_cache(x, inverse, dtype: tl.constexpr):
    """What a cache of `dtype` (uint8: e4m3 as bytes) holds of x; `inverse` scale of FP8 caches."""
    if dtype == tl.uint8:
        return narrow(x.to(tl.float32) * inverse)
    elif dtype == tl.float8e4nv:
        return _saturated(x, inverse).to(tl.float8e4nv)
    else:
        return x.to(dtype)


@triton.jit
def _saturated(x, inverse):
    """x * inverse within ±448, NaN kept."""
    wide = x.to(tl.float32) * inverse
    return tl.where(wide > BIGGEST, BIGGEST, tl.where(wide < -BIGGEST, -BIGGEST, wide))
