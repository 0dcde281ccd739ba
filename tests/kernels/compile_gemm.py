"""Compiles the GEMMs at every tiling of the lists for a card that need not be there: `python compile_gemm.py CAPABILITY [usual]`.

As `compile_triton.py`, whose trick it uses. Prints JSON: per launch, registers and stack bytes a thread (spills live on the stack) and
shared memory a program. "usual": only what runs unmeasured.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import triton
from compile_triton import compiling

from specdec.kernels.fp8_linear.cases import random_fp8
from specdec.kernels.int4_linear.cases import random_int4
from specdec.kernels.int4_linear.planes import pack_planes
from specdec.kernels.tilings import BUCKETS, CANDIDATES, FIXED, Choice, Table, Tiling, usual
from specdec.kernels.triton_table import BACKENDS

N, K = 512, 1024
BF16 = torch.bfloat16


def calls(tiling: Tiling) -> Iterator[tuple[str, tuple[Any, ...]]]:
    """(name in the lists, arguments): as models call them, and of scales inside the sum the kinds that cost the most registers."""
    x = torch.zeros(tiling.rows, K, dtype=BF16)
    q, scale = torch.zeros(tiling.rows, K, dtype=torch.float8_e4m3fn), torch.zeros(tiling.rows)
    groups = torch.zeros(tiling.rows, K // 128)
    yield "dense_linear", (x, torch.zeros(N, K, dtype=BF16))
    yield "fp8_linear", (x, random_fp8(N, K, "channel"))
    yield "fp8_linear inner", (x, random_fp8(N, K, "block"))
    yield "fp8_fp8_linear", (q, scale, random_fp8(N, K, "channel"), BF16)
    yield "fp8_fp8_linear inner", (q, groups, random_fp8(N, K, "block"), BF16)
    for name, group in (("int4_linear", 128), ("int4_linear inner", 32)):
        yield name, (x, pack_planes(random_int4(N, K, group, symmetric=False, dtype=BF16)))


def resources(kernel: Any) -> dict[str, int]:
    """Registers and stack of a compiled kernel, from its binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"REG:(\d+) STACK:(\d+)", text)
    assert found, text
    return {"registers": int(found[1]), "stack": int(found[2]), "shared": kernel.metadata.shared}


def compile_all(only_usual: bool, kernels: list[tuple[str, Any]]) -> dict[str, dict[str, int]]:
    """Per launch its resources. kernels: where `compiling` puts what it compiles."""
    found: dict[str, dict[str, int]] = {}
    for op, candidates in CANDIDATES.items():
        tilings = {usual(op, size, N, K) for size in (FIXED, *BUCKETS)} if only_usual else {replace(t, splits=2) for t in candidates}
        for tiling in sorted(tilings, key=str):
            args = next(args for name, args in calls(tiling) if name == op)
            with forced(tiling):
                BACKENDS[op.split()[0]].fn(*args)
            found[f"{op}: {tiling}"] = resources(kernels[-1][1])
    return found


class forced:
    """The tables say `tiling` for every shape within the block."""

    def __init__(self, tiling: Tiling):
        self.tiling = tiling

    def __enter__(self) -> None:
        self.before = Table.choice
        Table.choice = lambda *_: Choice("triton", self.tiling, 0.0)

    def __exit__(self, *_: object) -> None:
        Table.choice = self.before


if __name__ == "__main__":
    compiled: list[tuple[str, Any]] = []
    compiling(int(sys.argv[1]), compiled)
    print(json.dumps(compile_all("usual" in sys.argv, compiled)))
