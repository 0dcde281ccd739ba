"""A model-free engine around the real scheduler: its KV is the *content* each slot should have, so every read can be checked.

The KV of position p is the tuple of tokens 0…p. Rows of drafts write `GARBAGE` first; accepted ones are then compacted, as
the real engine does. Emitted tokens come from a tiny alphabet, so prefixes repeat and the prefix cache is busy.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Mapping
from unittest.mock import patch

from specdec.cache.ledger import Ledger
from specdec.cache.pool import NULL_BLOCK, BlockPool
from specdec.cache.prefix import first_visible
from specdec.config import EngineConfig, SamplingParams
from specdec.scheduler import Scheduler
from specdec.sequence import Sequence, Status
from specdec.types import KVGroup, Scheduled, SpecBudget, StepPlan

GARBAGE = ("draft",)
FULL = KVGroup("full", 1, 1, 4)
SLIDING = KVGroup("sliding", 1, 1, 4, window=6)


def sequence(tokens: list[int], new: int = 4, *, name: str = "r", choice: int = 0, fork_of: Sequence | None = None) -> Sequence:
    return Sequence(name, list(tokens), len(tokens), SamplingParams(), 0, len(tokens) + new, choice=choice, fork_of=fork_of)


class FakeEngine:
    """groups, blocks per group, and the sizes of `EngineConfig`. `rng` decides tokens and how many drafts are accepted."""

    def __init__(self, *, groups=(FULL, SLIDING), blocks=24, block_size=4, seqs=4, rows=24, length=64, prefix=True, seed=0, max_queue=None):
        self.config = EngineConfig(
            block_size=block_size, max_num_seqs=seqs, max_num_batched_tokens=rows, enable_prefix_caching=prefix, max_queue=max_queue
        )
        self.pools = [BlockPool(blocks, g.name) for g in groups]
        self.groups = groups
        self.scheduler = Scheduler(self.config, groups, self.pools, max_model_len=length)
        self.kv: list[dict[int, tuple]] = [{} for _ in groups]
        self.rng = random.Random(seed)
        self.all: list[Sequence] = []

    def add(self, *seqs: Sequence) -> None:
        self.scheduler.add(*seqs)
        self.all.extend(seqs)

    def _slot(self, seq: Sequence, g: int, cell: int) -> int:
        size = self.config.block_size
        block = int(self.scheduler.tables.tensor[g, seq.request_slot, cell // size])
        return block * size + cell % size

    def _write(self, seq: Sequence, cell: int, content: tuple) -> None:
        for g, pool in enumerate(self.pools):
            slot = self._slot(seq, g, cell)
            block = slot // self.config.block_size
            assert block != NULL_BLOCK and pool.refs(block) == 1 and not pool.is_cached(block), "wrote to a block it does not own alone"
            self.kv[g][slot] = content

    def _read_all(self, seq: Sequence) -> None:
        """Every key the next query of `seq` sees is there."""
        for g, group in enumerate(self.groups):
            for p in range(first_visible(group, seq.num_computed), seq.num_computed):
                assert self.kv[g].get(self._slot(seq, g, p)) == tuple(seq.tokens[: p + 1]), f"{group.name}: wrong KV at {p}"

    def snapshot(self) -> object:
        """Everything `plan` could disturb."""
        s = self.scheduler
        pools = [
            (list(p._refs), list(p._hash_of), dict(p._block_of), list(p._free), list(p._cached), list(p.generation)) for p in self.pools
        ]
        seqs = [
            (s.status, s.num_computed, s.request_slot, copy.deepcopy(s.block_tables), list(s.block_hashes), s.num_hashed_cached, s.fork_of)
            for s in self.all
        ]
        return pools, seqs, s.running, list(s._roster.queue()), list(s._slots), s.tables.tensor.tolist(), s.prefix_queries, s.preemptions

    def step(self, budget_of: Mapping[Sequence, SpecBudget] | None = None) -> StepPlan:
        """One step with every promise of the scheduler checked on the way."""
        s = self.scheduler
        before, oldest = self.snapshot(), s.running[:1]
        assert s.plan(budget_of) == s.plan(budget_of)
        ledgers: list[Ledger] = []
        with patch("specdec.planning.Ledger", lambda *args: ledgers.append(Ledger(*args)) or ledgers[-1]):
            plan = s.plan(budget_of)
        assert self.snapshot() == before, "plan() changed something"
        applied = s.apply(plan)
        assert ledgers[0].free == [p.num_free for p in self.pools], "plan() and apply() count blocks differently"
        self._check_plan(plan, oldest)
        for g, src, dst in applied.copies:
            size = self.config.block_size
            for i in range(size):
                self.kv[g].pop(dst * size + i, None)
                if src * size + i in self.kv[g]:
                    self.kv[g][dst * size + i] = self.kv[g][src * size + i]
        s.check()
        for share in plan.scheduled:
            self._read_all(share.seq)
        accepted = [self._forward(share) for share in plan.scheduled]
        for share, n in zip(plan.scheduled, accepted, strict=True):
            self._commit(share, n)
        s.check()
        assert sum(not seq.decoding for seq in s.running) <= 1, "two prefills share the rows meant for one"
        return plan

    def _check_plan(self, plan: StepPlan, oldest: tuple[Sequence, ...]) -> None:
        shares = {x.seq: x for x in plan.scheduled}
        assert len(shares) == len(plan.scheduled)
        assert sum(x.num_new + x.budget.nodes - 1 for x in plan.scheduled) <= self.config.max_num_batched_tokens
        if self.scheduler.has_work:
            assert plan.scheduled, "a step without progress"
        assert set(oldest) <= set(shares), "the oldest running sequence must advance"
        assert not set(plan.preempted) & set(shares) and set(plan.admitted) <= set(shares)
        for x in plan.scheduled:
            left = len(x.seq.tokens) - x.seq.num_computed
            assert 1 <= x.num_new <= left and x.samples == (x.num_new == left) and x.seq.status is Status.RUNNING
            if x.budget.nodes > 1:
                assert x.samples and x.num_new == 1 and 1 <= x.budget.depth <= min(x.budget.nodes - 1, x.seq.remaining - 1)
                assert x.seq.num_computed + x.budget.depth < self.scheduler._roster.max_model_len

    def _forward(self, share: Scheduled) -> int:
        """Write the share's rows; returns how many drafts will be accepted."""
        seq, start = share.seq, share.seq.num_computed
        for p in range(start, start + share.num_new):
            self._write(seq, p, tuple(seq.tokens[: p + 1]))
        for node in range(1, share.budget.nodes):
            self._write(seq, start + node, GARBAGE)
        return self.rng.randint(0, share.budget.depth) if share.budget.nodes > 1 else 0

    def _commit(self, share: Scheduled, accepted: int) -> None:
        seq, root = share.seq, share.seq.num_computed
        seq.num_computed += share.num_new - 1
        if share.samples:
            seq.append([self.rng.randint(0, 1) for _ in range(accepted + 1)], accepted)
            for d in range(1, accepted + 1):
                self._write(seq, root + d, tuple(seq.tokens[: root + d + 1]))
        else:
            seq.num_computed += 1
        self.scheduler.commit(seq)
        assert len(seq.tokens) <= seq.max_total
        if len(seq.tokens) == seq.max_total:
            self.scheduler.finish(seq, "length")

    def drain(self, budget_of=lambda seq: SpecBudget("fake", 8, 4, 2)) -> int:
        """Run to the end; returns the number of steps. Nothing may be left over."""
        steps = 0
        while self.scheduler.has_work:
            self.step({seq: budget_of(seq) for seq in self.scheduler.running})
            steps += 1
            assert steps < 5000
        self.check_empty()
        return steps

    def check_empty(self) -> None:
        s = self.scheduler
        s.check()
        assert s.queue_depth == s.num_running == 0 and s.kv_usage == 0.0
        assert all(p.num_free == p.capacity for p in self.pools), "blocks leaked"
        assert not s.tables.tensor.any() and all(seq.status is Status.FINISHED for seq in self.all)
