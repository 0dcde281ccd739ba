"""A model-free engine loop that is a step ahead, as `Engine`: budgets are asked for before the last verdict is known. Time is simulated."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass, field

from specdec.config import SpecConfig
from specdec.sequence import Sequence
from specdec.spec.policy import SpecPolicy
from specdec.spec.tree import tree_from_lists
from specdec.types import NO_DRAFT, DraftTree, Scheduled, SpecBudget, StepStats, Verdict
from tests.spec.drafting import judge, sequence
from tests.spec.simulator import VOCAB, Chain, Fake, LineCost

CONFIG = SpecConfig(method="auto", nodes=16, depth=12, width=1)


class Head(Fake):
    """A draft head in name only, which can draft behind a step in flight."""

    needs_hidden = True
    feeds = True
    width_ahead = 64


@dataclass
class Times:
    """Seconds of an H200 and an 8B model, about. depth: of a pass of the head; wait, plain_wait: of the host, where a step with drafts, or
    one without, does not follow another."""

    cost: LineCost = field(default_factory=lambda: LineCost(first=3.4e-3, per_row=2e-5))
    depth: float = 2.5e-4
    fixed: float = 2e-4
    wait: float = 2.5e-3
    plain_wait: float = 6e-4
    recording: float = 0.0  # of the first step of a shape and batch, and of the first one that follows


@dataclass
class Flown:
    shares: tuple[Scheduled, ...]
    tree: DraftTree
    verdict: Verdict
    futures: list[list[int]]
    seconds: float
    follows: bool


@dataclass
class Run:
    steps: list[tuple[SpecBudget | None, bool]] = field(default_factory=list)  # (budget of all, did it follow) by step
    seconds: float = 0.0
    tokens: int = 0
    plain: float = 0.0  # seconds of the same tokens without any draft

    @property
    def ratio(self) -> float:
        return self.seconds / self.plain

    @property
    def followed(self) -> float:
        """Share of the steps with drafts that followed another."""
        drafted = [follows for budget, follows in self.steps if budget is None or budget.drafter is not None]
        return sum(drafted) / len(drafted)


class Pipeline:
    def __init__(self, processes: Mapping[str, Chain], heads: tuple[str, ...] = ("head",), times: Times | None = None, seed: int = 0):
        self.processes, self.times, self.dice = processes, times or Times(), random.Random(seed)
        proposers = {name: Head(name) if name in heads else Fake(name) for name in processes}
        self.policy = SpecPolicy(CONFIG, proposers, self.times.cost, max_rows=256)  # type: ignore[arg-type]
        self.ahead = dict.fromkeys(heads, 64)
        self.stats: StepStats | None = None
        self.steps = 0
        self.recorded: set[tuple[int, int, bool]] = set()

    def run(self, lengths: list[int]) -> Run:
        result = Run()
        seqs = [sequence([1, 2, 3], max_total=3 + n, seed=i) for i, n in enumerate(lengths)]
        flight: Flown | None = None
        kept: dict[Sequence, SpecBudget] | None = None
        while running := [seq for seq in seqs if seq.remaining > 0]:
            if flight is None:
                budgets = self._budget(running) if kept is None else kept
                flight, kept = self._fly(running, budgets, follows=False), None
            kept, behind = self._budget(running), None
            going = [seq for seq in running if seq.remaining > 1]
            if going and self._follows(flight, [kept[seq] for seq in going]):
                behind = going, kept
                kept = None
            self._commit(flight, result)
            flight = None
            if behind is not None:
                going = [seq for seq in behind[0] if seq.remaining > 0]
                flight = self._fly(going, behind[1], follows=True) if going else None
        return result

    def _budget(self, running: list[Sequence]) -> dict[Sequence, SpecBudget]:
        return self.policy.budget(running, self.stats, self.ahead)

    @staticmethod
    def _follows(flight: Flown, budgets: list[SpecBudget]) -> bool:
        before = max((share.budget for share in flight.shares), key=lambda b: b.depth)
        alike = len(set(budgets)) == 1
        if before.drafter is None:
            return alike and budgets[0] == NO_DRAFT
        return alike and budgets[0].shared and before.shared and budgets[0].depth >= before.depth

    def _fly(self, running: list[Sequence], budgets: dict[Sequence, SpecBudget], *, follows: bool) -> Flown:
        shares = tuple(Scheduled(seq, 1, True, budgets.get(seq, NO_DRAFT)) for seq in running)
        trees, futures, deepest = [], [], max(share.budget.depth for share in shares)
        for share in shares:
            depth = share.budget.depth if follows else min(share.budget.depth, share.seq.remaining - 1)
            chain = self.processes[share.budget.drafter](share.seq, depth, self.dice) if share.budget.drafter else []
            future = [10 + self.dice.randrange(VOCAB - 20) for _ in range(share.seq.remaining)]
            drafted = [token if right else token + 1 for (right, _), token in zip(chain, [*future, *[0] * len(chain)], strict=False)]
            trees.append(([share.seq.tokens[-1], *drafted], list(range(-1, len(drafted))), [1.0, *(score for _, score in chain)]))
            futures.append(future)
        tree = tree_from_lists(trees, [share.budget.drafter for share in shares])
        if follows:
            self.policy.expected(tree, shares)
        elif deepest:
            tree = self.policy.trim(tree, shares)
        rows = (
            len(shares) * max(share.budget.nodes for share in shares) if deepest and shares[0].budget.shared else sum(tree.host.num_nodes)
        )
        times = self.times
        seconds = times.cost.base(rows, len(shares)) + (times.fixed + times.depth * deepest if deepest and self._heads(shares) else 0.0)
        seconds += 0.0 if follows else times.wait if max(tree.host.num_nodes) > 1 else times.plain_wait
        if deepest and (shape := (len(shares), deepest, follows)) not in self.recorded:
            self.recorded.add(shape)
            seconds += times.recording
        verdict = judge(tree, [future[: share.seq.remaining] for future, share in zip(futures, shares, strict=True)])
        return Flown(shares, tree, verdict, futures, seconds, follows)

    def _heads(self, shares: tuple[Scheduled, ...]) -> bool:
        return any(share.budget.drafter in self.ahead for share in shares)

    def _commit(self, flown: Flown, result: Run) -> None:
        committed, context = 0, sum(share.seq.num_computed for share in flown.shares)
        for b, share in enumerate(flown.shares):
            new = flown.futures[b][: int(flown.verdict.num_accepted[b]) + 1]
            share.seq.append(new, min(int(flown.verdict.num_accepted[b]), len(new)))
            share.seq.num_computed = len(share.seq.tokens) - 1
            flown.verdict.finish[b] = 2 if share.seq.remaining == 0 else 0
            committed += len(new)
        self.policy.observe(flown.shares, flown.tree, flown.verdict)
        count, budgets = len(flown.shares), {share.budget for share in flown.shares}
        budget = budgets.pop() if len(budgets) == 1 else None
        rows = sum(flown.tree.host.num_nodes)
        self.stats = StepStats(self.steps, count, rows, count, context, step_seconds=flown.seconds, committed=committed, budget=budget)
        self.stats.drafts = {"any": 1} if rows > count else {}
        self.steps += 1
        for share in flown.shares:
            if share.seq.remaining == 0:
                self.policy.reset(share.seq)
        result.steps.append((budget, flown.follows))
        result.seconds, result.tokens = result.seconds + flown.seconds, result.tokens + committed
        result.plain += committed * self.times.cost.base(count, count) / count
