"""Measures which backend and tiling a GEMM of M rows should run on this card, and writes the table that the dispatch reads.

    python -m bench.tune [--op fp8_linear …] [--model llama-70b …] [--shape 4096x4096 …] [--replays 5] [--out FOLDER]

For each op, shape and bucket of M every candidate of `kernels/tilings.py` and every other backend of the same recipe is timed as in
`bench.kernels`; the table goes to the cache directory, one file a card, shapes measured earlier are kept. "inner" in the name of an op
stands for weights with scales inside the sum over K.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from pathlib import Path

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

    buffers: dict[tuple[str, int, int, int], list[tuple[object, ...]]] = {}

    def timer(op: str, backend: str, m: int, n: int, k: int) -> float:
        key = (op, m, n, k)
        if key not in buffers:  # candidates of one shape share them
            buffers.clear()
            name, scales = layout(op)
            count = copies(moved_bytes(name, m, n, k, scales), cache_bytes())
            buffers[key] = [arguments(name, m, n, k, scales, torch.device("cuda")) for _ in range(count)]
        try:
            return quantiles(microseconds([call_with(op.split()[0], backend, args) for args in buffers[key]], replays))["p50"]
        except RuntimeError as err:
            print(f"{op} {backend} M={m} {n}x{k}: {str(err).splitlines()[0]}", flush=True)
            return math.inf

    return timer


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
    timer = on_the_card(args.replays)
    for op in args.op:
        for n, k in wanted(args.model, args.shape):
            for size in args.bucket:
                best = tune_fixed(op, n, k, timer) if size == FIXED else tune_bucket(op, n, k, size, timer)
                print(f"{op} {n}x{k} M={size or 'any'}: {best.backend} {best.microseconds:.1f} us {describe(best.tiling)}", flush=True)
            MEASURED.save(folder / file_name(card))  # a run that is cut short keeps what it has


if __name__ == "__main__":
    main()
