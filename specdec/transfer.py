"""Between host and device without waiting: through pinned memory, several arrays in one copy.

A copy from or to ordinary memory makes the host wait until the device has done all its work; one through pinned memory takes its place in
the queue like a kernel. Pinned memory comes from torch, which gives a piece out again only when the copies that use it are done.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import Any

import numpy as np
import torch
from torch import Tensor

_ALIGN = 16  # bytes; every array of a copy starts at a multiple


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
    staging = torch.empty(end, dtype=torch.uint8, pin_memory=True)
    bytes_ = staging.numpy()
    for start, array in zip(starts, arrays, strict=True):
        bytes_[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    arrived = staging.to(device, non_blocking=True)
    return [_part(arrived, start, array) for start, array in zip(starts, arrays, strict=True)]


def _part(arrived: Tensor, start: int, array: np.ndarray[Any, Any]) -> Tensor:
    dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
    return arrived[start : start + array.nbytes].view(dtype).view(array.shape)


class Fetch:
    """int64 tensors on their way to the host: the copy is queued when this is made, `lists` waits for it alone."""

    def __init__(self, tensors: Seq[Tensor]):
        self._shapes = [tensor.shape for tensor in tensors]
        together = torch.cat([tensor.flatten() for tensor in tensors])
        self._staging = torch.empty(together.shape, dtype=together.dtype, pin_memory=True).copy_(together, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def lists(self) -> list[Any]:
        """Each tensor as nested lists."""
        self._arrived.synchronize()
        parts = self._staging.split([shape.numel() for shape in self._shapes])
        return [part.view(shape).tolist() for part, shape in zip(parts, self._shapes, strict=True)]
