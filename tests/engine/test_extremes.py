"""Parameters at the ends of their ranges, together: every score stays a number, and speculation changes nothing."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from specdec.config import SamplingParams
from tests.harness import P, R, chain, checkpoint, engine, run, tree, visible

SAMPLED = SamplingParams(temperature=0.9, max_tokens=12, ignore_eos=True, seed=7, n=2, logprobs=5, logprobs_mode="processed")
DRAFTERS = {"ngram": tree("ngram", ngram_min=1), "draft": chain("draft_model", model=checkpoint("draft"))}
EVERY_TOKEN = range(512)
EXTREMES: dict[str, dict[str, Any]] = {
    "least penalty": {"repetition_penalty": 0.01, "frequency_penalty": -2.0, "presence_penalty": -2.0},
    "least penalty, coldest": {"repetition_penalty": 0.01, "temperature": 1e-6, "top_p": 0.5, "typical_p": 0.5},
    "greatest penalty": {"repetition_penalty": 100.0, "frequency_penalty": 2.0, "presence_penalty": 2.0, "typical_p": 0.3},
    "hottest": {"temperature": 100.0, "top_p": 0.5, "min_p": 1e-9},
    "narrowest": {"top_p": 1e-30, "typical_p": 1e-30, "min_p": 1.0, "top_k": 1},
    "every token biased": {"logit_bias": dict.fromkeys(EVERY_TOKEN, 100.0)},
    "every token banned": {"logit_bias": dict.fromkeys(EVERY_TOKEN, -100.0), "bad_words": [chr(c) for c in range(33, 127)]},
    "only the end, too early": {"allowed_token_ids": [3], "stop_token_ids": [3], "min_tokens": 5},
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
