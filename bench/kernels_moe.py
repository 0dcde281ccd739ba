"""A mixture-of-experts layer against the time it takes to read the experts it touches.

    python -m bench.kernels_moe [--model a3b-fp8 gpt-oss-120b] [--tokens 1 4 8 32 64] [--calls 16] [--repeats 30] [--plan usual]

A call is routing (without the router's product) and experts, as the engine makes it: three launches for few tokens, else five. `--calls`
of them with different random routings, hence different experts, are one CUDA graph, so that what a call reads is not in L2 from the
call before; a call's time is the graph's over their number. The yardstick is a plain read, in the same kind of graph, of as many bytes as
the distinct experts of the same routings have, weights, scales and biases, as a checkpoint stores them (records without `plan`: of no more
than gate|up of all experts has, too few at many tokens). `--plan` names other ways to run the experts, to choose from (`PLANS`). Before
it is timed, every case is compared with the reference. Records: `bench/results/kernels_moe.jsonl`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench import schema
from bench.cuda_timing import call_seconds
from bench.read_kernel import programs
from bench.read_kernel import read as read_words
from specdec import ops
from specdec.kernels.fp8_linear.weight import BLOCK, Fp8Weight
from specdec.kernels.moe_experts.weight import Experts, ExpertWeight, storage
from specdec.kernels.mxfp4.weight import BLOCK as GROUP
from specdec.kernels.mxfp4.weight import Mxfp4Weight

TARGET = 1.4  # times the read time, issue 4
PLANS: dict[str, dict[str, Any]] = {
    "usual": {},
    "early": {"early": True},
    "late": {"early": False},
    "rows16": {"rows": 16},
    "stages3": {"stages": 3},
    "stages5": {"stages": 5},
    "tall": {"features": 128, "stages": 3},
    "whole": {"splits": (1, 1)},
    "fixed": {"rows": 16, "features": 64, "stages": 4, "splits": (1, 1)},
}
"""What is changed of the plan that the kernel would choose (`Plan`); "fixed" is deterministic mode's."""

Experting = Callable[[Tensor, Tensor, Tensor, Experts], Tensor]


@dataclass(frozen=True, slots=True)
class Shape:
    """One layer of a model. storage: "fp8" (blocks of 128 × 128) or "mxfp4" (with biases and the clamped activation)."""

    experts: int
    per_token: int
    hidden: int
    inner: int
    storage: str


MODELS = {
    "a3b-fp8": Shape(128, 8, 2048, 768, "fp8"),
    "gpt-oss-20b": Shape(32, 4, 2880, 2880, "mxfp4"),
    "gpt-oss-120b": Shape(128, 4, 2880, 2880, "mxfp4"),
}


def make_experts(shape: Shape, device: torch.device) -> Experts:
    """Random weights of the size trained ones have, bfloat16 biases."""

    def weight(rows: int, columns: int) -> ExpertWeight:
        if shape.storage == "mxfp4":
            data = torch.randint(0, 256, (shape.experts, rows, columns // 2), dtype=torch.uint8, device=device)
            return Mxfp4Weight(data, torch.randint(117, 121, (shape.experts, rows, columns // GROUP), dtype=torch.uint8, device=device))
        data = torch.randint(0, 0x7F, (shape.experts, rows, columns), dtype=torch.uint8, device=device)  # below the NaN, then a sign
        data |= torch.randint(0, 2, data.shape, dtype=torch.uint8, device=device) << 7
        blocks = shape.experts, -(-rows // BLOCK), -(-columns // BLOCK)
        return Fp8Weight(
            data.view(torch.float8_e4m3fn), (torch.rand(blocks, device=device) + 0.5) * 0.01 * columns**-0.5
        )  # the codes are about 100

    gate_up, down = weight(2 * shape.inner, shape.hidden), weight(shape.hidden, shape.inner)
    if shape.storage == "fp8":
        return Experts(gate_up, down)
    biases = [torch.randn(shape.experts, n, device=device).bfloat16() * 0.1 for n in (2 * shape.inner, shape.hidden)]
    return Experts(gate_up, down, biases[0], biases[1], limit=7.0, alpha=1.702)


def bytes_an_expert(experts: Experts) -> int:
    """Of weights, scales and biases."""
    biases = [b for b in (experts.gate_up_bias, experts.down_bias) if b is not None]
    return (experts.nbytes + sum(b.nbytes for b in biases)) // experts.count


def routings(shape: Shape, tokens: int, calls: int, device: torch.device) -> list[Tensor]:
    """Random logits [tokens, E] per call: every expert as likely as any other."""
    return [torch.randn(tokens, shape.experts, device=device) for _ in range(calls)]


def hit(logits: Tensor, per_token: int) -> int:
    """How many distinct experts a call touches."""
    return int(ops.moe_route(logits, per_token, True)[0].unique().numel())


def planned(name: str) -> Experting:
    """The experts' kernel by the plan of that name."""
    if not PLANS[name]:
        return ops.moe_experts
    from specdec.kernels.moe_experts import triton

    def call(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
        return triton.run(x, ids, weights, experts, replace(triton.plan(ids, experts), **PLANS[name]))

    return call


def run(x: Tensor, logits: Tensor, shape: Shape, experts: Experts, call: Experting) -> Tensor:
    ids, weights = ops.moe_route(logits, shape.per_token, True)
    return call(x, ids, weights, experts)


def error(x: Tensor, logits: Tensor, shape: Shape, experts: Experts, call: Experting) -> float:
    """Largest difference from the reference, over its largest value."""
    found = run(x, logits, shape, experts, call).float()
    with ops.override("moe_route", "reference"), ops.override("moe_experts", "reference"):
        expected = run(x, logits, shape, experts, ops.moe_experts).float()
    return float((found - expected).abs().max() / expected.abs().max())


def read(weight: Tensor, start: int, size: int) -> int:
    """Load `size` bytes of the weight from about byte `start` on, and again from its start where it is smaller; the bytes loaded."""
    words = weight.view(torch.int32).flatten()
    total = left = size // 4
    while left:
        count = min(left, words.numel())
        first = min(start // 4, words.numel() - count) // 32 * 32
        read_words(words[first : first + count], torch.empty(programs(count), dtype=torch.int32, device=words.device))
        left, start = left - count, 0
    return total * 4


def record(
    model: str, tokens: int, plan: str, hits: list[int], per_expert: int, seconds: list[float], read_seconds: list[float]
) -> dict[str, Any]:
    """The record of one case; seconds of whole graphs of len(hits) calls."""
    calls, touched = len(hits), sum(hits) * per_expert / len(hits)
    took, read = (schema.quantiles([s / calls * 1e6 for s in values]) for values in (seconds, read_seconds))
    ratio = took["p50"] / read["p50"]
    return {
        "bench": "kernels_moe",
        "model": model,
        "tokens": tokens,
        "plan": plan,
        "experts_hit": sum(hits) / calls,
        "bytes": round(touched),
        "us": took,
        "read_us": read,
        "GB_per_s": touched / took["p50"] / 1e3,
        "ratio": ratio,
        "target": TARGET,
        "met": ratio <= TARGET,
    }


def measure(
    model: str, tokens: int, calls: int, repeats: int, experts: Experts, per_expert: int, plans: list[str]
) -> Iterator[dict[str, Any]]:
    """One case on the current CUDA device, by each of the plans. per_expert: bytes."""
    shape, device = MODELS[model], torch.device("cuda")
    x = torch.randn(tokens, shape.hidden, device=device).bfloat16()
    choices = routings(shape, tokens, calls, device)
    hits = [hit(logits, shape.per_token) for logits in choices]
    offsets = [sum(hits[:i]) * per_expert for i in range(calls)]
    weight = storage(experts.gate_up)[0]
    reads = [(offset % weight.nbytes, count * per_expert) for offset, count in zip(offsets, hits, strict=True)]
    read_took = [s * calls for s in call_seconds([partial(read, weight, *where) for where in reads], repeats)]
    for plan in plans:
        call = planned(plan)
        worst = error(x, choices[0], shape, experts, call)
        took = [s * calls for s in call_seconds([partial(run, x, logits, shape, experts, call) for logits in choices], repeats)]
        found = record(model, tokens, plan, hits, per_expert, took, read_took)
        yield found | {"error": worst, "calls": calls} | schema.environment()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", nargs="+", choices=MODELS, default=["a3b-fp8", "gpt-oss-120b"])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 8, 32, 64])
    parser.add_argument("--calls", type=int, default=16)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--plan", nargs="+", choices=PLANS, default=["usual"])
    parser.add_argument("--dry", action="store_true", help="write no records")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("kernels_moe.py needs a CUDA device")
    for model in args.model:
        experts = make_experts(MODELS[model], torch.device("cuda"))
        per_expert = bytes_an_expert(experts)
        experts = ops.prepare_experts(experts)
        for tokens in args.tokens:
            for found in measure(model, tokens, args.calls, args.repeats, experts, per_expert, args.plan):
                if not args.dry:
                    schema.append("kernels_moe", found)
                print(
                    f"{model} {tokens:3} tokens, {found['plan']}: {found['us']['p50']:7.1f} µs, {found['ratio']:.2f} × read, "
                    f"error {found['error']:.1e}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
