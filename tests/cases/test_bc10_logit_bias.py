"""BC-10: logit_bias acts at draft positions."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.harness import GREEDY, Log, P, R, assert_same, chain, engine, oracle_of, run, tree

SHAPES = {"chain": chain("oracle"), "TREE": tree("oracle"), "mix": tree("mix"), "ngram": tree("ngram", ngram_min=1)}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bc10_banned_tokens_never_appear(shape: str, temperature: float) -> None:
    """ORACLE is built without the bias, so it drafts exactly the banned tokens."""
    params = replace(GREEDY, max_tokens=16, temperature=temperature, seed=5)
    plain = run(engine(), {"r": (P, params)})["r"]
    banned = plain.outputs[0].token_ids[1:3]
    biased = replace(params, logit_bias=dict.fromkeys(banned, -100.0))
    expected = run(engine(), {"r": (P, biased)})["r"]
    log = Log()
    found = run(engine(SHAPES[shape], oracle=oracle_of({"r": plain})), {"r": (P, biased)}, log=log)["r"]
    assert_same(found, expected)
    assert not set(banned) & set(found.outputs[0].token_ids)
    if shape != "ngram":
        assert log.accepted < log.drafted, "the draft was wrong and must have been rejected"


@pytest.mark.parametrize("shape", SHAPES)
def test_bc10_forced_token(shape: str) -> None:
    """A bias of +100 makes the target repeat one token; a drafter that does not know is corrected every time."""
    plain = run(engine(), {"r": (R, GREEDY)})["r"]
    forced = replace(GREEDY, logit_bias={123: 100.0})
    found = run(engine(SHAPES[shape], oracle=oracle_of({"r": plain})), {"r": (R, forced)})["r"]
    assert found.outputs[0].token_ids == [123] * 32
