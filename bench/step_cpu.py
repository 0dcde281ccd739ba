"""Milliseconds of a target pass on the CPU: all layers in one compiled call, against op by op or memory in small pages.

    python -m bench.step_cpu [--threads 2] [--context 256] [--repeats 100] [--against by_ops small_pages]

A pass = embedding, layers, logits of M rows (a chain) over `context` cached keys in blocks of their own. The ways alternate call
by call, and the fastest call counts: other work on the machine only ever adds time. cpu_ms: processor time of the cheapest
call, all threads; waiting threads spin, so it is an upper bound of the work.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from unittest.mock import patch

import torch

from specdec import ops
from specdec.cache.kv import KVCache
from specdec.models.load import load_model
from specdec.models.registry import Model
from specdec.types import Batch

BLOCK = 16
CHUNK = 256


def make_cache(model: Model, tokens: int) -> KVCache:
    """Room for one sequence; block 0 stays unused."""
    groups = model.config.kv_groups()
    blocks = -(-tokens // BLOCK) + 1
    return KVCache(
        groups,
        [blocks] * len(groups),
        BLOCK,
        dtype=model.dtype,
        device="cpu",
        layer_group=model.config.layer_group,
        layer_in_group=model.config.layer_in_group,
    )


def rows_at(kv: KVCache, start: int, count: int, *, chain: bool) -> Batch:
    """`count` rows from position `start` on, causal or as a draft chain."""
    positions = torch.arange(start, start + count)
    groups = len(kv.groups)
    words = [(1 << (i + 1)) - 1 for i in range(count)] if chain else [0] * count
    return Batch(
        input_ids=positions % 400,
        positions=positions,
        cu_query=torch.tensor([0, count], dtype=torch.int32),
        ctx_lens=torch.tensor([start], dtype=torch.int32),
        tree_len=torch.tensor([count if chain else 0], dtype=torch.int32),
        tree_mask=torch.tensor(words, dtype=torch.int64),
        block_tables=torch.arange(1, kv.num_blocks[0], dtype=torch.int32).expand(groups, 1, -1).contiguous(),
        slot_mapping=(positions + BLOCK).expand(groups, -1).contiguous(),
        logit_rows=torch.arange(count),
        max_ctx=start,
    )


def fastest(calls: dict[str, Callable[[], object]], repeats: int) -> dict[str, tuple[float, float]]:
    """Per call: least wall and least processor milliseconds, the calls taking turns."""
    best = {name: (float("inf"), float("inf")) for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            wall, cpu = time.perf_counter(), time.process_time()
            call()
            spent = (time.perf_counter() - wall) * 1e3, (time.process_time() - cpu) * 1e3
            best[name] = (min(best[name][0], spent[0]), min(best[name][1], spent[1]))
    return best


class Pass:
    """A model with its cache filled up to `context`, in huge pages or in ordinary ones."""

    def __init__(self, name: str, context: int, rows: int, *, huge: bool = True):
        ordinary = patch("specdec.memory.zeros", lambda shape, dtype, device: torch.zeros(tuple(shape), dtype=dtype, device=device))
        with nullcontext() if huge else ordinary:
            self.model = load_model(name).model
            self.kv = make_cache(self.model, context + rows)
        for start in range(0, context, CHUNK):
            self.model.forward(rows_at(self.kv, start, min(CHUNK, context - start), chain=False), self.kv)

    def __call__(self, batch: Batch) -> torch.Tensor:
        return self.model.logits(self.model.forward(batch, self.kv)[0])

    def by_ops(self, batch: Batch) -> torch.Tensor:
        with ops.override("decoder_stack", "reference"):
            return self(batch)


@torch.inference_mode()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--model", default="smollm2-135m-instruct")
    parser.add_argument("--against", nargs="*", choices=["by_ops", "small_pages"], default=["by_ops"])
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    one_call = Pass(args.model, args.context, max(args.rows))
    ways: dict[str, Callable[[Batch], torch.Tensor]] = {"one_call": one_call}
    if "by_ops" in args.against:
        ways["by_ops"] = one_call.by_ops
    if "small_pages" in args.against:
        ways["small_pages"] = Pass(args.model, args.context, max(args.rows), huge=False)
    for rows in args.rows:
        batch = rows_at(one_call.kv, args.context, rows, chain=rows > 1)
        times = fastest({name: partial(way, batch) for name, way in ways.items()}, args.repeats)
        record = {name: {"ms": round(wall, 2), "cpu_ms": round(cpu, 2)} for name, (wall, cpu) in times.items()}
        load = round(os.getloadavg()[0], 1)
        print(json.dumps({"rows": rows, "threads": args.threads, "context": args.context, **record, "load": load}), flush=True)


if __name__ == "__main__":
    main()
