"""Decisions before drafting: which drafter, how deep, how wide at most. Pure functions of records and costs."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import NamedTuple

from specdec.spec.acceptance import SequenceRecord, expected_tokens
from specdec.spec.allocate import MIN_GAIN, plain_seconds
from specdec.spec.cost import StepCost

HOPEFUL = 0.97  # acceptance per token that the widest sensible budget is computed for
PROBE_NODES = 3  # root included
COUNTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
EXPLORE = 16  # every so many steps another drafter than the best is asked
HOME = 0.15  # tokens per step by which another drafter must beat the first one


class Bounds(NamedTuple):
    """What no draft in a batch of `batch` sequences gets past. widest: most nodes per sequence worth planning, 1 = drafting cannot pay.
    least_chance: of the likeliest node. row: seconds of the first row more."""

    batch: int
    widest: int
    least_chance: float
    row: float


def bounds_of(contexts: Seq[int], cost: StepCost) -> Bounds:
    """Those of sequences with these contexts."""
    batch = len(contexts)
    row = cost.base(batch + 1, batch) - cost.base(batch, batch)
    return Bounds(batch, widest(contexts, cost), least_chance(contexts, cost), row)


def widest(contexts: Seq[int], cost: StepCost) -> int:
    """Nodes per sequence with the best throughput if nearly every draft were right; 1 = drafting cannot pay.

    Bounds what the scheduler reserves: even perfect drafts deserve no more rows than that.
    """
    batch = len(contexts)
    best, best_rate = 1, MIN_GAIN / plain_seconds(contexts, cost)
    for nodes in COUNTS:
        seconds = cost.base(batch * nodes, batch) + sum(cost.attention(nodes, c) for c in contexts)
        rate = (1 - HOPEFUL**nodes) / (1 - HOPEFUL) / seconds
        if rate > best_rate:
            best, best_rate = nodes, rate
    return best


def least_chance(contexts: Seq[int], cost: StepCost) -> float:
    """Of the likeliest draft node: below it no tree pays, were all its nodes as likely, whether one sequence drafts or all do."""
    batch, plain = len(contexts), plain_seconds(contexts, cost)
    mean, least = sum(contexts) // batch, 1.0
    for nodes in COUNTS:
        one = plain + cost.base(batch + nodes - 1, batch) - cost.base(batch, batch) + cost.attention(nodes, mean) - cost.attention(1, mean)
        every = cost.base(batch * nodes, batch) + batch * cost.attention(nodes, mean)
        least = min(least, batch * (MIN_GAIN * one / plain - 1) / (nodes - 1), (MIN_GAIN * every / plain - 1) / (nodes - 1))
    return least


def choose(names: Seq[str], records: Mapping[str, SequenceRecord], step: int) -> str:
    """The drafter that won most tokens per step on this sequence; now and then each is asked, to know. Ties and small leads
    go to the first of `names`: switching costs evidence, and figures of a short sequence are mostly luck."""
    if len(names) == 1:
        return names[0]
    name = max(names, key=lambda n: records[n].value.mean() + (HOME if n == names[0] else 0.0))
    if step % EXPLORE == 0:
        name = names[step // EXPLORE % len(names)]
    records[name].asked += 1
    return name


def paying_depth(
    record: SequenceRecord,
    unit: float,
    deepest: int,
    headroom: float,
    token_seconds: float,
    cost: StepCost,
    batch: int,
    *,
    on_trial: bool = False,
    waits: float = 0.0,
) -> int:
    """Depth of the chain with the best expected rate for a drafter whose drafts cost time; 0 = do not draft.

    unit: seconds to draft one token. headroom: most extra seconds. token_seconds: a token's share of a plain step. All
    sequences are taken to draft alike. A drafter that has been idle for long enough gets a short probe. Nothing else gets one that wins
    nothing, whatever its depths promise: they are known of drafts that were verified, not of those cut after they had been paid for.
    on_trial: it is to be seen at work, and that does not hold for it. waits: seconds that a step with drafts waits more than one without.
    """
    plain, best, best_rate = cost.base(batch, batch), 0, MIN_GAIN / token_seconds
    expected = expected_tokens(record.rates, deepest) if on_trial or record.value.wins() else ()
    for depth in range(1, len(expected)):
        extra = unit * depth + (cost.base(batch * (1 + depth), batch) - plain) / batch
        if extra > headroom:
            break
        rate = (1 + expected[depth]) / (token_seconds + extra + waits / batch)
        if rate > best_rate:
            best, best_rate = depth, rate
    if best == 0 and (record.probe_due() if on_trial else record.trial_due()) and unit * PROBE_NODES <= headroom:
        return min(deepest, PROBE_NODES - 1)
    return best
