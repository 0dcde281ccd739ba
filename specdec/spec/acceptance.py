"""What the policy knows about a drafter: how far to trust its scores, how deep it gets, and what it has won or lost.

Statistics exist per drafter and per (sequence, drafter). A sequence starts from its drafter's figures and moves to its own
as evidence comes (shrinkage); the drafter starts from a prior. Gains and losses are counted in *tokens*: one token is a
sequence's share of a step of plain decoding, so a draft that costs a quarter of a step and has one token accepted wins 0.75.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

from specdec.spec.median import Median
from specdec.spec.profile import Pace, Profile

BANDS = (0.3, 0.7)  # bounds of the three bands of cumulative score
MAX_DEPTH = 16  # deeper positions share the last rate
MIN_VALUE = 0.05  # tokens per step that a drafter which takes time must win net of it: what surrounds a draft is not in the figures
TRIED = 8  # steps that say whether it does
LIAR = 0.1  # a band of scores that delivers less than this share of its promise is not believed at all, until a probe
DEEPER = 0.95  # rate at an untried depth over that of the depth before


def band_of(score: float) -> int:
    """The band of a cumulative score: doubtful, possible, likely."""
    return 0 if score < BANDS[0] else 1 if score < BANDS[1] else 2


class Reliability:
    """Accepted nodes ÷ what the drafter's scores promised, per band; 1 = honest. A mean that forgets, shrunk to `parent`.

    weight: promised nodes that the parent's figure counts for. horizon: promised nodes after which the past is halved.
    """

    __slots__ = ("accepted", "horizon", "parent", "promised", "weight")

    def __init__(self, parent: Reliability | None, weight: float, horizon: float):
        self.parent = parent
        self.weight = weight
        self.horizon = horizon
        self.promised = [0.0] * (len(BANDS) + 1)
        self.accepted = [0.0] * (len(BANDS) + 1)

    def factor(self, band: int) -> float:
        """What to multiply a score of this band by, at most 1.25."""
        prior = 1.0 if self.parent is None else self.parent.factor(band)
        return min(1.25, (self.accepted[band] + self.weight * prior) / (self.promised[band] + self.weight))

    def record(self, score: float, accepted: bool) -> None:
        """One verified node of cumulative score `score`."""
        band = band_of(score)
        self.promised[band] += score
        self.accepted[band] += accepted
        if self.promised[band] > self.horizon:
            self.promised[band] *= 0.5
            self.accepted[band] *= 0.5

    def forget(self) -> None:
        """Back to the parent's figures."""
        self.promised = [0.0] * (len(BANDS) + 1)
        self.accepted = [0.0] * (len(BANDS) + 1)


class DepthRates:
    """Acceptance at depth d given acceptance at d - 1 (any child counts), Beta means shrunk to `parent`.

    Without one: to `prior` at depth 1, and below it to somewhat less than the depth before, so that a drafter which is right at
    the depths it was tried at gets to try the next.
    """

    __slots__ = ("hits", "parent", "prior", "trials", "weight")

    def __init__(self, parent: DepthRates | None, weight: float, prior: float = 0.6):
        self.parent = parent
        self.weight = weight
        self.prior = prior
        self.hits = [0.0] * (MAX_DEPTH + 1)
        self.trials = [0.0] * (MAX_DEPTH + 1)

    def copy(self) -> DepthRates:
        """The same figures, from now on independent."""
        twin = DepthRates(self.parent, self.weight, self.prior)
        twin.hits, twin.trials = self.hits.copy(), self.trials.copy()
        return twin

    def rate(self, depth: int, parent: DepthRates | None = None) -> float:
        """Conditional acceptance at `depth` ≥ 1; parent: to shrink to instead of the usual one."""
        return self.up_to(depth, parent)[-1]

    def up_to(self, deepest: int, parent: DepthRates | None = None) -> list[float]:
        """`rate` of depths 1 … `deepest`."""
        parent, found = parent or self.parent, list[float]()
        above = None if parent is None else parent.up_to(deepest)
        for depth in range(1, deepest + 1):
            d = min(depth, MAX_DEPTH)
            prior = above[depth - 1] if above is not None else self.prior if d == 1 else max(self.prior, DEEPER * found[d - 2])
            found.append((self.hits[d] + self.weight * prior) / (self.trials[d] + self.weight))
        return found

    def record(self, depth: int, accepted: bool) -> None:
        """One trial at `depth`."""
        d = min(depth, MAX_DEPTH)
        self.trials[d] += 1.0
        self.hits[d] += accepted
        if self.trials[d] > 300:
            self.trials[d] *= 0.5
            self.hits[d] *= 0.5


class Value:
    """Mean net tokens per step in which the drafter was asked, with or without a draft; shrunk to `parent`, or to `prior`."""

    __slots__ = ("count", "parent", "prior", "total", "weight")

    def __init__(self, parent: Value | None, weight: float, prior: float = 0.0):
        self.parent = parent
        self.weight = weight
        self.prior = prior
        self.total = 0.0
        self.count = 0.0

    def mean(self) -> float:
        prior = self.prior if self.parent is None else self.parent.mean()
        return (self.total + self.weight * prior) / (self.count + self.weight)

    def wins(self) -> bool:
        """Whether the drafter may be worth its time, by what all sequences know of it."""
        shared = self.parent or self
        return shared.count < TRIED or self.mean() >= MIN_VALUE

    def record(self, tokens: float) -> None:
        self.total += tokens
        self.count += 1.0
        if self.count > 200:
            self.total *= 0.5
            self.count *= 0.5


class Ledger:
    """Bounds what drafting may cost a sequence: draft only while losses stay below a small share of its steps.

    headroom() is the most a step may risk, in tokens: an initial allowance, plus `SHARE` of a token per step taken, minus
    net losses so far. Wins count as negative losses, up to a credit that grows with what was won: a proven drafter may
    miss a few long drafts in a row, and one that stops working is found out soon. promise: what the best drafter won per step on
    other sequences, in tokens; a new sequence may risk that much more at once, instead of earning the right to try.
    """

    INITIAL = 0.5
    RISK = 0.5  # share of what is left that one step may risk
    SHARE = 0.01
    CREDIT = (2.0, 8.0, 0.25)  # smallest and largest credit, share of what was won

    __slots__ = ("initial", "loss", "steps", "won")

    def __init__(self, promise: float = 0.0) -> None:
        self.initial = self.INITIAL + min(max(promise, 0.0), self.CREDIT[0])
        self.steps = 0
        self.loss = 0.0
        self.won = 0.0

    def headroom(self) -> float:
        return self.RISK * (self.initial + self.SHARE * self.steps - self.loss)

    def record(self, spent: float, accepted: int) -> None:
        """A step spent `spent` tokens' worth of time on drafts and had `accepted` tokens accepted."""
        self.won += accepted
        low, high, share = self.CREDIT
        self.loss = max(self.loss + spent - accepted, -min(high, max(low, share * self.won)))


class DrafterRecord:
    """All statistics of one drafter over all sequences; `profile` and `pace` of what it drafts alike for a whole batch. promise: net tokens
    per step it is expected to win, before any evidence.
    rates: known from earlier."""

    WELCOME = 4  # while it does not pay, it is tried soon after the start of every so many sequences only

    PATIENCE = 3  # hiccups in a row that are none

    __slots__ = ("_hiccups", "_opened", "_recent", "pace", "profile", "rates", "reliability", "seconds_per_depth", "value")

    def __init__(self, promise: float = 0.0, rates: DepthRates | None = None) -> None:
        self._hiccups = self._opened = 0
        self.reliability = Reliability(None, weight=6.0, horizon=60.0)
        self.rates = rates or DepthRates(None, weight=4.0)
        self.value = Value(None, weight=2.0, prior=promise)
        self.seconds_per_depth = 0.0  # of propose(), per sequence and depth: median of the latest
        self._recent = Median(15)
        self.profile, self.pace = Profile(), Pace()

    def open(self) -> bool:
        """Another sequence begins: whether the drafter should be tried on it soon, even where it takes time."""
        self._opened += 1
        return self.value.wins() or self._opened % self.WELCOME == 0

    def took(self, seconds: float, *, hiccup: bool = False) -> None:
        """One measurement of propose(), per sequence and depth. hiccup: it took so long that something else must have been done in it, as
        long as that does not happen every time."""
        self._hiccups = self._hiccups + 1 if hiccup else 0
        if 0 < self._hiccups < self.PATIENCE:
            return
        self.seconds_per_depth = self._recent.add(seconds)


class SequenceRecord:
    """Statistics of one drafter on one sequence, and its back-off.

    idle: steps since the last draft that was verified. interval: idle steps until the next probe.
    asked: steps in which it was asked to draft. rest: steps in which it need not be looked at, since no depth of it paid when it was
    last; each time twice as many as the last time, up to `REST`, until a draft is verified again. So what has hardly changed is not
    computed in every step, and what has is seen `REST` steps later at most.
    """

    FIRST, LATER, LONGEST = 4, 40, 1280  # probe intervals in steps
    REST = 16

    __slots__ = ("_pause", "_welcome", "asked", "idle", "interval", "rates", "reliability", "rest", "value")

    def __init__(self, drafter: DrafterRecord):
        self.reliability = Reliability(drafter.reliability, weight=1.5, horizon=12.0)
        self.rates = DepthRates(drafter.rates, weight=2.0)
        self.value = Value(drafter.value, weight=6.0)
        self.idle = 0
        self.interval = self.FIRST
        self._welcome = drafter.open()
        self.asked = 0
        self.rest, self._pause = 0, 1

    def step(self) -> None:
        """A step begins."""
        self.idle += 1
        self.rest -= self.rest > 0

    def dismiss(self) -> None:
        """No depth pays now."""
        self.rest, self._pause = self._pause, min(self.REST, 2 * self._pause)

    def believed(self, band: int) -> float:
        """What to multiply its scores of this band by."""
        factor = self.reliability.factor(band)
        return factor if factor >= LIAR else 0.0

    def probe_due(self) -> bool:
        return self.idle >= self.interval

    def trial_due(self) -> bool:
        """`probe_due` of a drafter that takes time to ask."""
        return self.idle >= (self.interval if self._welcome else max(self.interval, self.LATER))

    def verified(self, accepted: int, *, probe: bool) -> None:
        """A draft was verified. A probe that paid restores trust; one that did not doubles the wait."""
        self.idle, self.rest, self._pause = 0, 0, 1
        if accepted:
            if probe:
                self.reliability.forget()
            self.interval = self.LATER
            return
        self.interval = min(self.LONGEST, 2 * self.interval) if probe and self.interval >= self.LATER else self.LATER


def expected_tokens(rates: DepthRates, depth: int) -> Seq[float]:
    """Expected accepted tokens of chains of 0 … `depth` drafts."""
    result, reach = [0.0], 1.0
    for rate in rates.up_to(depth):
        reach *= rate
        result.append(result[-1] + reach)
    return result


def synthesise(raw: list[float], parents: list[int], count: int, rates: DepthRates) -> None:
    """Scores for a drafter that gives none: measured acceptance by depth for first children, a share of the rest for others."""
    depth = [0] * count
    seen: set[int] = set()
    raw[0] = 1.0
    for i in range(1, count):
        depth[i] = depth[parents[i]] + 1
        rate = rates.rate(depth[i])
        raw[i] = raw[parents[i]] * (0.3 * (1 - rate) if parents[i] in seen else rate)
        seen.add(parents[i])
