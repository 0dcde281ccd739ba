"""W8A16 for many rows: the weight widened part by part to the activations' dtype, a library product, scales at the end.

The numbers of the streaming kernel but for the order of the sum: e4m3 is exact in bf16 and f16, sums are float32, scales multiply them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.fp8_linear.fragments import Fp8Fragments
from specdec.kernels.fp8_linear.weight import Fp8Weight

_PART = 8 << 20  # weights widened at a time: 16 MB in bf16, which with their source is half of Hopper's L2


def rejects(x: Tensor, weight: Fp8Weight | Fp8Fragments) -> str | None:
    """Why it cannot run the call, or None."""
    if isinstance(weight, Fp8Fragments):
        return "the weight is in fragments"
    return "scales of blocks belong inside the sum over K" if weight.blocked else None


def fp8_linear(x: Tensor, weight: Fp8Weight) -> Tensor:
    """Shapes in `specdec.ops.fp8_linear`."""
    features, columns = weight.shape
    out = x.new_empty(x.shape[0], features)
    step = max(128, _PART // max(1, columns))
    for start in range(0, features, step):
        part = weight.rows(start, min(start + step, features))
        out[:, start : start + step] = (_product(x, part.data.to(x.dtype)) * part.scale).to(x.dtype)
    return out


def _product(x: Tensor, weight: Tensor) -> Tensor:
    """x [M,K], weight [N,K] -> float32 [M,N], unrounded."""
    if x.is_cuda and x.dtype is not torch.float32:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return x.float() @ weight.float().t()
