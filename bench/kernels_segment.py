"""Time of the decoder segment (all of a layer behind its attention and the next projections) on a card, beside a read of its weights.

    python -m bench.kernels_segment [--model llama-3.1-8b …] [--format fp8 bf16] [--rows 1 4 8 16] [--chunk 2048]

Graph replays over rotated buffers larger than the second-level cache, medians; read_us reads the same bytes in the same run. Appends to
`bench/results/kernels_segment.jsonl`.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from functools import partial
from itertools import product

import torch

from bench.cuda_timing import copies, microseconds, read_microseconds
from bench.schema import append, environment
from specdec.kernels.cuda_fragments import shared_limit
from specdec.kernels.decoder_stack import segment as seg
from specdec.kernels.fp8_linear.weight import Fp8Weight

SHAPES = {  # H, I, columns of out, rows of qkv
    "smollm2-135m": (576, 1536, 576, 960),
    "llama-3.1-8b": (4096, 14336, 4096, 6144),
    "llama-3.3-70b": (8192, 28672, 8192, 10240),
}
REPLAYS = 30


def weight(rows: int, columns: int, fp8: bool) -> seg.Weight:
    dense = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16) / columns**0.5
    return seg.Weight.of(Fp8Weight((dense * 8).to(torch.float8_e4m3fn), torch.full((rows,), 0.125, device="cuda")) if fp8 else dense)


def segment(model: str, fp8: bool) -> seg.Segment:
    """Random weights of a layer of the model."""
    hidden, inner, q, qkv = SHAPES[model]
    norm = seg.Scaling(torch.ones(hidden, device="cuda", dtype=torch.bfloat16), 1e-5)
    shapes = (hidden, q), (2 * inner, hidden), (hidden, inner), (qkv, hidden)
    out, gate_up, down, following = (weight(*shape, fp8) for shape in shapes)
    return seg.Segment(out, gate_up, down, norm, following, norm).measured()


def measure(model: str, form: str, rows: int, chunk: int) -> dict[str, object] | None:
    """One record; None where shared memory does not hold so many rows, or rows of weights are no whole pieces."""
    hidden, _, q, _ = SHAPES[model]
    mixed, residual = (torch.randn(rows, n, device="cuda", dtype=torch.bfloat16) for n in (q, hidden))
    counters = [torch.zeros(seg.COUNTERS, dtype=torch.int64, device="cuda") for _ in range(64)]
    one = segment(model, form == "fp8")
    if seg.rejects(one.weights) is not None:
        return None
    moved = sum(w.data.nbytes for w in one.weights)
    call, _ = seg.prepare_call(one, mixed, residual, counters[0], limit=shared_limit(mixed.device), chunk=chunk)
    if call.stages < 2:
        return None
    layers = [one, *(segment(model, form == "fp8") for _ in range(copies(moved) - 1))]
    turn: list[Callable[[], object]] = [
        partial(seg.run, s, mixed, residual, own, chunk=chunk) for s, own in zip(layers, counters, strict=False)
    ]
    time, read = (statistics.median(t) for t in (microseconds(turn, REPLAYS), read_microseconds(moved, REPLAYS)))
    return {
        "model": model,
        "format": form,
        "rows": rows,
        "chunk": chunk,
        "stages": call.stages,
        "us": time,
        "read_us": read,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", nargs="+", default=list(SHAPES), choices=SHAPES)
    parser.add_argument("--format", nargs="+", default=["fp8", "bf16"], choices=("fp8", "bf16"))
    parser.add_argument("--rows", nargs="+", type=int, default=[1, 4, 8, 16])
    parser.add_argument("--chunk", nargs="+", type=int, default=[seg.CHUNK])
    args = parser.parse_args()
    about = environment()
    for model, form, chunk, rows in product(args.model, args.format, args.chunk, args.rows):
        record = measure(model, form, rows, chunk)
        if record is None:
            print(f"{model:14} {form} rows {rows:2}: the kernel does not take them")
            continue
        append("kernels_segment", {**about, **record})
        us, read = float(str(record["us"])), float(str(record["read_us"]))
        tiling = f"chunk {chunk} stages {record['stages']}"
        print(f"{model:14} {form} rows {rows:2} {tiling}: {us:.1f} us, read {read:.1f}, {us / read:.2f}")
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
