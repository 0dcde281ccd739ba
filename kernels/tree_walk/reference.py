"""Which path of each draft tree is taken, and where an end token or a limit cuts it, without a host synchronisation.

A draft node agrees if its token is the one that follows its parent. Siblings are distinct, so at most one child of a node
agrees, and the nodes whose whole path agrees form one path: the one a walk from the root would find. log2(depth) rounds of
pointer doubling find them for all trees at once.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specdec.kernels.noise.reference import philox_uniform

if TYPE_CHECKING:
    from specdec.rows import RowInfo
    from specdec.sampling import SamplingState

RUNNING, STOPPED, LENGTH = 0, 1, 2  # codes of Verdict.finish

Walked = tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]
"""The tensors of a `specdec.types.Verdict`, in its order."""


def tree_walk(
    following: Tensor, agrees: Tensor | None, rows: RowInfo, sampling: SamplingState, rates: Tensor | None = None, purpose: int = 0
) -> Walked:
    """Shapes and meaning in `specdec.ops.tree_walk`."""
    if rates is not None:
        agrees = forced(rows, sampling, rates, purpose)
    taken = taken_rows(agreement(following, rows) if agrees is None else agrees, rows)
    return settle(taken, following[taken.last], rows, sampling)


def agreement(chosen: Tensor, rows: RowInfo) -> Tensor:
    """[R] bool: the node drafts the token that the target chooses after its parent; True for roots. chosen [R] i64."""
    if rows.root_only:
        return torch.ones(rows.num_rows, dtype=torch.bool, device=rows.device)
    return (rows.node == 0) | (chosen[rows.parent] == rows.token)


def forced(rows: RowInfo, sampling: SamplingState, rates: Tensor, purpose: int, uniform: Callable[..., Tensor] = philox_uniform) -> Tensor:
    """[R] bool: first children (the best path) accepted at these rates, given that their parent is; True for roots. rates [K] f64 by depth,
    the last one beyond. What fills up a tree on the device, with token -1, is none of its nodes. uniform: a backend of that op."""
    rate = rates[rows.depth.clamp(max=len(rates) - 1)]
    slot = rows.slot
    coins = uniform(sampling.seed[slot], sampling.length[slot], sampling.choice[slot], rows.depth[:, None], purpose)
    first = torch.full_like(rows.node, rows.num_rows).scatter_reduce(0, rows.parent, torch.where(rows.node > 0, rows.node, 64), "amin")
    return (rows.node == 0) | ((first[rows.parent] == rows.node) & (coins[:, 0] < rate) & (rows.token >= 0))


class Taken(NamedTuple):
    """The accepted path of each tree. D = deepest node."""

    rows: Tensor  # [B, D + 1] i64, row of the path's node at each depth (the root first), 0 beyond the path
    drafts: Tensor  # [B] i64, how many draft nodes
    last: Tensor  # [B] i64, row of the path's last node


def taken_rows(agrees: Tensor, rows: RowInfo) -> Taken:
    """Nodes whose whole path agrees, by depth. agrees [R] bool, True for roots, for at most one child of any node."""
    if rows.root_only:
        roots = torch.arange(rows.num_rows, device=rows.device)
        return Taken(roots[:, None], torch.zeros_like(roots), roots)
    jump, deepest = rows.parent, rows.max_depth
    for _ in range(deepest.bit_length()):
        agrees = agrees & agrees[jump]
        jump = jump[jump]
    table = torch.zeros((len(rows.counts), deepest + 2), dtype=torch.int64, device=rows.device)
    column = torch.where(agrees, rows.depth, deepest + 1)  # the last column collects what is not on the path
    table[rows.seq, column] = torch.arange(rows.num_rows, device=rows.device)
    reached = torch.zeros(len(rows.counts), dtype=torch.int64, device=rows.device).index_add_(0, rows.seq, agrees.long())
    count = reached - 1
    return Taken(table[:, :-1], count, table.gather(1, count[:, None])[:, 0])


def settle(taken: Taken, final: Tensor, rows: RowInfo, sampling: SamplingState) -> Walked:
    """Accepted tokens and the final one ([B] i64), cut at the first end token or at the length limit.

    A token that is both the last allowed and an end token finishes as stopped.
    """
    column = torch.arange(taken.rows.shape[1], device=rows.device)
    count, slots = taken.drafts[:, None], rows.slots
    committed = torch.where(column == count, final[:, None], 0)
    if not rows.root_only:
        drafted = torch.nn.functional.pad(rows.token[taken.rows[:, 1:]], (0, 1))
        committed = torch.where(column < count, drafted, committed)
    position = sampling.length[slots][:, None] + column
    ends = (committed[:, :, None] == sampling.end_ids[slots][:, None, :]).any(dim=-1)
    ends &= position >= sampling.min_total[slots][:, None]
    full = position + 1 >= sampling.max_total[slots][:, None]
    none = len(column)
    first = torch.where((ends | full) & (column <= count), column, none).amin(dim=1)
    stopped = ends.gather(1, first.clamp(max=none - 1)[:, None])[:, 0]
    num_committed = torch.minimum(first, taken.drafts) + 1
    num_accepted = torch.minimum(taken.drafts, num_committed)
    inside = column[: none - 1] < num_accepted[:, None]
    return (
        torch.where(column < num_committed[:, None], committed, 0),
        num_committed,
        torch.where(inside, rows.node[taken.rows[:, 1:]], 0),
        num_accepted,
        torch.where(first == none, RUNNING, torch.where(stopped, STOPPED, LENGTH)),
        taken.rows,
    )
