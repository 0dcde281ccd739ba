"""Measures which backend and tiling a GEMM of M rows should run on this card, and writes the table that the dispatch reads.

    python -m bench.tune [--op fp8_linear …] [--model llama-70b …] [--shape 4096x4096 …] [--replays 5] [--out FOLDER]

For each op, shape and bucket of M every candidate of `kernels/tilings.py` and every other backend of the same recipe is timed as in
`bench.kernels`, after all kernels were compiled by one process a core (Triton keeps them on disk). The table goes to the cache directory,
one file a card, shapes measured earlier are kept. "inner" in the name of an op stands for weights with scales inside the sum over K.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from bench.suites.gemm import SHAPES, arguments, call_with, competitors, moved_bytes
from specdec.kernels.tilings import BUCKETS, CANDIDATES, FIXED, MEASURED, Choice, Tiling, candidates, file_name

FIXED_ROWS = (1, 16, 64, 256)  # where the one tiling for all M is judged, by the geometric mean
Timer = Callable[[str, str, int, int, int], float]  # name in the lists, backend, M, N, K -> microseconds


def layout(name: str) -> tuple[str, str]:
    """(op, layout of its scales) of a name in the lists."""
    op, _, inside = name.partition(" ")
    return op, "block" if inside else "" if op == "dense_linear" else "channel"


def tune_bucket(op: str, n: int, k: int, size: int, timer: Timer) -> Choice:
    """The fastest of all at M = `size`; leaves it in the table."""
    found: list[Choice] = []
    for tiling in candidates(op, size, n, k):
        MEASURED.choices[op, n, k, size] = Choice("triton", tiling, 0.0)
        found.append(Choice("triton", tiling, timer(op, "triton", size, n, k)))
    for backend in competitors(*layout(op)):
        if not backend.startswith("triton"):
            found.append(Choice(backend, None, timer(op, backend, size, n, k)))
    return _keep(op, n, k, size, found)


def tune_fixed(op: str, n: int, k: int, timer: Timer) -> Choice:
    """The tiling that is best for all M together; leaves it in the table. Its microseconds are the mean that it was judged by."""
    found = []
    for tiling in candidates(op, FIXED, n, k):
        MEASURED.choices[op, n, k, FIXED] = Choice("triton_fixed", tiling, 0.0)
        times = [timer(op, "triton_fixed", m, n, k) for m in FIXED_ROWS]
        found.append(Choice("triton_fixed", tiling, math.exp(sum(map(math.log, times)) / len(times))))
    return _keep(op, n, k, FIXED, found)


def _keep(op: str, n: int, k: int, size: int, found: Iterable[Choice]) -> Choice:
    best = min(found, key=lambda choice: choice.microseconds)
    MEASURED.choices[op, n, k, size] = best
    return best


def on_the_card(replays: int) -> Timer:
    """Times calls as `bench.kernels` does; a candidate that does not run takes for ever."""
    import torch

    from bench.cuda_timing import cache_bytes, copies, microseconds
    from bench.schema import quantiles

    buffers: dict[tuple[str, int, int], list[tuple[Any, ...]]] = {}

    def timer(op: str, backend: str, m: int, n: int, k: int) -> float:
        key = (op, n, k)
        if key not in buffers:  # all candidates of a shape share them, all M too: it takes longer to fill weights than to read them
            buffers.clear()
            name, scales = layout(op)
            count = copies(moved_bytes(name, 1, n, k, scales), cache_bytes())
            buffers[key] = [arguments(name, BUCKETS[-1], n, k, scales, torch.device("cuda")) for _ in range(count)]
        calls = [call_with(op.split()[0], backend, first_rows(op, args, m)) for args in buffers[key]]
        try:
            return quantiles(microseconds(calls, replays))["p50"]
        except RuntimeError as err:
            print(f"{op} {backend} M={m} {n}x{k}: {str(err).splitlines()[0]}", flush=True)
            return math.inf

    return timer


def first_rows(op: str, args: tuple[Any, ...], m: int) -> tuple[Any, ...]:
    """The op's arguments for the first m rows of its activations, and of their scales where they are e4m3."""
    own = 2 if op.startswith("fp8_fp8_linear") else 1
    return (*(arg[:m] for arg in args[:own]), *args[own:])


def to_compile(names: Iterable[str], shapes: Iterable[tuple[int, int]], sizes: Iterable[int]) -> list[tuple[str, Tiling]]:
    """(name, tiling) of all the kernels that are going to be timed, each once: two splits stand for any number but one."""
    found = {
        (name, replace(tiling, splits=min(tiling.splits, 2)))
        for name, (n, k), size in product(names, shapes, sizes)
        for tiling in candidates(name, size, n, k)
    }
    return sorted(found, key=str)


def compile_one(name: str, tiling: Tiling) -> None:
    """Runs the kernel once on a small weight. Its binary depends on the tiling, and of the shape only on what divides it."""
    import torch

    n, k, (op, scales) = 512, 1024, layout(name)
    for size in BUCKETS:
        MEASURED.choices[name, n, k, size] = Choice("triton", tiling, 0.0)
    with suppress(RuntimeError):  # one that does not run says so when it is timed
        call_with(op, "triton", arguments(op, tiling.rows, n, k, scales, torch.device("cuda")))()


def compile_all(kernels: list[tuple[str, Tiling]]) -> None:
    """Fills Triton's cache on disk, with one process a core."""
    with ProcessPoolExecutor(os.cpu_count(), mp_context=multiprocessing.get_context("spawn")) as pool:
        list(pool.map(compile_one, *zip(*kernels, strict=True)))


def wanted(models: list[str] | None, shapes: list[str] | None) -> list[tuple[int, int]]:
    """(N, K) of the models' layers and of shapes written as NxK, each once."""
    named = [tuple(int(part) for part in text.split("x")) for text in shapes or ()]
    listed = [] if shapes and not models else [nk for (model, _), nk in SHAPES.items() if not models or model in models]
    return list(dict.fromkeys([*listed, *((n, k) for n, k in named)]))


def describe(tiling: Tiling | None) -> str:
    return "" if tiling is None else " ".join(f"{name} {getattr(tiling, name)}" for name in tiling.__slots__)


def main() -> None:
    import torch

    from specdec import ops
    from specdec.models.hub import cache_dir

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", nargs="+", choices=list(CANDIDATES), default=list(CANDIDATES))
    parser.add_argument("--model", nargs="+")
    parser.add_argument("--shape", nargs="+")
    parser.add_argument("--bucket", type=int, nargs="+", choices=(FIXED, *BUCKETS), default=[FIXED, *BUCKETS])
    parser.add_argument("--replays", type=int, default=5)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    folder, card = args.out or cache_dir() / "tilings", torch.cuda.get_device_name()
    ops.load_tilings(folder, card)
    MEASURED.card = card
    compile_all(to_compile(args.op, wanted(args.model, args.shape), args.bucket))
    timer = on_the_card(args.replays)
    for op in args.op:
        for n, k in wanted(args.model, args.shape):
            for size in args.bucket:
                best = tune_fixed(op, n, k, timer) if size == FIXED else tune_bucket(op, n, k, size, timer)
                print(f"{op} {n}x{k} M={size or 'any'}: {best.backend} {best.microseconds:.1f} us {describe(best.tiling)}", flush=True)
            MEASURED.save(folder / file_name(card))  # a run that is cut short keeps what it has


if __name__ == "__main__":
    main()
