"""BC-24: the draft budget shrinks with load, and is never worse than plain decoding.

Real engine, real drafters, simulated time: a step costs 1, and 0.5 more for every row beyond four.
"""

from __future__ import annotations

from typing import Any

import pytest

from specdec.config import SamplingParams, SpecConfig
from specdec.engine import Engine
from specdec.spec.policy import SpecPolicy
from specdec.types import RequestOutput
from tests.harness import Log, R, engine, join, oracle_of, run

TOKENS = 40
FREE_ROWS, PER_ROW = 4, 0.5


class SimulatedCost:
    """Implements the policy's cost protocol with the cost of the case."""

    def base(self, rows: int, batch: int) -> float:
        return 1.0 + PER_ROW * max(0, rows - FREE_ROWS)

    def attention(self, nodes: int, context: int) -> float:
        return 0.0

    def observe(self, rows: int, batch: int, context: int, seconds: float) -> None:
        """Nothing to correct: the table is the truth."""


def requests(count: int) -> dict[str, tuple[list[int], SamplingParams]]:
    return {f"r{i}": ([i, *R], SamplingParams(temperature=1.0, seed=i, max_tokens=TOKENS, ignore_eos=True)) for i in range(count)}


def auto(method: str, known: dict[str, RequestOutput], **fields: Any) -> Engine:
    """An engine with the automatic policy over the simulated cost, K at most 4."""
    config = SpecConfig(method=method, nodes=5, depth=4, width=1, policy="auto", **fields)
    fixed = SpecConfig(method=method, nodes=5, depth=4, width=1, policy="fixed", **fields)
    target = engine(fixed, oracle=oracle_of(known), deterministic=True, max_num_batched_tokens=2048, max_num_seqs=32)
    target.policy = SpecPolicy(config, target.proposers, SimulatedCost())
    return target


class Bill:
    """Observer of an engine: what its decode steps cost, and that each makes progress."""

    def __init__(self, target: Engine):
        self.cost = 0.0
        self.drafts: list[int] = []  # draft tokens per decode step
        target.observers.append(self)

    def __call__(self, stats: Any) -> None:
        assert stats.committed >= stats.num_sampling, "a sampling sequence got no token"
        if stats.num_rows > 8 * stats.num_sampling:
            return  # the prefill costs the same with and without drafts
        self.cost += SimulatedCost().base(stats.num_rows, stats.num_sampling)
        self.drafts.append(sum(stats.drafted.values()))


def measure(target: Engine, count: int) -> tuple[Bill, dict[str, RequestOutput]]:
    bill = Bill(target)
    return bill, run(target, requests(count), trace=True)


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_bc24_useless_drafts_stop(count: int) -> None:
    """WRONG: no drafts from step 20 on, and at most 3 % more cost than OFF in all."""
    plain = engine(deterministic=True, max_num_batched_tokens=2048, max_num_seqs=32)
    off, known = measure(plain, count)
    on, found = measure(auto("wrong", known), count)
    for name, output in found.items():
        assert output.outputs[0].token_ids == known[name].outputs[0].token_ids
        decode = output.trace.steps[1:]  # the first step is the prefill
        assert all(len(step.tokens) == 1 for step in decode[20:]), f"{name} still drafts after 20 steps"
    assert on.cost <= 1.03 * off.cost


@pytest.mark.parametrize("count", [1, 2, 4, 8, 16])
def test_bc24_good_drafts_are_used_where_they_pay(count: int) -> None:
    """MIX(0.9): drafts at batch 1, where rows are nearly free; not at batch 16, where each row costs half a step."""
    plain = engine(deterministic=True, max_num_batched_tokens=2048, max_num_seqs=32)
    off, known = measure(plain, count)
    on, found = measure(auto("mix", known, mix_p=0.9), count)
    assert all(found[name].outputs[0].token_ids == known[name].outputs[0].token_ids for name in known)
    assert on.cost <= 1.03 * off.cost
    if count == 1:
        assert on.cost < 0.6 * off.cost and sum(on.drafts) > 0
    if count == 16:
        assert sum(on.drafts[len(on.drafts) // 2 :]) == 0 or on.cost <= off.cost


def test_bc24_crossing_the_threshold_back_and_forth() -> None:
    """Waves of load on one engine: the single request keeps its speed after every crowd, and nothing stalls."""
    plain = engine(deterministic=True, max_num_batched_tokens=2048, max_num_seqs=32)
    known = run(plain, requests(16))
    target, costs, crowded = auto("mix", known, mix_p=0.9), [], []
    for _ in range(3):
        costs.append(measure(target, 1)[0].cost)
        target.observers.clear()
        crowded.append(measure(target, 16)[0].cost)
        target.observers.clear()
    off_one = measure(engine(deterministic=True), 1)[0].cost
    off_many = measure(engine(deterministic=True, max_num_batched_tokens=2048, max_num_seqs=32), 16)[0].cost
    assert max(costs) < 0.7 * off_one
    assert max(crowded) <= 1.03 * off_many


def test_bc24_load_that_comes_and_goes_under_a_running_request() -> None:
    """One long request, a crowd that joins and leaves it: every step commits for every sampling sequence, ids equal OFF."""
    wanted = {"long": ([*R, 400], SamplingParams(temperature=0, max_tokens=70, ignore_eos=True)), **requests(12)}
    known = run(engine(deterministic=True, max_num_batched_tokens=2048, max_num_seqs=32), wanted)
    target = auto("mix", known, mix_p=0.9)
    bill, log, deltas = Bill(target), Log(), {}
    target.add_request("long", *wanted["long"])
    crowd = [(name, request) for name, request in wanted.items() if name != "long"]
    while target.has_work():
        if log.steps in (5, 6):
            for name, request in crowd[(log.steps - 5) * 6 :][:6]:
                target.add_request(name, *request)
        for delta in target.step():
            deltas.setdefault(delta.request_id, []).append(delta)
        log.steps += 1
    assert bill.drafts
    for name, parts in deltas.items():
        assert join(parts).outputs[0].token_ids == known[name].outputs[0].token_ids
