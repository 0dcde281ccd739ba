"""Time of a call on a CUDA card, as it is inside a captured step: graph replays over rotated buffers, the median.

A call runs on several copies of its buffers in turn, together far larger than the second-level cache, so weights come from memory each
time as they do in a model. One graph holds `calls` calls, so the launch of the graph and the events around it are spread over all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

CACHE = 50 << 20  # bytes of Hopper's second-level cache, where the card does not say
_ROUNDS = 8  # times the cache that the copies together exceed
_MOST_COPIES = 64
_LEAST_CALLS = 16  # in a graph


def copies(moved: int, cache: int = CACHE) -> int:
    """Buffers to rotate for calls that move `moved` bytes: at least two, and so many that none is left in the cache when its turn comes."""
    return max(2, min(_MOST_COPIES, -(-_ROUNDS * cache // max(moved, 1))))


def calls_per_graph(count: int) -> int:
    """Calls in a graph for `count` copies: whole turns, at least `_LEAST_CALLS`."""
    return count * -(-_LEAST_CALLS // count)


def cache_bytes() -> int:
    """The second-level cache of this card."""
    return int(getattr(torch.cuda.get_device_properties(0), "L2_cache_size", CACHE)) or CACHE


def capture(turn: Sequence[Callable[[], object]]) -> torch.cuda.CUDAGraph:
    """A graph that makes `calls_per_graph` calls, the copies in turn. Compiles and warms up outside of it."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            for call in turn:
                call()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(calls_per_graph(len(turn))):
            turn[i % len(turn)]()
    return graph


def microseconds(turn: Sequence[Callable[[], object]], replays: int) -> list[float]:
    """Microseconds of a call, one number a replay, after three replays to warm up."""
    graph, calls = capture(turn), calls_per_graph(len(turn))
    events = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(replays)]
    for _ in range(3):
        graph.replay()
    for begin, end in events:
        begin.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    return [begin.elapsed_time(end) * 1e3 / calls for begin, end in events]


def call_seconds(turn: Sequence[Callable[[], object]], replays: int) -> list[float]:
    """As `microseconds`, in seconds."""
    return [time * 1e-6 for time in microseconds(turn, replays)]


def read_microseconds(moved: int, replays: int) -> list[float]:
    """Microseconds to read `moved` bytes and do nothing with them, the yardstick, over rotated buffers."""
    from bench.read_kernel import programs, read  # needs Triton

    words = max(16, moved // 64 * 16)
    turn: list[Callable[[], object]] = []
    for _ in range(copies(moved, cache_bytes())):
        buffer = torch.zeros(words, dtype=torch.int32, device="cuda")
        out = torch.empty(programs(words), dtype=torch.int32, device="cuda")
        turn.append(partial(read, buffer, out))
    return microseconds(turn, replays)
