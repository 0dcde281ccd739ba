"""The real drafters inside the real engine: text never changes, draft KV follows prefix hits, forks and preemption."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.config import SamplingParams, SpecConfig
from tests.harness import GREEDY, Log, P, R, assert_same_or_tie, checkpoint, engine, run

WARM = SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=24, ignore_eos=True, repetition_penalty=1.1)
REQUESTS = {
    "greedy": (R, GREEDY),
    "sampled": (P, WARM),
    "two": (P, SamplingParams(temperature=1.0, seed=5, n=2, max_tokens=12, ignore_eos=True)),
}


def draft(kind: str = "draft", **fields: Any) -> SpecConfig:
    fields = {"nodes": 5, "depth": 4, "width": 1, "policy": "fixed"} | fields
    return SpecConfig(method="draft_model", model=checkpoint(kind), **fields)


SHAPES = {
    "draft-chain": draft(),
    "draft-tree": draft(nodes=9, width=3),
    "draft-auto": draft(policy="auto"),
    "auto": SpecConfig(),
    "ngram-auto": SpecConfig(method="ngram", ngram_min=1),
    "suffix-auto": SpecConfig(method="suffix", nodes=24, depth=20, width=3),
}


@pytest.fixture(scope="module")
def off():
    return run(engine("off"), REQUESTS)


@pytest.mark.parametrize("name", SHAPES)
def test_text_equals_off(name, off):
    outputs = run(engine(SHAPES[name]), REQUESTS)
    for request_id, request in REQUESTS.items():
        assert assert_same_or_tie(outputs[request_id], off[request_id], request) == 0


def test_the_target_as_its_own_draft_is_always_accepted():
    """Greedy and sampled, chain and penalties: with shared noise the same model makes the same choice."""
    log = Log()
    run(engine(draft("t0")), REQUESTS, log=log)
    assert log.drafted > 40 and log.accepted >= 0.97 * log.drafted


def test_second_turn_reuses_draft_kv_of_the_prefix():
    """A prefix hit brings draft KV along: catch-up runs the rest only, and drafts stay perfect."""
    target = engine(draft("t0"))
    first = run(target, {"a": (R, GREEDY)})["a"]
    runner = target.proposers["draft_model"]._runner
    widths = []
    original = runner.run
    runner.run = lambda rows, wanted: widths.append(sum(len(r.tokens) for r in rows)) or original(rows, wanted)
    log = Log()
    turn = [*R, *first.outputs[0].token_ids, 7, 8]
    second = run(target, {"b": (turn, GREEDY)}, log=log)["b"]
    assert second.metrics.cached_tokens > 0
    assert max(widths) < len(turn) // 2
    assert log.accepted >= 0.97 * log.drafted


@pytest.mark.parametrize("shape", ["draft-tree", "auto"])
def test_preemption_loses_draft_kv_and_nothing_else(shape):
    """A pool too small for everybody: sequences lose their blocks, return, and go on as if nothing had happened."""
    requests = {f"r{i}": ([*P, i], GREEDY) for i in range(6)}
    expected, log = run(engine("off"), requests), Log()
    outputs = run(engine(SHAPES[shape], num_kv_blocks=36, max_num_batched_tokens=64), requests, log=log)
    assert log.preempted > 0
    for request_id, request in requests.items():
        assert assert_same_or_tie(outputs[request_id], expected[request_id], request) == 0


@pytest.mark.parametrize("verify", ["rejection", "block"])
def test_drawn_drafts_run_under_classical_verification(verify):
    """The target as its own draft: p = q, so every drawn draft is accepted, whatever the coins."""
    log = Log()
    run(engine(draft("t0", verify=verify)), {"s": (P, WARM), "g": (R, GREEDY)}, log=log)
    assert log.drafted > 20 and log.accepted >= 0.97 * log.drafted


def test_requests_switch_and_narrow_at_run_time():
    target, log = engine(SpecConfig(method="auto", ngram_min=1)), Log()
    requests = {
        "off": (R, SamplingParams(temperature=0, max_tokens=16, speculation={"method": "off"})),
        "suffix": (R, SamplingParams(temperature=0, max_tokens=16, speculation={"method": "suffix", "nodes": 3})),
    }
    outputs = run(target, requests, log=log)
    assert outputs["off"].metrics.drafted == 0
    assert outputs["suffix"].metrics.drafted <= 2 * outputs["suffix"].metrics.steps
    assert outputs["off"].outputs[0].token_ids == outputs["suffix"].outputs[0].token_ids
    assert log.skipped["limit"] >= 15


def test_prediction_is_drafted_from_the_first_token():
    plain = run(engine("off"), {"a": (P, GREEDY)})["a"].outputs[0].token_ids
    guess = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True, prediction=plain)
    for method in ("ngram", "suffix"):
        log = Log()
        spec = SpecConfig(method=method, nodes=9, depth=8, width=1, policy="fixed")
        outputs = run(engine(spec), {"a": (P, guess)}, log=log)
        assert outputs["a"].outputs[0].token_ids == plain
        assert log.accepted >= 24
