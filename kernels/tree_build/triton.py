"""The draft tree from a pool of candidates: a program per sequence, everything in registers.

A key of score bits above inverted place orders the pool without ties, so the picks are the keys above a threshold: bisection over
its 63 bits, each step a sum over the pool (a sort of 1024 keys takes 55 exchanges through shared memory). Then a lane is a pick, in
rising place; relations between picks (parent of, sibling ahead of, numbered before) are masks of lanes × lanes, and what holds along a path
takes log2(lanes) rounds of pointer doubling. Two kilobytes in, two out: its time is that of its dependent steps.
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
    """The least key that is picked: no more than `budget` keys reach it. At least 1: without a score there is no key."""
    least = tl.full([], 1, tl.int64)
    most = tl.max(keys, 0) + 1
    while most - least > 0:
        middle = least + ((most - least) >> 1)
        few = tl.sum((keys >= middle).to(tl.int32), 0) <= budget
        least = tl.where(few, least, middle + 1)
        most = tl.where(few, middle, most)
    return least


@triton.jit
def _places(scores, pool, least, LANES: tl.constexpr):
    """(places [LANES] i32 of the picks in rising order, how many there are)."""
    lane = tl.arange(0, LANES)
    place = tl.zeros([LANES], tl.int32)
    before = tl.full([], 0, tl.int32)
    for at in range(0, pool, LANES):
        here = at + lane
        hit = (_key(tl.load(scores + here, mask=here < pool, other=0.0), here) >= least).to(tl.int32)
        position = before + tl.cumsum(hit, 0) - 1
        mine = (position[None, :] == lane[:, None]) & (hit[None, :] != 0)
        place += tl.sum(tl.where(mine, here[None, :], 0), 1)
        before += tl.sum(hit, 0)
    return place, before


@triton.jit
def _along(flag, jump, ROUNDS: tl.constexpr):
    """Bits that are set in flag at the pick and at all above it. jump: the pick above, itself at the top."""
    for _ in tl.static_range(ROUNDS):
        flag = flag & tl.gather(flag, jump, 0)
        jump = tl.gather(jump, jump, 0)
    return flag


@triton.jit
def _numbers(key, place, above, picked, ROUNDS: tl.constexpr, LANES: tl.constexpr):
    """Of each pick: whether it is kept, its depth - 1, number, that of its parent, its bit and its ancestor word without the root's bit."""
    lane = tl.arange(0, LANES)
    ahead = key[None, :] > key[:, None]  # [lane, other]: the other comes first
    hangs = (place[None, :] == above[:, None]) & ahead & picked[None, :]
    found = tl.sum(hangs.to(tl.int32), 1)
    jump = tl.where(found != 0, tl.sum(tl.where(hangs, lane[None, :], 0), 1), lane)
    kept = _along((picked & ((above == -1) | (found != 0))).to(tl.int32), jump, ROUNDS)
    siblings = (above[None, :] == above[:, None]) & ahead & (kept[None, :] != 0)
    best = _along(tl.where(tl.sum(siblings.to(tl.int32), 1) == 0, kept, 0), jump, ROUNDS)

    level = tl.where(found != 0, 1, 0)
    at = jump
    for _ in tl.static_range(ROUNDS):
        level += tl.gather(level, at, 0)
        at = tl.gather(at, at, 0)
    number = tl.where(best != 0, level + 1, tl.sum(best, 0) + tl.cumsum(kept - best, 0))
    bit = tl.where(kept != 0, tl.full([LANES], 1, tl.int64) << tl.where(kept != 0, number, 0).to(tl.int64), 0)
    word = bit
    at = jump
    for _ in tl.static_range(ROUNDS):
        word = word | tl.gather(word, at, 0)
        at = tl.gather(at, at, 0)
    return kept, level, number, tl.where(above == -1, 0, tl.gather(number, jump, 0)), bit, word


@triton.jit
def _store(out, number, value, mask, root, edge, LANES: tl.constexpr):
    """A row of the tree: values at their numbers, the root at 0, zeros behind them (edge: where these two go)."""
    lane = tl.arange(0, LANES)
    tl.store(out + number, value.to(out.dtype.element_ty), mask=mask)
    tl.store(out + lane, tl.where(lane == 0, root, 0).to(out.dtype.element_ty), mask=edge)


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
    own = sequence * pool
    whole = tl.arange(0, POOL)
    keys = _key(tl.load(scores + own + whole, mask=whole < pool, other=0.0), whole)
    least = _least_key(keys, tl.minimum(tl.load(nodes + sequence), width) - 1)
    place, picks = _places(scores + own, pool, least, LANES)
    lane = tl.arange(0, LANES)
    picked = lane < picks
    score = tl.load(scores + own + place, mask=picked, other=0.0)
    token = tl.load(tokens + own + place, mask=picked, other=0)
    above = tl.load(parents + own + place, mask=picked, other=0).to(tl.int32)
    kept, level, number, parent, bit, word = _numbers(_key(score, place), place, above, picked, ROUNDS, LANES)

    mask = kept != 0
    count = tl.sum(kept, 0) + 1
    edge = (lane < width) & ((lane == 0) | (lane >= count))
    row = sequence * width
    _store(tokens_out + row, number, token, mask, tl.load(roots + sequence), edge, LANES)
    _store(parents_out + row, number, parent, mask, -1, edge, LANES)
    _store(depth_out + row, number, level + 1, mask, 0, edge, LANES)
    _store(words_out + row, number, word | 1, mask, 1, edge, LANES)
    _store(places_out + row, number, place, mask, -1, edge, LANES)
    _store(score_out + row, number, score, mask, 1.0, edge, LANES)
    _store_paths(paths_out + row * deepest, number, level, token, bit, word, mask, edge, deepest, LANES, LEVELS)
    tl.store(count_out + sequence, count.to(tl.int64))
