"""Calls of the CUDA decoder segment (`csrc/cuda/segment.h`): all of a layer behind its attention, and the next layer's projections."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from specdec.kernels.cuda_fragments import compiled, multiprocessors, shared_limit
from specdec.kernels.fp8_linear.weight import Fp8Weight

TILE, PIECE, MAX_STAGES, SUMS, MOST_ROWS = 16, 128, 16, 2, 16  # as in segment_call.h
HEADER = 640 + 4 * MAX_STAGES * TILE  # and SCALES
COUNTERS = 32  # numbers of 64 bits that a segment's launches count with (`specdec::segment::Counters`)
CHUNK = 2048  # bytes of a weight's row that are copied at once; a copy takes no more
WARPS = 16
LEAST_GROWTH = 2.0**-8  # below it operands of `down` could lose more than 2^-17
WINDOW = 1 << 15  # bytes of tokens that are in shared memory at once where they need not all be
FORMATS = {torch.bfloat16: 0, torch.float8_e4m3fn: 1}


class Matrix(ctypes.Structure):
    """`specdec::segment::Matrix`."""

    _fields_ = [
        ("data", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        *((name, ctypes.c_int) for name in ("rows", "columns", "chunk", "window")),
    ]


class Rotary(ctypes.Structure):
    """`specdec::segment::Rotary`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("cos", "sin", "positions", "slots", "keys", "values")),
        *((name, ctypes.c_int) for name in ("heads", "kv_heads", "size")),
    ]


class Norm(ctypes.Structure):
    """`specdec::segment::Norm`."""

    _fields_ = [("weight", ctypes.c_void_p), ("peak", ctypes.c_float), ("eps", ctypes.c_float)]


class Call(ctypes.Structure):
    """`specdec::segment::Call`."""

    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("mixed", "residual", "mid", "inner", "last", "next", "counters")),
        ("to_64_bytes", ctypes.c_uint64),
        ("map", ctypes.c_uint64 * 64),
        ("matrix", Matrix * 4),
        *((name, Norm) for name in ("post_norm", "next_norm")),
        ("rotary", Rotary),
        *((name, ctypes.c_float) for name in ("inner_grown", "inner_shrunk")),
        *((name, ctypes.c_int) for name in ("M", "stages")),
    ]


@dataclass(frozen=True, slots=True, eq=False)
class Weight:
    """A weight [N,K] as the kernel reads it: bf16, or e4m3 with a float32 scale [N]."""

    data: Tensor
    scale: Tensor | None = None

    @staticmethod
    def of(weight: Tensor | Fp8Weight) -> Weight:
        """Shares memory, but for a scale per tensor, which becomes one a row."""
        return Weight(weight) if isinstance(weight, Tensor) else Weight(weight.data, weight.row_scales().contiguous())

    @property
    def row_bytes(self) -> int:
        return self.data.shape[1] * self.data.element_size()


@dataclass(frozen=True, slots=True, eq=False)
class Turn:
    """How the projections of a segment's end are turned and cached, as in `ops.rope_write_kv`: cos, sin [P,hd/2] f32, positions and slots
    [M] i64, caches [NB,bs,nkv,hd] bf16."""

    cos: Tensor
    sin: Tensor
    positions: Tensor
    slots: Tensor
    k_cache: Tensor
    v_cache: Tensor

    def rejects(self) -> str | None:
        """Why the kernel cannot do it, or None."""
        tensors = self.cos, self.sin, self.positions, self.slots, self.k_cache, self.v_cache
        bf16 = self.k_cache.dtype is self.v_cache.dtype is torch.bfloat16
        usable = bf16 and self.k_cache.shape[3] % TILE == 0 and all(t.is_contiguous() for t in tensors)
        return None if usable else f"caches must be bf16, heads of multiples of {TILE} numbers"

    def fields(self, rows: int) -> Rotary:
        """For projections of `rows` rows."""
        kv_heads, size = self.k_cache.shape[2:]
        tensors = self.cos, self.sin, self.positions, self.slots, self.k_cache, self.v_cache
        return Rotary(*(t.data_ptr() for t in tensors), rows // size - 2 * kv_heads, kv_heads, size)


@dataclass(frozen=True, slots=True, eq=False)
class Scaling:
    """A norm: weights [H] bf16, eps, the largest weight without its sign, which is for FP8 alone."""

    weight: Tensor
    eps: float
    peak: float = 0.0

    def measured(self) -> Scaling:
        """With its peak. Waits for the device."""
        return replace(self, peak=float(self.weight.abs().max()))

    def field(self) -> Norm:
        return Norm(self.weight.data_ptr(), self.peak, self.eps)


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """One segment's weights: of the attention's output, gate and up, down, and the projections behind (None at the end of a stack)
    with the norms before gate and up and before those projections."""

    out: Weight
    gate_up: Weight
    down: Weight
    post_norm: Scaling
    qkv: Weight | None = None
    next_norm: Scaling | None = None
    inner_grown: float = 1.0  # what the operands of `down` are multiplied by, a power of two (`growth_of`)

    @property
    def weights(self) -> tuple[Weight, ...]:
        return self.out, self.gate_up, self.down, *(() if self.qkv is None else (self.qkv,))

    def measured(self) -> Segment:
        """With what a launch has to know of the numbers in FP8 weights and their norms. Reads the weights and waits for the device."""
        if self.gate_up.scale is None:
            return self
        post, following = self.post_norm.measured(), None if self.next_norm is None else self.next_norm.measured()
        return replace(self, post_norm=post, next_norm=following, inner_grown=growth_of(self.gate_up, post))


def growth_of(gate_up: Weight, post_norm: Scaling) -> float:
    """The power of two that brings every silu(gate) · up below 2^15, so that f16 holds it: normed tokens are no longer than √H times the
    largest of the norm's weights, and a product no larger than that times the length of the longest row."""
    lengths = torch.cat([part.float().norm(dim=1) for part in gate_up.data.split(4096)])  # a part at a time, since it is widened
    if gate_up.scale is not None:
        lengths = lengths * gate_up.scale
    gate, up = lengths.nan_to_num(0.0).view(2, -1).amax(1).tolist()
    bound = gate * up * gate_up.data.shape[1] * post_norm.peak**2
    return 1.0 if not 0 < bound < math.inf else 2.0 ** min(14 - math.frexp(bound)[1], 30)


def chunk_bytes(row: int, most: int = CHUNK) -> int:
    """The largest part of a row of so many bytes that divides it and is of whole pieces, at most `most` bytes; 0 = there is none."""
    return next((row // n for n in range(-(-row // most), row // PIECE + 1) if row % (n * PIECE) == 0), 0)


def rejects(weights: Sequence[Weight]) -> str | None:
    """Why the kernel does not take these weights, or None."""
    if any(w.data.dtype not in FORMATS or not w.data.is_contiguous() for w in weights) or len({w.data.dtype for w in weights}) > 1:
        return "weights must be dense, all of bf16 or all of FP8 with a scale a row"
    fits = all(w.data.shape[0] % TILE == 0 and w.row_bytes % PIECE == 0 for w in weights)
    return None if fits else f"weights must be of multiples of {TILE} rows and of {PIECE} bytes a row"


def shared_bytes(call: Call, fp8: bool) -> tuple[int, int]:
    """(bytes of shared memory before the ring of units, bytes of a unit)."""
    widest = max((_up(2 * m.window, 128) + (16 if fp8 else 64)) * (1 + (m.window < m.columns)) for m in call.matrix if m.rows)
    before = _up(HEADER + SUMS * ((WARPS + 1) * -(-call.M // 8) * 512 + 128) + call.M * widest, 8 * PIECE)
    return before, max(TILE * m.chunk for m in call.matrix)


def _up(n: int, to: int) -> int:
    return -(-n // to) * to


def window_of(columns: int, rows: int, chunk: int) -> int:
    """Columns of `inner` that are in shared memory at once: all where they take little room, else whole chunks (of so many columns)."""
    most = WINDOW // (2 * rows)
    return columns if columns <= most else max(most // chunk, 1) * chunk


def prepare_call(
    segment: Segment,
    mixed: Tensor,
    residual: Tensor,
    counters: Tensor,
    turn: Turn | None = None,
    *,
    limit: int,
    chunk: int = CHUNK,
) -> tuple[Call, tuple[Tensor, Tensor | None, Tensor, Tensor]]:
    """The kernel's arguments, and what it writes: the residual behind the layer, the next projections (with `turn` only the queries,
    turned), and what lies between.

    mixed [M, columns of out] and residual [M,H] bf16, without gaps. limit: bytes of shared memory. `stages` is 0 where that is too little.
    """
    rows = len(residual)
    call = Call(M=rows, inner_grown=segment.inner_grown, inner_shrunk=1 / segment.inner_grown)
    for i, weight in enumerate(segment.weights):
        piece, scale = chunk_bytes(weight.row_bytes, chunk), weight.scale
        (features, columns), of_chunk = weight.data.shape, piece // weight.data.element_size()
        window = window_of(columns, rows, of_chunk) if weight is segment.down else columns
        call.matrix[i] = Matrix(weight.data.data_ptr(), None if scale is None else scale.data_ptr(), features, columns, piece, window)
    before, unit = shared_bytes(call, segment.out.scale is not None)
    call.stages = min((limit - before) // unit, MAX_STAGES) if before < limit else 0
    mid, last = torch.empty_like(residual), torch.empty_like(residual)
    inner = residual.new_empty(rows, segment.down.data.shape[1])  # f16 where the weights are FP8
    following = None if segment.qkv is None else residual.new_empty(rows, len(segment.qkv.data))
    if turn is not None and following is not None:
        call.rotary = turn.fields(following.shape[1])
        following = residual.new_empty(rows, call.rotary.heads * call.rotary.size)
    call.post_norm = segment.post_norm.field()
    if segment.next_norm is not None:
        call.next_norm = segment.next_norm.field()
    tensors = {"mixed": mixed, "residual": residual, "mid": mid, "inner": inner, "last": last, "counters": counters}
    for name, tensor in tensors.items():
        setattr(call, name, tensor.data_ptr())
    call.next = None if following is None else following.data_ptr()
    return call, (last, following, mid, inner)


@cache
def function(device: torch.device) -> tuple[Callable[..., int], Callable[[int], bytes]]:
    """(the launch, an error's text)."""
    functions = compiled(device)
    functions.specdec_segment.argtypes = [ctypes.c_void_p, *(ctypes.c_int,) * 5, ctypes.c_void_p]
    return functions.specdec_segment, functions.specdec_error


def run(
    segment: Segment,
    mixed: Tensor,
    residual: Tensor,
    counters: Tensor,
    turn: Turn | None = None,
    *,
    early: bool = False,
    chunk: int = CHUNK,
) -> tuple[Tensor, Tensor | None]:
    """(the residual stream behind the layer [M,H], the next projections [M,N], or queries, or None). See `prepare_call`; M at most 16.

    counters: int64 [COUNTERS] on the device, zero at first and of this segment alone. early: begin before the launch before has ended.
    """
    device = residual.device
    call, outputs = prepare_call(segment, mixed, residual, counters, turn, limit=shared_limit(device), chunk=chunk)
    launch, explain = function(device)
    stream = torch.cuda.current_stream(device).cuda_stream
    numbers = FORMATS[segment.out.data.dtype], multiprocessors(device), shared_limit(device), int(early), device.index
    if error := launch(ctypes.byref(call), *numbers, stream):
        raise RuntimeError(f"the CUDA decoder segment: {explain(error).decode()}")
    return outputs[0], outputs[1]
