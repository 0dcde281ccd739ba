"""The default model in its default dtype (packed blocks, float32 activations) against transformers on the same values."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import pytest
import torch

from specdec.models.hub import DEFAULT_MODEL
from specdec.models.load import LoadedModel, UnpackedWeights, find_checkpoint, load_model
from tests.oracle import GAP, assert_parity, oracle_logits, prompts, run_greedy, run_logits

pytestmark = pytest.mark.model


@cache
def loaded() -> LoadedModel:
    return load_model(DEFAULT_MODEL, progress=False)


@pytest.fixture(scope="module")
def reference() -> Iterator[torch.nn.Module]:
    """transformers' Llama with the dequantised blocks, built in memory."""
    from transformers import LlamaConfig, LlamaForCausalLM

    checkpoint = find_checkpoint(DEFAULT_MODEL)
    weights = UnpackedWeights(checkpoint.weights())
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**checkpoint.config.to_hf(), attn_implementation="eager"))
        shapes = {name: tuple(t.shape) for name, t in model.state_dict().items() if name != "lm_head.weight"}
    model = LlamaForCausalLM(LlamaConfig(**checkpoint.config.to_hf(), attn_implementation="eager"))
    result = model.load_state_dict({name: weights.get(name, shape) for name, shape in shapes.items()}, strict=False)
    assert result.missing_keys in ([], ["lm_head.weight"]) and not result.unexpected_keys
    model.tie_weights()
    yield model.eval()
    loaded.cache_clear()


def chat_ids(prompt: str) -> list[int]:
    return loaded().tokenizer.apply_chat_template([{"role": "user", "content": prompt}])


@pytest.mark.parametrize("index", [0, 6, 10, 14])
def test_logits_match(reference: torch.nn.Module, index: int) -> None:
    ids = chat_ids(prompts()[index])
    assert_parity(run_logits(loaded().model, ids, chunks=[1, 16]), oracle_logits(reference, ids))


@pytest.mark.slow
@pytest.mark.parametrize("index", range(20))
def test_64_greedy_tokens_match(reference: torch.nn.Module, index: int) -> None:
    """Every token is the oracle's argmax given the same history; a choice within GAP is nobody's error."""
    ids = chat_ids(prompts()[index])
    output = run_greedy(loaded().model, ids, 64)
    rows = oracle_logits(reference, ids + output)[len(ids) - 1 : -1]
    best = rows.topk(2, dim=-1)
    clear = best.values[:, 0] - best.values[:, 1] > GAP
    assert clear.sum() >= 60
    assert torch.equal(torch.tensor(output)[clear], best.indices[:, 0][clear])
