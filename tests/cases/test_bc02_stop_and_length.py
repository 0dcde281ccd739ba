"""BC-02: a stop inside the accepted run, in the same step that also crosses max_tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.config import SpecConfig
from specdec.types import RequestOutput
from tests.harness import GREEDY, P, assert_same, chain, engine, oracle_of, run, tree

SHAPES = {"K=6": chain("oracle", 6), "TREE": tree("oracle"), "ngram": chain("ngram", 6, ngram_min=1)}
PLAIN = "plain"


def off(**changes: object) -> RequestOutput:
    return run(engine(), {"r": (P, replace(GREEDY, **changes))})["r"]


def on(shape: SpecConfig, known: RequestOutput, **changes: object) -> RequestOutput:
    """The oracle knows the unstopped continuation, so the stop lands inside an accepted draft."""
    target = engine(shape, oracle=oracle_of({"r": known}))
    return run(target, {"r": (P, replace(GREEDY, **changes))})["r"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    ("index", "tokens", "reason", "produced"), [(2, 5, "stop", 3), (7, 5, "length", 5), (4, 5, "stop", 5), (5, 5, "length", 5)]
)
def test_bc02_stop_before_length(shape: str, index: int, tokens: int, reason: str, produced: int) -> None:
    plain = off()
    ids = plain.outputs[0].token_ids
    assert ids.index(ids[index]) == index, "the case needs a token that is new at this index"
    changes = {"stop_token_ids": [ids[index]], "max_tokens": tokens}
    found = on(SHAPES[shape], plain, **changes)
    assert_same(found, off(**changes))
    choice = found.outputs[0]
    assert (choice.finish_reason, len(choice.token_ids), found.metrics.generated) == (reason, produced, produced)
    assert choice.token_ids == ids[:produced]
    assert choice.stop_reason == (ids[index] if reason == "stop" else None)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("tokens", range(1, 16))
def test_bc02_every_length(shape: str, tokens: int) -> None:
    """The class of fault: whatever the limit, a step never commits past it."""
    plain = off()
    found = on(SHAPES[shape], plain, max_tokens=tokens)
    assert found.outputs[0].token_ids == plain.outputs[0].token_ids[:tokens]
    assert found.outputs[0].finish_reason == "length"
    assert found.metrics.accepted <= found.metrics.drafted and found.metrics.generated == tokens


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("index", [0, 1, 3, 6, 7, 12])
def test_bc02_every_stop(shape: str, index: int) -> None:
    """Whatever the index, nothing after the stop token is committed, counted or shown."""
    plain = off()
    stop = plain.outputs[0].token_ids[index]
    first = plain.outputs[0].token_ids.index(stop)
    found = on(SHAPES[shape], plain, stop_token_ids=[stop])
    assert_same(found, off(stop_token_ids=[stop]))
    assert found.outputs[0].token_ids == plain.outputs[0].token_ids[: first + 1]
    assert (found.outputs[0].finish_reason, found.outputs[0].stop_reason) == ("stop", stop)


@pytest.mark.parametrize("shape", SHAPES)
def test_bc02_the_models_own_end_token(shape: str) -> None:
    """The same with the model's EOS, which ends without a stop reason and is not shown."""
    plain = off()
    ids = plain.outputs[0].token_ids
    bias = {"logit_bias": {2: 100.0}, "min_tokens": 4, "max_tokens": 9, "ignore_eos": False}
    expected = off(**bias)
    assert expected.outputs[0].token_ids == [*ids[:4], 2]
    assert (expected.outputs[0].finish_reason, expected.outputs[0].stop_reason) == ("stop", None)
    assert_same(on(SHAPES[shape], expected, **bias), expected)
    assert_same(on(SHAPES[shape], plain, **bias), expected)
