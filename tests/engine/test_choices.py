"""n > 1: one prefill, forked choices, each what it would be alone."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.config import SamplingParams
from tests.harness import SHAPES, Log, P, R, assert_same, engine, oracle_of, run

HOT = SamplingParams(temperature=1.5, seed=8, max_tokens=14, ignore_eos=True)


def test_choice_zero_is_the_single_request() -> None:
    one = run(engine(deterministic=True), {"r": (R, HOT)})["r"].outputs[0]
    for n in (2, 5):
        assert run(engine(deterministic=True), {"r": (R, replace(HOT, n=n))})["r"].outputs[0] == one


def test_fewer_choices_are_a_prefix_of_more() -> None:
    """Choice i does not depend on n."""
    many = run(engine(deterministic=True), {"r": (P, replace(HOT, n=6))})["r"].outputs
    few = run(engine(deterministic=True), {"r": (P, replace(HOT, n=3))})["r"].outputs
    assert few == many[:3]
    assert len({tuple(c.token_ids) for c in many}) == 6


def test_greedy_choices_are_equal() -> None:
    outputs = run(engine(deterministic=True), {"r": (P, replace(HOT, temperature=0, n=3))})["r"].outputs
    assert len({tuple(c.token_ids) for c in outputs}) == 1


@pytest.mark.parametrize("length", [1, 4, 47, 48, 49])
@pytest.mark.parametrize("kind", ["t0", "two_groups"])
def test_the_prompt_is_computed_once(length: int, kind: str) -> None:
    """Whatever its length does to the last block: the rows of all steps are the prompt's, then one a choice and token."""
    target = engine(kind=kind, deterministic=True, enable_prefix_caching=False)
    rows: list[int] = []
    target.observers.append(lambda stats: rows.append(stats.num_rows))
    prompt = [*R, 6][:length]
    output = run(target, {"r": (prompt, replace(HOT, n=4))})["r"]
    assert sum(rows) == length + (4 - 1) + 4 * (HOT.max_tokens - 1 if HOT.max_tokens else 0)
    assert output.metrics.prompt_tokens == length


@pytest.mark.parametrize("kind", ["t0", "two_groups"])
@pytest.mark.parametrize("shape", ["off", "mix-tree", "ngram-chain", "draft-tree"])
@pytest.mark.parametrize("seats", [1, 2, 16])
def test_forks_equal_whatever_runs_beside(kind: str, shape: str, seats: int) -> None:
    """More choices than seats, forks made late or after the first choice is gone, with trees in flight."""
    params = replace(HOT, n=5, allowed_token_ids=list(range(60, 80)), stop_token_ids=[61, 62], repetition_penalty=1.2, logprobs=1)
    expected = run(engine(kind=kind, deterministic=True), {"r": (R, params)})
    assert len({len(c.token_ids) for c in expected["r"].outputs}) > 1
    target = engine(
        "off" if shape == "off" else SHAPES[shape], kind=kind, oracle=oracle_of(expected), deterministic=True, max_num_seqs=seats
    )
    assert_same(run(target, {"r": (R, params)})["r"], expected["r"], tolerance=0)


def test_forks_survive_preemption() -> None:
    params = replace(HOT, n=4, max_tokens=25)
    expected = run(engine(deterministic=True), {"r": (R, params)})
    for caching in (True, False):
        target = engine(
            SHAPES["mix-tree"],
            oracle=oracle_of(expected),
            deterministic=True,
            num_kv_blocks=26,
            max_model_len=76,
            enable_prefix_caching=caching,
        )
        log = Log()
        assert_same(run(target, {"r": (R, params)}, log=log)["r"], expected["r"], tolerance=0)
        assert log.preempted > 0


def test_metrics_are_sums_over_choices() -> None:
    known = run(engine(deterministic=True), {"r": (P, replace(HOT, n=3))})
    target, log = engine(SHAPES["mix-chain"], oracle=oracle_of(known), deterministic=True), Log()
    output = run(target, {"r": (P, replace(HOT, n=3))}, log=log)["r"]
    metrics = output.metrics
    assert (metrics.drafted, metrics.accepted, metrics.generated) == (log.drafted, log.accepted, log.committed)
    assert metrics.generated == sum(len(c.token_ids) for c in output.outputs)
