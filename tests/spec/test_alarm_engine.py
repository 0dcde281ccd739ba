"""A drafter that collapses in the middle of requests, in a real engine: outputs stay, it goes off, says so, and comes back."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from specdec.config import SamplingParams, SpecConfig
from specdec.engine import Engine
from specdec.metrics import Metrics
from specdec.spec.policy import SpecPolicy
from specdec.types import RequestOutput, StepStats
from tests.harness import P, R, assert_same, chain, engine, join, oracle_of, run, tree
from tests.spec.simulator import LineCost

Requests = dict[str, tuple[list[int], SamplingParams]]


def requests(count: int, first: int = 0) -> Requests:
    """Greedy and sampled ones, no prompt twice."""
    params = SamplingParams(max_tokens=60, ignore_eos=True)
    made = [replace(params, temperature=0.0 if i % 2 else 0.8, seed=i) for i in range(first, first + count)]
    return {f"r{p.seed}": ([7 + p.seed, *P], p) for p in made if p.seed is not None}


def auto(known: dict[str, RequestOutput], **options: Any) -> Engine:
    """ORACLE under the automatic policy, with costs that make drafting pay on any machine; its `share` is turned by the tests."""
    config = SpecConfig(method="oracle", nodes=5, depth=4, width=1)
    target = engine(replace(config, policy="fixed"), oracle=oracle_of(known), deterministic=True, **options)
    target.policy = policy = SpecPolicy(config, target.proposers, LineCost())
    drafted = policy.drafted
    policy.drafted = lambda name, seconds, tree: drafted(name, 1e-6, tree)  # type: ignore[method-assign]
    return target


def played(target: Engine, wanted: Requests, event: Callable[[int], None] = lambda step: None) -> dict[str, RequestOutput]:
    """All at once; `event` is told the number of the step before it runs."""
    deltas: dict[str, list[RequestOutput]] = {}
    for name, request in wanted.items():
        target.add_request(name, *request)
    step = 0
    while target.has_work():
        event(step)
        for delta in target.step():
            deltas.setdefault(delta.request_id, []).append(delta)
        step += 1
    return {name: join(parts) for name, parts in deltas.items()}


def test_good_bad_good(caplog: pytest.LogCaptureFixture) -> None:
    """Right, wrong from the middle of the second wave on, right again: off with a warning and metrics, on again, never another text."""
    caplog.set_level(logging.INFO, "specdec")
    waves = [requests(4, 4 * i) for i in range(12)]
    known = run(engine(deterministic=True), {name: r for wave in waves for name, r in wave.items()})
    target, seen, metrics = auto(known), list[StepStats](), Metrics()
    target.observers += [seen.append, metrics.observe_step]
    metrics.at_scrape.engine = target
    drafter, watch = target.proposers["oracle"], target.policy.experience.watch

    def turn(share: float, at: int) -> Callable[[int], None]:
        return lambda step: setattr(drafter, "share", share) if step == at else None

    def value(name: str, **labels: str) -> float | None:
        return metrics.registry.get_sample_value(f"specdec_{name}", {"drafter": "oracle", **labels})

    found = played(target, waves[0])
    assert not watch.off and (value("drafter_alarms_total"), value("drafter_collapsed")) == (0, 0)
    for wave in waves[1:4]:
        found |= played(target, wave, turn(0.0, 6))
    assert watch.off == {"oracle"} and (value("drafter_alarms_total"), value("drafter_collapsed")) == (1, 1)
    assert max(s.drafter_states["oracle"].get("collapsed", 0) for s in seen) == 4
    assert sum(s.skipped.get("collapsed", 0) for s in seen) > 100
    assert [r.levelno for r in caplog.records].count(logging.WARNING) == 1
    for wave in waves[4:]:
        found |= played(target, wave, turn(1.0, 6))
    assert not watch.off and (value("drafter_alarms_total"), value("drafter_collapsed")) == (1, 0)
    assert seen[-1].drafted.get("oracle", 0) > 0 or seen[-2].drafted.get("oracle", 0) > 0
    assert "works again" in caplog.text
    for name, output in found.items():
        assert_same(output, known[name], tolerance=0)


@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 20}, {"num_kv_blocks": 60, "max_model_len": 96}], ids=["", "chunks", "pool"]
)
@pytest.mark.parametrize("shape", ["auto", "chain", "tree"])
def test_a_collapse_changes_no_output(shape: str, options: dict[str, int]) -> None:
    wanted = requests(8) | {"long": (R, SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=40, logprobs=2, ignore_eos=True))}
    known = run(engine(deterministic=True), wanted)
    if shape == "auto":
        target = auto(known, **options)
    else:
        speculation = chain("oracle") if shape == "chain" else tree("oracle")
        target = engine(speculation, oracle=oracle_of(known), deterministic=True, **options)
    drafter = target.proposers["oracle"]
    for _ in range(2):  # the drafter is right, wrong and right again by turns of 7 steps
        found = played(target, wanted, lambda step: setattr(drafter, "share", float(step // 7 % 2 == 0)))
        for name in wanted:
            assert_same(found[name], known[name], tolerance=0)


def test_rejection_verification_is_watched_too() -> None:
    """At temperature 0 its text is that of off too."""
    wanted: Requests = {name: (prompt, replace(params, temperature=0.0)) for name, (prompt, params) in requests(8).items()}
    known = run(engine(deterministic=True), wanted)
    config = SpecConfig(method="oracle", nodes=5, depth=4, width=1, verify="rejection", policy="fixed")
    target = engine(config, oracle=oracle_of(known), deterministic=True)
    assert target.drafter_health.collapsed == {"oracle": False}
    for share in (1.0, 0.0):
        target.proposers["oracle"].share = share  # type: ignore[attr-defined]
        found = run(target, wanted)
        assert all(found[name].outputs[0].token_ids == known[name].outputs[0].token_ids for name in wanted)
    assert target.drafter_health.collapsed == {"oracle": True} and target.drafter_health.alarms == {"oracle": 1}
