"""A model-free engine loop for the policy: real budgets, trims and verdicts, simulated time.

A `Process` says what a drafter proposes and how the target answers; costs come from any `StepCost`. Deterministic.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

from specdec.config import SpecConfig
from specdec.sequence import Sequence
from specdec.spec.policy import SpecPolicy
from specdec.spec.tree import tree_from_lists
from specdec.types import NO_DRAFT, Scheduled, StepStats
from tests.spec.drafting import judge, sequence

VOCAB = 1000


class Fake:
    """A proposer in name only: the simulator drafts for it."""

    needs_hidden = False

    def __init__(self, name: str, max_len: int | None = None):
        self.name, self.max_len = name, max_len


@dataclass
class LineCost:
    """seconds = first + per_row · (rows - 1) + per_key · nodes · context; what is charged may differ from what is believed."""

    first: float = 8e-3
    per_row: float = 1e-3
    per_key: float = 0.0
    observed: list[tuple[int, float]] = field(default_factory=list)

    def base(self, rows: int, batch: int) -> float:
        return self.first + self.per_row * (rows - 1)

    def attention(self, nodes: int, context: int) -> float:
        return self.per_key * nodes * context

    def observe(self, rows: int, batch: int, context: int, seconds: float) -> None:
        self.observed.append((rows, seconds))


class LoadCost(LineCost):
    """The hook of the load case: a step costs 1, and every row beyond batch 4 costs 0.5 per draft token of width."""

    def base(self, rows: int, batch: int) -> float:
        width = rows / batch - 1
        return 1.0 + 0.5 * width * max(0, batch - 4)


class RowLoadCost(LineCost):
    """Its other reading: every row of the step beyond the fourth costs 0.5; plain decoding pays for its rows too."""

    def base(self, rows: int, batch: int) -> float:
        return 1.0 + 0.5 * max(0, rows - 4)


Chain = Callable[[Sequence, int, random.Random], list[tuple[bool, float]]]
"""(sequence, depth, dice) → for each drafted token: is it right, and its cumulative score."""


def constant(rate: float, claim: float | None = None) -> Chain:
    """Every token right with probability `rate`; the drafter claims `claim` per token (None = honest)."""
    said = rate if claim is None else claim
    return lambda seq, depth, dice: [(dice.random() < rate, said ** (i + 1)) for i in range(depth)]


@dataclass
class Result:
    seconds: float
    steps: int
    tokens: int
    drafts: list[list[int]]  # per step, draft nodes verified per running sequence
    off_seconds: float  # the same tokens, plain

    @property
    def ratio(self) -> float:
        """Time over the time of plain decoding."""
        return self.seconds / self.off_seconds


def simulate(
    processes: dict[str, Chain],
    *,
    cost: LineCost,
    lengths: list[int],
    config: SpecConfig | None = None,
    policy: SpecPolicy | None = None,
    params: dict | None = None,
    seed: int = 0,
    draft_seconds: float = 0.0,
) -> Result:
    """Decode `lengths[i]` tokens for each of the parallel sequences; time is what `cost` says, plus drafting."""
    config = config or SpecConfig(method="auto", nodes=16, depth=15, width=1)
    policy = policy or SpecPolicy(config, {n: Fake(n) for n in processes}, cost)  # type: ignore[arg-type]
    dice = random.Random(seed)
    seqs = [sequence([1, 2, 3], max_total=3 + n, seed=i) for i, n in enumerate(lengths)]
    seqs = [_with(seq, params) for seq in seqs]
    stats, total, step, drafts = None, 0.0, 0, []
    while running := [s for s in seqs if s.remaining > 0]:
        budgets = policy.budget(running, stats)
        shares = tuple(Scheduled(s, 1, True, budgets.get(s, NO_DRAFT)) for s in running)
        rights, trees, drafting = [], [], 0.0
        for share in shares:
            chain = processes[share.budget.drafter](share.seq, share.budget.depth, dice) if share.budget.drafter else []
            right = [r for r, _ in chain]
            future = [10 + dice.randrange(VOCAB - 20) for _ in range(share.seq.remaining)]
            drafted = [t if ok else t + 1 for ok, t in zip(right, future, strict=False)]
            rights.append(future)
            trees.append(([share.seq.tokens[-1], *drafted], list(range(-1, len(drafted))), [1.0, *(s for _, s in chain)]))
            if share.budget.drafter and draft_seconds:
                own = tree_from_lists([trees[-1]], [share.budget.drafter])
                policy.drafted(share.budget.drafter, draft_seconds * max(1, share.budget.depth), own)
                drafting += draft_seconds * max(1, share.budget.depth)
        tree = tree_from_lists(trees, [s.budget.drafter for s in shares])
        if any(s.budget.drafter for s in shares):
            tree = policy.trim(tree, shares)
        verdict = judge(tree, [f[: s.seq.remaining] for f, s in zip(rights, shares, strict=True)])
        contexts = [s.num_computed for s in running]
        nodes = tree.num_nodes.tolist()
        seconds = cost.base(sum(nodes), len(running)) + sum(cost.attention(n, c) for n, c in zip(nodes, contexts, strict=True)) + drafting
        committed = 0
        for b, share in enumerate(shares):
            accepted = int(verdict.num_accepted[b])
            new = rights[b][: accepted + 1]
            assert new, "a step without progress"
            share.seq.append(new, accepted)
            committed += len(new)
        policy.observe(shares, tree, verdict)
        stats = StepStats(step, len(shares), sum(nodes), len(shares), sum(contexts), step_seconds=seconds, committed=committed)
        stats.drafter_seconds = policy.take_drafting()
        total, step = total + seconds, step + 1
        drafts.append([n - 1 for n in nodes])
        for seq in running:
            if seq.remaining == 0:
                policy.reset(seq)
    return Result(total, step, sum(lengths), drafts, _off(cost, lengths))


def _with(seq: Sequence, params: dict | None) -> Sequence:
    if params is not None:
        seq.params = type(seq.params)(speculation=params)
    return seq


def _off(cost: LineCost, lengths: list[int]) -> float:
    total = 0.0
    for step in range(max(lengths)):
        batch = sum(1 for n in lengths if n > step)
        total += cost.base(batch, batch) + batch * cost.attention(1, 2 + step)
    return total
