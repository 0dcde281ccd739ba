"""Targets with experts: speculation never changes the output, whatever the drafter, chain or tree, chunks, or pool."""

from __future__ import annotations

import pytest

from specdec.config import SamplingParams
from tests.harness import GREEDY, SHAPES, Log, P, R, assert_same, engine, oracle_of, run
from tests.spec.heads import chain, random_head, tree

REQUESTS = {
    "greedy": (R, GREEDY),
    "sampled": (P, SamplingParams(temperature=0.8, seed=3, max_tokens=30, ignore_eos=True, logprobs=2)),
    "penalties": (R[:9], SamplingParams(temperature=0.7, seed=5, frequency_penalty=0.6, repetition_penalty=1.2, max_tokens=30)),
    "two": (R[:21], SamplingParams(n=2, temperature=1, seed=6, max_tokens=20, ignore_eos=True)),
}
KINDS = ["qwen3_moe", "gpt_oss"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", ["mix-tree", "ngram-chain"])
@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 21}], ids=["", "chunks"])
def test_output_is_that_of_off(kind: str, shape: str, options: dict) -> None:
    expected = {name: run(engine(kind=kind, deterministic=True), {name: request})[name] for name, request in REQUESTS.items()}
    assert len(set(expected["greedy"].outputs[0].token_ids)) > 8, "a constant continuation would prove little"
    target, log = engine(SHAPES[shape], kind=kind, oracle=oracle_of(expected), deterministic=True, **options), Log()
    found = run(target, REQUESTS, log=log)
    for name in REQUESTS:
        assert_same(found[name], expected[name], tolerance=0)
    assert log.drafted > log.accepted > 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [chain, tree])
def test_draft_heads_on_experts(kind: str, shape: object) -> None:
    """EAGLE-3 reads the taps of such a target like those of any other."""
    expected = {name: run(engine(kind=kind, deterministic=True), {name: request})[name] for name, request in REQUESTS.items()}
    target, log = engine(shape("eagle3", head=random_head("eagle3", kind)), kind=kind, deterministic=True), Log()  # type: ignore[operator]
    found = run(target, REQUESTS, log=log)
    for name in REQUESTS:
        assert_same(found[name], expected[name], tolerance=0)
    assert log.drafted > 50
