"""The host one step behind where everybody drafts with a head: the whole next step is given to the device before the host knows the last.

The device has what the next step needs: the path that its verdict took and the lengths that follow from it. Queued behind the verdict are
the compaction of accepted K and V, the head's pass over the accepted pairs, its drafts (`spec.recorded_growth`, numbered trees on the
device), their layout, the target pass and its verdict. The host lays out nothing that depends on the verdict; of lengths it knows how far
they can have come, and reserves blocks for that. Trees may come out with fewer nodes than planned: what fills them up writes no K and V, is
seen by nobody and accepted by nobody. The host hears of tree and verdict with one copy, when it commits the step.

Followed are steps that would be planned alike whatever the verdict: the policy is fixed, all sequences have one budget and room for it,
laws are temperatures, nobody waits for admission, no head is on trial. Who ends in the step before is dropped (`overlap.landed`).
Seconds of drafting, which the fixed policy does not read, are told of drafts that the host waited for alone.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from specdec.budget import clip, slots
from specdec.cache.tables import device_slots
from specdec.overlap import Flight
from specdec.spec.head_drafter import HeadDrafter
from specdec.spec.recorded_growth import host_drafts
from specdec.spec.tree import rows_of, tree_from_lists
from specdec.transfer import constant
from specdec.types import DraftTree, Scheduled, SpecBudget, StepPlan

if TYPE_CHECKING:
    from torch import Tensor

    from specdec.boot import Parts
    from specdec.overlap import Launcher
    from specdec.sequence import Sequence


class Behind:
    """Gives drafting steps to the device behind the one in flight."""

    def __init__(self, launcher: Launcher, parts: Parts):
        self._launcher, self._parts = launcher, parts

    def drafter(self, flight: Flight) -> HeadDrafter | None:
        """The head that everybody in the flight drafts with, again in the next step, whatever the verdict; else None."""
        parts, shares = self._parts, flight.plan.scheduled
        budget = shares[0].budget
        drafter = parts.proposers.get(budget.drafter or "")
        if not isinstance(drafter, HeadDrafter) or not parts.policy.fixed or parts.heads.on_trial:
            return None
        if parts.scheduler.admits or len(shares) != parts.scheduler.num_running or parts.verifier.mode not in ("coupled", "synthetic"):
            return None
        most, longest = budget.depth + 1, drafter.max_len
        for share in shares:
            seq = share.seq
            if share.budget != budget or not share.samples or share.num_new != 1 or share.rerun or seq.params.logprobs is not None:
                return None
            if seq.remaining - most <= budget.depth or (longest is not None and len(seq.tokens) + most > longest):
                return None
        return drafter if drafter.can_follow(list(shares), parts.sampling) else None

    def follow(self, flight: Flight, drafter: HeadDrafter, budgets: Mapping[Sequence, SpecBudget]) -> Flight | None:
        """The step behind `flight`, given to the device; None where it is planned otherwise, or for want of blocks. budgets: what each
        sequence may draft then."""
        start, parts, shares = time.perf_counter(), self._parts, flight.plan.scheduled
        seqs, budget = [share.seq for share in shares], shares[0].budget
        if any(clip(budgets[seq], seq, parts.max_model_len) != budget for seq in seqs):
            return None
        if not parts.scheduler.extend(seqs, budget.depth + slots(budget)):
            return None
        request_slots, tables = parts.builder.tables_of(seqs)
        newest = parts.sampling.length[request_slots] - 1
        if budget.width > 1:  # a chain lies where it belongs
            self._compact(flight, newest, tables)
        starts = accumulate(rows_of(flight.tree)[: len(seqs) - 1], initial=0)
        roots = constant(tuple(starts), parts.builder.device)
        assert flight.forward.taps is not None
        grown = drafter.follow(list(shares), parts.sampling, flight.verdict, flight.forward.taps, roots)
        whole = torch.full_like(grown.num_nodes, budget.nodes)
        uniform = budget.nodes, budget.depth
        tree = DraftTree(grown.tokens, grown.parents, grown.depth, whole, drafters=(drafter.name,) * len(seqs), uniform=uniform)
        batch = parts.builder.trees(tree, grown.num_nodes, grown.words, newest, tables)
        plan = StepPlan(tuple(Scheduled(seq, 1, True, budget) for seq in seqs))
        return self._launcher.launch(plan, tree, start, batch, grown.told)

    def _compact(self, flight: Flight, newest: Tensor, tables: Tensor) -> None:
        """As `commit.compaction`: accepted nodes go from cells root + node to root + depth; the others stay."""
        verdict, kv = flight.verdict, self._parts.kv
        root = (newest - verdict.num_committed)[:, None]
        depth = torch.arange(1, verdict.path.shape[1] + 1, device=newest.device)
        nodes = torch.where(depth <= verdict.num_accepted[:, None], verdict.path, depth)
        source, target = (device_slots(tables, root + node, kv.block_size).flatten(1) for node in (nodes, depth))
        for group in range(len(kv.groups)):
            kv.move(group, source[group], target[group])

    def settled(self, flight: Flight) -> Flight:
        """The flight with its trees on the host, whoever drafted them. Waits for the device where it did."""
        if flight.told is None:
            return flight
        drafter, drafts = self._parts.proposers[flight.plan.scheduled[0].budget.drafter or ""], host_drafts(flight.told())
        assert isinstance(drafter, HeadDrafter)
        for share, draft in zip(flight.plan.scheduled, drafts, strict=True):
            drafter.drew(share.seq, draft)
        names = [drafter.name if len(d.tokens) > 1 else None for d in drafts]
        tree = tree_from_lists([(d.tokens, d.parents, d.scores) for d in drafts], names)
        return replace(flight, tree=replace(tree, uniform=flight.tree.uniform), told=None)
