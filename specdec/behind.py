"""The host one step behind where everybody drafts with a head: the whole next step is given to the device before the host knows the last.

The device has what the next step needs: the path that its verdict took and the lengths that follow from it. Queued behind the verdict are
the compaction of accepted K and V, the head's pass over the accepted pairs, its drafts (`spec.recorded_growth`, numbered trees on the
device), their layout, the target pass and its verdict. The host lays out nothing that depends on the verdict; of lengths it knows how far
they can have come, and reserves blocks for that. Trees may come out with fewer nodes than planned: what fills them up writes no K and V, is
seen by nobody and accepted by nobody. The host hears of tree and verdict with one copy, when it commits the step.

Followed are steps in which everybody drafts with one head and one budget, whatever the verdict: laws are temperatures, nobody waits for
admission, no head is on trial. The policy offers such budgets where `able` says that they would be followed. Nobody keeps a batch from it
by ending: who surely ends in the step before is left out, who turns out to have ended is dropped (`overlap.landed`), and drafts that no
request has room for are cut by the verdict. A step that waits instead says why (`Wait`).
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

from specdec import ops
from specdec.budget import clip, shrink, slots
from specdec.overlap import Flight, only_rows
from specdec.spec.head_drafter import HeadDrafter
from specdec.spec.recorded_growth import host_drafts
from specdec.spec.tree import rows_of, tree_from_lists
from specdec.transfer import constant
from specdec.types import DraftTree, Scheduled, SpecBudget, StepPlan, Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.boot import Parts
    from specdec.overlap import Launcher
    from specdec.sequence import Sequence

MODES = ("coupled", "synthetic")  # verification that reads of a tree what lies on the device


class Wait(enum.Enum):
    """Why a step waits for the verdict of the one before, which drafted or might have been followed."""

    ADMISSION = "admission"  # somebody waits to be let in, or is being prefilled
    LAW = "law"  # a request asks for what the host must look at
    DRAFTER = "drafter"  # other drafters, or a head that cannot, has not run all pairs, or is on trial
    BUDGET = "budget"  # the next step is planned otherwise
    END = "end"  # everybody may have ended
    BLOCKS = "blocks"


class Behind:
    """Gives drafting steps to the device behind the one in flight."""

    def __init__(self, launcher: Launcher, parts: Parts):
        self._launcher, self._parts = launcher, parts

    def able(self, seqs: Seq[Sequence]) -> dict[str, int]:
        """The heads that could draft for all of these behind a step in flight, and how wide their trees may be."""
        parts = self._parts
        if parts.heads.on_trial or not self._lawful(seqs):
            return {}
        heads = ((name, proposer.width_ahead) for name, proposer in parts.proposers.items() if isinstance(proposer, HeadDrafter))
        return {name: width for name, width in heads if width > 0}

    def _lawful(self, seqs: Seq[Sequence]) -> bool:
        """Whether temperatures alone shape what they say, and nobody asks how likely it was."""
        parts, silent = self._parts, all(seq.params.logprobs is None for seq in seqs)
        return silent and parts.verifier.mode in MODES and parts.sampling.only_temperatures([seq.request_slot for seq in seqs])

    def waits(self, flight: Flight) -> Wait | None:
        """Why no step can follow the flight, whatever is planned; None where one may."""
        parts, shares = self._parts, flight.plan.scheduled
        if parts.scheduler.admits or len(shares) != parts.scheduler.num_running:
            return Wait.ADMISSION
        if not all(share.samples and share.num_new == 1 and not share.rerun for share in shares):
            return Wait.ADMISSION
        if not self._lawful([share.seq for share in shares]):
            return Wait.LAW
        names = {share.budget.drafter for share in shares if share.budget.drafter is not None}
        if len(names) > 1 or parts.heads.on_trial or not isinstance(parts.proposers[names.pop()], HeadDrafter):
            return Wait.DRAFTER
        return None

    def follow(self, flight: Flight, budgets: Mapping[Sequence, SpecBudget]) -> Flight | Wait:
        """The step behind `flight`, which nothing hinders, given to the device; or why it waits. budgets: what each may draft then."""
        start, parts = time.perf_counter(), self._parts
        most = flight.verdict.committed.shape[1]
        index = [i for i, share in enumerate(flight.plan.scheduled) if share.seq.remaining > 1]
        seqs = [flight.plan.scheduled[i].seq for i in index]
        if all(seq.remaining <= most for seq in seqs):
            return Wait.END
        budget = self._budget(flight, seqs, budgets)
        if budget is None:
            return Wait.BUDGET
        drafter, shares = parts.proposers[budget.drafter or ""], [Scheduled(seq, 1, True, budget) for seq in seqs]
        if not isinstance(drafter, HeadDrafter) or not self._ready(drafter, shares, most):
            return Wait.DRAFTER
        room = {share.seq: len(share.seq.tokens) - 1 + most for share in flight.plan.scheduled}  # to compact in
        room |= {seq: min(len(seq.tokens) + most, seq.max_total) - 1 + slots(budget) for seq in seqs}
        if not parts.scheduler.extend(room):
            return Wait.BLOCKS
        return self._launch(flight, index, shares, drafter, start)

    def _budget(self, flight: Flight, seqs: list[Sequence], budgets: Mapping[Sequence, SpecBudget]) -> SpecBudget | None:
        """One for all that gives each what it may have, but for drafts that its own end would cut: that in flight, else the largest."""
        parts, deepest = self._parts, flight.verdict.path.shape[1]
        most = parts.scheduler.max_rows // len(seqs)
        wanted = {seq: shrink(budgets[seq], most) for seq in seqs}
        for offers in ([share.budget for share in flight.plan.scheduled], wanted.values()):
            offered = max(offers, key=lambda budget: (budget.nodes, budget.depth))
            alike = all(_clipped(offered, seq, parts.max_model_len) == _clipped(wanted[seq], seq, parts.max_model_len) for seq in seqs)
            if alike and offered.drafter is not None and deepest <= offered.depth:
                return offered
        return None

    def _ready(self, drafter: HeadDrafter, shares: list[Scheduled], most: int) -> bool:
        """Whether the head can draft for them, `most` tokens from now."""
        longest = drafter.max_len
        if longest is not None and any(len(share.seq.tokens) + most > longest for share in shares):
            return False
        return drafter.can_follow(shares, self._parts.sampling)

    def _launch(self, flight: Flight, index: list[int], shares: list[Scheduled], drafter: HeadDrafter, start: float) -> Flight:
        """index: who of the flight goes on, each with a share."""
        parts, verdict, budget = self._parts, flight.verdict, shares[0].budget
        everybody = None
        if any(share.budget.width > 1 for share in flight.plan.scheduled):  # a chain lies where it belongs
            everybody = parts.builder.tables_of([share.seq for share in flight.plan.scheduled])
            self._compact(verdict, *everybody)
        if everybody is None or len(index) < len(flight.plan.scheduled):
            everybody = parts.builder.tables_of([share.seq for share in shares])
        request_slots, tables = everybody
        starts = list(accumulate(rows_of(flight.tree), initial=0))
        roots = constant(tuple(starts[i] for i in index), parts.builder.device)
        assert flight.forward.taps is not None
        said = [only_rows(field, index) for field in (verdict.committed, verdict.num_committed, verdict.path)]
        grown = drafter.follow(shares, parts.sampling, said, flight.forward.taps, roots)
        whole = constant((budget.nodes,) * len(shares), parts.builder.device)
        uniform = budget.nodes, budget.depth
        tree = DraftTree(grown.tokens, grown.parents, grown.depth, whole, drafters=(drafter.name,) * len(shares), uniform=uniform)
        batch = parts.builder.trees(tree, grown.num_nodes, grown.words, parts.sampling.length, request_slots, tables)
        return self._launcher.launch(StepPlan(tuple(shares)), tree, start, batch, grown.told)

    def _compact(self, verdict: Verdict, request_slots: Tensor, tables: Tensor) -> None:
        """As `commit.compaction`: accepted nodes go from cells root + node to root + depth; the others stay."""
        kv, said = self._parts.kv, (verdict.path, verdict.num_accepted, verdict.num_committed)
        source, target = ops.compaction_slots(*said, self._parts.sampling.length, request_slots, tables, kv.block_size)
        for group in range(len(kv.groups)):
            kv.move(group, source[group], target[group])

    def settled(self, flight: Flight) -> Flight:
        """The flight with its trees on the host, whoever drafted them. Waits for the device where it did."""
        if flight.told is None:
            return flight
        shares, drafts = flight.plan.scheduled, host_drafts(flight.told())
        drafter = self._parts.proposers[shares[0].budget.drafter or ""]
        assert isinstance(drafter, HeadDrafter)
        for share, draft in zip(shares, drafts, strict=True):
            drafter.drew(share.seq, draft)
        names = [drafter.name if len(d.tokens) > 1 else None for d in drafts]
        tree = replace(tree_from_lists([(d.tokens, d.parents, d.scores) for d in drafts], names), uniform=flight.tree.uniform)
        self._parts.policy.expected(tree, shares)
        return replace(flight, tree=tree, told=None)


def _clipped(budget: SpecBudget, seq: Sequence, max_model_len: int) -> SpecBudget:
    """What the sequence can have of it, as far as the host knows; how likely drafts must be, nobody asks behind a step in flight."""
    return replace(clip(budget, seq, max_model_len), floor=0.0)
