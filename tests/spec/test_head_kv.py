"""What a draft head keeps per sequence: nothing it does not need, nothing that is wrong, no silent hole."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from specdec.config import SamplingParams, SpecConfig
from specdec.engine import Engine
from specdec.types import Batch
from tests.harness import GREEDY, Log, P, R, assert_same, engine, run
from tests.spec.heads import chain, random_head, tree
from tests.spec.test_eagle3 import drafts

METHODS = ("eagle3", "peagle")


def rerun_rows(target: Engine) -> list[int]:
    """Positions that run without writing K and V, filled while the engine works."""
    seen: list[int] = []
    forward = target.runner.forward

    def watched(batch: Batch) -> Any:
        seen.extend(batch.positions[batch.slot_mapping[0] < 0].tolist())
        return forward(batch)

    target.runner.forward = watched  # type: ignore[method-assign]
    return seen


@pytest.mark.parametrize("kind", ["t0", "two_groups"])
@pytest.mark.parametrize("method", METHODS)
def test_a_prefix_hit_runs_one_row_again_and_drafts_the_same(method: str, kind: str) -> None:
    head = random_head(method, kind, taps=(0, 2))
    target = engine(chain(method, head=head), kind=kind, deterministic=True)
    seen = rerun_rows(target)
    first, second = (run(target, {"r": (R + P, GREEDY)}, trace=True)["r"] for _ in range(2))
    assert second.metrics.cached_tokens == 52 and first.metrics.cached_tokens == 0
    assert seen == [51]
    assert drafts(first)[1:] == drafts(second)[1:]  # the admitting step of a hit samples without a draft
    assert_same(second, first, tolerance=0)


@pytest.mark.parametrize("method", METHODS)
def test_a_conversation_goes_on_with_its_draft_kv(method: str) -> None:
    """The second turn finds prompt and output of the first, whose last pairs were run when it finished."""
    target = engine(chain(method), deterministic=True)
    first = run(target, {"r": (R, GREEDY)})["r"]
    longer = [*R, *first.outputs[0].token_ids, *P]
    found = run(target, {"r": (longer, GREEDY)}, trace=True)["r"]
    assert found.metrics.cached_tokens == 76
    alone = run(engine(chain(method), deterministic=True), {"r": (longer, GREEDY)}, trace=True)["r"]
    assert drafts(found) == drafts(alone)


@pytest.mark.parametrize("method", METHODS)
def test_blocks_filled_without_a_head_hide_their_keys(method: str) -> None:
    """After a request that did not use the head, its blocks hold no draft KV: the next one drafts from what it has."""
    target = engine(chain(method), deterministic=True)
    run(target, {"off": (R + P, replace(GREEDY, speculation="off"))})
    runner = target.proposers[method]._runner
    target.add_request("on", R + P, GREEDY)
    target.step()
    (progress,) = runner._progress.values()
    assert (progress.first, progress.seen, progress.pending) == (52, 56, 1)
    (seq,) = runner._progress
    runner._pair_seconds = 1e-3
    assert runner.owes(seq) == 0.0  # the pair of the newest token is part of any draft
    progress.pending += 9
    assert runner.owes(seq) == pytest.approx(9e-3)
    progress.pending -= 9
    target.close()
    assert not runner._progress


@pytest.mark.parametrize("method", METHODS)
def test_a_sequence_that_does_not_use_the_head_keeps_nothing(method: str) -> None:
    target = engine(chain(method), deterministic=True)
    seen = rerun_rows(target)
    for _ in range(2):
        target.add_request("off", R + P, replace(GREEDY, speculation="off"))
        while target.has_work():
            target.step()
            assert not target.proposers[method]._runner._progress
    assert seen == []


def test_resting_costs_a_view_and_waking_drafts_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy that lets the head rest for many steps: on waking it drafts what it would have drafted anyway."""
    plain = run(engine(chain("eagle3"), deterministic=True), {"r": (R, GREEDY)}, trace=True)["r"]
    target = engine(chain("eagle3"), deterministic=True)
    budget, asked = target.policy.budget, [0]

    def lazy(*args: Any) -> Any:
        asked[0] += 1
        return budget(*args) if asked[0] % 10 == 0 else {}

    monkeypatch.setattr(target.policy, "budget", lazy)
    passes: list[int] = []
    forward = target.proposers["eagle3"].head.forward

    def counted(batch: Batch, *rest: Any) -> Any:
        passes.append(asked[0])
        return forward(batch, *rest)

    monkeypatch.setattr(target.proposers["eagle3"].head, "forward", counted)
    found = run(target, {"r": (R, GREEDY)}, trace=True)["r"]
    assert_same(found, plain, tolerance=0)
    known = {held: tokens for held, tokens, _ in drafts(plain)}
    woken = drafts(found)
    assert len(woken) >= 3
    for held, tokens, _ in woken:
        assert held not in known or known[held] == tokens
    assert set(passes) <= {1, 10, 20, 30, 40}  # prefill, and the steps that drafted; the end completes no block here


def test_a_long_rest_moves_the_first_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond what is kept the oldest features go, and draft rows look at nothing before the rest."""
    monkeypatch.setattr("specdec.spec.head_progress.MAX_PENDING", 8)
    expected = run(engine(deterministic=True), {"r": (R, GREEDY)})["r"]
    target = engine(tree("eagle3"), deterministic=True)
    budget, asked = target.policy.budget, [0]

    def lazy(*args: Any) -> Any:
        asked[0] += 1
        return budget(*args) if asked[0] > 20 else {}

    monkeypatch.setattr(target.policy, "budget", lazy)
    target.add_request("r", R, GREEDY)
    for _ in range(20):
        target.step()
    runner = target.proposers["eagle3"]._runner
    (progress,) = runner._progress.values()
    (seq,) = target.scheduler.running
    assert (progress.pending, sum(len(t) for t in progress.taps)) == (8, 8)
    assert progress.first == progress.seen == seq.num_computed - 7
    log = Log()
    target.step()
    assert progress.first == progress.seen - 8
    target.close()
    assert_same(run(target, {"again": (R, GREEDY)}, log=log)["again"], replace(expected, request_id="again"), tolerance=0)


def test_wide_beams_need_slots_and_get_narrower_without() -> None:
    """63 fed nodes on a pool that is nearly full: the tree shrinks, nothing is written past the reserved slots."""
    shape = SpecConfig(method="eagle3", head=random_head(), nodes=20, depth=7, width=12, policy="fixed")
    requests = {f"r{i}": (R[i:], replace(GREEDY, max_tokens=40)) for i in range(4)}
    expected = {name: run(engine(deterministic=True), {name: request})[name] for name, request in requests.items()}
    for blocks in (26, 40, 80, 200):
        target = engine(shape, deterministic=True, num_kv_blocks=blocks, max_model_len=96, enable_prefix_caching=False)
        for name, output in run(target, requests).items():
            assert_same(output, expected[name], tolerance=0)


def test_an_untrusted_head_is_disabled_and_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("specdec.models.head_load._distrust", lambda *_: "another target")
    target, log = engine(chain("eagle3"), deterministic=True), Log()
    assert "another target" in caplog.text and target.runner.taps == ()
    run(target, {"r": (R, GREEDY)}, log=log)
    assert log.drafted == 0 and log.skipped == {"disabled": 30, "limit": 1}


def test_requests_of_different_width_and_depth_share_a_beam() -> None:
    requests = {
        f"r{i}": (
            R[i:],
            SamplingParams(temperature=i % 2, seed=i, max_tokens=24, ignore_eos=True, speculation={"width": w, "depth": d, "nodes": n}),
        )
        for i, (w, d, n) in enumerate([(4, 6, 20), (1, 6, 7), (2, 2, 4), (4, 1, 5), (3, 5, 9)])
    }
    shape = SpecConfig(method="eagle3", head=random_head(), nodes=24, depth=6, width=4, policy="fixed")
    expected = {name: run(engine(deterministic=True), {name: request})[name] for name, request in requests.items()}
    together = run(engine(shape, deterministic=True), requests, trace=True)
    for name in requests:
        assert_same(together[name], expected[name], tolerance=0)
        own, limits = drafts(together[name]), requests[name][1].speculation
        width, nodes = limits["width"], limits["nodes"]
        assert own and all(len(tokens) <= nodes and max(parents.count(p) for p in parents) <= width for _, tokens, parents in own)
        alone = run(engine(shape, deterministic=True), {name: requests[name]}, trace=True)[name]
        assert own[0] == drafts(alone)[0]  # later the scores differ, which all sequences teach
    assert torch.tensor([len(t) for _, t, _ in drafts(together["r0"])]).max() == 20
