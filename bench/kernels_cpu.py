"""Micro benchmark of the CPU linear layers on the real shapes: milliseconds per step of the default model.

    python bench/kernels_cpu.py [--threads 2] [--repeats 30] [--variant avx512]

A step = every linear layer of SmolLM2-135M (30 × qkv, o, gate_up, down in Q4_1) and the output head (Q8_0), weights far
larger than the caches. Other work on the machine only ever adds time, so the estimate is the sum over layers of the fastest call
of that shape; the median step shows the noise. Ratio: a step of M rows over a step of the first M, which is what a draft
tree of M nodes costs the linear layers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from specdec import ops
from specdec.kernels.cases import random_weight
from specdec.kernels.linear.tiles import TiledWeight

LAYERS = 30
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536))  # rows, columns: qkv, o, gate_up, down
HEAD = (49152, 576)


def model_weights() -> list[TiledWeight]:
    """The linear layers of one step in order, the head last."""
    layers = [random_weight(rows, cols, "Q4_1") for _ in range(LAYERS) for rows, cols in SHAPES]
    return [*layers, random_weight(*HEAD, "Q8_0")]


def call_seconds(weights: list[TiledWeight], rows: int, repeats: int) -> list[list[float]]:
    """Seconds of every call, [repeats][weights], after one step to warm up."""
    inputs = {cols: torch.randn(rows, cols) for cols in {w.cols for w in weights}}
    steps = []
    for _ in range(repeats + 1):
        times = []
        for weight in weights:
            start = time.perf_counter()
            ops.tiled_linear(inputs[weight.cols], weight)
            times.append(time.perf_counter() - start)
        steps.append(times)
    return steps[1:]


def undisturbed(steps: list[list[float]], weights: list[TiledWeight]) -> float:
    """Seconds of a step in which every call is as fast as the fastest of its shape."""
    best: dict[tuple[int, int], float] = {}
    for times in steps:
        for weight, seconds in zip(weights, times, strict=True):
            shape = (weight.rows, weight.cols)
            best[shape] = min(seconds, best.get(shape, seconds))
    return sum(best[(w.rows, w.cols)] for w in weights)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--variant", help="instruction-set variant; default the best of this processor")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    if args.variant:
        from specdec import _C

        _C.use_variant(args.variant)
    weights = model_weights()
    size = sum(w.data.nbytes for w in weights)
    base = None
    for rows in args.rows:
        steps = call_seconds(weights, rows, args.repeats)
        best = undisturbed(steps, weights)
        base = base or best
        record = {
            "rows": rows,
            "threads": args.threads,
            "ms": round(best * 1e3, 2),
            "ms_median_step": round(statistics.median(sum(times) for times in steps) * 1e3, 2),
            "ratio_to_first": round(best / base, 2),
            "weight_GB_per_s": round(size / best / 1e9, 1),
        }
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
