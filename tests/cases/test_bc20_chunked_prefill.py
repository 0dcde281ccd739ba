"""BC-20 without heads: what is drafted depends on the sequence alone, not on how its prompt was chunked or recomputed.

The draft model is the sharpest: it has KV of its own, and a position it missed would change what it says.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec.config import SamplingParams, SpecConfig
from specdec.types import RequestOutput
from tests.harness import P, R, assert_same, chain, checkpoint, engine, run, tree

PROMPT = R + P
PARAMS = SamplingParams(
    temperature=0, max_tokens=24, ignore_eos=True, allowed_token_ids=[5, 17, 42, 99, 3, 250]
)  # so that n-grams come again
SHAPES = {
    "ngram chain": chain("ngram", 4, ngram_min=1),
    "ngram TREE": tree("ngram", ngram_min=1),
    "suffix chain": chain("suffix", 4),
    "suffix TREE": tree("suffix"),
    "draft model chain": chain("draft_model", 4, model=checkpoint("draft")),
    "draft model TREE": tree("draft_model", model=checkpoint("draft")),
}
CHAINS = [name for name in SHAPES if "chain" in name]


def drafts(output: RequestOutput) -> dict[int, tuple[list[int], list[int]]]:
    """Position of the root -> drafted tokens and parents, from the trace."""
    return {step.position: (step.tokens, step.parents) for step in output.trace.steps}


def serve(shape: SpecConfig, **options: int) -> RequestOutput:
    return run(engine(shape, deterministic=True, **options), {"r": (PROMPT, PARAMS)}, trace=True)["r"]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", [1, 3, 7, 16])
def test_bc20_every_chunk_size_drafts_the_same(shape: str, rows: int) -> None:
    """Chunk sizes against the whole prompt at once. Where the rows do not allow the whole draft it is a prefix of it."""
    whole, found = serve(SHAPES[shape], max_num_batched_tokens=256), serve(SHAPES[shape], max_num_batched_tokens=rows)
    assert whole.metrics.drafted > 10
    assert_same(found, whole)
    if rows > SHAPES[shape].nodes:
        assert drafts(found) == drafts(whole)
        assert (found.metrics.drafted, found.metrics.accepted) == (whole.metrics.drafted, whole.metrics.accepted)
    elif "chain" in shape:
        by_position = reference(SHAPES[shape])
        for position, (tokens, _) in drafts(found).items():
            assert tokens == by_position[position][: len(tokens)]


def reference(shape: SpecConfig) -> dict[int, list[int]]:
    """Position of the root -> full draft there. Each from a request of its own, whose prompt ends at that position and is
    chunked so that its last token is a step of its own, which drafts."""
    ids = [*PROMPT, *serve(shape, max_num_batched_tokens=256).outputs[0].token_ids]
    result: dict[int, list[int]] = {}
    for length in range(len(PROMPT), len(ids)):
        target = engine(shape, deterministic=True, max_num_batched_tokens=length - 1)
        target.add_request("r", ids[:length], replace(PARAMS, max_tokens=len(ids) - length), trace=True)
        outputs = [delta for _ in range(2) for delta in target.step()]
        (step,) = outputs[-1].trace.steps
        result[step.position] = step.tokens
        target.close()
    return result


@pytest.mark.parametrize("shape", CHAINS)
@pytest.mark.parametrize("caching", [False, True])
def test_bc20_preempted_and_recomputed_in_chunks_of_three(shape: str, caching: bool) -> None:
    """Preempted after some output and re-prefilled in small chunks, so that a border falls inside its own output."""
    by_position = reference(SHAPES[shape])
    older = SamplingParams(temperature=1, seed=1, max_tokens=60, ignore_eos=True, speculation={"method": "off"})
    target = engine(
        SHAPES[shape], deterministic=True, num_kv_blocks=26, max_model_len=84, max_num_batched_tokens=3, enable_prefix_caching=caching
    )
    found = run(target, {"old": (P, older), "r": (PROMPT, PARAMS)}, trace=True)["r"]
    assert found.metrics.preemptions > 0
    plain = run(engine(deterministic=True), {"r": (PROMPT, PARAMS)})["r"]
    assert_same(found, plain)
    steps = [step for step in found.trace.steps if len(step.tokens) > 1]
    assert steps, "it must draft after it came back"
    for step in steps:
        assert step.tokens == by_position[step.position][: len(step.tokens)]


@pytest.mark.parametrize("shape", [name for name in CHAINS if "suffix" not in name])  # suffix remembers the first run, on purpose
def test_bc20_a_prefix_hit_drafts_the_same(shape: str) -> None:
    """The second run finds its prompt in the prefix cache and drafts what the first one drafted."""
    target = engine(SHAPES[shape], deterministic=True)
    first, second = (run(target, {"r": (PROMPT, PARAMS)}, trace=True)["r"] for _ in range(2))
    assert second.metrics.cached_tokens > 40 and first.metrics.cached_tokens == 0
    by_position = reference(SHAPES[shape])
    for output in (first, second):
        for position, (tokens, _) in drafts(output).items():
            if len(tokens) > 1:
                assert tokens == by_position[position][: len(tokens)]
