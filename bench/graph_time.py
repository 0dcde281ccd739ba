"""Seconds of device work a call, as a step sees it: CUDA-graph replays over rotated arguments, and a plain read of as many bytes.

A graph holds one call per set of arguments, and the sets together outgrow the L2 cache, so that no call finds its inputs there. The time
of a call is that of a replay over the number of calls; the median over replays is reported. The yardstick reads the same bytes in
the same run with a kernel that does nothing else.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_SETS = 64
_TILE = 8192


def sets_needed(set_bytes: int, cache_bytes: int) -> int:
    """How many argument sets outgrow the cache three times over; 2 to MOST_SETS."""
    return max(2, min(MOST_SETS, -(-3 * cache_bytes // max(set_bytes, 1))))


def call_seconds(calls: Sequence[Callable[[], Any]], replays: int) -> list[float]:
    """Seconds a call of every replay of a graph of `calls`. Needs a CUDA device."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):  # compiles, and makes what must exist before capture
        for call in calls:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / len(calls))
    return times[3:]


def read_seconds(num_bytes: int, sets: int, replays: int) -> float:
    """Median seconds of reading `num_bytes` that lie in memory."""
    words = max(1, num_bytes // 4)
    buffers = [torch.zeros(words, dtype=torch.float32, device="cuda") for _ in range(sets)]
    sink = torch.empty(triton.cdiv(words, _TILE), dtype=torch.float32, device="cuda")
    return statistics.median(call_seconds([lambda b=b: read(b, sink) for b in buffers], replays))


def read(source: Tensor, sink: Tensor) -> None:
    """Sums of stretches of source [n] f32 into sink [ceil(n / 8192)] f32: every word is loaded, next to nothing is stored."""
    _read[(triton.cdiv(source.numel(), _TILE),)](source, sink, source.numel(), TILE=_TILE)


@triton.jit
def _read(source, sink, size, TILE: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(sink + tl.program_id(0), tl.sum(tl.load(source + place, mask=place < size, other=0.0), 0))
