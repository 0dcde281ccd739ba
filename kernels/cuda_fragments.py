"""Calls of the CUDA fragment linear layer (`csrc/cuda/fragment_linear.h`), which formats of weights share.

The weight is read once per 64 rows, at the speed of memory. Bits of a row depend on the row, the weight and the number of
multiprocessors, not on the other rows. Which tiling and why is written where the kernel is.
"""

from __future__ import annotations

import ctypes
from functools import cache
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from specdec.errors import KernelUnavailable
from specdec.kernels.cuda_library import library

STRIP = 64  # rows of a weight
DEPTH = 128  # columns
TILE = 256  # rows that a CTA computes together
NUMBERS = {torch.bfloat16: 0, torch.float16: 1}

# Axes of a strip's rows and of a depth block's columns, as `Meeting` in csrc/cuda/fragment_layout.h splits them.
ROWS = (8, 4, 2)  # lane / 4, channel tile, register mod 2
COLUMNS = (2, 2, 2, 2, 4, 2)  # half, pair, step, register / 2, lane % 4, half word


class Fragments(Protocol):
    """A weight N × K in the kernel's order. FORMAT: the kernel's number of it. arrived: int32 [ceil(N/256)], zero between launches; hence
    one launch with a weight at a time. group: columns that share a scale, 0 where the format has no groups."""

    FORMAT: ClassVar[int]

    @property
    def shape(self) -> tuple[int, int]: ...
    @property
    def group(self) -> int: ...
    @property
    def arrived(self) -> Tensor: ...
    def operands(self) -> dict[str, Tensor]:
        """By field of `Call`."""
        ...


class Call(ctypes.Structure):
    """`specdec::fragment::Call`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "codes", "channel_scale", "block_scale", "groups", "y", "partial", "arrived")),
        ("x_stride", ctypes.c_int64),
        *((name, ctypes.c_int) for name in ("M", "N", "K", "group", "stages")),
    ]


def rejects_shape(n: int, k: int) -> str | None:
    """Why a weight of this shape has no fragments, or None."""
    return None if n and k and n % STRIP == 0 and k % DEPTH == 0 else f"a weight of {n} × {k}; it takes multiples of {STRIP} × {DEPTH}"


def counters(n: int, device: torch.device) -> Tensor:
    """The `arrived` of a weight of n rows."""
    return torch.zeros(-(-n // TILE), dtype=torch.int32, device=device)


def product(x: Tensor, w: Fragments) -> Tensor:
    """x [M,K] bf16 or f16 on a card -> [M,N] of x's dtype."""
    call, keep = prepare_call(x, w, multiprocessors(x.device))
    if x.shape[0]:
        functions = compiled(x.device)
        stream = torch.cuda.current_stream(x.device).cuda_stream
        numbers = w.FORMAT, NUMBERS[x.dtype], multiprocessors(x.device), x.device.index
        if error := functions.specdec_fragment_linear(ctypes.byref(call), *numbers, stream):
            raise RuntimeError(f"the CUDA linear layer: {functions.specdec_error(error).decode()}")
    return keep[0]


def prepare_call(x: Tensor, w: Fragments, ctas: int) -> tuple[Call, tuple[Tensor, ...]]:
    """The kernel's arguments, and the tensors that must live until it was launched: y, x, partial sums."""
    (n, k), m = w.shape, x.shape[0]
    if x.shape[1:] != (k,):
        raise ValueError(f"x is {tuple(x.shape)}, the weight {n} × {k}")
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)  # 16-byte copies
    y = x.new_empty(m, n)
    partial = torch.empty(partial_floats(ctas, m), dtype=torch.float32, device=x.device)
    operands = {"x": x, "y": y, "partial": partial, "arrived": w.arrived, **w.operands()}
    call = Call(**{name: tensor.data_ptr() for name, tensor in operands.items()}, M=m, N=n, K=k, group=w.group)
    call.x_stride = x.stride(0) * x.element_size()
    return call, (y, x, partial)


def partial_floats(ctas: int, rows: int) -> int:
    """Numbers of float32 for the sums of tiles that CTAs share: two slots of 256 channels a CTA, for 64 rows at most."""
    return 2 * ctas * TILE * 8 * next(tiles for tiles in (1, 2, 3, 4, 6, 8) if tiles >= min(-(-rows // 8), 8))


@cache
def multiprocessors(device: torch.device) -> int:
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


@cache
def shared_limit(device: torch.device) -> int:
    """Bytes of shared memory that a block may have."""
    limit: int = getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", 0)  # not in older releases
    return limit


def launches_early(device: torch.device) -> bool:
    """Whether kernels of a decode pass are launched so from here on (`triton_common.early`)."""
    from specdec.kernels.triton_common import early  # here, since the table of ops is read without Triton too

    return bool(early(device).get("launch_pdl"))


@cache
def capability(device: torch.device) -> int:
    """Of the card, 90 for 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def compiled(device: torch.device) -> ctypes.CDLL:
    """The functions, built if need be. KernelUnavailable where they cannot be."""
    try:
        functions = library(capability(device))
    except (OSError, RuntimeError) as err:
        raise KernelUnavailable(f"the CUDA kernels cannot be had ({err}); SPECDEC_CUDA=0 does without") from err
    functions.specdec_error.restype = ctypes.c_char_p
    functions.specdec_fragment_linear.argtypes = [ctypes.c_void_p, *(ctypes.c_int,) * 4, ctypes.c_void_p]
    functions.specdec_few_attention.argtypes = [ctypes.c_void_p, *(ctypes.c_int,) * 4, ctypes.c_void_p]
    functions.specdec_e4m3_linear.argtypes = [ctypes.c_void_p, *(ctypes.c_int,) * 7, ctypes.c_void_p]
    functions.specdec_read.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int, ctypes.c_int, ctypes.c_void_p]
    return functions
