"""Test cases per op: `CASES[op]()` yields named calls. A new op needs an entry here and one in `tolerances.py`.

Edge rows are part of every list: no rows, one row, sizes that are no multiple of a tile or vector, first and last slot,
-1 slots, trees of 64 nodes as chain and as star, and the shapes of SmolLM2 (H 576, I 1536, 9/3 heads of 64, V 49152).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from specdec.kernels.accepted_pairs import cases as pairs
from specdec.kernels.case import Case, randn
from specdec.kernels.clamped_swiglu import cases as clamped
from specdec.kernels.compaction_slots import cases as compaction
from specdec.kernels.coupled_verify import cases as verify
from specdec.kernels.draft_grow import cases as grow
from specdec.kernels.draft_layout import cases as draft_rows
from specdec.kernels.draft_topk import cases as topk
from specdec.kernels.fp8_linear import cases as fp8
from specdec.kernels.gather_pairs import cases as gather
from specdec.kernels.inputs import Rows, attention_batch, chain, generator, random_tree, star
from specdec.kernels.int4_linear import cases as int4
from specdec.kernels.linear.tiles import FLOATS, HEADER, KINDS, RAW_BYTES, TiledWeight, pack_blocks, pack_dense, pack_fp8
from specdec.kernels.moe_experts import cases as moe
from specdec.kernels.norm_rope import cases as norm_rope
from specdec.kernels.pad_batch import cases as pad
from specdec.kernels.rms_norm_fp8 import cases as norm_fp8
from specdec.kernels.silu_mul_fp8 import cases as silu_fp8
from specdec.kernels.tree_build import cases as build
from specdec.kernels.tree_layout import cases as layout


def random_weight(rows: int, cols: int, kind: str, seed: int = 0) -> TiledWeight:
    """A tiled weight with entries of the size trained weights have."""
    g = generator(seed)
    for dtype, name in FLOATS.items():
        if kind == name:
            return pack_dense((torch.randn(rows, cols, generator=g) * 0.05).to(dtype))
    if kind == "F8":
        numbers = torch.randint(0, 256, (rows, cols), dtype=torch.uint8, generator=g)
        numbers = torch.where(numbers & 0x7F == 0x7F, numbers - 1, numbers)  # what remains are all e4m3 numbers, NaN left out
        return pack_fp8(torch.cat(((torch.randn(rows, 1, generator=g) * 1e-3).view(torch.uint8), numbers), dim=1), cols)
    raw = torch.randint(0, 256, (rows, cols // 32, RAW_BYTES[kind]), dtype=torch.uint8, generator=g)
    scales = (torch.randn(rows, cols // 32, HEADER[kind] // 2, generator=g) * 0.01).half()
    raw[..., : HEADER[kind]] = scales.view(torch.uint8)
    return pack_blocks(raw.view(rows, -1), kind, cols)


def _norms(residual: bool) -> Iterator[Case]:
    for rows, hidden in ((0, 576), (1, 576), (5, 576), (3, 1), (2, 17), (4, 100), (33, 2048), (2, 2880), (2, 4096), (3, 8192)):
        x, weight = randn(rows, hidden, scale=3.0), randn(hidden, seed=1)
        args = (x, randn(rows, hidden, seed=2), weight, 1e-5) if residual else (x, weight, 1e-5)
        yield Case(f"{rows}x{hidden}", args, row_args=(0, 1) if residual else (0,))
    zeros, odd = torch.zeros(2, 64), randn(4, 64)
    odd[0, 3], odd[1, 60], odd[2] = torch.nan, torch.inf, 0.0
    for name, x in (("zeros", zeros), ("NaN, infinity, zeros", odd)):
        yield Case(name, (x, x * 0.5, randn(64), 1e-5) if residual else (x, randn(64), 1e-5), row_args=(0, 1) if residual else (0,))


def _silu() -> Iterator[Case]:
    for rows, inner in ((0, 1536), (1, 1536), (7, 1536), (3, 1), (2, 17), (5, 100), (2, 768), (2, 14336), (2, 28672)):
        yield Case(f"{rows}x{inner}", (randn(rows, 2 * inner, scale=8.0),), row_args=(0,))
    extreme = torch.tensor([[-1e4, -100.0, -88.0, -0.0, 0.0, 88.0, 100.0, 1e4] + [1.0] * 8])
    yield Case("extreme", (extreme,))
    odd = torch.tensor([[torch.nan, torch.inf, 0.0, 1.0, 1.0, -1.0, 1.0, 1.0, torch.nan, 0.0, torch.inf, -torch.inf], [0.5] * 12])
    yield Case("NaN, infinity", (odd,), row_args=(0,))


def _rope() -> Iterator[Case]:
    for rows, heads, kv, hd, slots in (
        (1, 9, 3, 64, [0]),
        (4, 9, 3, 64, [79, -1, 0, 33]),  # last slot of the last block, no write, first slot
        (3, 4, 4, 6, [-1, -1, -1]),
        (0, 2, 1, 16, []),
        (5, 6, 2, 80, [4, 3, 2, 1, 0]),
        (2, 64, 8, 128, [17, 3]),  # Llama 70B
        (2, 32, 8, 128, [1, 2]),  # Llama 8B
        (2, 64, 8, 64, [-1, 79]),  # gpt-oss
    ):
        table = randn(100, hd // 2, seed=1)
        positions = torch.arange(rows) * 7 % 100
        caches = randn(5, 16, kv, hd, seed=2), randn(5, 16, kv, hd, seed=3)
        args = (randn(rows, (heads + 2 * kv) * hd), positions, table.cos(), table.sin(), *caches, torch.tensor(slots, dtype=torch.int64))
        yield Case(f"{rows}x{heads}/{kv}x{hd}", args, row_args=(0, 1, 6))
    qkv = randn(3, 8 * 16)
    qkv[0, 3], qkv[0, 70], qkv[1, 120] = torch.nan, torch.inf, -torch.inf
    small, place = randn(100, 8, seed=1), torch.arange(3)
    caches = randn(2, 4, 2, 16, seed=2), randn(2, 4, 2, 16, seed=3)
    yield Case("NaN, infinity", (qkv, place, small.cos(), small.sin(), *caches, place), row_args=(0, 1, 6))


def _moves() -> Iterator[Case]:
    k = [randn(4, 16, 3, 64, seed=i) for i in range(3)]
    v = [randn(4, 16, 3, 64, seed=9 + i) for i in range(3)]
    for name, src, dst in (("none", [], []), ("one", [63], [0]), ("overlapping", [5, 7, 6, 9], [4, 5, 7, 6]), ("identity", [3], [3])):
        yield Case(name, (k, v, torch.tensor(src, dtype=torch.int64), torch.tensor(dst, dtype=torch.int64)))
    k, v = ([randn(3, 16, 8, 128, seed=i + side) for i in range(32)] for side in (0, 40))  # Llama 8B
    k[5][0, 9], v[31][1, 2] = torch.nan, torch.inf
    yield Case("Llama 8B", (k, v, torch.tensor([9, 18, 33, 34]), torch.tensor([1, 2, 3, 4])))


_ATTENTION = {
    "prefill": [Rows(0, 5)],
    "one key": [Rows(0, 1)],
    "decode": [Rows(100)],
    "chunk": [Rows(40, 100)],
    "tile edges": [Rows(62), Rows(63), Rows(64), Rows(127), Rows(128)],
    "chain of 64": [Rows(70, tree=tuple(chain(64)))],
    "chain of 64 at 0": [Rows(0, tree=tuple(chain(64)))],
    "star of 64": [Rows(10, tree=tuple(star(64)))],
    "mixed": [Rows(0, 3), Rows(63, tree=tuple(random_tree(20, 1))), Rows(31), Rows(1, tree=tuple(random_tree(64, 2))), Rows(15, 2)],
    "empty": [],
}


def _attention() -> Iterator[Case]:
    for name, rows in _ATTENTION.items():
        batch = attention_batch(rows, 9, 3, 64, 16)
        yield Case(name, tuple(batch.values()), {"scale": 0.125})
    for hd, block in ((16, 1), (32, 16), (48, 8), (80, 16), (96, 5), (128, 32), (256, 16)):
        batch = attention_batch(_ATTENTION["mixed"], 4, 2, hd, block, seed=hd)
        yield Case(f"head {hd}", tuple(batch.values()), {"scale": hd**-0.5})
    for window in (1, 7, 64, 65, 1000):
        batch = attention_batch([*_ATTENTION["mixed"], *_ATTENTION["chunk"]], 6, 2, 32, 16)
        yield Case(f"window {window}", tuple(batch.values()), {"scale": 0.2, "window": window})
        yield Case(f"window {window}, sinks", tuple(batch.values()), {"scale": 0.2, "window": window, "sinks": randn(6, scale=3.0)})
    tree = Rows(40, tree=tuple(random_tree(7, 5)))
    for name, one, heads, kv, hd, kwargs in (
        ("Llama 8B", tree, 32, 8, 128, {}),
        ("Llama 70B", tree, 64, 8, 128, {}),
        ("Qwen3-30B-A3B", tree, 32, 4, 128, {}),
        ("gpt-oss", Rows(135), 64, 8, 64, {"window": 128, "sinks": randn(64, scale=3.0)}),
    ):
        batch = attention_batch([one], heads, kv, hd, 16)
        yield Case(name, tuple(batch.values()), {"scale": hd**-0.5, **kwargs})
    yield from _draft_attention()


def _prefill() -> Iterator[Case]:
    """Chunks of prompts in bfloat16, which is what a backend of its own takes; other dtypes run as `tree_attention`."""
    chunks = [rows for rows in _ATTENTION["mixed"] + _ATTENTION["tile edges"] + _ATTENTION["chunk"] if rows.tree is None]
    lists = {"prompt": [Rows(0, 70)], "hit": [Rows(48, 33)], "one row": [Rows(0, 1)], "ragged": chunks, "empty": []}
    long = [Rows(257, 30), Rows(0, 0), Rows(0, 256), Rows(255, 1), Rows(0, 257)]  # around pages of 256; a sequence without rows
    for name, rows in lists.items():
        yield _halved(name, attention_batch(rows, 8, 2, 64, 16), {"scale": 0.125})
    yield _halved("long", attention_batch(long, 4, 2, 64, 16), {"scale": 0.125})
    for window in (1, 2, 64, 1000):
        yield _halved(f"window {window}", attention_batch(chunks, 6, 2, 32, 32), {"scale": 0.2, "window": window})
    for hd, block in ((16, 256), (80, 512), (128, 8), (128, 24), (256, 16)):
        yield _halved(f"head {hd}, blocks of {block}", attention_batch(chunks, 4, 4, hd, block), {"scale": hd**-0.5})
    for name, heads, kv_heads, hd in (("Llama 70B", 64, 8, 128), ("Qwen3-30B-A3B", 32, 4, 128)):
        yield _halved(name, attention_batch([Rows(30, 20)], heads, kv_heads, hd, 16), {"scale": hd**-0.5})
    padded = attention_batch(chunks, 9, 3, 64, 16)
    padded |= {name: torch.cat((padded[name], padded[name][:3])) for name in ("q", "tree_mask", "positions")}
    yield _halved("rows of no sequence", padded, {"scale": 0.125})
    yield _halved("sinks", attention_batch(chunks, 6, 2, 32, 16), {"scale": 0.2, "sinks": randn(6, scale=3.0)})


def _halved(name: str, batch: dict[str, Tensor], kwargs: dict[str, object]) -> Case:
    return Case(name, tuple(t.bfloat16() if t.is_floating_point() else t for t in batch.values()), kwargs)


def _draft_attention() -> Iterator[Case]:
    """As a draft head runs it: keys hidden before `first`, and rows that are some of a tree's nodes."""
    lists = [*_ATTENTION["mixed"], *_ATTENTION["chunk"], Rows(200)]
    batch = attention_batch(lists, 6, 2, 32, 16)
    for first in ([0, 63, 31, 1, 15, 40, 200], [0, 1, 1, 1, 1, 1, 1], [0, 5, 20, 0, 3, 33, 65]):
        yield Case(f"first {first}", tuple(batch.values()), {"scale": 0.2, "first": torch.tensor(first, dtype=torch.int32)})
    batch = attention_batch([Rows(70, tree=tuple(random_tree(60, 3))), Rows(9, 4), Rows(126, tree=tuple(random_tree(64, 4)))], 6, 2, 32, 16)
    some = torch.cat((torch.arange(7, 60, 9), torch.arange(60, 64), torch.tensor([64, 127])))
    batch |= {name: batch[name][some].contiguous() for name in ("q", "tree_mask", "positions")}
    batch["cu_query"] = torch.tensor([0, 6, 10, 12], dtype=torch.int32)
    for kwargs in ({}, {"window": 40}, {"first": torch.tensor([64, 2, 100], dtype=torch.int32)}):
        yield Case(f"some nodes {sorted(kwargs)}", tuple(batch.values()), {"scale": 0.2, **kwargs})


def _tiled() -> Iterator[Case]:
    for kind in KINDS:
        for m, n, k in ((0, 40, 64), (1, 1, 32), (1, 40, 64), (3, 16, 576), (7, 100, 576), (9, 33, 1536), (37, 20, 96)):
            yield Case(f"{kind} {m}x{n}x{k}", (randn(m, k), random_weight(n, k, kind)), row_args=(0,))
        outlier = randn(4, 576)
        outlier[:, 5] *= 1e4
        outlier[1] = 0.0
        outlier[2] *= 1e-30
        yield Case(f"{kind} outliers", (outlier, random_weight(48, 576, kind)), row_args=(0,))
    for kind in ("F32", "F16", "BF16", "F8"):
        yield Case(f"{kind} odd width", (randn(5, 77), random_weight(35, 77, kind)), row_args=(0,))
    for n, k in ((960, 576), (3072, 576), (576, 1536)):
        yield Case(f"Q4_1 model {n}x{k}", (randn(2, k), random_weight(n, k, "Q4_1")), row_args=(0,))


def _dense() -> Iterator[Case]:
    for m, n, k in ((0, 40, 64), (1, 40, 64), (5, 33, 100)):
        yield Case(f"{m}x{n}x{k}", (randn(m, k), randn(n, k, seed=1, scale=0.05)), row_args=(0,))
    zeros = randn(40, 100, seed=1, scale=0.05)
    zeros[:20] = 0.0
    yield Case("awkward rows, rows of zeros", (fp8.awkward_rows(100), zeros), row_args=(0,))


def _embedding() -> Iterator[Case]:
    for kind in KINDS:
        for ids in ([], [0], [99, 0, 15, 16, 99]):
            yield Case(f"{kind} {len(ids)}", (torch.tensor(ids, dtype=torch.int64), random_weight(100, 64, kind)), row_args=(0,))


def _keys(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    """Seeds with both words used and both signs, positions, choices."""
    index = torch.arange(rows)
    return index * 0x1234567_89ABCDEF - (1 << 61), index * 1001, index % 3


def _noise() -> Iterator[Case]:
    ids = torch.randint(0, 200000, (6, 37), generator=generator(0))
    yield Case("6x37", (*_keys(6), ids, 257), row_args=(0, 1, 2, 3))
    yield Case("empty", (*_keys(0), ids[:0], 0))
    yield Case("no ids", (*_keys(2), ids[:2, :0], 0))
    yield Case("vocabulary", (*_keys(2), torch.arange(49152).expand(2, -1).contiguous(), 0), row_args=(0, 1, 2, 3))


def _argmax() -> Iterator[Case]:
    model = ((1, 49152, 3.0), (4, 49152, 0.1), (6, 49152, 10.0), (2, 128256, 3.0))
    for rows, vocab, scale in (*model, (0, 10, 1.0), (5, 1, 1.0), (5, 63, 1.0), (5, 65, 0.0), (8, 1000, 0.0)):
        args = (randn(rows, vocab, scale=scale), *_keys(rows), torch.arange(rows) % 3 != 2, 0)
        yield Case(f"{rows}x{vocab}~{scale}", args, row_args=(0, 1, 2, 3, 4))
    odd = randn(6, 200)
    odd[0] = -torch.inf
    odd[1, 7:] = -torch.inf
    odd[2, 3:190] = torch.nan
    odd[3, 50] = torch.inf
    odd[4] = torch.nan
    odd[5, ::2] = -torch.inf
    yield Case("masks, NaN, infinity: noise", (odd, *_keys(6), torch.ones(6, dtype=torch.bool), 0), row_args=(0, 1, 2, 3, 4))
    yield Case("masks, NaN, infinity: greedy", (odd, *_keys(6), torch.zeros(6, dtype=torch.bool), 0), row_args=(0, 1, 2, 3, 4))


def _cuts() -> Iterator[Case]:
    """Laws of every shape, ranked by score and by typicality. The masses wanted are no sums of a few equal tokens."""
    model = ((3, 49152, 0.01), (2, 49152, 1.0), (2, 49152, 8.0), (1, 128256, 4.0))
    for rows, vocab, scale in (*model, (0, 10, 1.0), (5, 1, 1.0), (6, 47, 3.0), (5, 65, 0.0), (7, 1000, 0.0), (6, 1000, 100.0)):
        scores = randn(rows, vocab, scale=scale)
        p = torch.linspace(0.0513, 0.9891, max(rows, 1))[:rows]
        for name, x in (("", scores), (" with ties", (scores * 4).round() / 4)):
            log_p = x.log_softmax(-1)
            entropy = -(log_p * log_p.exp()).sum(-1, keepdim=True)
            yield Case(f"{rows}x{vocab}~{scale}{name}", (log_p, x, p), row_args=(0, 1, 2))
            yield Case(f"{rows}x{vocab}~{scale}{name}, typical", (log_p, -(log_p + entropy).abs(), p), row_args=(0, 1, 2))
    odd = randn(7, 200)
    odd[0, 1:] = -torch.inf  # one token
    odd[1, ::2] = -torch.inf
    odd[2, :100] = 30.0  # ranks many bins apart, twice over
    odd[2, 100] = 1e30
    odd[3] = torch.arange(200) * -0.5  # most have no mass
    odd[4, :100] *= 1e-30
    odd[5] = torch.where(odd[5] > 0, 0.0, -0.0)  # zeros of both signs tie
    odd[6, 0] = 60.0
    log_p = odd.log_softmax(-1)
    rank = odd.clone()
    rank[4] = torch.where(torch.arange(200) < 100, odd[4], odd[4].sign() * 1e-38)
    for mass in (0.0, 1e-30, 0.3137, 0.9731, 1.0):
        yield Case(f"odd rows, {mass}", (log_p, rank, torch.full((7,), mass)), row_args=(0, 1, 2))


CASES: dict[str, Callable[[], Iterator[Case]]] = {
    "rms_norm": lambda: _norms(False),
    "add_rms_norm": lambda: _norms(True),
    "silu_mul": _silu,
    "rope_write_kv": _rope,
    "move_kv": _moves,
    "tree_attention": _attention,
    "prefill_attention": _prefill,
    "tiled_linear": _tiled,
    "tiled_embedding": _embedding,
    "dense_linear": _dense,
    "mass_cut": _cuts,
    "gumbel_argmax": _argmax,
    "gumbel_noise": _noise,
    "philox_uniform": _noise,
    **fp8.CASES,
    **int4.CASES,
    **moe.CASES,
    **verify.CASES,
    **build.CASES,
    **draft_rows.CASES,
    **compaction.CASES,
    **pairs.CASES,
    **pad.CASES,
    **topk.CASES,
    **layout.CASES,
    **gather.CASES,
    **grow.CASES,
    **norm_fp8.CASES,
    **silu_fp8.CASES,
    **clamped.CASES,
    **norm_rope.CASES,
}
