"""With a draft head, output is that of speculation off: every kind of request at once, in chunks and from a small pool."""

from __future__ import annotations

import pytest

from specdec.config import SamplingParams
from tests.harness import GREEDY, Log, P, R, assert_same, engine, run
from tests.spec.heads import chain, tree

REQUESTS = {
    "greedy": (R, GREEDY),
    "sampled": (P, SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True)),
    "truncated": (R[:9], SamplingParams(temperature=0.9, seed=4, top_p=0.8, top_k=40, min_p=0.01, max_tokens=30, ignore_eos=True)),
    "penalties": (P[:3], SamplingParams(temperature=0.7, seed=5, frequency_penalty=0.6, repetition_penalty=1.2, max_tokens=30)),
    "greedy penalties": (R[:30], SamplingParams(temperature=0, presence_penalty=1.0, max_tokens=30, ignore_eos=True)),
    "bias": (P, SamplingParams(temperature=0, logit_bias={7: 3.0, 250: -100.0}, min_tokens=4, max_tokens=20)),
    "allowed": (P, SamplingParams(temperature=1, seed=9, allowed_token_ids=list(range(40)), logprobs=2, max_tokens=20, ignore_eos=True)),
    "two": (R[:21], SamplingParams(n=2, temperature=1, seed=6, max_tokens=20, ignore_eos=True)),
}


@pytest.mark.parametrize("method", ["eagle3", "peagle"])
@pytest.mark.parametrize("shape", ["chain", "TREE"])
@pytest.mark.parametrize(
    "options", [{}, {"max_num_batched_tokens": 30}, {"num_kv_blocks": 40, "max_model_len": 96}], ids=["", "chunks", "pool"]
)
def test_output_is_that_of_off_for_everything_at_once(method: str, shape: str, options: dict) -> None:
    expected = {name: run(engine(deterministic=True), {name: request})[name] for name, request in REQUESTS.items()}
    speculation = chain(method) if shape == "chain" else tree(method, nodes=16, depth=5, width=4)
    target, log = engine(speculation, deterministic=True, **options), Log()
    for _ in range(2):  # the second time with prefix hits
        found = run(target, REQUESTS, log=log)
        for name in REQUESTS:
            assert_same(found[name], expected[name], tolerance=0)
        log.deltas.clear()
    assert log.drafted > 100
    assert (log.preempted > 0) == ("num_kv_blocks" in options)
