"""The draft tree from a pool of candidates: a program per sequence, everything in registers.

A key of score bits above inverted place orders the pool without ties, so the picks are the keys above a threshold: bisection over
its 63 bits until as many as wanted lie above, some 12 steps of a sum over the pool unless scores tie. A running sum then says
where each pick goes, and they meet in the rows of the result (a few kilobytes, which the cache holds). Then a lane is a pick, in rising
place; relations between picks (parent of, sibling ahead of) are masks of lanes × lanes, and what holds along a path takes log2(lanes)
rounds of pointer doubling, 24 exchanges through shared memory in all. Its time is that of its dependent steps.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.tree_build.reference import BuiltTree

_MOST_NODES, _MOST_POOL = 64, 4096


def rejects(tokens: Tensor, parents: Tensor, scores: Tensor, roots: Tensor, nodes: Tensor, width: int, deepest: int) -> str | None:
    """Why this kernel cannot run the call, or None."""
    if width > _MOST_NODES or tokens.shape[1] > _MOST_POOL:
        return f"{width} nodes from a pool of {tokens.shape[1]}; it takes {_MOST_NODES} from {_MOST_POOL}"
    return None if all(t.is_contiguous() for t in (tokens, parents, scores)) else "the pool must be dense"


def tree_build(tokens: Tensor, parents: Tensor, scores: Tensor, roots: Tensor, nodes: Tensor, width: int, deepest: int) -> BuiltTree:
    """Shapes in `specdec.ops.tree_build`."""
    batch, pool = tokens.shape
    out = [torch.empty((batch, width), dtype=torch.int64, device=tokens.device) for _ in range(5)]
    score = torch.empty((batch, width), dtype=torch.float32, device=tokens.device)
    paths = torch.empty((batch, width, deepest), dtype=torch.int64, device=tokens.device)
    count = torch.empty(batch, dtype=torch.int64, device=tokens.device)
    if batch:
        lanes = triton.next_power_of_2(max(width, 2))
        _build[(batch,)](
            tokens, parents, scores, roots, nodes, *out, score, paths, count, pool, width, deepest,
            POOL=max(triton.next_power_of_2(max(pool, 1)), lanes), LANES=lanes, ROUNDS=(width - 1).bit_length(),
            LEVELS=triton.next_power_of_2(max(deepest, 1)),
        )  # fmt: skip
    built_tokens, built_parents, depth, words, places = out
    return BuiltTree(built_tokens, built_parents, depth, count, score, words, paths, places)


@triton.jit
def _key(score, place):
    """[n] i64 above 0, no two alike, rising with the score, for equals falling with the place; at most 0 without a score."""
    bits = tl.where(score > 0.0, score, 0.0).to(tl.int32, bitcast=True).to(tl.int64)
    return tl.where(bits > 0, (bits << 32) | (0x7FFFFFFF - place).to(tl.int64), 0)


@triton.jit
def _least_key(keys, budget):
    """A key that just those reach which are picked, `budget` of them or all there are. At least 1: without a score there is no key."""
    above = tl.max(keys, 0) + 1
    most = tl.where(tl.sum((keys > 0).to(tl.int32), 0) <= budget, 1, above)
    least = tl.where(budget <= 0, above, 1)
    while most > least:
        middle = least + ((most - least) >> 1)
        count = tl.sum((keys >= middle).to(tl.int32), 0)
        least = tl.where(count < budget, least, tl.where(count == budget, middle, middle + 1))
        most = tl.where(count <= budget, middle, most)
    return least


@triton.jit
def _numbers(key, place, above, picked, ROUNDS: tl.constexpr, LANES: tl.constexpr):
    """Of each pick: whether it is kept, its depth - 1, number, that of its parent, its bit and its ancestor word without the root's bit."""
    lane = tl.arange(0, LANES)
    ahead = key[None, :] > key[:, None]  # [lane, other]: the other comes first
    hangs = (place[None, :] == above[:, None]) & ahead & picked[None, :]
    parent = tl.max(tl.where(hangs, lane[None, :], -1), 1)
    jump = tl.where(parent >= 0, parent, lane)
    # added up along the path: steps, in the low half, and picks that cannot stand, in the high half
    path = tl.where(picked & ((above == -1) | (parent >= 0)), 0, 1 << 16) + tl.where(parent >= 0, 1, 0)
    jumps = (jump,)  # the pick above, two above, four above, …, or the top
    for i in tl.static_range(ROUNDS):
        path += tl.gather(path, jumps[i], 0)
        jumps = jumps + (tl.gather(jumps[i], jumps[i], 0),)  # type: ignore[assignment]  # noqa: RUF005 - Triton: no star
    level, kept = path & 0xFFFF, (path < 1 << 16).to(tl.int32)
    siblings = (above[None, :] == above[:, None]) & ahead & (kept[None, :] != 0)
    best = kept & (tl.max(siblings.to(tl.int32), 1) == 0).to(tl.int32)
    for i in tl.static_range(ROUNDS):
        best = best & tl.gather(best, jumps[i], 0)
    number = tl.where(best != 0, level + 1, tl.sum(best, 0) + tl.cumsum(kept - best, 0))
    bit = tl.where(kept != 0, tl.full([LANES], 1, tl.int64) << tl.where(kept != 0, number, 0).to(tl.int64), 0)
    word = bit
    for i in tl.static_range(ROUNDS):
        word = word | tl.gather(word, jumps[i], 0)
    return kept, level, number, tl.where(above == -1, 0, tl.gather(number, jump, 0)), bit, word


@triton.jit
def _store(out, number, value, mask, root, filler, edge, LANES: tl.constexpr):
    """A row of the tree: values at their numbers, the root at 0, filler behind them (edge: where these two go)."""
    lane = tl.arange(0, LANES)
    tl.store(out + number, value.to(out.dtype.element_ty), mask=mask)
    tl.store(out + lane, tl.where(lane == 0, root, filler).to(out.dtype.element_ty), mask=edge)


@triton.jit
def _store_paths(path, number, level, token, bit, word, mask, edge, deepest, LANES: tl.constexpr, LEVELS: tl.constexpr):
    """An ancestor of depth d puts its token in column d - 1 of every node below it; the rest is -1."""
    covers = ((word[:, None] & bit[None, :]) != 0) & mask[:, None] & (level[None, :] < deepest)
    row = tl.where(mask, number, 0)[:, None].to(tl.int64) * deepest
    tl.store(path + row + level[None, :], tl.broadcast_to(token[None, :], [LANES, LANES]), mask=covers)
    column = tl.arange(0, LEVELS)[None, :]
    nothing = tl.full([LANES, LEVELS], -1, tl.int64)
    tl.store(path + row + column, nothing, mask=mask[:, None] & (column > level[:, None]) & (column < deepest))
    row = tl.arange(0, LANES)[:, None].to(tl.int64) * deepest
    tl.store(path + row + column, nothing, mask=edge[:, None] & (column < deepest))


@triton.jit(do_not_specialize=["pool", "width", "deepest"])
def _build(
    tokens, parents, scores, roots, nodes,
    tokens_out, parents_out, depth_out, words_out, places_out, score_out, paths_out, count_out, pool, width, deepest,
    POOL: tl.constexpr, LANES: tl.constexpr, ROUNDS: tl.constexpr, LEVELS: tl.constexpr,
):  # fmt: skip
    """Grid (sequences). pool = C, width = N, deepest = D."""
    sequence = tl.program_id(0).to(tl.int64)
    row = sequence * width
    whole = tl.arange(0, POOL)
    there = whole < pool
    pool_score = tl.load(scores + sequence * pool + whole, mask=there, other=0.0)
    pool_token = tl.load(tokens + sequence * pool + whole, mask=there, other=0)
    pool_above = tl.load(parents + sequence * pool + whole, mask=there, other=0)
    keys = _key(pool_score, whole)
    hit = keys >= _least_key(keys, tl.minimum(tl.load(nodes + sequence), width) - 1)
    position = row + tl.cumsum(hit.to(tl.int32), 0) - 1
    picks = tl.sum(hit.to(tl.int32), 0)
    # the picks side by side, by way of the rows that the tree will be written to
    tl.store(tokens_out + position, pool_token, mask=hit)
    tl.store(parents_out + position, pool_above, mask=hit)
    tl.store(places_out + position, whole.to(tl.int64), mask=hit)
    tl.store(score_out + position, pool_score, mask=hit)
    tl.debug_barrier()
    lane = tl.arange(0, LANES)
    picked = lane < picks
    token = tl.load(tokens_out + row + lane, mask=picked, other=0)
    above = tl.load(parents_out + row + lane, mask=picked, other=0).to(tl.int32)
    place = tl.load(places_out + row + lane, mask=picked, other=0).to(tl.int32)
    score = tl.load(score_out + row + lane, mask=picked, other=0.0)
    tl.debug_barrier()
    kept, level, number, parent, bit, word = _numbers(_key(score, place), place, above, picked, ROUNDS, LANES)

    mask = kept != 0
    count = tl.sum(kept, 0) + 1
    edge = (lane < width) & ((lane == 0) | (lane >= count))
    _store(tokens_out + row, number, token, mask, tl.load(roots + sequence), -1, edge, LANES)
    _store(parents_out + row, number, parent, mask, -1, 0, edge, LANES)
    _store(depth_out + row, number, level + 1, mask, 0, 1, edge, LANES)
    _store(words_out + row, number, word | 1, mask, 1, 1, edge, LANES)
    _store(places_out + row, number, place, mask, -1, 0, edge, LANES)
    _store(score_out + row, number, score, mask, 1.0, 0.0, edge, LANES)
    _store_paths(paths_out + row * deepest, number, level, token, bit, word, mask, edge, deepest, LANES, LEVELS)
    tl.store(count_out + sequence, count.to(tl.int64))
