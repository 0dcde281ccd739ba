"""Draft trees: builders from host lists, ancestor words, merging, trimming, checking.

Builders make host (CPU) trees; the functions that read a tree run on whatever device it lies on, without host
synchronisation unless they say so. The ancestor word of node i has bit j set iff node j lies on the path from the root to
i, both ends included; bit 63 makes the word negative, so words are read as `(word >> j) & 1` and never compared by sign.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specdec.config import MAX_NODES
from specdec.errors import SpecdecError
from specdec.types import DraftTree

BIT_TABLE = torch.tensor([1 << i for i in range(63)] + [-(2**63)], dtype=torch.int64)  # [64]

HostTree = tuple[Seq[int], Seq[int], Seq[float] | None]
"""One tree on the host: tokens, parents (root's is -1), scores or None; node 0 is the root."""


def tree_from_lists(trees: Seq[HostTree], drafters: Seq[str | None] = ()) -> DraftTree:
    """Pad B host trees to one DraftTree; depths follow from the parents.

    Scores are kept when every tree has them. Numpy reads the lists: it is faster at that than torch.
    Not validated (drafters are trusted in the step); tests use `check_tree`.
    """
    width = max((len(tokens) for tokens, _, _ in trees), default=1)
    tokens, parents, depths, scores = [], [], [], []
    scored = len(trees) > 0 and all(s is not None for _, _, s in trees)
    for tree_tokens, tree_parents, tree_scores in trees:
        depth = [0]
        for parent in tree_parents[1:]:
            depth.append(depth[parent] + 1)
        pad = [0] * (width - len(tree_tokens))
        tokens.append([*tree_tokens, *pad])
        parents.append([*tree_parents, *pad])
        depths.append([*depth, *pad])
        if scored and tree_scores is not None:
            scores.append([*tree_scores, *pad])
    shape = (len(trees), width)
    columns = torch.from_numpy(np.array([tokens, parents, depths], dtype=np.int64).reshape(3, *shape)).unbind()
    return DraftTree(
        tokens=columns[0],
        parents=columns[1],
        depth=columns[2],
        num_nodes=torch.from_numpy(np.array([len(t) for t, _, _ in trees], dtype=np.int64)),
        score=torch.from_numpy(np.array(scores, dtype=np.float32).reshape(shape)) if scored else None,
        drafters=tuple(drafters) if drafters else (None,) * len(trees),
    )


def root_only(tokens: Seq[int]) -> DraftTree:
    """Trees of one node, the newest token of each sequence: plain decoding."""
    count = len(tokens)
    columns = torch.from_numpy(np.array([tokens, [-1] * count, [0] * count, [1] * count], dtype=np.int64).reshape(4, count, 1)).unbind()
    return DraftTree(columns[0], columns[1], columns[2], columns[3].view(count), drafters=(None,) * count)


def chain(roots: Seq[int], drafts: Seq[Seq[int]], scores: Seq[Seq[float]] | None = None, drafters: Seq[str | None] = ()) -> DraftTree:
    """Trees of width 1: each root followed by its draft tokens. `scores[b]` are those of the drafts, without the root."""
    trees: list[HostTree] = []
    for b, (root, own) in enumerate(zip(roots, drafts, strict=True)):
        trees.append(([root, *own], range(-1, len(own)), None if scores is None else [1.0, *scores[b]]))
    return tree_from_lists(trees, drafters)


def merge(parts: Seq[DraftTree], order: Seq[Seq[int]]) -> DraftTree:
    """Bring several drafters' trees together: tree k of `parts[i]` becomes tree `order[i][k]` of the result.

    The orders partition 0 … B-1. Missing scores become 0 for draft nodes (1 for roots) when any part has scores. A part without `log_q`
    gets rows of -inf beside one that has it: a law without mass means point masses.
    """
    live = [(part, list(own)) for part, own in zip(parts, order, strict=True) if len(own)]
    total = sum(len(own) for _, own in live)
    if len(live) == 1 and live[0][1] == list(range(total)):
        return live[0][0]
    width = max((part.tokens.shape[1] for part, _ in live), default=1)
    log_q = [part.log_q for part, _ in live if part.log_q is not None]
    tokens, parents, depth = (torch.zeros((total, width), dtype=torch.int64) for _ in range(3))
    num_nodes = torch.zeros(total, dtype=torch.int64)
    score = torch.zeros((total, width)) if any(part.score is not None for part, _ in live) else None
    law = torch.full((total, width, log_q[0].shape[-1]), -torch.inf, device=log_q[0].device) if log_q else None
    drafters: list[str | None] = [None] * total
    for part, own in live:
        n = part.tokens.shape[1]
        tokens[own, :n], parents[own, :n], depth[own, :n] = part.tokens, part.parents, part.depth
        num_nodes[own] = part.num_nodes
        if score is not None:
            score[own, 0] = 1.0
            if part.score is not None:
                score[own, :n] = part.score
        if law is not None and part.log_q is not None:
            law[own, :n] = part.log_q
        for k, b in enumerate(own):
            drafters[b] = part.drafters[k] if part.drafters else None
    return DraftTree(tokens, parents, depth, num_nodes, score, law, tuple(drafters))


def trim(tree: DraftTree, num_nodes: Tensor) -> DraftTree:
    """Keep the first `num_nodes[b]` nodes of each tree ([B] i64, ≥ 1): a tree again, since parents come first.

    Reads the widest count on the host. Not for trees with `log_q` whose cut depends on the drawn tokens (see `verify`).
    """
    kept = torch.minimum(tree.num_nodes, num_nodes.to(tree.num_nodes))
    width = max(int(kept.max()) if kept.numel() else 1, 1)
    inside = torch.arange(width, device=kept.device) < kept[:, None]

    def cut(values: Tensor) -> Tensor:
        return torch.where(inside, values[:, :width], torch.zeros((), dtype=values.dtype, device=values.device))

    return replace(
        tree,
        tokens=cut(tree.tokens),
        parents=cut(tree.parents),
        depth=cut(tree.depth),
        num_nodes=kept,
        score=None if tree.score is None else cut(tree.score),
        log_q=None if tree.log_q is None else tree.log_q[:, :width],
        drafters=tuple(name if n > 1 else None for name, n in zip(tree.drafters, kept.tolist(), strict=True)) if tree.drafters else (),
    )


def rows_of(tree: DraftTree) -> list[int]:
    """Rows of the batch that each tree has."""
    return tree.host.num_nodes if tree.uniform is None else [tree.uniform[0]] * len(tree.tokens)


def ancestor_words(tree: DraftTree) -> Tensor:
    """[B, N] i64: the ancestor word of every node, 0 beyond `num_nodes`.

    Pointer doubling: after k rounds a word holds the 2**k nearest nodes of its path, so log2(N) rounds do.
    """
    width = tree.tokens.shape[1]
    words = BIT_TABLE[:width].to(tree.tokens.device).expand_as(tree.tokens)
    jump = tree.parents.clamp(min=0)
    for _ in range((width - 1).bit_length()):
        words = words | words.gather(1, jump)
        jump = jump.gather(1, jump)
    return torch.where(torch.arange(width, device=words.device) < tree.num_nodes[:, None], words, 0)


def host_words(parents: Seq[int]) -> list[int]:
    """The ancestor words of one tree on the host, as signed 64-bit integers. parents: by node, the root's is not read."""
    words = [1]
    for node, parent in enumerate(parents[1:], start=1):
        words.append(words[parent] | (1 << node if node < 63 else -(1 << 63)))
    return words


def check_tree(tree: DraftTree, *, vocab_size: int, duplicates: bool = False) -> None:
    """Raise SpecdecError naming the tree and node that break the contract of `DraftTree` (host; for tests and start-up).

    duplicates: siblings may repeat a token (draws with replacement, rejection verification only).
    """
    rows = zip(tree.tokens.tolist(), tree.parents.tolist(), tree.depth.tolist(), tree.num_nodes.tolist(), strict=True)
    for b, (tokens, parents, depth, count) in enumerate(rows):
        if not 1 <= count <= min(len(tokens), MAX_NODES):
            raise SpecdecError(f"tree {b}: {count} nodes; a draft tree has 1 to {MAX_NODES}, root included", param="num_nodes")
        if parents[0] != -1 or depth[0] != 0:
            raise SpecdecError(f"tree {b}: node 0 is the root: parent -1 and depth 0", param="parents")
        if any(tokens[count:]) or any(parents[count:]) or any(depth[count:]):
            raise SpecdecError(f"tree {b}: entries beyond node {count - 1} must be 0", param="num_nodes")
        siblings: set[tuple[int, int]] = set()
        for i in range(count):
            if not 0 <= tokens[i] < vocab_size:
                raise SpecdecError(f"tree {b}, node {i}: token {tokens[i]} is outside the vocabulary of {vocab_size}", param="tokens")
            if i and not (0 <= parents[i] < i and depth[i] == depth[parents[i]] + 1):
                raise SpecdecError(f"tree {b}, node {i}: its parent must come before it, one level up", param="parents")
            if i and (parents[i], tokens[i]) in siblings and not duplicates:
                raise SpecdecError(f"tree {b}, node {i}: a sibling drafts the same token {tokens[i]}; merge them", param="tokens")
            siblings.add((parents[i], tokens[i]))
