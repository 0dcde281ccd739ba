"""Inputs for kernel tests and benchmarks: seeded, with the awkward cases included on purpose.

SPECDEC_FRESH_INPUTS=N draws other numbers for all of them, the same for the same N.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

BIT_TABLE = tuple(1 << i if i < 63 else -(2**63) for i in range(64))  # bit i as a two's complement int64

FRESH = int(os.environ.get("SPECDEC_FRESH_INPUTS", "0"))


def generator(seed: int) -> torch.Generator:
    """What the numbers of `seed` are drawn with."""
    return torch.Generator().manual_seed(seed + 1_000_003 * FRESH)


def ancestor_words(parents: list[int]) -> list[int]:
    """Ancestor words of a tree given parents (root -1): bit i = node i, self included."""
    words: list[int] = []
    for node, parent in enumerate(parents):
        words.append((words[parent] if parent >= 0 else 0) | BIT_TABLE[node])
    return words


def depths(parents: list[int]) -> list[int]:
    """Depth of every node, root 0."""
    out: list[int] = []
    for parent in parents:
        out.append(0 if parent < 0 else out[parent] + 1)
    return out


def chain(nodes: int) -> list[int]:
    """A path: node i's parent is i - 1."""
    return list(range(-1, nodes - 1))


def star(nodes: int) -> list[int]:
    """A root with nodes - 1 leaves."""
    return [-1] + [0] * (nodes - 1)


def random_tree(nodes: int, seed: int) -> list[int]:
    """Every node hangs from a random earlier one."""
    g = generator(seed)
    return [-1] + [int(torch.randint(0, i, (1,), generator=g)) for i in range(1, nodes)]


def grown_pool(batch: int, depth: int, width: int, beam: int, seed: int, hopeless: float = 0.1) -> tuple[Tensor, Tensor, Tensor]:
    """(tokens, parents, scores) [B, C] of a beam search over random chances: `width` candidates of the root, then of `beam` nodes a depth.

    A share of `hopeless` of the candidates cannot be right (score 0).
    """
    g = generator(seed)
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    above, place, start = torch.ones(batch, 1), torch.full((batch, 1), -1), 0
    for _ in range(depth):
        chance = torch.rand(batch, above.shape[1], width, generator=g) * 0.98 + 0.01
        chance = torch.where(torch.rand(chance.shape, generator=g) < hopeless, 0.0, chance)
        score = (above[:, :, None] * chance).flatten(1)
        token = torch.rand(batch, above.shape[1], 200, generator=g).argsort(-1)[:, :, :width].flatten(1)
        columns.append((token, place[:, :, None].expand(-1, -1, width).flatten(1), score))
        above, best = score.topk(min(beam, score.shape[1]), dim=1)
        place, start = start + best, start + score.shape[1]
    tokens, parents, scores = (torch.cat(part, dim=1) for part in zip(*columns, strict=True))
    return tokens, parents, scores


@dataclass(frozen=True, slots=True)
class Rows:
    """One sequence of an attention batch: `context` committed keys, then `new` causal rows, or a tree."""

    context: int
    new: int = 1
    tree: tuple[int, ...] | None = None

    @property
    def count(self) -> int:
        return self.new if self.tree is None else len(self.tree)


def attention_batch(rows: list[Rows], heads: int, kv_heads: int, head_dim: int, block: int, seed: int = 0) -> dict[str, Tensor]:
    """Arguments of `tree_attention` (scale aside). Blocks are shuffled; cache slots nobody may read hold NaN."""
    g = generator(seed)
    counts = [r.count for r in rows]
    width = max([1] + [-(-(r.context + r.count) // block) for r in rows])
    num_blocks = len(rows) * width + 3
    order = torch.randperm(num_blocks, generator=g)[: len(rows) * width].view(len(rows), width)
    k, v = (torch.full((num_blocks, block, kv_heads, head_dim), torch.nan) for _ in range(2))
    positions: list[int] = []
    words: list[int] = []
    for b, r in enumerate(rows):
        place = torch.arange(r.context + r.count)
        slots = order[b][place // block] * block + place % block
        for cache in (k, v):
            cache.view(-1, kv_heads, head_dim)[slots] = torch.randn(len(slots), kv_heads, head_dim, generator=g)
        offsets = list(range(r.count)) if r.tree is None else depths(list(r.tree))
        positions += [r.context + d for d in offsets]
        words += [0] * r.count if r.tree is None else ancestor_words(list(r.tree))
    return {
        "q": torch.randn(sum(counts), heads, head_dim, generator=g),
        "k_cache": k,
        "v_cache": v,
        "block_table": order.int(),
        "cu_query": torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()] if counts else [0], dtype=torch.int32),
        "ctx_lens": torch.tensor([r.context for r in rows], dtype=torch.int32),
        "tree_len": torch.tensor([0 if r.tree is None else len(r.tree) for r in rows], dtype=torch.int32),
        "tree_mask": torch.tensor(words, dtype=torch.int64),
        "positions": torch.tensor(positions, dtype=torch.int64),
    }
