"""The walk on the device: a program per tree, a lane per node, pointer doubling in registers.

Latency is all there is (a 64-node tree is 2 kB): loads once, then log2(D) rounds of two gathers inside the warp instead of one dependent
load per depth, then a loop over the few end tokens.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.noise.triton import named_word, uniform

if TYPE_CHECKING:
    from specdec.kernels.tree_walk.reference import Walked
    from specdec.rows import RowInfo
    from specdec.sampling import SamplingState

_MOST_NODES = 64


def rejects(following: Tensor, agrees: Tensor | None, rows: RowInfo, *_: object) -> str | None:
    """Why this kernel cannot run the call, or None."""
    nodes = rows.tree.tokens.shape[1]
    return None if nodes <= _MOST_NODES else f"trees of up to {nodes} nodes; it takes {_MOST_NODES}"


def tree_walk(
    following: Tensor, agrees: Tensor | None, rows: RowInfo, sampling: SamplingState, rates: Tensor | None = None, purpose: int = 0
) -> Walked:
    """Shapes and meaning in `specdec.ops.tree_walk`."""
    tree, batch, width = rows.tree, len(rows.counts), rows.max_depth + 1
    nodes, device = tree.tokens.shape[1], following.device
    new = (
        torch.empty(shape, dtype=torch.int64, device=device) for shape in ((batch, width),) * 2 + ((batch, width - 1),) + ((batch,),) * 3
    )
    committed, path_rows, path, num_committed, num_accepted, finish = new
    if batch:
        fields = (t.contiguous() for t in rows.drafted)
        given, forced = agrees is not None and not rows.root_only, rates is not None and not rows.root_only
        law = rates if forced else agrees if given else following
        limits = sampling.length, sampling.min_total, sampling.max_total, sampling.end_ids
        _walk[(batch,)](
            following, law, *fields, rows.starts, rows.slots, *limits, sampling.seed, sampling.choice,
            committed, num_committed, path, num_accepted, finish, path_rows, width, nodes, sampling.end_ids.shape[1],
            0 if rates is None else len(rates), purpose, GIVEN=given, FORCED=forced,
            NODES=triton.next_power_of_2(max(nodes, 2)), ROUNDS=(width - 1).bit_length(), COLUMNS=triton.next_power_of_2(width),
            num_warps=1,
        )  # fmt: skip
    return committed, num_committed, path, num_accepted, finish, path_rows


@triton.jit
def _forced(rates, num_rates, token, parent, depth, real, length, seed, choice, purpose, NODES: tl.constexpr):
    """1 for first children whose coin is below their depth's rate: the reference's `forced`."""
    node = tl.arange(0, NODES)
    siblings = (parent[:, None] == parent[None, :]) & real[None, :] & (node > 0)[None, :]
    elders = tl.max((siblings & (node[None, :] < node[:, None])).to(tl.int32), 1)
    coin = uniform(named_word(depth, seed, length, choice, purpose))
    rate = tl.load(rates + tl.minimum(depth, num_rates - 1))
    return ((elders == 0) & (coin.to(tl.float64) < rate) & (token >= 0)).to(tl.int32)


@triton.jit
def _clear(committed, path_rows, path, drafts, width, COLUMNS: tl.constexpr):
    """Zeros in a tree's results beyond the path."""
    place = tl.arange(0, COLUMNS)
    beyond = (place > drafts) & (place < width)
    nothing = tl.zeros([COLUMNS], tl.int64)
    tl.store(committed + place, nothing, mask=beyond)
    tl.store(path_rows + place, nothing, mask=beyond)
    tl.store(path + place - 1, nothing, mask=beyond)


@triton.jit(do_not_specialize=["width", "nodes", "ends", "num_rates", "purpose"])
def _walk(
    following, law, tokens, parents, depths, num_nodes, starts, slots, lengths, min_totals, max_totals, end_ids, seeds, choices,
    committed, num_committed, path, num_accepted, finish, path_rows, width, nodes, ends, num_rates, purpose,
    GIVEN: tl.constexpr, FORCED: tl.constexpr, NODES: tl.constexpr, ROUNDS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Grid (trees). law: GIVEN, which nodes agree; FORCED, num_rates rates. width = D + 1, nodes = N, ends = end tokens a request slot has
    room for."""
    tree = tl.program_id(0).to(tl.int64)
    node = tl.arange(0, NODES)
    real = node < tl.load(num_nodes + tree)
    own = tree * nodes + node
    first = tl.load(starts + tree)
    token = tl.load(tokens + own, mask=real, other=0)
    depth = tl.load(depths + own, mask=real, other=0).to(tl.int32)
    parent = tl.maximum(tl.load(parents + own, mask=real, other=0), 0).to(tl.int32)
    after = tl.load(following + first + node, mask=real, other=0)
    slot = tl.load(slots + tree)
    length = tl.load(lengths + slot)
    if FORCED:
        seed, choice = tl.load(seeds + slot), tl.load(choices + slot)
        on_path = _forced(law, num_rates, token, parent, depth, real, length, seed, choice, purpose, NODES)
    elif GIVEN:
        on_path = tl.load(law + first + node, mask=real, other=0).to(tl.int32)
    else:
        on_path = (tl.gather(after, parent, 0) == token).to(tl.int32)
    on_path = tl.where(node == 0, 1, tl.where(real, on_path, 0))
    for _ in tl.static_range(ROUNDS):
        on_path = on_path & tl.gather(on_path, parent, 0)
        parent = tl.gather(parent, parent, 0)
    taken = on_path != 0
    drafts = tl.sum(on_path, 0) - 1

    # what is emitted: the token of the path's node one deeper; after its last node, what follows that one
    column = tl.where(node == 0, drafts, depth - 1)
    final = tl.sum(tl.where(taken & (depth == drafts), after, 0), 0)
    emitted = tl.where(node == 0, final, token)
    position = length + column
    stops = tl.zeros([NODES], tl.int32)
    for e in range(ends):
        stops = stops | (emitted == tl.load(end_ids + slot * ends + e)).to(tl.int32)
    stops = tl.where(position >= tl.load(min_totals + slot), stops, 0)
    full = position + 1 >= tl.load(max_totals + slot)
    cut = tl.min(tl.where(taken & ((stops != 0) | full), column, width), 0)
    stopped = tl.max(tl.where(taken & (column == cut), stops, 0), 0)
    count = tl.minimum(cut, drafts) + 1
    accepted = tl.minimum(drafts, count)

    inside = column < count
    tl.store(committed + tree * width + column, tl.where(inside, emitted, 0), mask=taken)
    tl.store(path_rows + tree * width + depth, first + node, mask=taken)
    draft = taken & (node > 0)
    tl.store(path + tree * (width - 1) + column, tl.where(column < accepted, node, 0).to(tl.int64), mask=draft)
    _clear(committed + tree * width, path_rows + tree * width, path + tree * (width - 1), drafts, width, COLUMNS)
    tl.store(num_committed + tree, count.to(tl.int64))
    tl.store(num_accepted + tree, accepted.to(tl.int64))
    code = tl.where(cut == width, 0, tl.where(stopped != 0, 1, 2))
    tl.store(finish + tree, code.to(tl.int64))
