"""`Experience`: what verdicts teach about drafters, per drafter and per sequence, and who is off because of it.

The policy decides with it and leaves the learning here; the figures themselves are in `acceptance`, the alarms in `watch`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec.config import SpecConfig
from specdec.spec.acceptance import DepthRates, DrafterRecord, Ledger, SequenceRecord, band_of, synthesise
from specdec.spec.alarm import Trial, trials_of
from specdec.spec.choice import PROBE_NODES
from specdec.spec.limits import Limits, limits_of
from specdec.spec.proposer import Proposer
from specdec.spec.watch import Comparison, Watch
from specdec.types import DraftTree, Scheduled, Verdict

if TYPE_CHECKING:
    from specdec.sequence import Sequence

HOPE = 0.6  # least that a probe's drafts are believed, so that they are verified where rows are not dear


@dataclass(slots=True)
class Pending:
    """A draft between trim and observe: raw scores by node of the verified tree, and what it costs, in tokens. shared: see `SpecBudget`."""

    drafter: str
    scores: list[float]
    spent: float
    probe: bool
    shared: bool = False


@dataclass(slots=True)
class State:
    """One sequence. drafter: of the last budget. probe: it was given only to see whether the drafter works again. owed: seconds that
    the draft of this step takes besides drafting."""

    limits: Limits
    records: dict[str, SequenceRecord]
    ledger: Ledger
    drafter: str | None = None
    probe: bool = False
    owed: float = 0.0
    pending: Pending | None = None


def _promise(proposer: Proposer) -> float:
    return float(getattr(proposer, "promise", 0.0))


class Experience:
    """drafters and states are read by the policy; they change here. warn_only: see `Watch`."""

    def __init__(self, config: SpecConfig, proposers: Mapping[str, Proposer], *, warn_only: bool):
        self.drafters = {name: DrafterRecord(_promise(proposer)) for name, proposer in proposers.items()}
        self.states: dict[Sequence, State] = {}
        self.watch = Watch(self.drafters, warn_only=warn_only)
        self._config = config

    def state(self, seq: Sequence) -> State:
        """That of the sequence, opened when it is new."""
        state = self.states.get(seq)
        if state is None:
            limits = limits_of(seq.params.speculation, self._config, tuple(self.drafters))
            records = {name: SequenceRecord(self.drafters[name]) for name in limits.drafters}
            ledger = Ledger(max((r.value.mean() for r in records.values()), default=0.0))
            state = self.states[seq] = State(limits, records, ledger)
        return state

    def begin(self, seq: Sequence) -> State:
        """A step of the sequence begins; its state."""
        state = self.state(seq)
        state.drafter, state.probe, state.owed = None, False, 0.0
        state.ledger.steps += 1
        for record in state.records.values():
            record.step()
        return state

    def corrected(self, share: Scheduled, raw: list[float], parents: list[int], count: int) -> tuple[list[float], bool]:
        """Scores as experience says they are, falling along paths, and whether this is a probe. Fills `raw` if unscored."""
        state, name = self.states.get(share.seq), share.budget.drafter
        if count < 2 or state is None or name is None:
            return [1.0], False
        record = state.records[name]
        if raw[1] <= 0.0:
            synthesise(raw, parents, count, record.rates)
        factors = [record.believed(band) for band in range(3)]
        probe = state.probe or (factors[band_of(raw[1])] < 0.5 and record.probe_due())
        if probe:
            count = min(count, PROBE_NODES)
            factors = [max(f, HOPE) for f in factors]
        on_trial = state.probe or name in self.watch.comparisons  # to be seen at work, whatever it claims
        scores = [1.0]
        for i in range(1, count):
            chance, above = raw[i] * factors[band_of(raw[i])], scores[parents[i]]
            scores.append(min(above, max(chance, HOPE * above) if on_trial and i < PROBE_NODES else chance, 0.999))
        return scores, probe

    def observe(self, shares: tuple[Scheduled, ...], tree: DraftTree, verdict: Verdict) -> None:
        """Learn from a verified step. A cut by an end token or a limit says nothing about the drafter."""
        drafted, decided, counts = tree.host, verdict.host, tree.host.num_nodes
        if max(counts, default=1) == 1 and not any(state.pending is not None for state in self.states.values()):
            return
        scores = [None] * len(counts) if tree.score is None else tree.score.tolist()
        alike: dict[str, list[tuple[float, int]]] = {}
        for b, share in enumerate(shares):
            state, name = self.states.get(share.seq), share.budget.drafter
            if state is None:
                continue
            pending, state.pending = state.pending, None
            if decided.finish[b] or name is None or name not in state.records:
                continue
            taken = set(decided.path[b][: decided.num_accepted[b]])
            if pending is not None and len(pending.scores) == counts[b]:
                self._learn(state, pending, taken)
                if pending.shared:
                    alike.setdefault(name, []).append((sum(pending.scores[1:]), len(taken)))
            probe = pending is not None and pending.probe
            if counts[b] > 1 and (probe or name not in self.watch.off):  # what was under way when it was switched off is no probe
                self._judge(state, name, trials_of(drafted.parents[b], drafted.depth[b], scores[b], counts[b], taken))
        for name, found in alike.items():
            promised, accepted = (sum(column) / len(found) for column in zip(*found, strict=True))
            self.drafters[name].profile.verified(promised, accepted)

    def saw_nothing(self, state: State, name: str) -> None:
        """`name` was chosen for the sequence and has nothing to draft: a step in which it wins nothing."""
        state.records[name].value.record(0.0)
        self.drafters[name].value.record(0.0)

    def _learn(self, state: State, pending: Pending, taken: set[int]) -> None:
        """What the draft won, and how honest its scores were."""
        record, drafter = state.records[pending.drafter], self.drafters[pending.drafter]
        net = len(taken) - pending.spent
        state.ledger.record(pending.spent, len(taken))
        record.value.record(net)
        drafter.value.record(net)
        if len(pending.scores) == 1:
            return
        for i in range(1, len(pending.scores)):
            for reliability in (record.reliability, drafter.reliability):
                reliability.record(pending.scores[i], i in taken)
        record.verified(len(taken), probe=pending.probe)

    def _judge(self, state: State, name: str, trials: list[Trial]) -> None:
        """How deep the drafter gets, after what is known so far was held against it."""
        record, drafter = state.records[name], self.drafters[name]
        before = self.watch.record(name, trials, record.rates, drafter.rates)
        if before is not None:  # what was learned of the collapse is void, on every sequence
            self._start_over(name, DrafterRecord(drafter.value.prior, before))
            return
        for depth, hit, _ in trials:
            record.rates.record(depth, hit)
            drafter.rates.record(depth, hit)

    def _start_over(self, name: str, record: DrafterRecord) -> None:
        self.drafters[name] = record
        for state in self.states.values():
            if name in state.records:
                state.records[name] = SequenceRecord(record)

    def replace(
        self, proposers: Mapping[str, Proposer], name: str, *, comparison: Comparison | None = None, rates: DepthRates | None = None
    ) -> None:
        """`proposers` have another drafter `name` than before, or none, and maybe another order. Ledgers go on. comparison: the new
        one is on trial. rates: how deep it got earlier; else nothing is known of it."""
        self.watch.replace(name, present=name in proposers, comparison=comparison)
        self.drafters = {n: self.drafters[n] if n != name else DrafterRecord(_promise(p), rates) for n, p in proposers.items()}
        for seq, state in self.states.items():
            state.limits = limits_of(seq.params.speculation, self._config, tuple(self.drafters))
            kept = {n: r for n, r in state.records.items() if n != name}
            state.records = {n: kept.get(n) or SequenceRecord(self.drafters[n]) for n in state.limits.drafters}
            state.drafter = state.drafter if state.drafter in state.records else None
            state.pending = None

    def counts(self) -> dict[str, dict[str, int]]:
        """Per drafter: sequences for which it is active, warm or dormant, or off because it collapsed."""
        result = {name: {"active": 0, "warm": 0, "dormant": 0, "collapsed": 0} for name in self.drafters}
        for state in self.states.values():
            for name in state.limits.drafters:
                resting = "collapsed" if name in self.watch.off else "dormant"
                result[name]["active" if state.drafter == name else resting] += 1
        return result
