"""What a verdict means for caches, statistics and log-probabilities. Pure functions of a step, but `move`; the engine applies them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from specdec.types import DraftTree, Scheduled, StepPlan, StepStats, Verdict

if TYPE_CHECKING:
    from specdec.batch import BatchBuilder
    from specdec.cache.kv import KVCache
    from specdec.overlap import Flight


@dataclass(slots=True)
class Moves:
    """KV cells to copy: in the sequence of `request_slots[i]`, cell `source[i]` → `target[i]`."""

    request_slots: list[int] = field(default_factory=list)
    source: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)


def compaction(shares: tuple[Scheduled, ...], verdict: Verdict) -> Moves:
    """Accepted nodes lie in cells root + node index and belong to root + depth; a chain needs no move. Before commit."""
    moves = Moves()
    for share, path, count in zip(shares, verdict.host.path, verdict.host.num_accepted, strict=True):
        root = share.seq.num_computed
        for depth, node in enumerate(path[:count], start=1):
            if node != depth:
                moves.request_slots.append(share.seq.request_slot)
                moves.source.append(root + node)
                moves.target.append(root + depth)
    return moves


def move(moves: Moves, builder: BatchBuilder, kv: KVCache) -> None:
    """Carry them out, all reads before all writes."""
    if moves.request_slots:
        source = builder.slots(moves.request_slots, moves.source)
        target = builder.slots(moves.request_slots, moves.target)
        for group in range(len(kv.groups)):
            kv.move(group, source[group], target[group])


def open_stats(step: int, plan: StepPlan, tree: DraftTree) -> StepStats:
    """Statistics of a step that ran and is not committed yet."""
    shares = plan.sampling
    rows = plan.num_rows - len(shares) + sum(tree.host.num_nodes)
    first = shares[0].budget if shares else None
    return StepStats(
        step,
        len(plan.scheduled),
        rows,
        len(shares),
        context=sum(s.seq.num_computed for s in shares),
        preempted=len(plan.preempted),
        alone=all(s.samples and s.num_new == 1 and not s.rerun for s in plan.scheduled),
        budget=first if all(s.budget == first for s in shares) else None,
    )


def clocked(stats: StepStats, flight: Flight, before: float) -> float:
    """Give the statistics their times, up to now, which is returned. before: when the last step was committed; a flight may have begun
    while it was."""
    start, drafted, forwarded = (max(moment, before) for moment in flight.clock)
    end = time.perf_counter()
    stats.draft_seconds = drafted - start
    stats.forward_seconds = forwarded - drafted
    stats.verify_seconds = end - forwarded
    stats.step_seconds = end - start
    stats.drafter_seconds, stats.waited = flight.drafter_seconds, flight.waited
    return end


def count(stats: StepStats, share: Scheduled, drafter: str | None, drafted: int, accepted: int, committed: int) -> None:
    """Add one sequence's outcome to the step's statistics and to its own metrics. `drafted`: draft tokens, root excluded."""
    metrics = share.seq.metrics
    metrics.steps += 1
    metrics.generated += committed
    stats.committed += committed
    if drafter is None or drafted == 0:
        return
    metrics.drafted += drafted
    metrics.accepted += accepted
    stats.drafts[drafter] = stats.drafts.get(drafter, 0) + 1
    stats.drafted[drafter] = stats.drafted.get(drafter, 0) + drafted
    stats.accepted[drafter] = stats.accepted.get(drafter, 0) + accepted
    reached = stats.accepted_position.setdefault(drafter, [])
    reached.extend([0] * (accepted - len(reached)))
    for i in range(accepted):
        reached[i] += 1
