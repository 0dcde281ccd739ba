"""Rows to e4m3 with a scale each while they are in registers: what ops with a fused quantisation share. As `quantize_fp8`, to the bit."""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.kernels.triton_e4m3 import narrow


@triton.jit
def magnitude(y):
    """Bits of the magnitude of y f32, i32. As integers NaN is the largest."""
    return tl.abs(y).to(tl.int32, bitcast=True)


@triton.jit
def row_scale(largest):
    """The scale of rows whose largest magnitude this is, f32."""
    return tl.div_rn(largest, tl.zeros_like(largest) + 448.0)


@triton.jit
def codes(y, scale, NATIVE: tl.constexpr):
    """y [R,C] f32 over scale [R], as uint8 codes; 0 where the scale is. NATIVE: see `triton_e4m3.native`."""
    zero = scale == 0.0
    if NATIVE:
        return _divided(y, scale, zero).to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        number = tl.div_rn(y, tl.zeros_like(y) + tl.where(zero, 1.0, scale)[:, None])
        return narrow(tl.where(zero[:, None], 0.0, number))


@triton.jit
def _divided(y, scale, zero):
    """y / scale as IEEE division rounds it, where a code can tell, in five operations a number.

    Markstein: with the reciprocal rounded to nearest, one correction by the exact remainder rounds the quotient to nearest. Rows so
    small that the remainder might underflow are made larger by a power of two first. The sign is y's, which zeros would lose.
    """
    lift = tl.where(scale < 8.271806125530277e-25, 1.2676506002282294e30, 1.0)  # 2**-80, 2**100
    divisor = tl.where(zero, 1.0, scale * lift)
    inverse = tl.div_rn(tl.zeros_like(divisor) + 1.0, divisor)[:, None]
    lifted = y * lift[:, None]
    rough = lifted * inverse
    exact = tl.fma(tl.fma(-rough, divisor[:, None], lifted), inverse, rough)
    unsigned = tl.where(zero, -1, 0x7FFFFFFF)[:, None]
    bits = (exact.to(tl.int32, bitcast=True) & unsigned) | (y.to(tl.int32, bitcast=True) & ~unsigned)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def quantize_rows(y, NATIVE: tl.constexpr):
    """y [R,C] f32, 0 outside the row -> (codes [R,C] uint8, scales [R] f32). Zero rows get scale 0 and codes 0."""
    scale = row_scale(tl.max(magnitude(y), 1).to(tl.float32, bitcast=True))
    return codes(y, scale, NATIVE), scale
