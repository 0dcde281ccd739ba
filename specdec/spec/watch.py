"""`Watch`: the alarms of all drafters, and a new head's comparison with the one that it replaced."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from specdec.spec.acceptance import MAX_DEPTH, DepthRates
from specdec.spec.alarm import P_MAX, Alarm, Trial, evidence

WORSE = 0.6  # of the old head's acceptance: what "clearly below" means
WORSE_LEVEL = math.log(1000)
ENOUGH = 20  # trials of the old head at a depth, before it is compared with
VERIFIED = 200  # committed drafts after which a new head stays


@dataclass(frozen=True, slots=True)
class DrafterHealth:
    """What befell the drafters of an engine. alarms: collapses of acceptance so far, by drafter (absent: none). collapsed: whether the
    last one still holds, for every drafter there is. head_swaps: heads loaded or dropped while running; head_rollbacks: undone."""

    alarms: dict[str, int]
    collapsed: dict[str, bool]
    head_swaps: int = 0
    head_rollbacks: int = 0


class Comparison:
    """Is a new head clearly worse than the old one? A one-sided sequential test (Wald 1945) over the drafts of all sequences.

    S sums the log-likelihood ratios of "accepted WORSE times as often" against "as often as the old head, at this depth". A head that
    is as good as the old one ever reaches WORSE_LEVEL with probability at most exp(-WORSE_LEVEL) = 0.1 % (Ville's inequality), if
    the old rates are right; a useless one does within 6.9 / log((1 - 0.6 p) / (1 - p)) trials: 5 at p = 0.9, 11 at 0.7, 21 at 0.5. An
    old head of which little is known proves nothing; then only the new one's alarm sends it back.
    """

    __slots__ = ("drafts", "level", "old", "worse")

    def __init__(self, old: DepthRates):
        self.old = old
        self.level = 0.0
        self.drafts = 0  # of the new head that were verified
        self.worse = False

    @property
    def passed(self) -> bool:
        return not self.worse and self.drafts >= VERIFIED

    def record(self, trials: Iterable[Trial]) -> None:
        """One verified draft of the new head."""
        self.drafts += 1
        for depth, hit, _ in trials:
            if self.old.trials[min(depth, MAX_DEPTH)] >= ENOUGH:
                self.level += evidence(min(self.old.rate(depth), P_MAX), hit, WORSE)
                self.worse |= self.level >= WORSE_LEVEL


class Watch:
    """Knows which drafters are off. warn_only: an alarm is counted and logged, and switches nothing off (policy="fixed")."""

    def __init__(self, names: Iterable[str], *, warn_only: bool):
        self.alarms: Counter[str] = Counter()  # per drafter, ever
        self.comparisons: dict[str, Comparison] = {}
        self.off: frozenset[str] = frozenset()  # drafters that do not draft but for probes
        self._warn_only = warn_only
        self._alarms = {name: Alarm() for name in names}

    @property
    def collapsed(self) -> dict[str, bool]:
        """Per drafter: did the alarm ring, with no recovery since? Safe from any thread."""
        return {name: alarm.off for name, alarm in list(self._alarms.items())}

    def replace(self, name: str, *, present: bool, comparison: Comparison | None = None) -> None:
        """A new drafter of this name (or none any more), on trial where there is something to compare it with."""
        self._alarms.pop(name, None)
        self.comparisons.pop(name, None)
        if present:
            self._alarms[name] = Alarm()
        if comparison is not None:
            self.comparisons[name] = comparison
        self._switch()

    def record(self, name: str, trials: list[Trial], own: DepthRates, shared: DepthRates) -> DepthRates | None:
        """Judge a verified draft before `own`, the rates of its sequence, and `shared`, the drafter's, learn it. What the latter were
        before the collapse, when the drafter has just recovered from it."""
        comparison, alarm = self.comparisons.get(name), self._alarms[name]
        if comparison is not None:
            comparison.record(trials)
        if not alarm.record(trials, own, shared):
            return None
        log = logging.getLogger("specdec")
        self._switch()
        if not alarm.off:
            log.info("drafter %s works again", name)
            return alarm.before
        self.alarms[name] += 1
        if comparison is not None:
            comparison.worse = True
        consequence = "policy='fixed' goes on with it" if self._warn_only else "it is off until probes show that it works again"
        log.warning("drafter %s: acceptance has collapsed; %s", name, consequence)
        return None

    def tick(self) -> None:
        """A step of decoding begins."""
        for name in self.off:
            self._alarms[name].tick()

    def due(self, names: Seq[str]) -> str | None:
        """The first of `names` that is off and due for a probe."""
        return next((name for name in names if name in self.off and self._alarms[name].probe_due), None)

    def probed(self, name: str) -> None:
        """A sequence was given a probe of this drafter."""
        self._alarms[name].probed()

    def _switch(self) -> None:
        self.off = frozenset() if self._warn_only else frozenset(name for name, alarm in self._alarms.items() if alarm.off)
