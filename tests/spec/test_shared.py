"""One budget for a batch, in simulation: steps follow each other, nothing is lost, gains are found. Times are those of a card, about."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.config import SamplingParams
from specdec.spec.shared import FIRST_CALM, Offer, shapes
from specdec.types import NO_DRAFT, StepStats
from tests.spec.drafting import sequence
from tests.spec.pipeline import Pipeline, Run, Times
from tests.spec.simulator import LineCost, constant


def used(run: Run, drafter: str) -> float:
    return sum(budget is not None and budget.drafter == drafter for budget, _ in run.steps) / len(run.steps)


@pytest.mark.parametrize("batch", [1, 8, 32])
@pytest.mark.parametrize(("rate", "bound"), [(0.5, 0.85), (0.7, 0.68), (0.85, 0.55)])
def test_steps_follow_and_gain(rate: float, bound: float, batch: int) -> None:
    run = Pipeline({"head": constant(rate)}).run([200 + 5 * i for i in range(batch)])
    assert run.ratio < bound
    assert run.followed > 0.95


@pytest.mark.parametrize("batch", [1, 4])
@pytest.mark.parametrize("recording", [0.05, 3.0])
def test_steps_that_record_their_shape_say_nothing_of_the_next(recording: float, batch: int) -> None:
    """They come once, and nobody knows how long they take."""
    run = Pipeline({"head": constant(0.85)}, times=Times(recording=recording)).run([4000] * batch)
    assert used(run, "head") > 0.85
    assert run.followed > 0.9


def test_better_heads_draft_deeper_and_fuller_cards_less_deep() -> None:
    def depth(rate: float, batch: int, per_row: float = 2e-5) -> float:
        run = Pipeline({"head": constant(rate)}, times=Times(LineCost(3.4e-3, per_row))).run([400] * batch)
        late = [budget.depth for budget, _ in run.steps[40:] if budget is not None]
        return sum(late) / len(late)

    assert depth(0.9, 1) > depth(0.7, 1) > depth(0.4, 1)
    assert depth(0.8, 32, 1e-4) < depth(0.8, 1, 1e-4)


@pytest.mark.parametrize("claim", [None, 0.5, 0.9])
@pytest.mark.parametrize("rate", [0.0, 0.05])
@pytest.mark.parametrize("batch", [1, 16])
def test_worthless_heads_are_given_up(rate: float, claim: float | None, batch: int) -> None:
    run = Pipeline({"head": constant(rate, claim)}).run([800] * batch)
    assert run.ratio < 1.02
    assert used(run, "head") < 0.05
    assert any(budget is None or budget.drafter == "head" for budget, _ in run.steps[300:])  # probed


def test_a_head_that_takes_too_long_is_given_up() -> None:
    """Nobody times its drafting alone: it shows in whole steps."""
    run = Pipeline({"head": constant(0.5)}, times=Times(depth=1.5e-3)).run([1500])
    assert run.ratio < 1.02


def test_a_head_that_becomes_good_is_found_by_a_probe() -> None:
    def late(seq: Any, depth: int, dice: Any) -> list[tuple[bool, float]]:
        good = seq.num_output >= 400
        return [(good and dice.random() < 0.9, 0.5 ** (i + 1)) for i in range(depth)]

    run = Pipeline({"head": late}).run([2500])
    assert run.ratio < 0.75
    assert run.steps[-1][0] is not None and run.steps[-1][0].drafter == "head"


def test_lookups_take_over_where_they_copy_and_give_back() -> None:
    def copying(seq: Any, depth: int, dice: Any) -> list[tuple[bool, float]]:
        return [(seq.num_output % 600 > 300, 0.97 ** (i + 1)) for i in range(depth)]

    alone = Pipeline({"head": constant(0.6)}).run([3000])
    both = Pipeline({"head": constant(0.6), "ngram": copying})
    both.policy.proposers["ngram"].outlook = lambda seq: 0.97 * (seq.num_output % 600 > 300)  # type: ignore[attr-defined]
    run = both.run([3000])
    assert run.ratio < 0.75 * alone.ratio
    assert used(run, "ngram") > 0.05 and used(run, "head") > 0.5


def test_two_worthless_drafters_lose_little() -> None:
    both = Pipeline({"head": constant(0.0, 0.6), "ngram": constant(0.0, 0.6)})
    both.policy.proposers["ngram"].outlook = lambda seq: 0.6  # type: ignore[attr-defined]
    assert both.run([3000]).ratio < 1.03


def test_plain_decoding_is_measured_first_and_again() -> None:
    pipeline = Pipeline({"head": constant(0.9)})
    run = pipeline.run([6000])
    plain = [i for i, (budget, _) in enumerate(run.steps) if budget == NO_DRAFT]
    assert plain[: FIRST_CALM - 1] == list(range(FIRST_CALM - 1))
    assert 1 < len([i for i in plain if i > 100]) < 0.01 * len(run.steps)
    assert {rows for rows, _ in pipeline.times.cost.observed} == {1}  # the pass of plain steps alone


def test_first_steps_after_a_change_count_for_neither_side() -> None:
    pipeline = Pipeline({"head": constant(0.9)})
    pipeline.run([300])
    shared, seq = pipeline.policy.shared, sequence([1, 2])
    assert shared is not None
    record, budget = pipeline.policy.experience.drafters["head"], pipeline.run([60]).steps[-1][0]
    assert budget is not None
    from specdec.spec.profile import Shape

    known = record.pace.beyond(Shape(budget.nodes, budget.depth), 1)
    assert known == pytest.approx(2e-4 + budget.depth * 2.5e-4, rel=0.2)
    assert shared._change == pytest.approx(2.5e-3, rel=0.3)
    pipeline.policy.budget([seq], StepStats(10**6, 1, 400, 1, 10, step_seconds=9.0, committed=1, alone=False, budget=budget))
    assert record.pace.beyond(Shape(budget.nodes, budget.depth), 1) == known


def test_whoever_may_not_draft_takes_the_batch_with_him() -> None:
    pipeline = Pipeline({"head": constant(0.9)})
    pipeline.run([100])
    seqs = [sequence([1, 2]) for _ in range(3)]
    assert all(budget.shared for budget in pipeline.policy.budget(seqs, None, {"head": 64}).values())
    seqs[1].params = SamplingParams(speculation={"method": "off"})
    pipeline.policy.reset(seqs[1])
    budgets = pipeline.policy.budget(seqs, None, {"head": 64})
    assert budgets[seqs[1]] == NO_DRAFT and not any(budget.shared for budget in budgets.values())


def test_limits_of_a_request_are_those_of_the_batch() -> None:
    pipeline = Pipeline({"head": constant(0.95)})
    pipeline.run([300])
    seqs = [sequence([1, 2]) for _ in range(2)]
    seqs[0].params = SamplingParams(speculation={"depth": 2})
    budgets = pipeline.policy.budget(seqs, None, {"head": 64})
    assert {budget.depth for budget in budgets.values()} <= {1, 2} and len(set(budgets.values())) == 1


def test_shapes() -> None:
    assert [*shapes(Offer(5, 12, 1, True))] == [(2, 1), (3, 2), (4, 3), (5, 4)]
    assert [*shapes(Offer(2, 1, 1, True))] == [(2, 1)]
    wide = [*shapes(Offer(16, 6, 2, True))]
    assert all(shape.depth < shape.nodes <= 16 and shape.depth <= 6 for shape in wide)
    assert (16, 6) in wide and (16, 3) not in wide  # two children a node: no more than 15 nodes three deep
    assert (4, 3) in wide and len(wide) == len(set(wide))
