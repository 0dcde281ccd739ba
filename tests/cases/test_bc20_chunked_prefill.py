"""BC-20: what is drafted depends on the sequence alone, not on how its prompt was chunked or recomputed.

The draft heads are the sharpest: they have KV of their own from the target's hidden states, which cannot be had later, and a
position they missed would change what they say.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from torch import Tensor

from specdec.config import SamplingParams, SpecConfig
from specdec.layers.attention import KVStore
from specdec.types import Batch, RequestOutput
from tests.harness import P, R, assert_same, chain, checkpoint, engine, run, tree
from tests.spec import heads

PROMPT = R + P
PARAMS = SamplingParams(
    temperature=0, max_tokens=24, ignore_eos=True, allowed_token_ids=[5, 17, 42, 99, 3, 250]
)  # so that n-grams come again
E3 = heads.random_head("eagle3", draft_vocab_size=512)
PE = heads.random_head("peagle", draft_vocab_size=512, mask_token_id=511)  # an id that no text here contains
SHAPES = {
    "ngram chain": chain("ngram", 4, ngram_min=1),
    "ngram TREE": tree("ngram", ngram_min=1),
    "suffix chain": chain("suffix", 4),
    "suffix TREE": tree("suffix"),
    "draft model chain": chain("draft_model", 4, model=checkpoint("draft")),
    "draft model TREE": tree("draft_model", model=checkpoint("draft")),
    "E3 chain": heads.chain("eagle3", head=E3),
    "E3 TREE": heads.tree("eagle3", head=E3),
    "two-layer E3 chain": heads.chain("eagle3", head=heads.random_head("eagle3", num_layers=2, draft_vocab_size=512)),
    "PE chain": heads.chain("peagle", head=PE),
    "PE TREE": heads.tree("peagle", head=PE),
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
    """Preempted after some output and re-prefilled in small chunks, so that a border falls inside its own output.

    The older request shares no prefix with it: blocks that a request without a head filled hold no draft KV.
    """
    by_position = reference(SHAPES[shape])
    older = SamplingParams(temperature=1, seed=1, max_tokens=60, ignore_eos=True, speculation={"method": "off"})
    target = engine(
        SHAPES[shape], deterministic=True, num_kv_blocks=26, max_model_len=84, max_num_batched_tokens=3, enable_prefix_caching=caching
    )
    found = run(target, {"old": ([7, *P[1:]], older), "r": (PROMPT, PARAMS)}, trace=True)["r"]
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


@pytest.mark.parametrize("method", ["eagle3", "peagle"])
@pytest.mark.parametrize("rows", [1, 3, 7, 16, 256])
def test_bc20_the_head_is_fed_real_tokens(method: str, rows: int) -> None:
    """The pairs the head runs are (position - 1, the sequence's own token at position), each position once, whatever the chunks."""
    target = engine(SHAPES["E3 chain" if method == "eagle3" else "PE chain"], deterministic=True, max_num_batched_tokens=rows)
    runner, fed = target.proposers[method]._runner, {}
    head, forward = runner.head, runner.head.forward

    def watched(batch: Batch, features: Tensor, kv: KVStore) -> tuple[Tensor, Tensor]:
        if int(batch.tree_len.max()) == 0:  # not a beam of drafts
            for position, token in zip(batch.positions.tolist(), batch.input_ids.tolist(), strict=True):
                if token != head.config.mask_token_id:
                    assert position not in fed
                    fed[position] = token
        return forward(batch, features, kv)

    head.forward = watched
    output = run(target, {"r": (PROMPT, PARAMS)})["r"]
    tokens = [*PROMPT, *output.outputs[0].token_ids]
    assert fed == dict(list(enumerate(tokens))[1 : len(fed) + 1]) and len(fed) >= len(PROMPT) - 1
