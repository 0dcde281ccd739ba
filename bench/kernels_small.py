"""Benchmark of the fused small ops and of drafting and verification on a GPU: time a call against a plain read of its bytes.

    python -m bench.kernels_small [--ops coupled_verify tree_build] [--replays 50] [--shapes 2048x8 1024x8]

Appends to `bench/results/kernels_small.jsonl`: per op, backend and shape the median seconds a call (`bench/cuda_timing.py`), the bytes
that the op cannot avoid moving, the read time of as many bytes in the same run, and the ratio of the two. Shapes are those of Llama-3
(hidden 4096 and 8192, vocabulary 128,256), Qwen3-32B heads, GPT-OSS (intermediate 2880) and EAGLE-3 heads (draft vocabulary 32,000).
With --shapes, `coupled_verify` or `draft_topk` in Triton at each of these shapes (their argument `shape`) in place of the usual one.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.cuda_timing import call_seconds, copies, read_microseconds
from bench.schema import append, environment
from specdec import ops
from specdec.kernels.cases import CASES
from specdec.kernels.inputs import chain, grown_pool, random_tree
from specdec.kernels.pad_batch.reference import zeroed
from specdec.rows import RowInfo
from specdec.sampling import SamplingState
from specdec.spec.tree import HostTree, tree_from_lists

VOCAB, DRAFT_VOCAB = 128256, 32000


@dataclass(frozen=True, slots=True)
class Work:
    """One line of the benchmark. make(seed) -> arguments, all on one device; num_bytes: read and written, at least."""

    op: str
    shape: str
    num_bytes: int
    make: Callable[[int], tuple[Any, ...]]


def _generator(device: str, seed: int) -> torch.Generator:
    return torch.Generator(device).manual_seed(seed)


def _logits(rows: int, vocab: int, device: str, seed: int) -> Tensor:
    """Rows with the spread of a language model's: a bulk of width 2 and a few tokens far above."""
    g = _generator(device, seed)
    bulk = torch.randn(rows, vocab, device=device, generator=g) * 2
    return bulk + 6 * torch.randn(rows, vocab, device=device, generator=g).clamp(min=3.0).sub(3.0)


def verify_work(device: str, vocab: int = VOCAB) -> Iterator[Work]:
    """64 greedy rows, a 64-node tree of 8 depths, 64 independent rows, and one."""
    for name, rows, depths in (("greedy", 64, 0), ("tree of 8 depths", 64, 8), ("independent", 64, 64), ("one", 1, 1)):

        def make(seed: int, rows: int = rows, depths: int = depths) -> tuple[Any, ...]:
            index = torch.arange(rows, device=device)
            noisy = torch.ones(1, dtype=torch.bool, device=device) if depths else None
            one = torch.zeros(1, dtype=torch.int64, device=device)  # request slot
            tables = torch.ones(1, device=device), one + seed, one, one, noisy
            return _logits(rows, vocab, device, seed), index * 0, index % max(depths, 1), *tables, 0

        yield Work("coupled_verify", f"{name} {rows}x{vocab}", 4 * rows * vocab, make)


def cut_work(device: str, vocab: int = VOCAB) -> Iterator[Work]:
    for rows in (1, 64):

        def make(seed: int, rows: int = rows) -> tuple[Any, ...]:
            scores = _logits(rows, vocab, device, seed)
            return scores.log_softmax(-1), scores, torch.full((rows,), 0.95, device=device)

        yield Work("mass_cut", f"top_p {rows}x{vocab}", (4 + 4 + 1) * rows * vocab, make)


def row_work(device: str, rows: tuple[int, ...] = (1, 16, 64, 512), hidden: int = 8192, inner: int = 28672) -> Iterator[Work]:
    """Norms and activations in bfloat16."""

    def matrix(seed: int, *shape: int) -> Tensor:
        return torch.randn(*shape, device=device, generator=_generator(device, seed)).bfloat16()

    for t in rows:
        size = t * hidden
        yield Work("rms_norm", f"{t}x{hidden}", 4 * size, lambda s, t=t: (matrix(s, t, hidden), matrix(1, hidden), 1e-5))
        yield Work("rms_norm_fp8", f"{t}x{hidden}", 3 * size, lambda s, t=t: (matrix(s, t, hidden), matrix(1, hidden), 1e-5))
        two = lambda s, t=t: (matrix(s, t, hidden), matrix(s + 1, t, hidden), matrix(1, hidden), 1e-5)  # noqa: E731
        yield Work("add_rms_norm", f"{t}x{hidden}", 8 * size, two)
        yield Work("add_rms_norm_fp8", f"{t}x{hidden}", 7 * size, two)
        yield Work("silu_mul", f"{t}x{inner}", 6 * t * inner, lambda s, t=t: (matrix(s, t, 2 * inner),))
        yield Work("silu_mul_fp8", f"{t}x{inner}", 5 * t * inner, lambda s, t=t: (matrix(s, t, 2 * inner),))
        yield Work("clamped_swiglu", f"{t}x2880", 6 * t * 2880, lambda s, t=t: (matrix(s, t, 5760), 1.702, 7.0))


def rope_work(device: str, rows: tuple[int, ...] = (1, 64), heads: int = 64, kv: int = 8, hd: int = 128) -> Iterator[Work]:
    """RoPE and the KV write, alone and with head norms; Qwen3-32B."""
    for t in rows:

        def make(seed: int, t: int = t) -> tuple[Any, ...]:
            qkv = torch.randn(t, (heads + 2 * kv) * hd, device=device, generator=_generator(device, seed)).bfloat16()
            angle = torch.rand(4096, hd // 2, device=device)
            caches = (torch.zeros(64, 16, kv, hd, dtype=torch.bfloat16, device=device) for _ in range(2))
            place = torch.arange(t, device=device)
            return qkv, place + 100, angle.cos(), angle.sin(), *caches, place * 3

        def normed(seed: int, make: Callable[[int], tuple[Any, ...]] = make) -> tuple[Any, ...]:
            qkv, *rest = make(seed)
            return qkv, torch.ones_like(qkv[0, :hd]), torch.ones_like(qkv[0, :hd]), 1e-6, *rest

        size = 4 * t * (heads + 2 * kv) * hd
        yield Work("rope_write_kv", f"{t}x{heads}/{kv}x{hd}", size, make)
        yield Work("norm_rope_write_kv", f"{t}x{heads}/{kv}x{hd}", size, normed)


def draft_work(device: str, vocab: int = DRAFT_VOCAB, hidden: int = 4096) -> Iterator[Work]:
    """A head's output layer with candidates, and the tree of a beam of 10, 8 deep."""
    for rows in (1, 10, 80):

        def make(seed: int, rows: int = rows) -> tuple[Any, ...]:
            g = _generator(device, seed)
            index = torch.arange(rows, device=device)
            weight = (torch.randn(vocab, hidden, device=device, generator=g) * hidden**-0.5).bfloat16()
            x = torch.randn(rows, hidden, device=device, generator=g).bfloat16()
            noisy = torch.ones(rows, dtype=torch.bool, device=device)
            return (
                x,
                weight,
                torch.ones(rows, device=device),
                torch.arange(vocab, device=device) * 4,
                index,
                index,
                index,
                noisy,
                0,
                0.7,
                10,
            )

        yield Work("draft_topk", f"{rows}x{vocab}x{hidden}, 10", 2 * vocab * hidden, make)
    for batch in (1, 32):

        def pool(seed: int, batch: int = batch) -> tuple[Any, ...]:
            columns = (t.to(device) for t in grown_pool(batch, 8, 10, 10, seed))
            return *columns, torch.arange(batch, device=device), torch.full((batch,), 64, device=device), 64, 8

        yield Work("tree_build", f"{batch} of 64 nodes", batch * (710 * 20 + 64 * (5 * 8 + 4 + 64)), pool)


def cache_work(device: str, layers: int = 32, kv: int = 8, hd: int = 128, hidden: int = 8192) -> Iterator[Work]:
    """What an accepted path of a tree moves in all layers of Llama-8B at once; activations to e4m3; routing of Qwen3-30B-A3B."""
    for batch in (1, 32):

        def moves(seed: int, batch: int = batch) -> tuple[Any, ...]:
            g = _generator(device, seed)
            sides = [[torch.randn(4 * batch, 16, kv, hd, device=device, generator=g).bfloat16() for _ in range(layers)] for _ in range(2)]
            path = torch.arange(5, device=device)  # nodes 8, 16, … of a tree of 64, moved to the slots of a chain
            first = torch.arange(batch, device=device)[:, None] * 64
            return *sides, (first + 8 * (path + 1)).flatten(), (first + path + 1).flatten()

        yield Work("move_kv", f"{batch} paths of 5, {layers} layers", 2 * 2 * layers * 5 * batch * kv * hd * 2, moves)
    for t in (1, 16, 64, 512):

        def rows(seed: int, t: int = t) -> tuple[Any, ...]:
            return (torch.randn(t, hidden, device=device, generator=_generator(device, seed)).bfloat16(),)

        def router(seed: int, t: int = t) -> tuple[Any, ...]:
            return torch.randn(t, 128, device=device, generator=_generator(device, seed)), 8, True

        yield Work("quantize_fp8", f"{t}x{hidden}", 3 * t * hidden, rows)
        yield Work("moe_route", f"{t}x128, 8", t * (4 * 128 + 8 * 8), router)


def walk_work(device: str) -> Iterator[Work]:
    """The accept walk of a chain of 8 and of trees of 64 nodes, whose path of first children is right to its end."""
    for batch, nodes in ((1, 8), (1, 64), (32, 64)):

        def make(seed: int, batch: int = batch, nodes: int = nodes) -> tuple[Any, ...]:
            trees: list[HostTree] = []
            following: list[int] = []
            for b in range(batch):
                parents = chain(nodes) if nodes == 8 else random_tree(nodes, seed * batch + b)
                tokens = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(seed * batch + b))[:nodes].tolist()
                trees.append((tokens, parents, None))
                following += [tokens[parents.index(node)] if node in parents else VOCAB for node in range(nodes)]
            sampling = SamplingState(batch, VOCAB, device=device)
            sampling.max_total.fill_(1 << 20)
            rows = RowInfo(tree_from_lists(trees), list(range(batch)), torch.device(device))
            return torch.tensor(following, device=device), None, rows, sampling

        kind = "a chain" if nodes == 8 else "trees"
        yield Work("tree_walk", f"{kind} of {nodes}, batch {batch}", batch * nodes * 4 * 8, make)


def layout_work(device: str, width: int = 12288, blocks: int = 512) -> Iterator[Work]:
    """What a step lays out around the target's pass: chains of 4 of one sequence and of 32, over 8k of context; three taps of Llama-8B."""
    for batch in (1, 32):
        yield from _layouts(device, batch, 4, width, blocks)


def _layouts(device: str, batch: int, nodes: int, width: int, blocks: int) -> Iterator[Work]:
    rows, size = batch * nodes, f"{batch} chains of {nodes}"
    tables = torch.zeros((1, batch, blocks), dtype=torch.int32, device=device)
    slots, roots = torch.arange(batch, device=device), torch.arange(0, rows, nodes, device=device)
    lengths, whole = torch.full((batch,), 8 * blocks, device=device), torch.full((batch,), nodes, device=device)

    def numbers(seed: int, *shape: int) -> Tensor:
        return torch.randint(1, 1000, shape, device=device, generator=_generator(device, seed))

    def layout(seed: int) -> tuple[Any, ...]:
        tokens = numbers(seed, batch, nodes)
        return tokens, tokens % nodes, whole, lengths, slots, tables, 16

    def compaction(seed: int) -> tuple[Any, ...]:
        return numbers(seed, batch, nodes - 1) % nodes, whole - 1, whole, lengths, slots, tables, 16

    def pad(seed: int) -> tuple[Any, ...]:
        own, given = (zeroed(rows, batch, 1, blocks, torch.device(device), first_key=False) for _ in range(2))
        return (numbers(seed, rows), *own[1:]), (numbers(seed, rows), *given[1:])

    def pairs(seed: int) -> tuple[Any, ...]:
        taps = torch.randn((rows, width), device=device, generator=_generator(device, seed)).bfloat16()
        own = numbers(seed, batch, nodes + 1), torch.zeros((batch, nodes, width), dtype=taps.dtype, device=device)
        return *own, numbers(seed, batch, nodes), whole, numbers(seed, batch, nodes - 1) % nodes, taps, roots, None

    yield Work("tree_layout", size, rows * 8 * 5, layout)
    yield Work("compaction_slots", size, batch * (nodes - 1) * 8 * 3, compaction)
    yield Work("pad_batch", size, 2 * (rows * 8 * 4 + 4 * batch * blocks), pad)
    yield Work("gather_pairs", size, 2 * 2 * rows * width, pairs)


def recorded_work(device: str) -> Iterator[Work]:
    """What a recorded draft does besides its head's passes and races, in the shapes of its tests: launches, not bytes."""
    for op in ("draft_layout", "accepted_pairs", "draft_grow"):
        for case in CASES[op]():
            tensors = [part for part in _tensors(case.args) if part.numel()]
            if len(tensors[0]):
                yield Work(op, case.name, sum(part.nbytes for part in tensors), lambda seed, args=case.args: _copied(args, device))


def _tensors(value: Any) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for part in value:
            yield from _tensors(part)


def _copied(value: Any, device: str) -> Any:
    if isinstance(value, tuple):
        return tuple(_copied(part, device) for part in value)
    return value.to(device, copy=True) if isinstance(value, Tensor) else value


GROUPS: tuple[Callable[[str], Iterator[Work]], ...] = (
    *(verify_work, cut_work, row_work, rope_work, draft_work, cache_work, walk_work, layout_work, recorded_work),
)


def record(work: Work, backend: str, seconds: list[float], read: float) -> dict[str, Any]:
    """What is appended for one line; times in microseconds."""
    median = statistics.median(seconds)
    return {
        "op": work.op,
        "backend": backend,
        "shape": work.shape,
        "bytes": work.num_bytes,
        "us": round(median * 1e6, 2),
        "us_min": round(min(seconds) * 1e6, 2),
        "read_us": round(read * 1e6, 2),
        "over_read": round(median / read, 3),
        "GB_per_s": round(work.num_bytes / median / 1e9, 1),
        "replays": len(seconds),
    }


def measure(work: Work, backend: str, replays: int, cache_bytes: int, tile: str | None) -> dict[str, Any]:
    """One line measured. Needs a CUDA device."""
    count = copies(work.num_bytes, cache_bytes)
    fn = ops.TABLE.ops[work.op].find(backend).fn
    if tile is not None:
        fn = partial(fn, shape=tuple(int(size) for size in tile.split("x")))
    sets = [work.make(seed) for seed in range(count)]
    took = call_seconds([partial(fn, *args) for args in sets], replays)
    line = record(work, backend, took, statistics.median(read_microseconds(work.num_bytes, replays)) * 1e-6)
    return line if tile is None else line | {"tile": tile}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", nargs="+", help="default: all")
    parser.add_argument("--backend", default="triton")
    parser.add_argument("--replays", type=int, default=50)
    parser.add_argument("--shapes", nargs="+", help="of the kernel of one op, sizes with x between them")
    parser.add_argument("--dry", action="store_true", help="print, append nothing")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    cache_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    for group in GROUPS:
        for work in group("cuda"):
            for tile in args.shapes or [None]:
                if args.ops is None or work.op in args.ops:
                    line = measure(work, args.backend, args.replays, cache_bytes, tile)
                    print(json.dumps(line), flush=True)
                    if not args.dry:
                        append("kernels_small", {**environment(), **line})


if __name__ == "__main__":
    main()
