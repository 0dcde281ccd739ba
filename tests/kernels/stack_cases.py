"""Cases of `decoder_stack`: it runs layers, so they are built here and not in `specdec.kernels.cases`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec.kernels.cases import Case, randn
from specdec.kernels.inputs import Rows, attention_batch, chain, generator, random_tree, star
from specdec.kernels.linear.tiles import HEADER, RAW_BYTES
from specdec.layers.attention import Attention
from specdec.layers.decoder import DecoderStack, Layer
from specdec.layers.linear import Linear, RawWeight, make_linear
from specdec.layers.norm import RMSNorm
from specdec.layers.rotary import Rotary
from specdec.models.config import RopeConfig
from specdec.quant.fp8 import to_fp8
from specdec.quant.ggml import GgmlBlocks
from specdec.types import Batch

BLOCK = 16


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a stack. kinds: weight formats of q | k | v, or gate | up, or the first of them alone. windows: one per layer."""

    hidden: int = 96
    inner: int = 160
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 16
    kinds: tuple[str, ...] = ("Q4_1",)
    bias: bool = False
    windows: tuple[int | None, ...] = (None, None)

    @property
    def groups(self) -> list[int]:
        """One KV group per kind of window."""
        order = list(dict.fromkeys(self.windows))
        return [order.index(w) for w in self.windows]


def raw_weight(rows: int, cols: int, kind: str, seed: int) -> RawWeight:
    """Entries that keep the size of their input."""
    if kind in ("F32", "F16", "BF16", "F8"):
        weight = randn(rows, cols, seed=seed, scale=cols**-0.5)
        return to_fp8(weight) if kind == "F8" else weight.to({"F16": torch.float16, "BF16": torch.bfloat16}.get(kind, torch.float32))
    g = generator(seed)
    raw = torch.randint(0, 256, (rows, cols // 32, RAW_BYTES[kind]), dtype=torch.uint8, generator=g)
    size = cols**-0.5 / (64 if kind == "Q8_0" else 5)
    raw[..., : HEADER[kind]] = (torch.randn(rows, cols // 32, HEADER[kind] // 2, generator=g) * size).half().view(torch.uint8)
    return GgmlBlocks(raw.view(rows, -1), kind, (rows, cols))


def linear(s: Shape, rows: tuple[int, ...], cols: int, seed: int) -> Linear:
    shards = [raw_weight(n, cols, s.kinds[i % len(s.kinds)], seed + i) for i, n in enumerate(rows)]
    bias = randn(sum(rows), seed=seed + 7, scale=0.3) if s.bias else None
    # tiles have a fixed order by themselves; without the extension layers are dense and must be told
    return make_linear(shards, bias, device="cpu", dtype=torch.float32, deterministic=True)


def stack(s: Shape) -> DecoderStack:
    """Layers with seeded weights."""
    rotary = Rotary(RopeConfig(), s.head_dim, 400, device=torch.device("cpu"))

    def norm(seed: int) -> RMSNorm:
        return RMSNorm(1.0 + randn(s.hidden, seed=seed, scale=0.1), 1e-5)

    def layer(window: int | None, seed: int) -> Layer:
        kv = s.kv_heads * s.head_dim
        qkv = linear(s, (s.heads * s.head_dim, kv, kv), s.hidden, seed)
        out = linear(s, (s.hidden,), s.heads * s.head_dim, seed + 10)
        attention = Attention(qkv, out, rotary, s.head_dim**-0.5, window)
        gate_up, down = linear(s, (s.inner, s.inner), s.hidden, seed + 20), linear(s, (s.hidden,), s.inner, seed + 30)
        return Layer(norm(seed + 40), attention, norm(seed + 41), gate_up, down)

    return DecoderStack([layer(window, 100 * i) for i, window in enumerate(s.windows)], norm(99))


def arguments(s: Shape, rows: list[Rows], taps: tuple[int, ...] = (), *, padding: int = 0) -> tuple[tuple[object, ...], dict[str, object]]:
    """Arguments for one batch over caches that hold NaN wherever nothing may be read. The last `padding` rows are no sequence's."""
    made = attention_batch(rows, s.heads, s.kv_heads, s.head_dim, BLOCK)
    tokens = sum(r.count for r in rows)
    table = made["block_table"]
    cells = torch.tensor([r.context + i for r in rows for i in range(r.count)], dtype=torch.int64)
    owner = torch.tensor([b for b, r in enumerate(rows) for _ in range(r.count)], dtype=torch.int64)
    slots = table[owner, cells // BLOCK].long() * BLOCK + cells % BLOCK if tokens else cells
    extra = torch.zeros(padding, dtype=torch.int64)
    count = max(s.groups) + 1
    batch = Batch(
        input_ids=torch.zeros(tokens + padding, dtype=torch.int64),
        positions=torch.cat((made["positions"], extra)),
        cu_query=made["cu_query"],
        ctx_lens=made["ctx_lens"],
        tree_len=made["tree_len"],
        tree_mask=torch.cat((made["tree_mask"], extra)),
        block_tables=table.expand(count, -1, -1).contiguous(),
        slot_mapping=torch.cat((slots, extra - 1)).expand(count, -1).contiguous(),
        logit_rows=torch.arange(tokens),
    )
    caches = [(made["k_cache"] + 0.01 * i, made["v_cache"] - 0.01 * i) for i in range(len(s.windows))]
    x: Tensor = randn(tokens + padding, s.hidden, seed=5)
    return (x, stack(s), batch, caches, s.groups), {"taps": taps}


SHAPES = {
    "Q4_1": Shape(),
    "F32, odd sizes": Shape(hidden=100, inner=77, kinds=("F32",)),
    "mixed formats, biases": Shape(kinds=("Q4_1", "Q4_0", "Q8_0"), bias=True),
    "mixed numbers, odd sizes": Shape(hidden=100, inner=77, kinds=("F8", "F16", "BF16"), bias=True),
    "two groups": Shape(windows=(None, 24, 24), kinds=("Q8_0",)),
    "model": Shape(hidden=576, inner=1536, heads=9, kv_heads=3, head_dim=64),
}
BATCHES = {
    "prefill": [Rows(0, 90)],
    "chunk": [Rows(40, 33)],
    "decode": [Rows(100)],
    "chain": [Rows(70, tree=tuple(chain(5)))],
    "tree": [Rows(70, tree=tuple(random_tree(12, 3)))],
    "several": [Rows(0, 3), Rows(63, tree=tuple(random_tree(20, 1))), Rows(31), Rows(1, tree=tuple(star(64))), Rows(15, 2)],
    "nothing": [],
}


def stack_cases() -> Iterator[Case]:
    """Every shape over every batch, with taps; the model's own shape over the small ones."""
    for shape_name, shape in SHAPES.items():
        for batch_name, rows in BATCHES.items():
            if shape_name == "model" and batch_name not in ("decode", "tree"):
                continue
            args, kwargs = arguments(shape, rows, (len(shape.windows), 0, 1), padding=2 if batch_name == "several" else 0)
            yield Case(f"{shape_name}, {batch_name}", args, kwargs)
