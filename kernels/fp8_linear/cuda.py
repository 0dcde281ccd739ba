"""W8A16 in CUDA C++ (`csrc/cuda/fragment_linear.h`): the weight is read once per 64 rows, at the speed of memory.

Bits of a row depend on the row, the weight and the number of multiprocessors, not on the other rows. Which tiling and why is written
where the kernel is.
"""

from __future__ import annotations

import ctypes
from functools import cache

import torch
from torch import Tensor

from specdec.errors import KernelUnavailable
from specdec.kernels.cuda_library import library
from specdec.kernels.fp8_linear.fragments import Fp8Fragments, pack
from specdec.kernels.fp8_linear.weight import Fp8Weight

NUMBERS = {torch.bfloat16: 0, torch.float16: 1}


class Call(ctypes.Structure):
    """`specdec::fragment::Call`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "codes", "channel_scale", "block_scale", "y", "partial", "arrived")),
        ("x_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("M", "N", "K", "stages")),
    ]


def rejects(x: Tensor, w: Fp8Weight | Fp8Fragments) -> str | None:
    """Why this kernel cannot run the call, or None."""
    if not isinstance(w, Fp8Fragments):
        return "the weight is not in fragments: prepare_fp8 puts it there, once, at load"
    return None if x.dtype in NUMBERS else f"activations in {x.dtype}; it takes bfloat16 and float16"


def fp8_linear(x: Tensor, w: Fp8Weight | Fp8Fragments) -> Tensor:
    """x [M,K] bf16 or f16 -> [M,N] of x's dtype. A weight that is not in fragments is put there for this call: for tests."""
    if isinstance(w, Fp8Weight):
        w = pack(w)
    if reason := rejects(x, w):
        raise KernelUnavailable(f"fp8_linear in CUDA: {reason}")
    call, keep = prepare_call(x, w, multiprocessors(x.device))
    y: Tensor = keep[0]
    if x.shape[0]:
        functions = compiled(x.device)
        stream = torch.cuda.current_stream(x.device).cuda_stream
        error = functions.specdec_fp8_linear(ctypes.byref(call), NUMBERS[x.dtype], multiprocessors(x.device), x.device.index, stream)
        if error:
            raise RuntimeError(f"fp8_linear in CUDA: {functions.specdec_error(error).decode()}")
    return y


def prepare_call(x: Tensor, w: Fp8Fragments, ctas: int) -> tuple[Call, tuple[Tensor, ...]]:
    """The kernel's arguments, and the tensors that must live until it was launched; the result is the first of them."""
    (n, k), m = w.shape, x.shape[0]
    if x.shape[1:] != (k,):
        raise ValueError(f"x is {tuple(x.shape)}, the weight {n} × {k}")
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)  # 16-byte copies
    y = x.new_empty(m, n)
    partial = torch.empty(partial_floats(ctas, m), dtype=torch.float32, device=x.device)
    block = None if w.block is None else w.block.data_ptr()
    pointers = (x.data_ptr(), w.words.data_ptr(), w.channel.data_ptr(), block, y.data_ptr(), partial.data_ptr(), w.arrived.data_ptr())
    return Call(*pointers, x.stride(0) * x.element_size(), m, n, k, 0), (y, x, partial)


def partial_floats(ctas: int, rows: int) -> int:
    """Numbers of float32 for the sums of tiles that CTAs share: two slots of 256 channels a CTA, for 64 rows at most."""
    return 2 * ctas * 256 * 8 * next(tiles for tiles in (1, 2, 3, 4, 6, 8) if tiles >= min(-(-rows // 8), 8))


@cache
def multiprocessors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@cache
def compiled(device: torch.device) -> ctypes.CDLL:
    """The functions, built if need be. KernelUnavailable where they cannot be."""
    major, minor = torch.cuda.get_device_capability(device)
    try:
        functions = library(10 * major + minor)
    except (OSError, RuntimeError) as err:
        raise KernelUnavailable(f"the CUDA kernels cannot be had ({err}); SPECDEC_CUDA=0 does without") from err
    functions.specdec_error.restype = ctypes.c_char_p
    functions.specdec_fp8_linear.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    return functions
