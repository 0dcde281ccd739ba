"""Kernels on a CUDA card against the time that reading the same bytes takes: CUDA graphs, rotated buffers, medians.

    python -m bench.kernels [--suite gemm …] [--op fp8_linear …] [--backend triton …] [--rows 1 16 …] [--model llama-70b …] [--replays 20]

Each suite is a file in `bench/suites` with `cases(rows=…, models=…)`, an iterator of `KernelCase`: a new file is a new suite. Every
case is one record in `bench/results/kernels.jsonl`; a table comes last. The yardstick runs in the same process, once per size.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from bench.cuda_timing import cache_bytes, copies, microseconds, read_microseconds
from bench.kernel_case import KernelCase, record, table
from bench.schema import append

SUITES = tuple(sorted(path.stem for path in (Path(__file__).parent / "suites").glob("*.py")))


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--suite", nargs="+", choices=SUITES, default=list(SUITES))
    made.add_argument("--op", nargs="+")
    made.add_argument("--backend", nargs="+")
    made.add_argument("--rows", type=int, nargs="+")
    made.add_argument("--model", nargs="+")
    made.add_argument("--replays", type=int, default=20)
    made.add_argument("--tilings", type=Path, help="folder with a measured table; default the cache's, else the package's")
    made.add_argument("--dry", action="store_true", help="write no records")
    return made


def selected(args: argparse.Namespace) -> Iterator[tuple[str, KernelCase]]:
    """(suite, case) of what the arguments ask for."""
    for suite in args.suite:
        options: dict[str, Any] = {"rows": tuple(args.rows)} if args.rows else {}
        if args.model:
            options["models"] = tuple(args.model)
        for case in import_module(f"bench.suites.{suite}").cases(**options):
            if (not args.op or case.op in args.op) and (not args.backend or case.backend in args.backend):
                yield suite, case


def measure(case: KernelCase, replays: int) -> list[float]:
    """Microseconds of a call, over rotated copies of its buffers."""
    turn = [case.make(i) for i in range(copies(case.moved, cache_bytes()))]
    return microseconds(turn, replays)


def main() -> None:
    import torch

    from specdec import ops
    from specdec.models.hub import cache_dir

    args = parser().parse_args()
    ops.load_tilings(args.tilings or cache_dir() / "tilings", torch.cuda.get_device_name())
    reads: dict[int, list[float]] = {}
    records = []
    for suite, case in selected(args):
        size = round(case.moved / 2**16) * 2**16 or case.moved  # sizes within 64 KB share a yardstick
        if size not in reads:
            reads[size] = read_microseconds(size, args.replays)
        try:
            times = measure(case, args.replays)
        except (RuntimeError, torch.OutOfMemoryError) as err:  # one kernel's failure is not the others'
            print(f"{case.op} {case.backend} {case.shape} M={case.rows}: {str(err).splitlines()[0]}", flush=True)
            continue
        records.append(record(suite, case, times, reads[size]))
        if not args.dry:
            append("kernels", records[-1])
    print(table(records) if records else "nothing measured")


if __name__ == "__main__":
    main()
