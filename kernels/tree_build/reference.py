"""The draft tree from a pool of candidates, on the device: static shapes, no look from the host.

The same tree as the host's `rerank` and `numbered` (`specdec/spec/growth.py`, `head_drafter.py`) make of it. Of the pool the `nodes - 1`
best by score are picked, equals by rising place; what has no score, or hangs on a node that is not there or comes after it, is
left out. Numbers: the root, the likeliest child of each node from the root down (the best path), then the others by
rising place, which puts parents before children where the pool does.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class BuiltTree(NamedTuple):
    """B trees of up to N nodes, depth up to D. Entries at and beyond `num_nodes[b]` are children of the root that nobody accepts and
    that see what it sees: token -1, parent 0, depth 1, word 1, score 0, place 0; paths -1."""

    tokens: Tensor  # [B, N] i64
    parents: Tensor  # [B, N] i64, the root's is -1
    depth: Tensor  # [B, N] i64
    num_nodes: Tensor  # [B] i64
    score: Tensor  # [B, N] f32, the root's is 1
    words: Tensor  # [B, N] i64 ancestor words
    paths: Tensor  # [B, N, D] i64: the draft tokens from depth 1 down to the node itself, -1 beyond its depth
    places: Tensor  # [B, N] i64: place in the pool, the root's is -1


def tree_build(tokens: Tensor, parents: Tensor, scores: Tensor, roots: Tensor, nodes: Tensor, width: int, deepest: int) -> BuiltTree:
    """Shapes in `specdec.ops.tree_build`. A pick is a column here, in falling order of score."""
    batch = len(tokens)
    score, place = scores.sort(dim=1, descending=True, stable=True)
    score, place = score[:, : width - 1], place[:, : width - 1]
    picks = place.shape[1]
    rank = torch.arange(picks, device=tokens.device)
    above = parents.gather(1, place)
    hangs = place[:, None, :] == above[:, :, None]  # [B, pick, parent]: at most one, and only where the parent comes first
    hangs &= rank[None, :] < rank[:, None]
    jump = torch.where(hangs.any(-1), (hangs * rank).sum(-1), rank)
    kept = (rank < nodes[:, None] - 1) & (score > 0) & ((above == -1) | hangs.any(-1))
    kept = _along(kept, jump)

    same = (above[:, None, :] == above[:, :, None]) & kept[:, None, :] & (rank[None, :] < rank[:, None])
    best = _along(kept & ~same.any(-1), jump)  # the first child of the first child of … the root
    other = kept & ~best
    lower = other[:, None, :] & (place[:, None, :] < place[:, :, None])
    on_path = _along_sum((jump != rank).long(), jump)
    number = torch.where(best, on_path + 1, 1 + best.sum(1, keepdim=True) + lower.sum(-1))
    number = torch.where(kept, number, width)  # the last column collects what is left out

    depth = torch.where(kept, on_path + 1, 0)
    word = 1 | _along_or(torch.ones_like(number) << number.clamp(max=63), jump)
    above_number = torch.where(above == -1, 0, number.gather(1, jump))
    roots_column = roots[:, None]
    numbers = (
        (roots_column, tokens.gather(1, place), -1),
        (-torch.ones_like(roots_column), above_number, 0),
        (torch.zeros_like(roots_column), depth, 1),
        (torch.ones_like(roots_column), word, 1),
        (-torch.ones_like(roots_column), place, 0),
    )
    out = [_numbered(root, values, number, width, filler) for root, values, filler in numbers]
    built_tokens, built_parents, built_depth, words, places = out
    values = _numbered(score.new_ones((batch, 1)), score, number, width, 0)
    count = kept.sum(1) + 1
    inside = torch.arange(width, device=tokens.device) < count[:, None]
    paths = _paths(built_tokens, built_depth, torch.where(inside, words, 0), deepest)
    return BuiltTree(built_tokens, built_parents, built_depth, count, values, words, paths, places)


def _numbered(root: Tensor, values: Tensor, number: Tensor, width: int, filler: int) -> Tensor:
    """[B, N]: root [B, 1] at 0, values [B, P] at their numbers, filler elsewhere; number N drops one."""
    table = values.new_full((len(root), width + 1), filler).scatter_(1, number, values)
    return torch.cat((root, table[:, 1:width]), dim=1)


def _rounds(jump: Tensor) -> range:
    return range(max(jump.shape[1] - 1, 0).bit_length())


def _along(flag: Tensor, jump: Tensor) -> Tensor:
    """[B, P] bool: flag holds at the pick and at all above it. jump [B, P] i64: the pick above, itself at the top."""
    for _ in _rounds(jump):
        flag, jump = flag & flag.gather(1, jump), jump.gather(1, jump)
    return flag


def _along_sum(value: Tensor, jump: Tensor) -> Tensor:
    """Sum of value, 0 at the top, over the pick and all above it."""
    for _ in _rounds(jump):
        value, jump = value + value.gather(1, jump), jump.gather(1, jump)
    return value


def _along_or(word: Tensor, jump: Tensor) -> Tensor:
    for _ in _rounds(jump):
        word, jump = word | word.gather(1, jump), jump.gather(1, jump)
    return word


def _paths(tokens: Tensor, depth: Tensor, words: Tensor, deepest: int) -> Tensor:
    """[B, N, D]: column d - 1 of a node is the token of its ancestor of depth d."""
    width = tokens.shape[1]
    bits = torch.arange(width, device=tokens.device)
    above = ((words[:, :, None] >> bits) & 1).bool() & (depth > 0)[:, None, :]  # [B, node, ancestor]
    paths = torch.full((*tokens.shape, deepest + 1), -1, dtype=torch.int64, device=tokens.device)
    column = torch.where(above, depth[:, None, :] - 1, deepest)
    return paths.scatter_(2, column, tokens[:, None, :].expand_as(column))[:, :, :deepest]
