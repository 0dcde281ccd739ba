"""`SpecPolicy`: who drafts, how much, and which drafts are worth verifying. Pure CPU work of some microseconds per sequence.

Before planning, `budget` picks a drafter per sequence and an upper bound of nodes. After drafting, `trim` keeps the nodes
that maximise expected committed tokens per second of the batch, with measured costs (`cost`) and the drafter's scores
corrected by how honest they proved (`acceptance`); nothing is kept where plain decoding is best. A ledger per sequence bounds
what drafting can lose. `SpecConfig(policy="fixed")` skips all of that: exactly these nodes, depth and width every step.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specdec.config import SpecConfig
from specdec.spec.acceptance import DrafterRecord, Ledger, SequenceRecord, band_of, synthesise
from specdec.spec.allocate import Candidate, allocate, plain_seconds, subtree
from specdec.spec.choice import PROBE_NODES, choose, paying_depth, widest
from specdec.spec.cost import StepCost, measure_costs
from specdec.spec.limits import Limits, limits_of, usable
from specdec.spec.proposer import Proposer
from specdec.spec.tree import tree_from_lists
from specdec.types import NO_DRAFT, DraftTree, Scheduled, SpecBudget, StepStats, Verdict

if TYPE_CHECKING:
    from specdec.sequence import Sequence

CHEAP = 0.1  # a drafter that takes less than this share of a plain step is always asked, and its drafts judged by score
LIAR = 0.1  # a band of scores that delivers less than this share of its promise is not believed at all, until a probe
REFRESH = 16  # steps for which the widest sensible budget is kept while the batch stays as it is


@dataclass(slots=True)
class _Pending:
    """A draft between trim and observe: raw scores by node of the verified tree, and what it costs, in tokens."""

    drafter: str
    scores: list[float]
    spent: float
    probe: bool


@dataclass(slots=True)
class _State:
    limits: Limits
    records: dict[str, SequenceRecord]
    ledger: Ledger
    drafter: str | None = None  # of the last budget
    pending: _Pending | None = None


class SpecPolicy:
    """Decides per sequence and step. `cost` None goes with policy="fixed" or no drafters."""

    def __init__(self, config: SpecConfig, proposers: Mapping[str, Proposer], cost: StepCost | None):
        self.config = config
        self.proposers = proposers
        self.cost = cost
        self.fixed = config.policy == "fixed" or cost is None
        self._drafters = {name: DrafterRecord(getattr(proposer, "promise", 0.0)) for name, proposer in proposers.items()}
        self._states: dict[Sequence, _State] = {}
        self._skipped: Counter[str] = Counter()
        self._token_seconds = 1.0  # of plain decoding in the current batch: one sequence's share of a step
        self._asked: dict[str, int] = {}  # drafter -> deepest budget of this step
        self._widest_known = (0, 0, 1)  # steps ago, batch size, answer of _widest
        self._decoding = 0  # sequences that the last budget was for
        self._drafting = 0.0  # seconds spent in drafters since the last budget
        self._last_step = -1
        self._window: deque[tuple[float, float]] = deque(maxlen=128)  # (plain seconds for what was committed, real seconds)

    # -- before planning ----------------------------------------------------------------------------------------------

    def budget(self, sequences: Iterable[Sequence], stats: StepStats | None) -> dict[Sequence, SpecBudget]:
        """What each decoding sequence may draft this step. `stats` of the last step correct the cost model."""
        self._learn_cost(stats)
        decoding = [seq for seq in sequences if seq.decoding]
        self._decoding = len(decoding)
        if not self.proposers or not decoding:
            return {}
        widest = self._widest([seq.num_computed for seq in decoding])
        return {seq: self._budget_one(seq, widest, len(decoding)) for seq in decoding}

    def _widest(self, contexts: Seq[int]) -> int:
        """Most nodes per sequence worth planning; 1 = drafting cannot pay in this batch."""
        if self.fixed or self.cost is None:
            return self.config.nodes
        batch = len(contexts)
        self._token_seconds = plain_seconds(contexts, self.cost) / batch
        since, size, nodes = self._widest_known
        if size != batch or since >= REFRESH:
            since, nodes = 0, widest(contexts, self.cost)
        self._widest_known = (since + 1, batch, nodes)
        return nodes

    def _budget_one(self, seq: Sequence, widest: int, batch: int) -> SpecBudget:
        state = self._states.get(seq)
        if state is None:
            limits = limits_of(seq.params.speculation, self.config, tuple(self.proposers))
            records = {n: SequenceRecord(self._drafters[n]) for n in limits.drafters}
            state = self._states[seq] = _State(limits, records, Ledger(max((r.value.mean() for r in records.values()), default=0.0)))
        state.drafter, limits = None, state.limits
        state.ledger.steps += 1
        for record in state.records.values():
            record.idle += 1
        nodes, depth = limits.nodes, min(limits.depth, seq.remaining - 1, limits.nodes - 1)
        if not limits.drafters or depth < 1:
            return self._skip("limit")
        names, reason = usable(limits.drafters, self.proposers, len(seq.tokens))
        if not names:
            return self._skip(reason)
        name = names[0]
        if not self.fixed:
            nodes = min(nodes, widest)
            deepest, depth = min(depth, nodes - 1), 0
            while names and depth < 1:  # where the best drafter costs too much to try, a cheaper one may not
                name = choose(names, state.records, state.ledger.steps)
                depth = self._depth(state, name, deepest, batch)
                names = [n for n in names if n != name]
        if depth < 1:
            return self._skip("policy")
        state.drafter = name
        self._asked[name] = max(depth, self._asked.get(name, 1))
        return SpecBudget(name, nodes, depth, limits.width, feeds=getattr(self.proposers[name], "feeds", False))

    def _skip(self, reason: str) -> SpecBudget:
        self._skipped[reason] += 1
        return NO_DRAFT

    def _depth(self, state: _State, name: str, deepest: int, batch: int) -> int:
        """How deep to draft. A cheap drafter drafts as deep as it may and is trimmed after; a costly one must pay first."""
        headroom = state.ledger.headroom() * self._token_seconds
        if headroom <= 0.0 or deepest < 1:
            return 0
        unit = self._drafters[name].seconds_per_depth
        if unit == 0.0 and getattr(self.proposers[name], "needs_hidden", False):
            return min(deepest, PROBE_NODES - 1)  # what a pass of its network costs here is not known yet
        if unit * deepest <= CHEAP * self._token_seconds or self.cost is None:
            return deepest
        return paying_depth(state.records[name], unit, deepest, headroom, self._token_seconds, self.cost, batch)

    # -- after drafting -----------------------------------------------------------------------------------------------

    def drafted(self, name: str, seconds: float, num_seqs: int) -> None:
        """`name` took `seconds` to draft for `num_seqs` sequences."""
        self._drafting += seconds
        self._drafters[name].took(seconds / max(1, num_seqs * self._asked.pop(name, self.config.depth)))

    def trim(self, tree: DraftTree, shares: tuple[Scheduled, ...], other_rows: int = 0) -> DraftTree:
        """Keep the nodes that pay. other_rows: rows of the step besides these trees (prefill).

        Sampled drafts (`log_q`) are left alone: choosing among drawn tokens would bias rejection sampling.
        """
        if self.fixed or self.cost is None or tree.log_q is not None:
            return tree
        counts = tree.host.num_nodes
        if max(counts) == 1:
            for share in shares:
                self._expect(share, [1.0], 1, 0.0, False)
            return tree
        tokens, parents = tree.host.tokens, tree.host.parents
        raw = tree.score.tolist() if tree.score is not None else [[0.0] * len(t) for t in tokens]
        candidates, probes = [], []
        for b, share in enumerate(shares):
            scores, probe = self._corrected(share, raw[b], parents[b], counts[b])
            state = self._states.get(share.seq)
            headroom = state.ledger.headroom() * self._token_seconds if state is not None else 0.0
            candidates.append(Candidate(scores, share.seq.num_computed, headroom))
            probes.append(probe)
        chosen = allocate(candidates, self.cost, other_rows)
        for b, share in enumerate(shares):
            self._expect(share, [raw[b][i] for i in chosen.kept[b]], counts[b], chosen.extra[b], probes[b])
        if all(len(k) == n for k, n in zip(chosen.kept, counts, strict=True)):
            return tree
        names = [share.budget.drafter if len(k) > 1 else None for share, k in zip(shares, chosen.kept, strict=True)]
        return tree_from_lists([subtree(t, p, s, k) for t, p, s, k in zip(tokens, parents, raw, chosen.kept, strict=True)], names)

    def _corrected(self, share: Scheduled, raw: list[float], parents: list[int], count: int) -> tuple[list[float], bool]:
        """Scores as experience says they are, falling along paths, and whether this is a probe. Fills `raw` if unscored."""
        state, name = self._states.get(share.seq), share.budget.drafter
        if count < 2 or state is None or name is None:
            return [1.0], False
        record = state.records[name]
        if raw[1] <= 0.0:
            synthesise(raw, parents, count, record.rates)
        factors = [f if (f := record.reliability.factor(band)) >= LIAR else 0.0 for band in range(3)]
        probe = factors[band_of(raw[1])] < 0.5 and record.probe_due()
        if probe:
            count = min(count, PROBE_NODES)
            factors = [max(f, 0.6) for f in factors]
        scores = [1.0]
        for i in range(1, count):
            scores.append(min(scores[parents[i]], raw[i] * factors[band_of(raw[i])], 0.999))
        return scores, probe

    def _expect(self, share: Scheduled, scores: list[float], drafted: int, seconds: float, probe: bool) -> None:
        state, name = self._states.get(share.seq), share.budget.drafter
        if state is None or name is None or share.budget.nodes < 2:
            return
        drafting = self._drafters[name].seconds_per_depth * max(1, share.budget.depth)
        if drafting > CHEAP * self._token_seconds:  # what little a lookup takes must not use up what drafts may risk
            seconds += drafting
        spent = seconds / self._token_seconds
        state.pending = _Pending(name, scores, spent, probe)
        if len(scores) == 1:
            self._skipped["no_match" if drafted == 1 else "policy"] += 1

    # -- after the step -----------------------------------------------------------------------------------------------

    def observe(self, shares: tuple[Scheduled, ...], tree: DraftTree, verdict: Verdict) -> None:
        """Learn from a verified step. A cut by an end token or a limit says nothing about the drafter."""
        if self.fixed or not any(state.pending is not None for state in self._states.values()):
            return
        drafted, decided = tree.host, verdict.host
        for b, share in enumerate(shares):
            state = self._states.get(share.seq)
            if state is None or state.pending is None:
                continue
            pending, state.pending = state.pending, None
            if decided.finish[b] or len(pending.scores) != drafted.num_nodes[b]:
                continue
            taken = set(decided.path[b][: decided.num_accepted[b]])
            self._learn(state, pending, drafted.parents[b], drafted.depth[b], taken)

    def _learn(self, state: _State, pending: _Pending, parents: list[int], depths: list[int], taken: set[int]) -> None:
        record, drafter = state.records[pending.drafter], self._drafters[pending.drafter]
        net = len(taken) - pending.spent
        state.ledger.record(pending.spent, len(taken))
        record.value.record(net)
        drafter.value.record(net)
        if len(pending.scores) == 1:
            return
        tried: dict[int, bool] = {}  # depth -> was a child accepted, where the parent was
        for i in range(1, len(pending.scores)):
            for reliability in (record.reliability, drafter.reliability):
                reliability.record(pending.scores[i], i in taken)
            if parents[i] == 0 or parents[i] in taken:
                tried[depths[i]] = tried.get(depths[i], False) or i in taken
        for depth, hit in tried.items():
            record.rates.record(depth, hit)
            drafter.rates.record(depth, hit)
        record.verified(len(taken), probe=pending.probe)

    def _learn_cost(self, stats: StepStats | None) -> None:
        drafting, self._drafting = self._drafting, 0.0
        if stats is None or self.cost is None or stats.step == self._last_step:
            return
        self._last_step = stats.step
        if stats.num_sampling == 0 or not stats.num_seqs == stats.num_sampling == self._decoding or stats.preempted:
            return  # somebody was prefilled: not a step of decoding alone
        self.cost.observe(stats.num_rows, stats.num_sampling, stats.context, stats.step_seconds - drafting)
        mean = stats.context // stats.num_sampling
        plain = self.cost.base(stats.num_sampling, stats.num_sampling) + stats.num_sampling * self.cost.attention(1, mean)
        self._window.append((plain * stats.committed / stats.num_sampling, stats.step_seconds))

    def reset(self, seq: Sequence) -> None:
        """The sequence finished or was preempted: forget it."""
        self._states.pop(seq, None)

    # -- what metrics ask ---------------------------------------------------------------------------------------------

    def take_skipped(self) -> dict[str, int]:
        """Decoding sequences that did not draft since the last call, by reason: no_match, policy, limit, draft_len, disabled."""
        skipped, self._skipped = dict(self._skipped), Counter()
        return skipped

    def states(self) -> dict[str, dict[str, int]]:
        """Per drafter: sequences for which it is active, warm or dormant."""
        result = {name: {"active": 0, "warm": 0, "dormant": 0} for name in self.proposers}
        for state in self._states.values():
            for name in state.limits.drafters:
                result[name]["active" if state.drafter == name else "dormant"] += 1
        return result

    def gain(self) -> float | None:
        """Speed over what plain decoding should take for the same tokens, over recent steps; None before any."""
        real = sum(seconds for _, seconds in self._window)
        return sum(plain for plain, _ in self._window) / real if real > 0 else None


def make_policy(
    config: SpecConfig,
    proposers: Mapping[str, Proposer],
    measure: Callable[[int, int], float],
    *,
    key: str = "",
    max_model_len: int = 256,
    cache: Path | None = None,
) -> SpecPolicy:
    """The policy for an engine. Costs are measured only when they will be used: policy="auto" and a drafter.

    measure: (rows, context) → seconds of a target pass. key, cache: as in `measure_costs`.
    """
    if not proposers or config.policy == "fixed":
        return SpecPolicy(config, proposers, None)
    far = max(2, min(1024, max_model_len - 64))
    rows = max(1, min(64, max_model_len - far))
    return SpecPolicy(config, proposers, measure_costs(measure, max_rows=rows, max_context=far, cache=cache, key=key))
