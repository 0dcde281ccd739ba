"""Arithmetic on `SpecBudget`: what of a wish can be committed at all, and how a limited number of rows is shared."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

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
    return shrink(replace(budget, depth=depth), min(MAX_NODES, largest))


def shrink(budget: SpecBudget, nodes: int) -> SpecBudget:
    """`budget` with at most `nodes` nodes, root included; NO_DRAFT when only the root is left."""
    nodes = min(nodes, budget.nodes)
    return NO_DRAFT if nodes < 2 else replace(budget, nodes=nodes, depth=min(budget.depth, nodes - 1))


def beam(budget: SpecBudget) -> int:
    """Nodes that a feeding drafter runs per depth: `width`, or what 63 nodes besides the root allow."""
    return min(budget.width, (MAX_NODES - 1) // max(1, budget.depth - 1))


def slots(budget: SpecBudget) -> int:
    """Slots from the newest token on that drafting and verification write."""
    return max(budget.nodes, 1 + beam(budget) * max(0, budget.depth - 1)) if budget.feeds else budget.nodes


def confine(budget: SpecBudget, room: int) -> SpecBudget:
    """`budget` that writes at most `room` slots: fewer nodes, then a narrower beam."""
    budget = shrink(budget, room)
    if slots(budget) > room:  # with a beam of 1 it writes `depth` slots, fewer than its nodes
        budget = replace(budget, width=max(1, (room - 1) // (budget.depth - 1)))
    return budget


def fair_cap(wants: Seq[int], total: int) -> int:
    """Largest c with `sum(min(w, c) for w in wants) <= total`: all get what they want, up to the same cap."""
    left = total
    for i, want in enumerate(sorted(wants)):
        share = left // (len(wants) - i)
        if want > share:
            return share
        left -= want
    return max(wants, default=0)
