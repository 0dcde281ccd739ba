"""Scheduler under random traffic: arrivals, aborts, forks, drafts, tiny pools, one group or two."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from specdec.errors import RequestTooLong
from specdec.sequence import Status
from specdec.types import SpecBudget
from tests.engine.fake_engine import FULL, SLIDING, FakeEngine, sequence

PROMPTS = st.tuples(st.sampled_from(["a", "b"]), st.integers(1, 30))


class SchedulerMachine(RuleBasedStateMachine):
    """Random traffic; `FakeEngine.step` checks purity, exactness, progress and every KV read."""

    @initialize(
        blocks=st.integers(22, 40),
        size=st.sampled_from([4, 8]),
        rows=st.integers(3, 30),
        seqs=st.integers(1, 5),
        prefix=st.booleans(),
        two=st.booleans(),
        seed=st.integers(0, 99),
    )
    def begin(self, blocks: int, size: int, rows: int, seqs: int, prefix: bool, two: bool, seed: int) -> None:
        """Two groups need room for a window and 64 slots in flight; one group may be far smaller."""
        groups = (FULL, SLIDING) if two else (FULL,)
        self.length = 100
        self.engine = FakeEngine(
            groups=groups,
            blocks=blocks if two else blocks // 2,
            block_size=size,
            seqs=seqs,
            rows=rows,
            length=self.length,
            prefix=prefix,
            seed=seed,
        )
        self.names = 0

    @rule(prompt=PROMPTS, new=st.integers(1, 40), n=st.sampled_from([1, 1, 1, 2, 3]))
    def add(self, prompt: tuple[str, int], new: int, n: int) -> None:
        kind, length = prompt
        tokens = [(i * (3 if kind == "a" else 5) // 7) % 2 for i in range(length)]
        parent = sequence(tokens, new, name=str(self.names))
        self.names += 1
        try:
            self.engine.add(parent, *(sequence(tokens, new, name=parent.request_id, choice=i, fork_of=parent) for i in range(1, n)))
        except RequestTooLong:
            assert (length + new - 1) > self.engine.pools[0].capacity * self.engine.config.block_size

    @precondition(lambda self: self.engine.scheduler.has_work)
    @rule(wish=st.sampled_from([1, 2, 4, 16, 64]), depth=st.integers(1, 63), width=st.integers(1, 4), repeat=st.integers(1, 4))
    def step(self, wish: int, depth: int, width: int, repeat: int) -> None:
        for _ in range(repeat):
            self.engine.step({seq: SpecBudget("fake", wish, depth, width) for seq in self.engine.scheduler.running})

    @precondition(lambda self: self.engine.scheduler.has_work)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        alive = [s for s in self.engine.all if s.status is not Status.FINISHED]
        self.engine.scheduler.abort(data.draw(st.sampled_from(alive)))

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "engine"):
            self.engine.scheduler.check()

    def teardown(self) -> None:
        if hasattr(self, "engine"):
            self.engine.drain()


TestSchedulerFuzz = SchedulerMachine.TestCase
TestSchedulerFuzz.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
