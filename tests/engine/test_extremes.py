"""Parameters at the ends of their ranges, together: every score stays a number, and speculation changes nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from specdec.config import SamplingParams
from specdec.errors import InvalidRequest
from tests.harness import Log, P, R, chain, checkpoint, engine, oracle_of, run, tree, visible

SAMPLED = SamplingParams(temperature=0.9, max_tokens=12, ignore_eos=True, seed=7, n=2, logprobs=5, logprobs_mode="processed")
DRAFTERS = {"ngram": tree("ngram", ngram_min=1), "draft": chain("draft_model", model=checkpoint("draft"))}
EVERY_TOKEN = range(512)
XYZ = [123, 124, 125]  # their ids
NO_WAY_ON = ["xx", "yy", "zzz", "xz", "xyx", "zxy", "yzx", "zy"]  # leave few ways through x, y and z, and none of more than 6
WAYS = {"xyzzx", "yxyzzx", "yzzx", "zzx", "zx"}
EXTREMES: dict[str, dict[str, Any]] = {
    "least penalty": {"repetition_penalty": 0.01, "frequency_penalty": -2.0, "presence_penalty": -2.0},
    "least penalty, coldest": {"repetition_penalty": 0.01, "temperature": 1e-6, "top_p": 0.5, "typical_p": 0.5},
    "greatest penalty": {"repetition_penalty": 100.0, "frequency_penalty": 2.0, "presence_penalty": 2.0, "typical_p": 0.3},
    "hottest": {"temperature": 100.0, "top_p": 0.5, "min_p": 1e-9},
    "narrowest": {"top_p": 1e-30, "typical_p": 1e-30, "min_p": 1.0, "top_k": 1},
    "every token biased": {"logit_bias": dict.fromkeys(EVERY_TOKEN, 100.0)},
    "all but two banned": {"logit_bias": dict.fromkeys(range(2, 512), -100.0), "bad_words": [chr(c) for c in range(33, 127)]},
    "dead ends": {"allowed_token_ids": XYZ, "bad_words": NO_WAY_ON, "min_tokens": 12},
    "all at once": {"repetition_penalty": 0.01, "logit_bias": {3: 100.0}, "temperature": 1e-6, "allowed_token_ids": [3, 9], "top_p": 0.1},
}


@pytest.mark.parametrize("name", EXTREMES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_identity_and_finite_scores(name: str, drafter: str) -> None:
    requests = {"r": (R, replace(SAMPLED, **EXTREMES[name])), "beside": (P, SAMPLED)}
    off = run(engine(deterministic=True), requests)
    on = run(engine(DRAFTERS[drafter], deterministic=True), requests)
    for request in requests:
        assert visible(on[request]) == visible(off[request])
        for choice in on[request].outputs:
            assert all(not math.isnan(entry.logprob) for entry in choice.logprobs or ())


@pytest.mark.parametrize("drafter", [*DRAFTERS, "oracle"])
def test_an_output_without_a_way_on_ends(drafter: str) -> None:
    """Every choice, before its minimum; a drafter that knows what came before the end drafts beyond it in vain."""
    requests = {"r": (R, replace(SAMPLED, n=8, **EXTREMES["dead ends"]))}
    off = run(engine(), requests)
    oracle = oracle_of(off)
    target = engine(DRAFTERS.get(drafter, chain("oracle")), oracle=lambda seq: [*oracle(seq), *XYZ])
    on = run(target, requests)
    assert visible(on["r"]) == visible(off["r"])
    texts = {choice.text for choice in on["r"].outputs}
    assert len(texts) > 1 and texts <= WAYS
    for choice in on["r"].outputs:
        assert (choice.finish_reason, choice.stop_reason) == ("stop", "nothing_allowed")
        assert len(choice.logprobs or ()) == len(choice.token_ids) == len(choice.text)


@pytest.mark.parametrize("mode", ["rejection", "block"])
def test_drawn_drafts_may_run_into_dead_ends(mode: str) -> None:
    """The draft model knows the rules too: where they leave nothing, it has nothing to draw from."""
    requests = {str(seed): (R, replace(SAMPLED, seed=seed, n=4, **EXTREMES["dead ends"])) for seed in range(6)}
    log = Log()
    found = run(engine(chain("draft_model", model=checkpoint("draft"), verify=mode)), requests, log=log)
    ends = [(c.text, c.finish_reason, c.stop_reason) for output in found.values() for c in output.outputs]
    assert {text for text, _, _ in ends} <= WAYS and {end[1:] for end in ends} == {("stop", "nothing_allowed")}
    assert log.accepted > 0


EVERY_LETTER = [*map(chr, range(33, 127))]
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "bad words": ({"allowed_token_ids": XYZ, "bad_words": ["z", "x", "y"]}, "allowed_token_ids and bad_words"),
    "bias": ({"allowed_token_ids": XYZ, "logit_bias": dict.fromkeys(XYZ, -100)}, "allowed_token_ids and logit_bias"),
    "stop token": ({"allowed_token_ids": [3], "stop_token_ids": [3], "min_tokens": 5}, "allowed_token_ids and min_tokens"),
    "end token": ({"allowed_token_ids": [2], "ignore_eos": False, "min_tokens": 1}, "allowed_token_ids and min_tokens"),
    "each a part": (
        {"allowed_token_ids": [*XYZ, 123], "bad_words": ["x"], "logit_bias": {124: -100.0}, "stop_token_ids": [125, 126], "min_tokens": 2},
        "allowed_token_ids and bad_words and min_tokens and logit_bias",
    ),
    "no list": ({"logit_bias": dict.fromkeys(range(1, 512), -100.0), "stop_token_ids": [0], "min_tokens": 1}, "min_tokens and logit_bias"),
    "every token": ({"logit_bias": dict.fromkeys(EVERY_TOKEN, -100.0), "bad_words": EVERY_LETTER}, "bad_words and logit_bias"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_rules_that_leave_nothing_to_begin_with_are_refused(name: str) -> None:
    fields, named = REFUSED[name]
    target = engine()
    with pytest.raises(InvalidRequest, match=f"^{named} leave no token to begin with") as caught:
        target.add_request("r", P, replace(SAMPLED, **fields))
    assert caught.value.param == named.split()[0] and not target.has_work()


@pytest.mark.parametrize("name", ["bad words", "bias", "stop token", "end token"])
def test_the_same_rules_with_one_token_more_are_served(name: str) -> None:
    fields, _ = REFUSED[name]
    found = run(engine(), {"r": (P, replace(SAMPLED, n=1, **(fields | {"allowed_token_ids": [*fields["allowed_token_ids"], 40]})))})["r"]
    assert set(found.outputs[0].token_ids[:1]) == {40}


@pytest.mark.parametrize("seed", [-(2**63), -1, 0, 2**63 - 1, 2**63, 2**64 - 1])
def test_seeds_at_the_ends(seed: int) -> None:
    """Seeds are 64 bits: the negative ones are the upper half."""
    off, on = (
        run(engine(spec), {"r": (R, replace(SAMPLED, seed=s))})["r"] for spec, s in (("off", seed), (DRAFTERS["ngram"], seed % 2**64))
    )
    assert visible(on) == visible(off)


@pytest.mark.parametrize("length", [2, 3, 5])
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_contexts_of_a_few_tokens(length: int, block: int, drafter: str) -> None:
    options: dict[str, Any] = {"max_model_len": length, "block_size": block, "deterministic": True}
    requests = {str(n): (P[:n], replace(SAMPLED, max_tokens=None, n=3)) for n in range(1, length)}
    off, on = run(engine(**options), requests), run(engine(DRAFTERS[drafter], **options), requests)
    for name in requests:
        assert visible(on[name]) == visible(off[name])
        assert [len(c.token_ids) for c in on[name].outputs] == [length - int(name)] * 3
