"""Stored weights of experts to numbers, for `triton.py`: loads of a tile, and codes to values."""

from __future__ import annotations

import triton
import triton.language as tl

from specdec.kernels.triton_common import INTERPRET
from specdec.kernels.triton_e4m3 import widen_finite

DENSE, FP8, INT4, MXFP4 = (tl.constexpr(i) for i in range(4))  # kinds of storage

# two words of `mxfp4.units` to four pairs, each of the numbers at one place
E2M1_ASM = """{
.reg .b32 t, u;
prmt.b32 t, $4, 0, 0x2301;
and.b32 u, $4, 0x81808180;
lop3.b32 $0, t, 0x00400040, u, 0xEA;
shl.b32 u, $4, 2;
and.b32 $1, u, 0x81c081c0;
shl.b32 u, $4, 6;
and.b32 $2, u, 0x81c081c0;
shl.b32 u, t, 4;
and.b32 $3, u, 0x81c081c0;
}"""
_E2M1 = tl.constexpr(E2M1_ASM)
_FOUR_BF16 = tl.constexpr((tl.bfloat16,) * 4)


@triton.jit
def e4m3(code, DTYPE: tl.constexpr, PACK: tl.constexpr):
    """Values of e4m3 codes (uint8, none NaN); in bfloat16 on a card 2^-120 times them. PACK: neighbouring codes a register holds."""
    return widen_finite(code, DTYPE, False, PACK, False)


@triton.jit
def e2m1(words, DTYPE: tl.constexpr):
    """Words of `mxfp4.units` (int16) -> the values at their four places; in bfloat16 on a card 2^-126 times them."""
    if tl.bfloat16 == DTYPE and not INTERPRET:
        return tl.inline_asm_elementwise(_E2M1, "=&r,=&r,=&r,=&r,r", [words], dtype=_FOUR_BF16, is_pure=True, pack=2)
    else:
        return (
            _value(words, 15, 8, 7, 14, DTYPE),
            _value(words, 13, 6, 5, 4, DTYPE),
            _value(words, 9, 2, 1, 0, DTYPE),
            _value(words, 3, 12, 11, 10, DTYPE),
        )


@triton.jit
def _value(words, SIGN: tl.constexpr, HIGH: tl.constexpr, MIDDLE: tl.constexpr, LOW: tl.constexpr, DTYPE: tl.constexpr):
    """Of the code whose bits lie there."""
    word = words.to(tl.int32)
    bits = ((word >> HIGH) & 1) << 24 | ((word >> MIDDLE) & 1) << 23 | ((word >> LOW) & 1) << 22 | ((word >> SIGN) & 1) << 31
    return (bits.to(tl.float32, bitcast=True) * 8.507059173023462e37).to(DTYPE)  # 2^126


@triton.jit
def lift(x, KIND: tl.constexpr, DTYPE: tl.constexpr):
    """x times the root of what `e4m3` and `e2m1` leave out: once on the rows, which keeps the products out of the subnormals, and
    once on the sums. DTYPE: of the rows."""
    if tl.bfloat16 == DTYPE and not INTERPRET:
        if KIND == FP8:
            x = (x.to(tl.float32) * 1.152921504606847e18).to(x.dtype)  # 2^60
        if KIND == MXFP4:
            x = (x.to(tl.float32) * 9.223372036854775808e18).to(x.dtype)  # 2^63
    return x


@triton.jit
def load_columns(source, used, at, K: tl.constexpr, EVEN: tl.constexpr, SPAN: tl.constexpr):
    """Columns at … at + SPAN of the rows that start at source [ROWS]: [SPAN, ROWS], 0 outside. EVEN: none is past the end."""
    column = at + tl.arange(0, SPAN)[:, None]
    mask = used[None, :] if EVEN else used[None, :] & (column < K)
    return tl.load(source[None, :] + column, mask=mask, other=0.0)


@triton.jit
def load_numbers(data, row, at, K: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr):
    """Weight rows `row` [TALL], columns at … at + WIDE, as stored [TALL, WIDE]; 0 past the end."""
    column = at + tl.arange(0, WIDE)[None, :]
    place = data + row.to(tl.int64)[:, None] * K + column
    return tl.load(place) if EVEN else tl.load(place, mask=column < K, other=0)


@triton.jit
def load_int4(data, zero, row, at, K: tl.constexpr, GROUP: tl.constexpr, EVEN: tl.constexpr, WIDE: tl.constexpr, DTYPE: tl.constexpr):
    """code - zero of weight rows `row` [TALL], columns at … at + WIDE, in DTYPE [TALL, WIDE]."""
    code = load_numbers(data, row, at // 2, K // 2, EVEN, WIDE // 2)
    shift = tl.load(zero + row * (K // GROUP) + at // GROUP).to(tl.float32)
    both = tl.reshape(tl.join(code & 15, code >> 4), [row.shape[0], WIDE])
    return (both.to(tl.float32) - shift[:, None]).to(DTYPE)


@triton.jit
def load_scales(scale, row, at, K: tl.constexpr, GROUP: tl.constexpr, SCALE_ROWS: tl.constexpr):
    """The scale of columns at … of each row, f32 [TALL]."""
    groups: tl.constexpr = (K + GROUP - 1) // GROUP
    return tl.load(scale + row // SCALE_ROWS * groups + at // GROUP).to(tl.float32)


@triton.jit
def e8m0(scales, BLOCK: tl.constexpr):
    """E8M0 scale of block BLOCK in words of four, f32. It is an exponent, but for its ends: none is NaN, 0 is 0."""
    bits = scales << (23 - 8 * BLOCK) if BLOCK < 3 else scales >> 1
    return (bits & 0x7F800000).to(tl.float32, bitcast=True)
