"""`SpecPolicy`: who drafts, how much, and which drafts are worth verifying. Pure CPU work of some microseconds per sequence.

Before planning, `budget` picks a drafter per sequence and an upper bound of nodes. After drafting, `trim` keeps the nodes
that maximise expected committed tokens per second of the batch, with measured costs (`cost`) and the drafter's scores
corrected by how honest they proved (`acceptance`); nothing is kept where plain decoding is best. A ledger per sequence bounds
what drafting can lose, and a drafter that collapses on all of them is off until probes show that it recovered (`watch`).
A step without drafts has to stay what it is without speculation: who would draft nothing, or what would be cut to nothing anyway, is
not asked (`_hopeless`), and a drafter no depth of which pays is looked at again after a pause (`SequenceRecord.rest`).
Where heads draft behind a step in flight the whole batch gets one budget, and nothing is trimmed (`shared`).
`SpecConfig(policy="fixed")` skips all of that: exactly these nodes, depth and width every step; a collapse is only reported.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

from specdec.config import SpecConfig
from specdec.spec.acceptance import band_of
from specdec.spec.allocate import Candidate, allocate, plain_seconds, subtree
from specdec.spec.choice import PROBE_NODES, Bounds, bounds_of, choose, paying_depth
from specdec.spec.cost import StepCost
from specdec.spec.experience import Experience, Pending, State
from specdec.spec.limits import usable
from specdec.spec.meter import Meter
from specdec.spec.proposer import Proposer
from specdec.spec.shared import Shared
from specdec.spec.tree import tree_from_lists
from specdec.types import NO_DRAFT, DraftTree, Scheduled, SpecBudget, StepStats, Verdict

if TYPE_CHECKING:
    from specdec.sequence import Sequence

CHEAP = 0.1  # a drafter that takes less than this share of a plain step is always asked, and its drafts judged by score
NEXT = 0.7  # chance of a child, given its parent, that a drafter's next pass is hoped to find
HICCUP = 10.0  # plain steps of a sequence that no draft takes: a compiler or a recorder was at work
OWED = 0.9  # largest share of a draft's time that is put down to what was owed
NOBODY: Mapping[str, int] = {}
REFRESH = 16  # steps for which the bounds of a batch are kept while it stays as it is


class SpecPolicy:
    """Decides per sequence and step. `cost` None goes with policy="fixed" or no drafters. max_rows: of a step, where one may be begun
    behind another; None: all of them wait."""

    def __init__(self, config: SpecConfig, proposers: Mapping[str, Proposer], cost: StepCost | None, max_rows: int | None = None):
        self.config = config
        self.proposers = proposers
        self.cost = cost
        self.fixed = config.policy == "fixed" or cost is None
        self.experience = Experience(config, proposers, warn_only=self.fixed)
        self._skipped: Counter[str] = Counter()
        self._token_seconds = 1.0  # of plain decoding in the current batch: one sequence's share of a step
        self._bounds, self._bounds_age = Bounds(0, 1, 0.0, 0.0), 0  # of the current batch, and for how many steps
        self._owed: defaultdict[str, float] = defaultdict(float)  # seconds besides drafting that this step's drafts take, by drafter
        self._meter = Meter(cost)
        self._alike_all = False  # the last budgets are one for all
        self._drafting = 0.0  # seconds spent in drafters, until somebody asks
        self._shared = None if self.fixed or cost is None or max_rows is None else Shared(cost, self.experience, proposers, max_rows)

    # -- before planning ----------------------------------------------------------------------------------------------

    def budget(
        self, sequences: Iterable[Sequence], stats: StepStats | None, ahead: Mapping[str, int] = NOBODY
    ) -> dict[Sequence, SpecBudget]:
        """What each decoding sequence may draft this step. `stats` of the last step correct the cost model. ahead: the heads that could
        draft for all of them behind a step in flight, and how wide."""
        decoding = [seq for seq in sequences if seq.decoding]
        self._meter.stepped(stats, self.shared)
        if not self.proposers or not decoding:
            return {}
        self.experience.watch.tick()
        self._owed.clear()
        shared = self.shared if ahead else None
        budget = None if shared is None else shared.choose(decoding, ahead)
        self._alike_all = budget is not None
        if budget is not None:
            return {seq: self._alike(seq, budget) for seq in decoding}
        without = {} if shared is None else shared.managed
        self._look([seq.num_computed for seq in decoding])
        return {seq: self._budget_one(seq, len(decoding), without) for seq in decoding}

    @property
    def shared(self) -> Shared | None:
        """Who chooses for batches, where there are heads that can go ahead."""
        return self._shared if any(getattr(proposer, "width_ahead", 0) for proposer in self.proposers.values()) else None

    def _alike(self, seq: Sequence, budget: SpecBudget) -> SpecBudget:
        """What the whole batch drafts, for one of it."""
        state = self.experience.begin(seq)
        if seq.remaining < 2 or budget.drafter is None:
            return self._skip("policy" if budget.drafter is None else "limit")
        state.drafter = budget.drafter
        return budget

    def _look(self, contexts: Seq[int]) -> None:
        """What the current batch allows, looked at anew when its size changes and now and then."""
        if self.fixed or self.cost is None:
            return
        batch = len(contexts)
        self._token_seconds = plain_seconds(contexts, self.cost) / batch
        self._bounds_age += 1
        if self._bounds.batch != batch or self._bounds_age > REFRESH:
            self._bounds, self._bounds_age = bounds_of(contexts, self.cost), 1

    def _budget_one(self, seq: Sequence, batch: int, without: Collection[str]) -> SpecBudget:
        state = self.experience.begin(seq)
        limits = state.limits
        nodes, depth = limits.nodes, min(limits.depth, seq.remaining - 1, limits.nodes - 1)
        if not limits.drafters or depth < 1:
            return self._skip("limit")
        names, reason = usable(limits.drafters, self.proposers, len(seq.tokens))
        names = [name for name in names if name not in without]
        if not names:
            return self._skip("policy" if without else reason)
        name = names[0]
        if not self.fixed:
            nodes = min(nodes, self._bounds.widest)
            name, depth, reason = self._choose(state, seq, names, min(depth, nodes - 1), batch)
        if depth < 1:
            return self._skip(reason)
        state.drafter = name
        proposer = self.proposers[name]
        hopeless = "" if self.fixed else self._hopeless(state, seq, name)
        if hopeless:
            self.experience.saw_nothing(state, name)
            return self._skip(hopeless)
        self._owed[name] += state.owed
        return SpecBudget(name, nodes, depth, limits.width, getattr(proposer, "feeds", False), self._floor(name, batch))

    def _hopeless(self, state: State, seq: Sequence, name: str) -> str:
        """Why what `name` would draft need not even be asked for, or "": it would be cut to nothing."""
        outlook = getattr(self.proposers[name], "outlook", None)
        chance = 1.0 if outlook is None else outlook(seq)
        if chance == 0.0:
            return "no_match"
        record = state.records[name]
        if chance >= 1.0 or state.probe or name in self.experience.watch.comparisons or record.probe_due():
            return ""
        return "policy" if chance * record.believed(band_of(chance)) < self._bounds.least_chance else ""

    def _choose(self, state: State, seq: Sequence, names: list[str], deepest: int, batch: int) -> tuple[str, int, str]:
        """(drafter, depth, why it is 0). Where the best drafter costs too much to try, a cheaper one may not."""
        watch = self.experience.watch
        if watch.off:
            due = watch.due(names)
            depth = 0 if due is None else self._probe_depth(state, due, deepest)
            if due is not None and depth > 0:
                watch.probed(due)
                state.probe = True
                return due, depth, ""
            names = [n for n in names if n not in watch.off]
            if not names:
                return "", 0, "collapsed"
        name, depth, names = names[0], 0, [n for n in names if not state.records[n].rest]
        while names and depth < 1:
            name = choose(names, state.records, state.ledger.steps)
            depth = self._depth(state, seq, name, deepest, batch)
            names = [n for n in names if n != name]
        return name, depth, "policy"

    def _probe_depth(self, state: State, name: str, deepest: int) -> int:
        """Depth of a probe of a drafter that is off; 0 = this sequence cannot afford it."""
        depth = min(deepest, PROBE_NODES - 1)
        headroom = state.ledger.headroom() * self._token_seconds
        return depth if headroom > 0.0 and self.experience.drafters[name].seconds_per_depth * depth <= headroom else 0

    def _skip(self, reason: str) -> SpecBudget:
        self._skipped[reason] += 1
        return NO_DRAFT

    def _depth(self, state: State, seq: Sequence, name: str, deepest: int, batch: int) -> int:
        """How deep to draft. A cheap drafter drafts as deep as it may and is trimmed after; a costly one must pay first."""
        headroom = state.ledger.headroom() * self._token_seconds
        if headroom <= 0.0 or headroom < self._bounds.row or deepest < 1:
            return 0
        unit, on_trial = self.experience.drafters[name].seconds_per_depth, name in self.experience.watch.comparisons
        state.owed = 0.0 if on_trial else self.owes(name, seq)  # on trial it is to be seen at work
        if unit == 0.0 and getattr(self.proposers[name], "needs_hidden", False):
            return min(deepest, PROBE_NODES - 1)  # what a pass of its network costs here is not known yet
        if state.owed + unit * deepest <= CHEAP * self._token_seconds or self.cost is None:
            return deepest
        headroom -= state.owed  # it must be affordable, yet is no part of what one draft costs: the next ones gain by it
        record, waits = state.records[name], self._waits()
        paying = paying_depth(record, unit, deepest, headroom, self._token_seconds, self.cost, batch, on_trial=on_trial, waits=waits)
        if paying == 0 and not on_trial:
            record.dismiss()
        looks = paying > 1 and getattr(self.proposers[name], "looks", False)  # it stops by itself, where this draft stops paying
        return max(paying, min(deepest, int(headroom / unit))) if looks else paying

    def _waits(self) -> float:
        """Seconds that a step with drafts waits more than one without, which follows the one before."""
        return 0.0 if self.shared is None else self.shared.exposed

    def owes(self, name: str, seq: Sequence) -> float:
        """Seconds that a draft would take besides drafting."""
        owes = getattr(self.proposers[name], "owes", None)
        return 0.0 if owes is None else owes(seq)

    def _floor(self, name: str, batch: int) -> float:
        """Chance of a node below which the drafter's next pass and the row of its child cost more than the child wins."""
        if self.fixed or self.cost is None:
            return 0.0
        row = (self.cost.base(2 * batch, batch) - self.cost.base(batch, batch)) / batch
        return (self.experience.drafters[name].seconds_per_depth + row) / (NEXT * self._token_seconds)

    # -- after drafting -----------------------------------------------------------------------------------------------

    def drafted(self, name: str, seconds: float, tree: DraftTree) -> None:
        """`name` took `seconds` to draft these trees."""
        self._drafting += seconds
        if self._alike_all:
            return  # seen in whole steps
        deepest = max(max(depths) for depths in tree.host.depth)
        seconds -= min(self._owed[name], OWED * seconds)
        trees = len(tree.host.num_nodes)
        self.experience.drafters[name].took(seconds / (trees * max(1, deepest)), hiccup=seconds > HICCUP * trees * self._token_seconds)

    def take_drafting(self) -> float:
        """Seconds spent in drafters since the last call."""
        seconds, self._drafting = self._drafting, 0.0
        return seconds

    def expected(self, tree: DraftTree, shares: tuple[Scheduled, ...], *, waited: bool = False) -> None:
        """Trees on the host that are verified as they were drafted, and perhaps have been. waited: not behind a step in flight."""
        if self.shared is not None:
            self.shared.expected(tree, shares, waited=waited)

    def trim(self, tree: DraftTree, shares: tuple[Scheduled, ...], other_rows: int = 0) -> DraftTree:
        """Keep the nodes that pay. other_rows: rows of the step besides these trees (prefill).

        Sampled drafts (`log_q`) are left alone: choosing among drawn tokens would bias rejection sampling.
        """
        if self.fixed or self.cost is None or tree.log_q is not None:
            return tree
        if any(share.budget.shared for share in shares):
            self.expected(tree, shares, waited=True)
            return tree
        counts = tree.host.num_nodes
        if max(counts) == 1:
            for share in shares:
                self._expect(share, [1.0], (1, 0), 0.0, False)
            return tree
        tokens, parents = tree.host.tokens, tree.host.parents
        raw = tree.score.tolist() if tree.score is not None else [[0.0] * len(t) for t in tokens]
        candidates, probes = [], []
        for b, share in enumerate(shares):
            scores, probe = self.experience.corrected(share, raw[b], parents[b], counts[b])
            state = self.experience.states.get(share.seq)
            headroom = state.ledger.headroom() * self._token_seconds if state is not None else 0.0
            candidates.append(Candidate(scores, share.seq.num_computed, headroom))
            probes.append(probe)
        chosen = allocate(candidates, self.cost, other_rows, 0.0 if any(probes) else self._waits())
        for b, share in enumerate(shares):
            drafted = counts[b], max(tree.host.depth[b])
            self._expect(share, [raw[b][i] for i in chosen.kept[b]], drafted, chosen.extra[b], probes[b])
        if all(len(k) == n for k, n in zip(chosen.kept, counts, strict=True)):
            return tree
        names = [share.budget.drafter if len(k) > 1 else None for share, k in zip(shares, chosen.kept, strict=True)]
        return tree_from_lists([subtree(t, p, s, k) for t, p, s, k in zip(tokens, parents, raw, chosen.kept, strict=True)], names)

    def _expect(self, share: Scheduled, scores: list[float], drafted: tuple[int, int], seconds: float, probe: bool) -> None:
        """scores: of the nodes that stayed. drafted: nodes and depth before the cut."""
        state, name = self.experience.states.get(share.seq), share.budget.drafter
        if state is None or name is None or share.budget.nodes < 2:
            return
        drafting = self.experience.drafters[name].seconds_per_depth * max(1, drafted[1]) + state.owed
        if drafting > CHEAP * self._token_seconds:  # what little a lookup takes must not use up what drafts may risk
            seconds += drafting
        spent = seconds / self._token_seconds
        state.pending = Pending(name, scores, spent, probe)
        if len(scores) == 1:
            self._skipped["no_match" if drafted[0] == 1 else "policy"] += 1
            if self._shared is not None:
                state.records[name].dismiss()  # to ask made a step wait that could have followed another

    # -- after the step -----------------------------------------------------------------------------------------------

    def observe(self, shares: tuple[Scheduled, ...], tree: DraftTree, verdict: Verdict) -> None:
        """Learn from a verified step."""
        self.experience.observe(shares, tree, verdict)

    def reset(self, seq: Sequence) -> None:
        """The sequence finished or was preempted: forget it."""
        self.experience.states.pop(seq, None)

    # -- what metrics ask ---------------------------------------------------------------------------------------------

    def take_skipped(self) -> dict[str, int]:
        """Decoding sequences that did not draft since the last call, by reason: no_match, policy, limit, draft_len, disabled,
        collapsed."""
        skipped, self._skipped = dict(self._skipped), Counter()
        return skipped

    def states(self) -> dict[str, dict[str, int]]:
        """See `Experience.counts`."""
        return self.experience.counts()

    def gain(self) -> float | None:
        """See `Meter`."""
        return self._meter.gain()
