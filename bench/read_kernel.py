"""The yardstick of the kernel benchmarks: a kernel that reads a tensor once and does nothing else. Needs Triton."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 4096  # int32 words a program takes at a time
_PER_PROCESSOR = 8


@triton.jit
def _read(data, out, words, TILE: tl.constexpr):
    """Grid: any number of programs; each adds up every so-many-th tile."""
    total = tl.zeros([TILE], tl.int32)
    for start in tl.range(tl.program_id(0).to(tl.int64) * TILE, words, tl.num_programs(0) * TILE, num_stages=4):
        index = start + tl.arange(0, TILE)
        total += tl.load(data + index, mask=index < words, other=0)
    tl.store(out + tl.program_id(0), tl.sum(total, 0))


def read(data: Tensor) -> Tensor:
    """Reads every byte of a dense tensor (a multiple of 4 bytes); returns sums that nobody needs."""
    words = data.view(-1).view(torch.int32)
    programs = _PER_PROCESSOR * torch.cuda.get_device_properties(data.device).multi_processor_count
    out = torch.empty(programs, dtype=torch.int32, device=data.device)
    _read[(programs,)](words, out, words.numel(), TILE=_TILE, num_warps=8)
    return out
