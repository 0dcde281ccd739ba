"""`Shared`: one budget for a whole batch, where its steps are given to the device before the host knows the last verdict.

Behind a step in flight (`specdec.behind`) nobody looks at a draft before it is verified, so trees are not trimmed, and all have one shape,
as recorded passes want it. So nothing is chosen per sequence and step, but for the batch the shape that promises most tokens a second: what
it wins (`profile.Profile`, as of one verdict before) over what its steps take, whole, from one commit to the next (`profile.Pace`). Plain
steps follow each other too, so that both sides are what a step takes in a steady run; the first step after a change, which waits, counts
for neither. A change must promise more than SWITCH, and all shapes are looked at every REVIEW steps.

Never lose: where no shape promises MIN_GAIN over plain decoding, or the ledgers of the sequences cannot bear what it risks, nobody drafts;
after a pause, which doubles, some steps of a small shape show whether that has changed. Plain decoding is measured again when it has
not been for long. Other drafters (lookups) cannot go ahead. They are asked now and then, where they think they know how it goes on, and
the batch is theirs while they win more, what their steps wait included.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from specdec.spec.allocate import MIN_GAIN
from specdec.spec.cost import StepCost
from specdec.spec.experience import Experience, Pending, State
from specdec.spec.limits import usable
from specdec.spec.median import Median
from specdec.spec.profile import Shape
from specdec.spec.proposer import Proposer
from specdec.types import NO_DRAFT, DraftTree, Scheduled, SpecBudget, StepStats

if TYPE_CHECKING:
    from specdec.sequence import Sequence

DEPTHS = (1, 2, 3, 4, 5, 7, 9, 12, 15, 20, 30, 45, 63)
NODES = (2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
REVIEW = 16  # steps between two looks at all shapes
SWITCH = 1.04  # what another shape, or drafting at all, must promise over what is: a change waits, and may have to be recorded
UNKNOWN = 0.1  # of a plain step, that a depth of drafting is taken to take before any was measured
STALE, CALM, FIRST_CALM = 512, 3, 6  # steps without a measurement of plain decoding; plain steps that give one, and the first one
PAUSE, LONGEST = 64, 512  # steps between probes of a batch that does not draft
PROBE = Shape(3, 2)
PROBE_STEPS, JUDGED = 5, 3  # steps of a probe, and looks at what it showed: the last of its steps, and one
RECORDED = 8.0  # plain steps; a change that takes longer has recorded its shape, which it does once
SETTLED = 64  # steps of drafting after which pauses are short again
ASK, SELDOM = 16, 256  # steps between two looks at other drafters
MIXED = SpecBudget("")  # stands for those of a step in which they differ
LIKELY = 0.6  # how sure of its first token another drafter must be to be asked


class Offer(NamedTuple):
    """What all sequences may be drafted by one head: limits of the tree. feeds: see `SpecBudget`."""

    nodes: int
    depth: int
    width: int
    feeds: bool


class Choice(NamedTuple):
    """A shape for the batch. rate: tokens a second and sequence."""

    name: str
    shape: Shape
    rate: float


def shapes(offer: Offer) -> Iterator[Shape]:
    """Those to choose from within the limits."""
    deepest = min(offer.depth, offer.nodes - 1)
    depths = [depth for depth in sorted({*DEPTHS, deepest}) if 0 < depth <= deepest]
    if offer.width == 1:
        yield from (Shape(depth + 1, depth) for depth in depths)
        return
    room = {depth: sum(offer.width**level for level in range(min(depth, 7) + 1)) for depth in depths}
    for nodes in sorted({*NODES, offer.nodes}):
        yield from (Shape(nodes, depth) for depth in depths if depth < nodes <= min(offer.nodes, room[depth]))


class Shared:
    """cost: of steps that follow each other. max_rows: of a step. Asked once a step, while heads of the batch can go ahead."""

    def __init__(self, cost: StepCost, experience: Experience, proposers: Mapping[str, Proposer], max_rows: int):
        self._cost, self._experience, self._proposers, self._max_rows = cost, experience, proposers, max_rows
        self._clock = self._plain_at = 0  # steps; when plain decoding was measured, 0 = never
        self._calm = 0
        self._present: tuple[str, Shape] | None = None
        self._seen: tuple[int, Mapping[str, Offer]] = 0, {}  # batch and offers when all shapes were looked at
        self._age = self._lasted = 0  # steps since then, and since the batch began to draft
        self._idle, self._pause, self._probing, self._open = 0, PAUSE, 0, 0
        self._waits, self.exposed = Median(25), 0.0  # seconds of the host that steps of other drafters do not hide
        self._changes, self._change = Median(15), 0.0  # seconds that the first step after a change waits
        self._asked, self._ask = 0, ASK
        self._before: SpecBudget | None = None  # of the step that was measured last
        self.managed: Mapping[str, Offer] = {}  # heads that `choose` decided about last

    # -- deciding -----------------------------------------------------------------------------------------------------

    def choose(self, seqs: Seq[Sequence], ahead: Mapping[str, int]) -> SpecBudget | None:
        """What all of these draft, perhaps nothing; None = each what it likes, but for `managed`. ahead: the heads that can go ahead, and
        how wide."""
        states = [self._experience.state(seq) for seq in seqs]
        offers = self.managed = self._offers(seqs, states, ahead)
        if not offers:
            return None
        self._clock += 1
        if self._calms():
            return NO_DRAFT
        others = self._others(seqs, states, offers)
        choice, plain = self._choice(seqs, states, offers), self._plain(seqs)
        rate = 1.0 / plain if choice is None else choice.rate
        if others and (self._theirs(seqs, states, others, plain) > SWITCH * rate or (choice is not None and self._asks(seqs, others))):
            return None
        if choice is None:
            return self._rest(offers, bool(others))
        self._idle, self._lasted = 0, self._lasted + 1
        self._pause = PAUSE if self._lasted > SETTLED else self._pause
        return _budget(choice.name, choice.shape, offers[choice.name])

    def _offers(self, seqs: Seq[Sequence], states: Seq[State], ahead: Mapping[str, int]) -> dict[str, Offer]:
        """The heads that everybody may use, in order of preference, with the narrowest limits."""
        watch, found = self._experience.watch, {}
        longest = max(len(seq.tokens) for seq in seqs)
        for name in states[0].limits.drafters:
            if name not in ahead or name in watch.off or name in watch.comparisons or not usable([name], self._proposers, longest)[0]:
                continue
            limits = [state.limits for state in states]
            if all(name in each.drafters for each in limits):
                nodes = min(min(each.nodes for each in limits), self._max_rows // len(seqs))
                width = min(ahead[name], *(each.width for each in limits))
                if nodes > 1:
                    feeds = getattr(self._proposers[name], "feeds", False)
                    found[name] = Offer(nodes, min(each.depth for each in limits), width, feeds)
        return found

    def _calms(self) -> bool:
        """Whether plain decoding must be measured now."""
        if self._calm == 0 and (self._plain_at == 0 or self._clock - self._plain_at > STALE):
            self._calm = CALM if self._plain_at else FIRST_CALM
            self._plain_at = self._clock
        self._calm -= self._calm > 0
        return self._calm > 0

    def _choice(self, seqs: Seq[Sequence], states: Seq[State], offers: Mapping[str, Offer]) -> Choice | None:
        """The best shape, None where none pays. The present one stays while it does, until others promise enough more."""
        self._age, self._open = self._age + 1, max(0, self._open - 1)
        kept, known = self._kept(seqs, states, offers), self._seen == (len(seqs), offers)
        if known and self._present is None and not 0 < self._open <= JUDGED:
            return None  # what ended it is not over because some steps have passed
        if known and kept is not None and self._age <= REVIEW:
            return kept
        self._seen, self._age = (len(seqs), dict(offers)), 0
        rated = (self._rated(name, shape, seqs, states) for name, offer in offers.items() for shape in shapes(offer))
        best = max((choice for choice in rated if choice is not None), key=lambda choice: choice.rate, default=None)
        least = SWITCH * (1.0 / self._plain(seqs) if kept is None else kept.rate)
        best = kept if best is None or best.rate < least else best
        if best is None or self._present is None:
            self._lasted = 0
        self._present = None if best is None else (best.name, best.shape)
        return best

    def _kept(self, seqs: Seq[Sequence], states: Seq[State], offers: Mapping[str, Offer]) -> Choice | None:
        """The present shape, if it can be and pays."""
        if self._present is None:
            return None
        (name, shape), offer = self._present, offers.get(self._present[0])
        if offer is None or shape.nodes > offer.nodes or shape.depth > offer.depth:
            return None
        return self._rated(name, shape, seqs, states)

    def _rated(self, name: str, shape: Shape, seqs: Seq[Sequence], states: Seq[State]) -> Choice | None:
        """The shape, if it pays and can be risked."""
        plain, seconds = self._plain(seqs), self._seconds(name, shape, seqs)
        headroom = sum(state.ledger.headroom() for state in states) / len(states)
        rate = (1.0 + self._experience.drafters[name].profile.wins(shape)) / seconds
        return Choice(name, shape, rate) if rate * plain > MIN_GAIN and seconds <= plain * (1.0 + headroom) else None

    def _plain(self, seqs: Seq[Sequence]) -> float:
        """Seconds of a plain step in a steady run."""
        return self._pass(1, len(seqs), sum(seq.num_computed for seq in seqs))

    def _pass(self, nodes: int, batch: int, context: int) -> float:
        return self._cost.base(batch * nodes, batch) + self._cost.attention(nodes, context)

    def _seconds(self, name: str, shape: Shape, seqs: Seq[Sequence]) -> float:
        """Of a step of this shape in a steady run."""
        beyond = self._experience.drafters[name].pace.beyond(shape, len(seqs))
        beyond = UNKNOWN * shape.depth * self._plain(seqs) if beyond is None else beyond
        return self._pass(shape.nodes, len(seqs), sum(seq.num_computed for seq in seqs)) + beyond

    def _rest(self, offers: Mapping[str, Offer], others: bool) -> SpecBudget | None:
        """Of a batch that does not draft with a head: a probe when it is due."""
        self._idle, self._lasted = self._idle + 1, 0
        if self._probing == 0 and self._idle >= self._pause:
            self._probing, self._pause, self._idle = PROBE_STEPS, min(LONGEST, 2 * self._pause), 0
            self._open = PROBE_STEPS + 1
        if self._probing == 0:
            return None if others else NO_DRAFT
        self._probing -= 1
        name, offer = next(iter(offers.items()))
        depth = min(PROBE.depth, offer.depth, offer.nodes - 1)
        return _budget(name, Shape(depth + 1, depth), offer)

    # -- other drafters -----------------------------------------------------------------------------------------------

    def _others(self, seqs: Seq[Sequence], states: Seq[State], offers: Mapping[str, Offer]) -> list[list[str]]:
        """Of each sequence the drafters that may draft for it and cannot go ahead; empty where nobody has any."""
        off = self._experience.watch.off
        left = [[name for name in state.limits.drafters if name not in offers and name not in off] for state in states]
        found = [usable(names, self._proposers, len(seq.tokens))[0] for seq, names in zip(seqs, left, strict=True)]
        return found if any(found) else []

    def _theirs(self, seqs: Seq[Sequence], states: Seq[State], others: list[list[str]], plain: float) -> float:
        """Tokens a second and sequence if each had the best of them that finds anything now, in steps that wait."""
        values = [
            max(((state.records[n].value.mean(), n) for n in names), default=(0.0, "")) for state, names in zip(states, others, strict=True)
        ]
        won = [value for seq, (value, name) in zip(seqs, values, strict=True) if value > 0.0 and _outlook(self._proposers[name], seq) > 0.0]
        theirs = (1.0 + sum(won) / len(seqs)) / (plain + self.exposed)
        if theirs * plain > SWITCH:
            self._ask = ASK
        return theirs

    def _asks(self, seqs: Seq[Sequence], others: list[list[str]]) -> bool:
        """Whether the others shall draft once, to know: at times, where somebody's think they know how it goes on."""
        self._asked += 1
        if self._asked < self._ask:
            return False
        self._asked = 0
        if not any(_outlook(self._proposers[name], seq) >= LIKELY for seq, names in zip(seqs, others, strict=True) for name in names):
            return False
        self._ask = min(SELDOM, 2 * self._ask)
        return True

    # -- learning -----------------------------------------------------------------------------------------------------

    def expected(self, tree: DraftTree, shares: Seq[Scheduled], *, waited: bool) -> None:
        """Trees on the host that are verified as they were drafted, and perhaps have been. waited: not behind a step in flight."""
        budget = max((s.budget for s in shares if s.budget.shared), key=lambda b: (b.nodes, b.depth), default=NO_DRAFT)
        drafter = self._experience.drafters.get(budget.drafter or "")
        if drafter is None or budget.drafter is None or tree.score is None:
            return
        shape, seqs, counts = Shape(budget.nodes, budget.depth), [share.seq for share in shares], tree.host.num_nodes
        drafter.profile.learn(tree.score.numpy(), tree.depth.numpy(), np.array(counts), shape)
        spent = (self._seconds(budget.drafter, shape, seqs) + self._change * waited) / self._plain(seqs) - 1.0
        for share, scores, count in zip(shares, tree.score.tolist(), counts, strict=True):
            state = self._experience.states.get(share.seq)
            if state is not None and share.budget.shared:
                state.pending = Pending(budget.drafter, scores[:count], spent, False, shared=True)

    def took(self, stats: StepStats) -> None:
        """A step of decoding alone. One after a change of budgets waited for it, which the next do not."""
        budget, before = stats.budget or MIXED, self._before
        self._before = budget
        if not (budget.shared or budget == NO_DRAFT):
            self._waited(stats)
        elif budget == before or before is None:
            self._steady(budget, stats)
        elif budget.shared and before == NO_DRAFT and budget.drafter in self._experience.drafters:
            pace, shape = self._experience.drafters[budget.drafter].pace, Shape(budget.nodes, budget.depth)
            expected = self._pass(budget.nodes, stats.num_sampling, stats.context) + (pace.beyond(shape, stats.num_sampling) or 0.0)
            waited = stats.step_seconds - expected
            if waited < RECORDED * self._pass(1, stats.num_sampling, stats.context):
                self._change = max(0.0, self._changes.add(waited))

    def _steady(self, budget: SpecBudget, stats: StepStats) -> None:
        batch = stats.num_sampling
        if not budget.shared:
            self._plain_at = self._clock
            self._cost.observe(stats.num_rows, batch, stats.context, stats.step_seconds)
        elif budget.drafter in self._experience.drafters:
            expected = self._pass(budget.nodes, batch, stats.context)
            self._experience.drafters[budget.drafter].pace.add(Shape(budget.nodes, budget.depth), batch, stats.step_seconds - expected)

    def _waited(self, stats: StepStats) -> None:
        """A step in which not all had one shared budget."""
        batch = stats.num_sampling
        if not stats.drafts:
            return
        nodes = max(1, round(stats.num_rows / batch))
        expected = self._cost.base(stats.num_rows, batch) + self._cost.attention(nodes, stats.context)
        self.exposed = max(0.0, self._waits.add(stats.step_seconds - stats.drafter_seconds - expected))

    def interrupted(self) -> None:
        """A step was not of decoding alone: what comes next waits for that, and counts as it is."""
        self._before = None


def _budget(name: str, shape: Shape, offer: Offer) -> SpecBudget:
    return SpecBudget(name, shape.nodes, shape.depth, offer.width, offer.feeds, shared=True)


def _outlook(proposer: Proposer, seq: Sequence) -> float:
    outlook = getattr(proposer, "outlook", None)
    return 1.0 if outlook is None else float(outlook(seq))
