"""Between host and device without waiting: through pinned memory, several arrays in one copy.

A copy from or to ordinary memory makes the host wait until the device has done all its work; one through pinned memory takes its place in
the queue like a kernel. Torch's own pool of pinned memory takes some 70 µs for a piece; here a ring of pieces goes round, and a piece whose
copy is still under way when its turn comes is waited for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from collections.abc import Sequence as Seq
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGN = 16  # bytes; every array of a copy starts at a multiple
_PIECES = 64  # more than the copies of two steps


class _Ring:
    """Pinned pieces of one device, each large enough for what it was last asked for. Of the thread that owns the engine."""

    def __init__(self) -> None:
        self._pieces = [(torch.empty(0, dtype=torch.uint8), torch.cuda.Event()) for _ in range(_PIECES)]
        self._next = 0

    def take(self, size: int) -> tuple[Tensor, torch.cuda.Event]:
        """A piece of `size` bytes, and the event to record behind the copy that uses it."""
        index, self._next = self._next, (self._next + 1) % _PIECES
        piece, free = self._pieces[index]
        free.synchronize()
        if len(piece) < size:
            piece = torch.empty(max(2 * size, 1 << 14), dtype=torch.uint8, pin_memory=True)
            self._pieces[index] = piece, free
        return piece[:size], free


@cache
def _ring(device: torch.device, thread: int, way: str) -> _Ring:
    return _Ring()


def _take(size: int, device: torch.device, way: str) -> tuple[Tensor, torch.cuda.Event]:
    return _ring(device, threading.get_ident(), way).take(size)


def send(values: np.ndarray[Any, Any], device: torch.device) -> Tensor:
    """The array as a tensor on `device`. On a CPU they share memory."""
    return torch.from_numpy(values) if device.type == "cpu" else send_all([values], device)[0]


def send_all(arrays: Seq[np.ndarray[Any, Any]], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on `device`, by one copy. On a CPU they share memory."""
    if device.type == "cpu":
        return [torch.from_numpy(array) for array in arrays]
    starts, end = [], 0
    for array in arrays:
        starts.append(end)
        end += -(-array.nbytes // _ALIGN) * _ALIGN
    staging, used = _take(end, device, "there")
    bytes_ = staging.numpy()
    for start, array in zip(starts, arrays, strict=True):
        bytes_[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    arrived = staging.to(device, non_blocking=True)
    used.record()
    return [_part(arrived, start, array) for start, array in zip(starts, arrays, strict=True)]


def send_into(own: Tensor, values: np.ndarray[Any, Any]) -> None:
    """Overwrites own, which is dense, with an array of its size and dtype: the copy to the device is all there is."""
    if own.device.type == "cpu":
        own.copy_(torch.from_numpy(values))
        return
    staging, used = _take(values.nbytes, own.device, "there")
    staging.numpy()[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    own.flatten().view(torch.uint8).copy_(staging, non_blocking=True)
    used.record()


def _part(arrived: Tensor, start: int, array: np.ndarray[Any, Any]) -> Tensor:
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    return arrived[start : start + array.nbytes].view(dtype).view(array.shape)


@lru_cache(256)
def constant(values: tuple[int, ...], device: torch.device, dtype: type[np.signedinteger[Any]] = np.int64) -> Tensor:
    """[n], i64 or i32, on `device`, sent when these are first asked for. Not to be written to."""
    return send(np.array(values, dtype=dtype), device)


class Fetch:
    """Tensors of 64 bits and one dtype on their way to the host: the copy is queued when this is made, `lists` waits for it alone and is
    called before as many others are made as a ring has pieces."""

    def __init__(self, tensors: Seq[Tensor]):
        self._shapes = [tensor.shape for tensor in tensors]
        together = torch.cat([tensor.flatten() for tensor in tensors])
        staging, self._arrived = _take(8 * len(together), together.device, "back")
        self._staging = staging.view(together.dtype).copy_(together, non_blocking=True)
        self._arrived.record()

    def lists(self) -> list[Any]:
        """Each tensor as nested lists."""
        self._arrived.synchronize()
        parts = self._staging.split([shape.numel() for shape in self._shapes])
        return [part.view(shape).tolist() for part, shape in zip(parts, self._shapes, strict=True)]


def arrival(tensors: Seq[Tensor]) -> Callable[[], list[Any]]:
    """The tensors as nested lists, when they are asked for: by one copy that is queued now (see `Fetch`), or as they lie on a CPU."""
    return cache((lambda: [tensor.tolist() for tensor in tensors]) if tensors[0].device.type == "cpu" else Fetch(tensors).lists)
