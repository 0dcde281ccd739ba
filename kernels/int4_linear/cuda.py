"""W4A16 in CUDA C++ (`cuda_fragments`): (code - zero) * scale in x's dtype, rounded once, in registers; sums in float32."""

from __future__ import annotations

from torch import Tensor

from specdec.errors import KernelUnavailable
from specdec.kernels.cuda_fragments import NUMBERS, product
from specdec.kernels.int4_linear.fragments import Int4Fragments, pack
from specdec.kernels.int4_linear.weight import Int4Weight


def rejects(x: Tensor, w: Int4Weight | Int4Fragments) -> str | None:
    """Why this kernel cannot run the call, or None."""
    if not isinstance(w, Int4Fragments):
        return "the weight is not in fragments"
    if x.dtype not in NUMBERS:
        return f"activations in {x.dtype}; it takes bfloat16 and float16"
    return None if x.dtype is w.dtype else f"activations in {x.dtype} and scales in {w.dtype}"


def int4_linear(x: Tensor, w: Int4Weight | Int4Fragments) -> Tensor:
    """x [M,K] bf16 or f16 -> [M,N] of x's dtype. A weight that is not in fragments is put there for this call: for tests."""
    packed = pack(w) if isinstance(w, Int4Weight) else w
    if reason := rejects(x, packed):
        raise KernelUnavailable(f"int4_linear in CUDA: {reason}")
    return product(x, packed)
