"""Arithmetic on `SpecBudget`: what of a wish can be committed at all, and how a limited number of rows is shared."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from specdec.config import MAX_NODES
from specdec.sequence import Sequence
from specdec.types import NO_DRAFT, SpecBudget


def clip(budget: SpecBudget, seq: Sequence, max_model_len: int) -> SpecBudget:
    """The part of `budget` that can possibly be committed: a node at depth d sits at position `len(tokens) - 1 + d`, which
    must stay below `max_model_len`, and `d <= remaining - 1`; no more nodes than a tree of that depth and width has."""
    depth = min(budget.depth, seq.remaining - 1, max_model_len - len(seq.tokens), MAX_NODES - 1)
    if budget.drafter is None or depth < 1:
        return NO_DRAFT
    largest, layer = 1, 1
    for _ in range(depth):
        layer *= max(1, budget.width)
        largest += layer
        if largest >= MAX_NODES:
            break
    return shrink(SpecBudget(budget.drafter, budget.nodes, depth, budget.width), min(MAX_NODES, largest))


def shrink(budget: SpecBudget, nodes: int) -> SpecBudget:
    """`budget` with at most `nodes` nodes, root included; NO_DRAFT when only the root is left."""
    nodes = min(nodes, budget.nodes)
    return NO_DRAFT if nodes < 2 else SpecBudget(budget.drafter, nodes, min(budget.depth, nodes - 1), budget.width)


def fair_cap(wants: Seq[int], total: int) -> int:
    """Largest c with `sum(min(w, c) for w in wants) <= total`: all get what they want, up to the same cap."""
    left = total
    for i, want in enumerate(sorted(wants)):
        share = left // (len(wants) - i)
        if want > share:
            return share
        left -= want
    return max(wants, default=0)
