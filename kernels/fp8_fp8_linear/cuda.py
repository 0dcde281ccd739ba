"""W8A8 in CUDA C++ (`csrc/cuda/e4m3_linear.h`, which has the argument): 9 to 128 rows on Hopper's tensor cores at the speed of memory.

A row's bits depend on the row and the weight alone; not a fixed order nevertheless, since more rows go elsewhere.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.cuda_fragments import capability, compiled, launches_early, multiprocessors, shared_limit
from specdec.kernels.fp8_linear.weight import Fp8Weight
from specdec.kernels.tilings import MEASURED

__all__ = ["fp8_fp8_linear", "rejects"]

ROWS, PIECE, SHARE = 128, 128, 8  # most rows; columns of a piece; rows that a block fetches come in eights
FEW = 8  # rows for which Triton's narrow tiles, or a whole segment, do as well
WIDTHS = (32, 48, 64, 80, 96, 112, 128)
DEEP = 80  # up to this width a unit has two pieces, so that its products outlast the wait for it


class Call(ctypes.Structure):
    """`specdec::e4m3::Call`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("x", "w", "x_scale", "w_scale", "y")),
        ("to_maps", ctypes.c_uint64 * 3),  # maps begin at multiples of 64 bytes
        ("maps", ctypes.c_uint64 * 32),
        *((name, ctypes.c_int) for name in ("M", "N", "K", "channels", "share", "stages")),
        ("to_end", ctypes.c_int * 10),
    ]


@dataclass(frozen=True, slots=True)
class Cut:
    """width: rows of the weight that a block multiplies at a time; pieces of a unit; blocks of a cluster, and in all."""

    width: int
    pieces: int
    cluster: int
    blocks: int


def rejects(q: Tensor, scale: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> str | None:
    """Why the kernel cannot run the call, or should not, or None."""
    if dtype is not torch.bfloat16 or weight.blocked or scale.dim() == 2:
        return "it writes bfloat16, with one scale a row and a channel"
    (n, k), m = weight.shape, q.shape[0]
    if n % 8 or k % PIECE or k == 0:
        return f"a weight of {n} × {k}; it takes multiples of 8 × {PIECE}"
    if not FEW < m <= ROWS:
        return f"{m} rows; it is for {FEW + 1} to {ROWS}"
    dense = all(t.is_contiguous() for t in (q, scale, weight.data, weight.scale))
    if not dense or q.data_ptr() % 16 or weight.data.data_ptr() % 16:
        return "operands must be contiguous and begin at multiples of 16 bytes"
    chosen = MEASURED.choice("fp8_fp8_linear", m, n, k)
    if chosen is not None and chosen.backend != "cuda":
        return f"measured: {chosen.backend} is faster"
    return None if capability(q.device) == 90 else "it needs a warpgroup's products (Hopper)"


def cut(m: int, n: int, processors: int) -> Cut:
    """The width that leaves the busiest block least to do, the widest of those, in clusters of two."""
    cluster = 2  # of four, 128 blocks do not fit on the card at once
    most = processors // cluster * cluster

    def rounds(width: int) -> int:
        return -(-n // (width * most))

    width = min(WIDTHS, key=lambda width: (rounds(width) * width, -width))
    blocks = -(-n // (width * rounds(width)))
    return Cut(width, 2 if width <= DEEP else 1, cluster, -(-blocks // cluster) * cluster)


def fp8_fp8_linear(q: Tensor, scale: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """Shapes in `specdec.ops.fp8_fp8_linear`."""
    return product(q, scale, weight, cut(q.shape[0], weight.shape[0], multiprocessors(q.device)))


def product(q: Tensor, scale: Tensor, weight: Fp8Weight, cut: Cut) -> Tensor:
    """q [M,K] e4m3, scale f32 [M] -> [M,N] bf16."""
    y = q.new_empty(q.shape[0], weight.shape[0], dtype=torch.bfloat16)
    call = prepare_call(y, q, scale, weight, cut.cluster)
    functions, stream = compiled(q.device), torch.cuda.current_stream(q.device).cuda_stream
    numbers = cut.width, cut.pieces, cut.cluster, cut.blocks, shared_limit(q.device), int(launches_early(q.device)), q.device.index
    if error := functions.specdec_e4m3_linear(ctypes.byref(call), *numbers, stream):
        raise RuntimeError(f"the CUDA product of e4m3: {functions.specdec_error(error).decode()}")
    return y


def prepare_call(y: Tensor, q: Tensor, scale: Tensor, weight: Fp8Weight, cluster: int) -> Call:
    """The kernel's arguments, which share memory with these tensors."""
    (n, k), m = weight.shape, q.shape[0]
    operands = {"x": q, "w": weight.data, "x_scale": scale, "w_scale": weight.scale, "y": y}
    call = Call(**{name: t.data_ptr() for name, t in operands.items()}, M=m, N=n, K=k)
    call.channels = int(weight.scale.numel() > 1)
    call.share = -(-m // (SHARE * cluster)) * SHARE
    return call
