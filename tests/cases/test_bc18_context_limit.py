"""BC-18: prompts next to the context limit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specdec.config import SpecConfig
from specdec.errors import RequestTooLong
from tests.harness import GREEDY, SHAPES, Log, assert_same, chain, checkpoint, engine, oracle_of, run, tree
from tests.spec import heads
from tests.spec.heads import random_head

LIMIT = 64
WIDE = {
    "K=4": chain("oracle"),
    "TREE": tree("oracle"),
    "long chain": chain("oracle", 63),
    "wrong": tree("wrong"),
    "ngram": SHAPES["ngram-tree"],
    "E3 chain": heads.chain("eagle3", 8),
    "E3 TREE": heads.tree("eagle3", nodes=40, depth=6, width=9),
    "PE TREE": heads.tree("peagle", nodes=20, depth=8, width=3),
}


def prompt(length: int) -> list[int]:
    return [i % 500 for i in range(length)]


@pytest.mark.parametrize("shape", WIDE)
@pytest.mark.parametrize("kind", ["t0", "two_groups"])
def test_bc18_up_to_the_last_position(shape: str, kind: str) -> None:
    if kind == "two_groups" and WIDE[shape].head is not None:
        head = random_head(WIDE[shape].method, kind, taps=(0, 2))
        shapes = {shape: replace(WIDE[shape], head=head)}
    else:
        shapes = WIDE
    for length in range(56, LIMIT):
        requests = {"r": (prompt(length), GREEDY)}
        expected = run(engine(kind=kind, max_model_len=LIMIT), requests)
        assert len(expected["r"].outputs[0].token_ids) == min(32, LIMIT - length)
        target = engine(shapes[shape], kind=kind, max_model_len=LIMIT, oracle=oracle_of(expected))
        _assert_positions(target)
        found = run(target, requests)["r"]
        assert_same(found, expected["r"])
        assert (found.outputs[0].finish_reason, found.metrics.generated) == ("length", LIMIT - length)


@pytest.mark.parametrize("length", [LIMIT, LIMIT + 1, 3 * LIMIT])
def test_bc18_too_long(length: int) -> None:
    """Refused with a code that clients know; the engine serves the next request."""
    target = engine(chain("oracle"), max_model_len=LIMIT, oracle=lambda seq: ())
    with pytest.raises(RequestTooLong) as caught:
        target.add_request("r", prompt(length), GREEDY)
    assert (caught.value.status, caught.value.code, caught.value.param) == (400, "context_length_exceeded", "prompt")
    assert not target.has_work()
    assert len(run(target, {"r": (prompt(LIMIT - 1), GREEDY)})["r"].outputs[0].token_ids) == 1


@pytest.mark.parametrize("shape", WIDE)
def test_bc18_the_models_own_limit(shape: str) -> None:
    """The limit of the checkpoint (256 positions), reached from a short prompt without max_tokens."""
    requests = {"r": (prompt(8), replace(GREEDY, max_tokens=None))}
    expected = run(engine(max_model_len=None, deterministic=True), requests)
    assert len(expected["r"].outputs[0].token_ids) == 248
    target = engine(WIDE[shape], max_model_len=None, oracle=oracle_of(expected), deterministic=True)
    _assert_positions(target, 256)
    assert_same(run(target, requests)["r"], expected["r"])


@pytest.mark.parametrize(
    "shape",
    [
        chain("draft_model", model=checkpoint("short_draft")),
        tree("draft_model", model=checkpoint("short_draft")),
        heads.chain("eagle3", head=random_head("eagle3", max_positions=32)),
        heads.tree("eagle3", head=random_head("eagle3", max_positions=32)),
        heads.tree("peagle", head=random_head("peagle", max_positions=32)),
    ],
    ids=["K=4", "TREE", "E3 K=4", "E3 TREE", "PE TREE"],
)
def test_bc18_beyond_the_drafters_own_limit(shape: SpecConfig) -> None:
    """A drafter with 32 positions: drafts up to there, skips past it and says so, output as OFF."""
    for length, drafts in ((8, True), (20, True), (32, False), (33, False), (50, False)):
        requests = {"r": (prompt(length), GREEDY)}
        expected = run(engine(max_model_len=LIMIT, deterministic=True), requests)
        target, log = engine(shape, max_model_len=LIMIT, deterministic=True), Log()
        _assert_positions(target)
        found = run(target, requests, log=log)["r"]
        assert_same(found, expected["r"])
        assert log.skipped.get("draft_len", 0) > 0
        assert (found.metrics.drafted > 0) == drafts


def test_bc18_limits_reached_side_by_side() -> None:
    """Eight requests arrive at the limit in different steps of one batch."""
    requests = {f"r{n}": (prompt(n), GREEDY) for n in range(56, LIMIT)}
    expected = run(engine(max_model_len=LIMIT), requests)
    target, log = engine(tree("mix"), max_model_len=LIMIT, oracle=oracle_of(expected)), Log()
    _assert_positions(target)
    for name, found in run(target, requests, log=log).items():
        assert_same(found, expected[name])


def _assert_positions(target: Any, limit: int = LIMIT) -> None:
    """No row at or beyond the limit ever reaches the model."""
    forward = target.runner.forward

    def checked(batch: Any) -> Any:
        assert int(batch.positions.min()) >= 0 and int(batch.positions.max()) < limit
        assert int(batch.input_ids.min()) >= 0 and int(batch.input_ids.max()) < target.vocab_size
        return forward(batch)

    target.runner.forward = checked
