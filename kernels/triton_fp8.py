"""FP8 caches inside Triton kernels: read and written with exact codes on every target (`triton_e4m3`).

Triton knows the type from compute capability 8.9 on. Elsewhere, and in the interpreter (which reads it wrongly), the caches are handed
over as bytes and the codes are made and read with integer operations. Which of the two runs follows from the pointer's type.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.kv_fp8 import FP8, LARGEST
from specdec.kernels.triton_e4m3 import narrow, native, widen

_LARGEST = tl.constexpr(LARGEST)


def handed(cache: Tensor) -> Tensor:
    """The cache as a kernel is to see it."""
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
    return tl.where(wide > _LARGEST, _LARGEST, tl.where(wide < -_LARGEST, -_LARGEST, wide))
