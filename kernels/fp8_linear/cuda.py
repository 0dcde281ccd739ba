"""W8A16 in CUDA C++ (`cuda_fragments`): e4m3 widened to x's dtype in registers, exactly; scales applied to float32 sums."""

from __future__ import annotations

from torch import Tensor

from specdec.errors import KernelUnavailable
from specdec.kernels.cuda_fragments import NUMBERS, product
from specdec.kernels.fp8_linear.fragments import Fp8Fragments, pack
from specdec.kernels.fp8_linear.weight import Fp8Weight


def rejects(x: Tensor, w: Fp8Weight | Fp8Fragments) -> str | None:
    """Why this kernel cannot run the call, or None."""
    if not isinstance(w, Fp8Fragments):
        return "the weight is not in fragments: prepare_fp8 puts it there, once, at load"
    return None if x.dtype in NUMBERS else f"activations in {x.dtype}; it takes bfloat16 and float16"


def fp8_linear(x: Tensor, w: Fp8Weight | Fp8Fragments) -> Tensor:
    """x [M,K] bf16 or f16 -> [M,N] of x's dtype. A weight that is not in fragments is put there for this call: for tests."""
    packed = pack(w) if isinstance(w, Fp8Weight) else w
    if reason := rejects(x, packed):
        raise KernelUnavailable(f"fp8_linear in CUDA: {reason}")
    return product(x, packed)
