"""K and V in an FP8 cache: e4m3 codes and one scale per layer and side. Other caches hold the numbers themselves.

A number x is stored as the code of x / scale, rounded to nearest even and saturated at ±448 (e4m3 has no infinity; NaN stays NaN),
and read as code * scale. The scales are floats: a checkpoint fixes them at load, so a launcher can fold K's into the softmax scale
and V's into the output, and a captured graph may hold them. `specdec.ops` passes them on for FP8 caches only.
"""

from __future__ import annotations

import math
from functools import cache as remembered

import torch
from torch import Tensor

from specdec.errors import ConfigError
from specdec.kernels.fp8_linear.weight import LARGEST

FP8 = torch.float8_e4m3fn
Scales = tuple[float, float]  # K's and V's
UNSCALED: Scales = (1.0, 1.0)


@remembered
def inverse(scale: float) -> float:
    """1 / scale as a float32: what every backend multiplies by, so that all store the same codes."""
    if not (math.isfinite(scale) and scale > 0.0):
        raise ConfigError(f"the scale of an FP8 KV cache must be positive and finite, got {scale}", param="kv_dtype")
    return float(torch.tensor(scale, dtype=torch.float64).reciprocal().float())


def encode(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """x as a cache of `dtype` stores it, any shape."""
    return (x.float() * inverse(scale)).clamp(-LARGEST, LARGEST).to(FP8) if dtype is FP8 else x.to(dtype)


def raw(cache: Tensor) -> Tensor:
    """The cache as something that can be copied and indexed everywhere: bytes for FP8, which few library kernels know."""
    return cache.view(torch.uint8) if cache.dtype is FP8 else cache


def gather(cache: Tensor, slots: Tensor) -> Tensor:
    """cache [N, …], slots of any shape -> cache[slots] in float32, codes not yet scaled."""
    return raw(cache)[slots].view(cache.dtype).float()


def scaled(cache: Tensor, kv_scales: Scales) -> dict[str, Scales]:
    """The scales as a keyword where the cache is FP8; the backends of other caches know no scales."""
    return {"kv_scales": kv_scales} if cache.dtype is FP8 else {}
