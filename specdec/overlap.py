"""The host one step behind: a step that needs nothing of the step before but its tokens is begun before the host knows them.

The device already has them, and where each sequence gets exactly one token the host can lay out the next step without: positions, blocks
and request slots are known. So a batch of plain decode rows is *followed*: its next step is queued behind it, and while the device works
on that, the host reads the verdict, streams tokens and drops who has finished. A sequence that turns out to have ended (end token, stop
string, cancellation) costs one row of the step in flight, of which nothing is kept. Steps in which heads draft are followed by `behind`.
Everything else waits for the verdict, as in the plain loop: other drafts, prefill, admissions, sequences whose laws depend on what was said
(penalties, bad words), log-probabilities.

The plain loop is the specification: with and without, tokens, statistics and caches are the same (`tests/engine/test_overlap.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from specdec.spec.tree import root_only
from specdec.transfer import arrival, send
from specdec.types import Batch, DraftTree, Forward, Scheduled, StepPlan, Verdict

if TYPE_CHECKING:
    from specdec.batch import BatchBuilder
    from specdec.runner.runner import ModelRunner
    from specdec.sampling import SamplingState
    from specdec.scheduler import Scheduler
    from specdec.spec.verify import Verifier


@dataclass(frozen=True, slots=True)
class Flight:
    """A step that the device has and the host has not committed. clock: when it began, had its drafts, had its pass queued."""

    plan: StepPlan
    tree: DraftTree
    forward: Forward
    verdict: Verdict
    clock: tuple[float, float, float]
    drafter_seconds: float = 0.0  # that the host waited for drafters
    waited: str | None = None  # see `StepStats`
    told: Callable[[], list[Any]] | None = None  # where the device drafted: its trees as lists (`recorded_growth.host_drafts`), when asked


class Launcher:
    """Gives steps to the device."""

    def __init__(self, scheduler: Scheduler, builder: BatchBuilder, runner: ModelRunner, verifier: Verifier, sampling: SamplingState):
        self._scheduler, self._builder, self._runner = scheduler, builder, runner
        self._verifier, self._sampling = verifier, sampling

    def launch(self, plan: StepPlan, tree: DraftTree, start: float, batch: Batch | None = None, told: tuple[Tensor, ...] = ()) -> Flight:
        """Target pass and verdict of a step; neither is waited for on a device of its own. batch: None = as plan and tree have it.
        told: what else the host has to know of the step, with its verdict."""
        drafted = time.perf_counter()
        forward = self._runner.forward(batch or self._builder.build(plan, tree))
        forwarded = time.perf_counter()
        shares = plan.sampling
        verdict = self._verifier.verify(tree, forward.logits, shares, self._sampling)
        self._sampling.advance([share.seq.request_slot for share in shares], verdict.num_committed)
        arriving, known = arrival((*verdict.decided, *told)), len(verdict.decided)
        verdict = replace(verdict, arriving=lambda: arriving()[:known])
        said = (lambda: arriving()[known:]) if told else None
        return Flight(plan, tree, forward, verdict, (start, drafted, forwarded), told=said)

    def can_follow(self, flight: Flight) -> bool:
        """Whether the next step is a plain row for those of the flight who go on, whatever its verdict, if nobody drafts."""
        shares = flight.plan.scheduled
        if self._scheduler.admits or len(shares) != self._scheduler.num_running:
            return False
        alone = all(s.samples and s.num_new == 1 and s.budget.drafter is None and s.seq.params.logprobs is None for s in shares)
        return alone and self._sampling.follows([share.seq.request_slot for share in shares])

    def follow(self, flight: Flight) -> Flight | None:
        """The step after `flight`, given to the device before its verdict is known; None where everybody ends, or for want of blocks."""
        start = time.perf_counter()
        index = [i for i, share in enumerate(flight.plan.scheduled) if share.seq.remaining > 1]
        seqs = [flight.plan.scheduled[i].seq for i in index]
        if not seqs or not self._scheduler.extend({seq: len(seq.tokens) + 1 for seq in seqs}):
            return None
        plan = StepPlan(tuple(Scheduled(seq, 1, True) for seq in seqs))
        batch = self._builder.follow(seqs, only_rows(flight.verdict.committed, index)[:, 0], self._sampling.length)
        return self.launch(plan, root_only([0] * len(seqs)), start, batch)


def landed(flight: Flight | None) -> Flight | None:
    """A flight as the step that it is, now that the one before is committed: without those who ended there, rooted in their newest
    tokens; None where nobody is left."""
    if flight is None:
        return None
    index = [i for i, share in enumerate(flight.plan.scheduled) if not share.seq.finished]
    if not index:
        return None
    shares = tuple(flight.plan.scheduled[i] for i in index)
    told, tree = flight.told, flight.tree if flight.told is not None else root_only([share.seq.tokens[-1] for share in shares])
    if len(index) == len(flight.plan.scheduled):
        return replace(flight, tree=tree)
    verdict, forward, arriving = flight.verdict, flight.forward, flight.verdict.arriving
    committed, num_committed, path, num_accepted, finish, rows = (only_rows(field, index) for field in (*verdict.decided, verdict.rows))
    kept = Verdict(committed, num_committed, path, num_accepted, finish, rows, arriving=_only(arriving, index))
    taps = None if forward.taps is None else only_rows(forward.taps.unflatten(0, (len(flight.plan.scheduled), -1)), index).flatten(0, 1)
    return Flight(StepPlan(shares), tree, replace(forward, taps=taps), kept, flight.clock, told=_only(told, index))


def _only(arriving: Callable[[], list[Any]] | None, index: list[int]) -> Callable[[], list[Any]] | None:
    """Of every field the entries `index`."""
    return None if arriving is None else lambda: [[field[i] for i in index] for field in arriving()]


def only_rows(values: Tensor, index: list[int]) -> Tensor:
    """The rows `index` of values [B, any]."""
    if len(index) == len(values):
        return values
    return values.index_select(0, send(np.array(index, dtype=np.int64), values.device))
