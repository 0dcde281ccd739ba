"""Traces, step statistics, request metrics and the per-request switch tell one consistent story."""

from __future__ import annotations

import re
import sys
from dataclasses import replace
from typing import Any

import pytest

from specdec.config import SamplingParams
from specdec.errors import ConfigError
from specdec.metrics import Emission, Metrics
from specdec.spec.tree import check_tree
from tests.harness import GREEDY, SHAPES, VOCAB, Log, P, R, assert_same, engine, oracle_of, run

PARAMS = SamplingParams(temperature=0.8, seed=4, max_tokens=22, ignore_eos=True)


def requests() -> dict[str, tuple[list[int], SamplingParams]]:
    return {
        "a": (R, replace(PARAMS, allowed_token_ids=P)),  # so few that n-grams come again
        "b": (P, replace(PARAMS, n=2)),
        "c": (R[3:], replace(GREEDY, max_tokens=9)),
        "d": ([7], replace(PARAMS, max_tokens=1)),
    }


def known() -> dict[str, Any]:
    return run(engine(deterministic=True), requests())


@pytest.mark.parametrize("shape", SHAPES)
def test_trace_tells_the_output(shape: str) -> None:
    """Committed tokens of the steps make up the output; accepted paths lead from the root and carry those tokens."""
    target = engine(SHAPES[shape], oracle=oracle_of(known()), deterministic=True)
    for output in run(target, requests(), trace=True).values():
        for choice in output.outputs:
            steps = [s for s in output.trace.steps if s.choice == choice.index]
            assert [t for s in steps for t in s.committed] == choice.token_ids
            position = len(output.prompt_token_ids) - 1
            for s in steps:
                assert s.position == position and s.parents[0] == -1
                assert len(s.committed) in (len(s.path), len(s.path) + 1)
                parent = 0
                for node, token in zip(s.path, s.committed, strict=False):
                    assert (s.parents[node], s.tokens[node]) == (parent, token)
                    parent = node
                position += len(s.committed)
        assert output.metrics.drafted == sum(len(s.tokens) - 1 for s in output.trace.steps)
        assert output.metrics.accepted == sum(len(s.path) for s in output.trace.steps)
        assert output.metrics.steps == len(output.trace.steps)


def test_trace_as_table_and_pictures() -> None:
    target = engine(SHAPES["mix-tree"], oracle=oracle_of(known()), deterministic=True)
    output = run(target, requests(), trace=True)["a"]
    frame = output.trace.frame()
    assert len(frame) == len(output.trace.steps) and frame["nodes"].max() == 10
    assert list(frame["accepted"]) == [len(s.path) for s in output.trace.steps]
    assert (frame["step_seconds"] >= frame["forward_seconds"]).all() and (frame["forward_seconds"] > 0).all()
    svg = output.trace._repr_svg_()
    assert svg.startswith("<svg") and svg.endswith("</svg>") and svg.count("<circle") == 10
    assert str(output.trace).count("\n") >= 9


def test_trace_times_are_those_of_the_steps() -> None:
    """Every record carries the times of its own step, whichever requests and choices shared it."""
    target, seen = engine(SHAPES["mix-tree"], oracle=oracle_of(known()), deterministic=True), {}
    target.observers.append(lambda stats: seen.update({stats.step: stats}))
    names = ("draft_seconds", "forward_seconds", "verify_seconds", "step_seconds")
    for output in run(target, requests(), trace=True).values():
        for s in output.trace.steps:
            assert [getattr(s, name) for name in names] == [getattr(seen[s.step], name) for name in names]
            assert s.step_seconds > 0
    assert len({s.step_seconds for s in seen.values()}) > 1


def test_data_frame_without_pandas(monkeypatch: pytest.MonkeyPatch) -> None:
    output = run(engine(), {"r": (P, GREEDY)}, trace=True)["r"]
    monkeypatch.setitem(sys.modules, "pandas", None)  # as if it were not installed
    with pytest.raises(ConfigError, match="pip install pandas"):
        output.trace.frame()
    assert str(output.trace).startswith("step ")


def test_no_trace_unless_asked() -> None:
    assert run(engine(), {"r": (P, GREEDY)})["r"].trace is None


@pytest.mark.parametrize("shape", SHAPES)
def test_statistics_add_up(shape: str) -> None:
    """Sums over steps equal sums over requests; rows are what the model saw; accepted positions are unconditional."""
    target, log = engine(SHAPES[shape], oracle=oracle_of(known()), deterministic=True), Log()
    seen: list[Any] = []
    rows: list[int] = []
    forward = target.runner.forward

    def counted(batch: Any) -> Any:
        rows.append(batch.input_ids.numel())
        return forward(batch)

    target.runner.forward = counted  # type: ignore[method-assign]
    target.observers.append(seen.append)
    found = run(target, requests(), log=log)
    assert [s.num_rows for s in seen] == rows
    assert [s.step for s in seen] == list(range(len(seen)))
    total = {name: sum(getattr(o.metrics, name) for o in found.values()) for name in ("drafted", "accepted", "generated")}
    assert (total["drafted"], total["accepted"], total["generated"]) == (log.drafted, log.accepted, log.committed)
    assert log.drafted > 0
    by_position = [sum(s.accepted_position.get(name, [])) for s in seen for name in s.accepted]
    assert sum(by_position) == log.accepted
    for s in seen:
        for positions in s.accepted_position.values():
            assert positions == sorted(positions, reverse=True)
        assert s.step_seconds >= s.forward_seconds > 0 and s.num_sampling <= s.num_seqs


@pytest.mark.parametrize("shape", ["oracle-chain", "ngram-tree", "suffix-tree", "draft-chain"])
def test_switched_off_per_request(shape: str) -> None:
    """{"method": "off"} drafts nothing for that request, and only for that one."""
    outputs = known()
    target, log = engine(SHAPES[shape], oracle=oracle_of(outputs), deterministic=True), Log()
    asked = {name: (p, replace(s, speculation={"method": "off"}) if name in ("b", "c") else s) for name, (p, s) in requests().items()}
    found = run(target, asked, log=log, trace=True)
    for name, output in found.items():
        assert_same(output, outputs[name], tolerance=0)
        if name in ("b", "c"):
            assert (output.metrics.drafted, output.metrics.accepted) == (0, 0)
            assert output.metrics.steps == output.metrics.generated
            assert all(len(s.tokens) == 1 and s.drafter is None for s in output.trace.steps)
    assert found["a"].metrics.drafted == log.drafted > 0
    assert log.skipped.get("limit", 0) > 0


@pytest.mark.parametrize(
    ("override", "nodes", "depth"),
    [({"nodes": 3}, 3, 3), ({"depth": 1}, 4, 1), ({"width": 1}, 4, 3), ({"nodes": 64, "depth": 64}, 10, 3), ({"nodes": 1}, 1, 0)],
)
def test_narrowed_per_request(override: dict[str, int], nodes: int, depth: int) -> None:
    """A request can narrow the tree and never widen it."""
    outputs = known()
    target = engine(SHAPES["oracle-tree"], oracle=oracle_of(outputs), deterministic=True)
    found = run(target, {"a": (R, replace(requests()["a"][1], speculation=override))}, trace=True)["a"]
    assert_same(found, outputs["a"], tolerance=0)
    assert max(len(s.tokens) for s in found.trace.steps) == nodes
    assert max(len(s.path) for s in found.trace.steps) <= depth


@pytest.mark.parametrize("shape", SHAPES)
def test_every_tree_keeps_the_contract(shape: str) -> None:
    """What drafters hand over are trees: parents first, siblings distinct, ids in the vocabulary, within the budget."""
    target = engine(SHAPES[shape], oracle=oracle_of(known()), deterministic=True)
    launch, trees = target.launcher.launch, []

    def checked(plan: Any, tree: Any, *rest: Any) -> Any:
        check_tree(tree, vocab_size=VOCAB)
        shares = [s for s in plan.scheduled if s.samples]
        for share, count, depth in zip(shares, tree.num_nodes.tolist(), tree.depth.tolist(), strict=True):
            assert count <= share.budget.nodes and max(depth[:count]) <= share.budget.depth
            assert max(depth[:count]) <= max(0, share.seq.remaining - 1)
        trees.append(tree)
        return launch(plan, tree, *rest)

    target.launcher.launch = checked  # type: ignore[method-assign]
    run(target, requests())
    assert any(int(tree.num_nodes.max()) > 1 for tree in trees)


def test_times_are_in_order() -> None:
    for output in run(engine(), requests()).values():
        m = output.metrics
        assert m.first_scheduled is not None and m.first_token is not None and m.finished is not None
        assert m.arrival <= m.first_scheduled <= m.first_token <= m.finished
        assert m.queue_wait is not None and m.ttft is not None and 0 <= m.queue_wait <= m.ttft


def test_exposed_metrics_are_the_sums() -> None:
    """What /metrics shows equals what the requests report."""
    target, log, metrics = engine(SHAPES["mix-chain"], oracle=oracle_of(known()), deterministic=True), Log(), Metrics()
    metrics.at_scrape.engine = target
    target.observers.append(metrics.observe_step)
    found = run(target, requests(), log=log)
    for deltas in log.deltas.values():
        emission = Emission()
        for delta in deltas:
            metrics.observe_output(delta, emission)
    shown = {m[1]: float(m[2]) for m in re.finditer(r"^(specdec_[^ ]+) ([^ ]+)$", metrics.render().decode(), re.MULTILINE)}
    drafter = '{drafter="mix"}'
    assert shown[f"specdec_spec_draft_tokens_total{drafter}"] == log.drafted == sum(o.metrics.drafted for o in found.values())
    assert shown[f"specdec_spec_accepted_tokens_total{drafter}"] == log.accepted
    assert sum(v for k, v in shown.items() if k.startswith("specdec_spec_accepted_position_total")) == log.accepted
    assert shown["specdec_generation_tokens_total"] == log.committed
    assert shown["specdec_prompt_tokens_total"] == sum(len(p) for p, _ in requests().values())
    assert shown['specdec_requests_total{outcome="length"}'] == len(found)
    assert (shown["specdec_requests_running"], shown["specdec_queue_depth"], shown["specdec_kv_usage_ratio"]) == (0, 0, 0)
    assert ":" not in "".join(k.split("{")[0] for k in shown)


@pytest.mark.parametrize("temperature", [1e-5, 1e-20, 1e-39, 1e-300])
def test_vanishing_temperatures_are_greedy(temperature: float) -> None:
    """No overflow, no arbitrary token: the limit of sampling is the argmax."""
    expected = run(engine(deterministic=True), {"r": (R, replace(GREEDY, temperature=0))})["r"]
    found = run(engine(deterministic=True), {"r": (R, replace(GREEDY, temperature=temperature, seed=1))})["r"]
    assert found.outputs[0].token_ids == expected.outputs[0].token_ids
