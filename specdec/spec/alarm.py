"""`Alarm`: has a drafter stopped working? A sequential test on its acceptance, over all sequences together; and its recovery.

Evidence. Along the accepted path of a verified tree every node with drafted children is a *trial*: was one of them accepted?
The reference chance p of a trial is the smaller of what the sequence has seen of this drafter at that depth (its own rate,
shrunk to the drafter's as it was when S last was 0) and what the drafter claimed. So a drafter that says it does not know, a
text it never did well on, and one that was never any good raise no alarm: only a change for the worse does.

Test. CUSUM (Page 1954): S ← max(0, S + l), l the log-likelihood ratio of "p fell to COLLAPSE · p" against "p holds":
log COLLAPSE for a hit, log((1 - COLLAPSE·p) / (1 - p)) for a miss; alarm when S ≥ OFF_LEVEL.
  *False alarms.* Under "p holds" exp of the sum of l is a martingale of mean 1, whatever p each trial has (p is fixed before the
  trial). From each zero of S it reaches exp(h) with probability at most exp(-h) (Ville), and each such excursion takes a
  trial at least: the mean number of trials to a false alarm is at least exp(h) (Lorden 1971). OFF_LEVEL = log 10⁷: less than one
  in ten million trials, if p is not too high; where the rate is really q < p for good, h shrinks by the root θ < 1 of
  q·COLLAPSE^θ + (1 - q)·((1 - COLLAPSE·p) / (1 - p))^θ = 1 (p = 0.7, q = 0.6: θ = 0.6, one in 2·10⁴), until the rates have learned q.
  *Delay.* About h over the mean of l after the change. Total collapse: 16.1 / log((1 - p/4) / (1 - p)), which is 8 trials at
  p = 0.9, 16 at 0.7, 29 at 0.5; a fall to a quarter: 13, 27, 51. What falls by less than 40 % is left to the policy.
A sequence that does badly from its start moves its own p at once and adds 8 to S at most: some of them are needed, one is a text
that does not suit the drafter. P_MAX keeps a handful of misses after a long perfect run from being proof.

Recovery. The rates before the change are those of the last time that S was 0. While the drafter is off one sequence at a time
gets a short draft (a probe) every `interval` steps: FIRST, doubled after each failure up to LONGEST, so that n steps see at most
log2(LONGEST / FIRST) + n / LONGEST failed probes; while evidence is positive the next probe follows at once. The mirrored test (-l, against
the rates before the change) switches it on at ON_LEVEL: a drafter that is still collapsed gets there by luck less than once in 200
trials, one that works as before needs about 5.3 / mean(-l): 8 trials at 0.7.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from specdec.spec.acceptance import DepthRates

COLLAPSE = 0.25  # what is left of the acceptance rate after the change that is tested for
OFF_LEVEL = math.log(1e7)
ON_LEVEL = math.log(200)
P_MAX = 0.95
FIRST, LONGEST = 16, 1024  # steps between probes of a drafter that is off


class Trial(NamedTuple):
    """Was a child drafted at `depth` accepted, where its parent was? claim: the drafter's own chance of that, 1 = it gave none."""

    depth: int
    hit: bool
    claim: float


def trials_of(parents: Seq[int], depths: Seq[int], scores: Seq[float] | None, count: int, taken: set[int]) -> list[Trial]:
    """Trials of a verified tree of `count` nodes; taken: its accepted nodes. scores: cumulative, by node, None or 0 = none given."""
    found: dict[int, tuple[bool, float]] = {}  # depth -> (hit, claim): there is one parent per depth
    scored = scores is not None and count > 1 and scores[1] > 0.0
    for i in range(1, count):
        parent = parents[i]
        if parent == 0 or parent in taken:
            hit, claim = found.get(depths[i], (False, 0.0))
            share = scores[i] / max(scores[parent], 1e-9) if scored and scores is not None else 1.0
            found[depths[i]] = (hit or i in taken, claim + share)
    return [Trial(depth, hit, min(claim, 1.0)) for depth, (hit, claim) in found.items()]


def evidence(p: float, hit: bool, ratio: float) -> float:
    """Log-likelihood ratio of chance ratio · p against p, of one trial."""
    return math.log(ratio) if hit else math.log((1.0 - ratio * p) / (1.0 - p))


class Alarm:
    """State of the test for one drafter."""

    __slots__ = ("_wait", "before", "interval", "level", "off")

    def __init__(self) -> None:
        self.before: DepthRates | None = None  # the drafter's rates when the level last was 0
        self.level = 0.0  # while off: of the recovery
        self.off = False
        self.interval = FIRST
        self._wait = 0  # steps to the next probe

    def record(self, trials: Iterable[Trial], own: DepthRates, shared: DepthRates) -> bool:
        """Judge trials of one sequence before its rates (`own`) and the drafter's (`shared`) learn them. True when the state changed:
        off, or on again."""
        return self._watch(trials, own, shared) if not self.off or self.before is None else self._recover(trials, self.before)

    def _watch(self, trials: Iterable[Trial], own: DepthRates, shared: DepthRates) -> bool:
        for depth, hit, claim in trials:
            usual = self.before if self.level > 0.0 else shared  # else a long bad sequence would teach what to expect of the next one
            step = evidence(min(own.rate(depth, usual), claim, P_MAX), hit, COLLAPSE)
            if self.level == 0.0 and step > 0.0:
                self.before = shared.copy()
            self.level = max(0.0, self.level + step)
        if self.level < OFF_LEVEL:
            return False
        self.off, self.level, self.interval, self._wait = True, 0.0, FIRST, FIRST
        return True

    def _recover(self, trials: Iterable[Trial], before: DepthRates) -> bool:
        judged = False
        for depth, hit, claim in trials:
            judged = True
            self.level = max(0.0, self.level - evidence(min(before.rate(depth), claim, P_MAX), hit, COLLAPSE))
        if self.level >= ON_LEVEL:
            self.off, self.level = False, 0.0
            return True
        if judged:
            self.interval = FIRST if self.level > 0.0 else min(LONGEST, 2 * self.interval)
            self._wait = 0 if self.level > 0.0 else self.interval
        return False

    def tick(self) -> None:
        """A step began in which the drafter could be asked."""
        self._wait -= 1

    @property
    def probe_due(self) -> bool:
        return self.off and self._wait <= 0

    def probed(self) -> None:
        """A probe was handed out; if it comes to nothing, the next follows after as long a wait."""
        self._wait = self.interval
