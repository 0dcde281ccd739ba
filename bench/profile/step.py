"""Where the time of a decode step goes on a GPU: a Chrome trace, the kernels by time, and the gaps between them.

    python -m bench.profile.step [--model llama-3.1-8b] [--batch 1] [--accept 0.8 0.6] [--head peagle] [--act fp8] [--eager] [--out FILE]

The steps are those of `bench.decode`. Open the trace in ui.perfetto.dev. Needs nothing but torch; its own cost widens the gaps, so a step
is longer here than there, and only the times of kernels can be compared.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from bench.decode import MODELS, config_of, decoding, directory, promising
from bench.dummy_head import HEADS
from specdec.boot import load_target
from specdec.config import ACT_DTYPES


@dataclass(frozen=True, slots=True)
class Span:
    """One kernel, copy or fill on the device, in microseconds."""

    name: str
    begin: float
    end: float


def by_time(spans: Iterable[Span]) -> list[tuple[str, int, float]]:
    """(name, launches, microseconds in all), most first."""
    total: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        total[span.name].append(span.end - span.begin)
    return sorted(((name, len(times), sum(times)) for name, times in total.items()), key=lambda row: -row[2])


def busy(spans: Iterable[Span]) -> tuple[float, float]:
    """(microseconds in which the device did something, microseconds from its first to its last work)."""
    ordered = sorted(spans, key=lambda span: span.begin)
    worked, until = 0.0, ordered[0].begin
    for span in ordered:
        worked += max(0.0, span.end - max(span.begin, until))
        until = max(until, span.end)
    return worked, until - ordered[0].begin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, default="llama-3.1-8b")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--accept", type=float, nargs="*", default=[], help="as in bench.decode")
    parser.add_argument("--head", choices=HEADS, help="as in bench.decode")
    parser.add_argument("--act", choices=ACT_DTYPES, default="auto", help="as in bench.decode")
    parser.add_argument("--eager", action="store_true")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--top", type=int, default=40, help="kernels to print")
    parser.add_argument("--out", type=Path, default=Path("step.json"))
    args = parser.parse_args()
    config = config_of(directory(args.model), args.batch, args.accept, args.eager, act=args.act)
    target = load_target(config)
    if args.head:
        head = args.head, promising(target, args.head, args.accept)
        config = config_of(directory(args.model), args.batch, args.accept, args.eager, head=head, act=args.act)
    engine = decoding(config, target)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as traced:
        for _ in range(args.steps):
            engine.step()
        torch.cuda.synchronize()
    traced.export_chrome_trace(str(args.out))
    device = [event for event in traced.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    spans = [Span(event.name, event.time_range.start, event.time_range.end) for event in device]
    worked, whole = busy(spans)
    for name, launches, spent in by_time(spans)[: args.top]:
        print(f"{spent / args.steps:10.1f} us a step {launches / args.steps:7.1f} launches  {name[:90]}")
    print(f"device busy {worked / args.steps:.0f} of {whole / args.steps:.0f} us a step; trace in {args.out}")


if __name__ == "__main__":
    main()
