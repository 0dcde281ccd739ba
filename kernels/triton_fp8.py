"""e4m3 inside Triton kernels: reading and writing FP8 caches with exact codes on every target.

Triton knows the type from compute capability 8.9 on. Elsewhere, and in the interpreter (which reads it wrongly), the caches are handed
over as bytes and the codes are made and read with integer operations. Which of the two runs follows from the pointer's type.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.kv_fp8 import FP8, LARGEST
from specdec.kernels.triton_common import INTERPRETED

_LARGEST = tl.constexpr(LARGEST)


def native() -> bool:
    """Whether Triton compiles e4m3 for the current device."""
    if INTERPRETED:
        return False
    target = triton.runtime.driver.active.get_current_target()
    return target.backend == "cuda" and target.arch >= 89


def handed(cache: Tensor) -> Tensor:
    """The cache as a kernel is to see it."""
    return cache.view(torch.uint8) if cache.dtype is FP8 and not native() else cache


@triton.jit
def from_cache(x, dtype: tl.constexpr):
    """Numbers (of codes: not yet scaled) in `dtype` from what was loaded. Every e4m3 number is exact in float16."""
    if x.dtype == tl.uint8:
        # the bits of a float16 with the exponent 8 too small; denormals of one are denormals of the other
        code = x.to(tl.uint16)
        half = (((code & 0x80) << 8) | ((code & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        return tl.where((code & 0x7F) == 0x7F, float("nan"), half).to(dtype)
    elif x.dtype == tl.float8e4nv:
        return x.to(tl.float16).to(dtype)
    else:
        return x.to(dtype)


@triton.jit
def to_cache(x, inverse, dtype: tl.constexpr):
    """What a cache of `dtype` (uint8: e4m3 as bytes) holds of x; `inverse` scale of FP8 caches."""
    if dtype == tl.uint8:
        return _code(_saturated(x, inverse))
    elif dtype == tl.float8e4nv:
        return _saturated(x, inverse).to(tl.float8e4nv)
    else:
        return x.to(dtype)


@triton.jit
def _saturated(x, inverse):
    """x * inverse within ±448, NaN kept."""
    wide = x.to(tl.float32) * inverse
    return tl.where(wide > _LARGEST, _LARGEST, tl.where(wide < -_LARGEST, -_LARGEST, wide))


@triton.jit
def _code(x):
    """e4m3 code of float32 numbers within ±448 (or NaN), rounded to nearest even."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)  # 20 mantissa bits go, the bias falls from 127 to 7
    # below 2**-6 codes count in steps of 2**-9, which is the last bit of float32 numbers from 2**14 on
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    code = tl.where(size < (121 << 23), small, normal)
    code = tl.where(size > 0x7F800000, 0x7F, code)
    return (code | ((bits >> 24) & 0x80)).to(tl.uint8)
