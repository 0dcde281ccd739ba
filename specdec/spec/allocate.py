"""`allocate`: which draft nodes of a batch are worth verifying. Pure, so that it can be held against brute force.

Maximises expected committed tokens per second of the whole batch, (B + Σ kept scores) / cost(rows). Scores are cumulative, so
they fall along every path: in order of falling score any prefix is a set of trees again, and for a given number of rows no
other choice has a larger numerator. One pass over the order therefore finds the best cut, however jagged the cost curve.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from specdec.spec.cost import StepCost

MIN_SCORE = 0.03  # nodes less likely than this are dropped even where rows are free
MIN_GAIN = 1.01  # drafting must promise 1 % over plain decoding


@dataclass(frozen=True, slots=True)
class Candidate:
    """One sequence's draft tree as the allocation sees it. scores[i] of node i, root included, falling along paths.

    headroom: most extra seconds that its nodes may cost in this step.
    """

    scores: Seq[float]
    context: int
    headroom: float


@dataclass(frozen=True, slots=True)
class Allocation:
    """kept[b]: nodes of sequence b in increasing order, root first. extra[b]: seconds they add to the step."""

    kept: list[list[int]]
    extra: list[float]


def plain_seconds(contexts: Seq[int], cost: StepCost, other_rows: int = 0) -> float:
    """Seconds of the step without any draft."""
    batch = len(contexts)
    return cost.base(batch + other_rows, batch) + sum(cost.attention(1, c) for c in contexts)


def allocate(candidates: Seq[Candidate], cost: StepCost, other_rows: int = 0, waits: float = 0.0) -> Allocation:
    """The best cut over all trees. other_rows: rows of the step that are not decoding (prefill). waits: seconds that it takes more with any
    draft than without, however many nodes; shared by those who draft."""
    batch = len(candidates)
    order = sorted((-s, b, i) for b, c in enumerate(candidates) for i, s in enumerate(c.scores) if i and s >= MIN_SCORE)
    plain = plain_seconds([c.context for c in candidates], cost, other_rows)
    attention = plain - cost.base(batch + other_rows, batch)
    taken: list[tuple[int, int, float]] = []  # (sequence, node, marginal seconds)
    nodes, extra, closed = [1] * batch, [0.0] * batch, [False] * batch
    rows, expected, seconds = batch + other_rows, float(batch), plain
    best, best_rate = 0, MIN_GAIN * batch / plain
    for negative, b, i in order:
        if closed[b]:
            continue
        context = candidates[b].context
        grown = attention + cost.attention(nodes[b] + 1, context) - cost.attention(nodes[b], context)
        after = max(seconds, cost.base(rows + 1, batch) + grown)
        if extra[b] + after - seconds > candidates[b].headroom:
            closed[b] = True  # its other nodes are less likely still, and cost no less
            continue
        taken.append((b, i, after - seconds))
        extra[b] += after - seconds
        nodes[b] += 1
        rows, attention, seconds, expected = rows + 1, grown, after, expected - negative
        if expected / (seconds + waits) > best_rate:
            best, best_rate = len(taken), expected / (seconds + waits)
    kept, spent = [[0] for _ in candidates], [0.0] * batch
    for b, i, marginal in taken[:best]:
        kept[b].append(i)
        spent[b] += marginal
    drafting = sum(len(own) > 1 for own in kept)
    if waits and drafting:
        spent = [seconds + waits / drafting if len(own) > 1 else 0.0 for own, seconds in zip(kept, spent, strict=True)]
    return Allocation([sorted(k) for k in kept], spent)


def subtree(tokens: list[int], parents: list[int], scores: list[float], kept: list[int]) -> tuple[list[int], list[int], list[float]]:
    """The nodes `kept` (increasing, closed under parents) of a tree, renumbered in their old order."""
    number = {old: new for new, old in enumerate(kept)}
    return [tokens[i] for i in kept], [number.get(parents[i], -1) for i in kept], [scores[i] for i in kept]
