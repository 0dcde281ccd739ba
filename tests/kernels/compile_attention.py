"""Compiles the attention kernels at the sizes that matter for a card that need not be there: `python compile_attention.py CAPABILITY`.

Prints JSON: per kernel and call shared memory, registers a thread, and bytes of registers spilled to memory (from the cubin's own notes).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton

from specdec.kernels.inputs import Rows, attention_batch, chain
from specdec.kernels.kv_fp8 import FP8
from specdec.kernels.tree_attention import triton as free
from specdec.kernels.tree_attention import triton_fixed as fixed
from tests.kernels.compile_triton import compiling

MODELS = {"group 4": (32, 8, 128), "group 8": (64, 8, 128), "group 3": (9, 3, 64)}  # heads, KV heads, head size
NODES = (1, 8, 64)
CARDS = {90: (232448, 132), 80: (166912, 108)}  # bytes of shared memory a program may have, processors


def calls() -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """(name, arguments, options): decode and trees over a context of 32 blocks, prefill, every model, bf16 and FP8 caches."""
    for model, (heads, kv_heads, hd) in MODELS.items():
        for kv in (torch.bfloat16, FP8):
            for nodes in NODES:
                tree = tuple(chain(nodes)) if nodes > 1 else None
                yield f"{model}, {kv}, {nodes} nodes", *_call([Rows(500, tree=tree)], heads, kv_heads, hd, kv)
            yield f"{model}, {kv}, prefill", *_call([Rows(0, 300)], heads, kv_heads, hd, kv)
    window, kwargs = _call([Rows(500, tree=tuple(chain(16)))], 64, 8, 64, torch.bfloat16)
    yield "window and sinks", window, kwargs | {"window": 128, "sinks": torch.zeros(64, dtype=torch.bfloat16)}


def _call(rows: list[Rows], heads: int, kv_heads: int, hd: int, kv: torch.dtype) -> tuple[tuple[Any, ...], dict[str, Any]]:
    batch = attention_batch(rows, heads, kv_heads, hd, 16)
    batch["q"] = batch["q"].bfloat16()
    batch |= {name: batch[name].nan_to_num().to(kv) for name in ("k_cache", "v_cache")}
    return tuple(batch.values()), {"scale": hd**-0.5}


def resources(cubin: bytes) -> dict[str, int]:
    """Registers and stack bytes (spills live there) that the compiled kernel asks for."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        text = subprocess.run([tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True).stdout
    return {name.lower(): int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", text)}


if __name__ == "__main__":
    kernels: list[tuple[str, Any]] = []
    compiling(int(sys.argv[1]), kernels)
    for module in (free, fixed):
        module.card = lambda device: CARDS[int(sys.argv[1])]
    report = {}
    for name, args, kwargs in calls():
        for backend, fn in (("triton", free.tree_attention), ("triton_fixed", fixed.tree_attention)):
            del kernels[:]
            fn(*args, **kwargs)
            for kernel_name, kernel in kernels:
                report[f"{backend}, {name}: {kernel_name}"] = {"shared": kernel.metadata.shared, **resources(kernel.asm["cubin"])}
    print(json.dumps(report))
