"""Tree attention on the GPU against the time to read its keys and values: one JSON record a cell in results/kernels-attention.jsonl.

    python bench/kernels_attention.py [--contexts 8192 32768] [--batch 1 8] [--nodes 1 8 32 64] [--group 4 8] [--kv bf16 fp8]
        [--cut chosen merged=0 least=1,alone=0 keys=64,stages=4]

A call is one layer with 8 KV heads of 128. Calls run inside a CUDA graph, over as many copies of the cache as make them read past L2, and
the time of a call is that of a replay over its calls: median, with the 20th and 80th percentile. Beside it, in the same run, a kernel
that only reads the same bytes. `bound` is the larger of that and of the products at 450 TFLOP/s; the aim is 1.25 times `bound`, and 1.15
times the one-node call where nodes × group ≤ 64. `--cut` times other launches beside the chosen one: fields of `tiling.Tiling`.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from bench import schema
from specdec import ops
from specdec.kernels.inputs import ancestor_words, chain, depths, random_tree
from specdec.kernels.kv_fp8 import FP8
from specdec.kernels.tree_attention import tiling

KV_HEADS, HEAD = 8, 128
RATE = 450e12  # attention products a second that the bound assumes
MOST_NODES = 64  # of a tree; more rows a sequence are a chunk of its prompt
PAST_L2 = 4  # copies of the cache together, in units of L2
KV_DTYPES = {"bf16": torch.bfloat16, "fp8": FP8}


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement: `batch` sequences of `context` committed keys, each with a tree of `nodes` nodes (1 = plain decoding, more than
    64 = a chunk of as many prompt tokens)."""

    context: int
    batch: int
    nodes: int
    group: int
    kv: str
    block: int = 16

    @property
    def kv_bytes(self) -> int:
        """Bytes of K and V that a call must read."""
        return 2 * self.batch * (self.context + self.nodes) * KV_HEADS * HEAD * KV_DTYPES[self.kv].itemsize

    @property
    def operations(self) -> int:
        """Multiplications and additions of both products; a tree's keys count for every node, a chunk's for the rows that see them."""
        own = self.nodes if self.is_tree else (self.nodes + 1) // 2
        return 4 * self.batch * self.nodes * self.group * KV_HEADS * HEAD * (self.context + own)

    @property
    def is_tree(self) -> bool:
        """More nodes than a word has bits are a chunk of a prompt, as is none of them decoding."""
        return 1 < self.nodes <= MOST_NODES

    def copies(self, l2_bytes: int) -> int:
        """Caches to rotate over."""
        return max(2, -(-PAST_L2 * l2_bytes // self.kv_bytes))


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    """All combinations asked for, larger trees after smaller ones of the same cell."""
    for context, batch, group, kv, nodes in itertools.product(args.contexts, args.batch, args.group, args.kv, args.nodes):
        yield Cell(context, batch, nodes, group, kv, args.block)


def inputs(cell: Cell, copies: int, device: str) -> tuple[Tensor, dict[str, Tensor]]:
    """(caches [copies, 2, NB, block, 8, 128], the other arguments of `tree_attention`). Blocks are shuffled; trees are random."""
    g = torch.Generator(device).manual_seed(0)
    width = -(-(cell.context + cell.nodes) // cell.block)
    blocks = cell.batch * width
    caches = torch.empty(copies, 2, blocks, cell.block, KV_HEADS, HEAD, dtype=KV_DTYPES[cell.kv], device=device)
    for cache in caches.flatten(0, 1):
        cache.copy_(torch.randn(cache.shape, generator=g, device=device))
    parents = random_tree(cell.nodes, 0) if cell.is_tree else chain(cell.nodes)
    words = ancestor_words(parents) if cell.is_tree else [0] * cell.nodes
    rows = cell.batch * cell.nodes
    counts = {"dtype": torch.int32, "device": device}
    return caches, {
        "q": torch.randn(rows, KV_HEADS * cell.group, HEAD, generator=g, device=device).bfloat16(),
        "block_table": torch.randperm(blocks, generator=g, device=device).view(cell.batch, width).int(),
        "cu_query": torch.arange(0, rows + 1, cell.nodes, **counts),
        "ctx_lens": torch.full((cell.batch,), cell.context, **counts),
        "tree_len": torch.full((cell.batch,), cell.nodes if cell.is_tree else 0, **counts),
        "tree_mask": torch.tensor(words, device=device).repeat(cell.batch),
        "positions": torch.tensor([cell.context + d for d in depths(parents)], device=device).repeat(cell.batch),
    }


def attend(caches: Tensor, rest: dict[str, Tensor], backend: str) -> Tensor:
    """One call of `backend` on one copy [2, NB, …]."""
    q, *others = rest.values()
    op = "prefill_attention" if backend == "flash" else "tree_attention"
    with ops.override(op, backend):
        return getattr(ops, op)(q, caches[0], caches[1], *others, scale=HEAD**-0.5, kv_scales=(0.5, 0.5))


@contextmanager
def cut_as(changes: str) -> Iterator[None]:
    """The tilings chosen within, with some fields changed: `keys=64,stages=4`."""
    chosen = tiling.fast
    fields = {} if changes == "chosen" else {name: int(value) for name, value in (part.split("=") for part in changes.split(","))}

    def changed(*args: Any, **kwargs: Any) -> tiling.Tiling:
        return replace(chosen(*args, **kwargs), **fields)

    tiling.fast = changed
    try:
        yield
    finally:
        tiling.fast = chosen


def judged(cell: Cell, times: list[float], read_times: list[float]) -> dict[str, float]:
    """What the times mean: microseconds, the bound, the ratio to it, rates."""
    seconds, read = statistics.median(times), statistics.median(read_times)
    bound = max(read, cell.operations / RATE)
    return {
        **{f"us_{name}": round(value * 1e6, 2) if name != "n" else value for name, value in schema.quantiles(times).items()},
        "read_us": round(read * 1e6, 2),
        "bound_us": round(bound * 1e6, 2),
        "times_bound": round(seconds / bound, 3),
        "GB_per_s": round(cell.kv_bytes / seconds / 1e9, 1),
        "TFLOP_per_s": round(cell.operations / seconds / 1e12, 1),
    }


def measure(cell: Cell, backend: str, repeats: int) -> dict[str, Any]:
    """The record of one cell, environment aside."""
    from bench.cuda_timing import call_seconds
    from bench.read_kernel import programs, read

    copies = cell.copies(torch.cuda.get_device_properties(0).L2_cache_size)
    caches, rest = inputs(cell, copies, "cuda")
    times = call_seconds([lambda c=c: attend(c, rest, backend) for c in caches], repeats)
    words = [c.view(-1).view(torch.int32) for c in caches]
    out = torch.empty(programs(words[0].numel()), dtype=torch.int32, device="cuda")
    read_times = call_seconds([lambda w=w: read(w, out) for w in words], repeats)
    exact = attend(caches[0], rest, "matmul").float()
    error = ((attend(caches[0], rest, backend).float() - exact).abs().max() / exact.abs().max()).item()
    return {
        **asdict(cell),
        "backend": backend,
        "copies": copies,
        **judged(cell, times, read_times),
        "error": error,
        "matched": error < 2e-2,
    }


def line(found: dict[str, Any]) -> str:
    """A record in short."""
    name = " ".join(str(found[field]) for field in ("context", "batch", "nodes", "group", "kv", "backend", "cut"))
    numbers = " ".join(f"{field} {found.get(field)}" for field in ("us_p50", "bound_us", "times_bound", "times_one_node", "matched"))
    return f"{name}: {numbers}"


def arguments() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[8192, 32768])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--nodes", type=int, nargs="+", default=[1, 8, 32, 64], help="more than 64: rows of a prefill chunk")
    parser.add_argument("--group", type=int, nargs="+", default=[4, 8], help="query heads a KV head")
    parser.add_argument("--kv", nargs="+", choices=list(KV_DTYPES), default=list(KV_DTYPES))
    parser.add_argument("--block", type=int, default=16)
    parser.add_argument("--backend", nargs="+", default=["triton"], help="triton, triton_fixed; flash for chunks of prompts")
    parser.add_argument("--cut", nargs="+", default=["chosen"], help="fields of the launch to change, as keys=64,stages=4")
    parser.add_argument("--repeats", type=int, default=50)
    parser.add_argument("--dry", action="store_true", help="write no records")
    return parser


def main() -> None:
    args = arguments().parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    one_node: dict[tuple[Any, ...], float] = {}
    for cell, backend, cut in itertools.product(cells(args), args.backend, args.cut):
        with cut_as(cut):
            found = measure(cell, backend, args.repeats) | {"cut": cut}
        key = (cell.context, cell.batch, cell.group, cell.kv, backend, cut)
        if cell.nodes == 1:
            one_node[key] = found["us_p50"]
        if key in one_node:
            found["times_one_node"] = round(found["us_p50"] / one_node[key], 3)
        if not args.dry:
            schema.append("kernels-attention", {"bench": "kernels-attention", **schema.environment(), **found})
        print(line(found), flush=True)


if __name__ == "__main__":
    main()
