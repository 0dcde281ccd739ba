"""Large CPU tensors in huge pages: a step reads all weights and much of the KV cache, and 4 KiB pages miss the TLB on each."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from specdec import ops


def zeros(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A zeroed tensor; on the CPU in huge pages where the extension and the system offer them, committed on first touch."""
    if device.type != "cpu" or not ops.compiled():
        return torch.zeros(tuple(shape), dtype=dtype, device=device)
    from specdec import _C

    data: Tensor = _C.huge_zeros(math.prod(shape) * dtype.itemsize)
    return data.view(dtype).view(tuple(shape))
