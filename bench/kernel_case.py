"""What a suite of kernel benchmarks yields, and what becomes of it: one case is one kernel on one shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from bench.schema import environment, quantiles


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One call to time.

    op, backend: names of `specdec.ops`, or a baseline's. shape: what the numbers stand for, by name (N, K, layer, layout, …).
    rows: M. moved: bytes that the call must read and write at least, each once. flops: arithmetic it must do.
    make: called with a number for each rotated copy, gives a call without arguments on buffers of its own, on the card.
    """

    op: str
    backend: str
    shape: dict[str, Any]
    rows: int
    moved: int
    flops: int
    make: Callable[[int], Callable[[], object]]


def record(suite: str, case: KernelCase, times: Sequence[float], read: Sequence[float]) -> dict[str, Any]:
    """The JSON record of a case. times, read: microseconds of the call, and of reading `moved` bytes in the same run."""
    us, read_us = quantiles(list(times)), quantiles(list(read))
    return {
        "bench": "kernels",
        "suite": suite,
        "op": case.op,
        "backend": case.backend,
        "shape": case.shape,
        "rows": case.rows,
        "bytes": case.moved,
        "flops": case.flops,
        "us": us,
        "read_us": read_us,
        "times_read": us["p50"] / read_us["p50"],
        "GB_per_s": case.moved / us["p50"] / 1e3,
        "TFLOP_per_s": case.flops / us["p50"] / 1e6,
        **environment(),
        **versions(),
    }


def versions() -> dict[str, str | None]:
    """What kernels depend on besides `environment()`."""
    import torch

    try:
        import triton
    except ImportError:
        return {"triton": None, "cuda": torch.version.cuda}
    return {"triton": triton.__version__, "cuda": torch.version.cuda}


def table(records: Sequence[dict[str, Any]]) -> str:
    """For people: a line per shape and backend, a column per number of rows, microseconds and the multiple of the read time."""
    rows = sorted({r["rows"] for r in records})
    lines: dict[tuple[str, str, str], dict[int, str]] = {}
    for r in records:
        shape = " ".join(str(v) for v in r["shape"].values())
        cell = f"{r['us']['p50']:.1f} {r['times_read']:.2f}x"
        lines.setdefault((r["op"], shape, r["backend"]), {})[r["rows"]] = cell
    head = ["op", "shape", "backend", *(f"M={m}" for m in rows)]
    body = [[*key, *(cells.get(m, "") for m in rows)] for key, cells in lines.items()]
    widths = [max(len(line[i]) for line in (head, *body)) for i in range(len(head))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in (head, *body))
