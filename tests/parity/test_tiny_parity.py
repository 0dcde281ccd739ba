"""Logits equal transformers' on random tiny checkpoints of every variant the Llama block has."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from specdec.models.load import load_model
from tests.oracle import assert_parity, oracle, oracle_logits, run_greedy, run_logits
from tests.tiny import GPT_OSS, QWEN3_MOE, write_tiny

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
VARIANTS: dict[str, dict[str, Any]] = {
    "gqa": {},
    "tied": {"tied": True},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "wide_heads": {"head_dim": 32},
    "head_dim_absent": {"head_dim": None},
    "odd_sizes": {
        "vocab_size": 419,
        "intermediate_size": 100,
        "hidden_size": 60,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "head_dim": 20,
    },
    "biases": {"attention_bias": True, "mlp_bias": True},
    "llama3_rope": {"rope_scaling": LLAMA3},
    "llama3_rope_new_key": {"rope_parameters": {**LLAMA3, "rope_theta": 5e5}},
    "linear_rope": {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
    "two_groups": {"two_groups": True},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "tied": True},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "tied": True},
    "qwen3_biases_and_wide_heads": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "attention_bias": True,
        "head_dim": 32,
        "rope_theta": 1e6,
    },
    "qwen3_window": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "use_sliding_window": True,
        "sliding_window": 20,
        "max_window_layers": 1,
    },
    "mistral_window": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": 20},
    "mistral_full": {"architectures": ["MistralForCausalLM"], "model_type": "mistral", "sliding_window": None},
    "yarn_rope": {"rope_scaling": {**GPT_OSS["rope_scaling"], "truncate": True}},
    "qwen3_moe": QWEN3_MOE,
    "qwen3_moe_sparse": {**QWEN3_MOE, "norm_topk_prob": False, "num_experts_per_tok": 3, "mlp_only_layers": []},
    "gpt_oss": GPT_OSS,
    "gpt_oss_one_expert_full": {**GPT_OSS, "num_experts_per_tok": 1, "layer_types": ["full_attention"] * 2},
}
IDS = [(7 * i * i + 13 * i + 5) % 400 for i in range(90)]  # longer than every window


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_match(tmp_path: Path, variant: str) -> None:
    directory = write_tiny(tmp_path, seed=3, **VARIANTS[variant])
    loaded = load_model(directory)
    expected = oracle_logits(oracle(directory), IDS)
    assert_parity(run_logits(loaded.model, IDS), expected)
    assert_parity(run_logits(loaded.model, IDS, chunks=[1, 40, 1, 1, 17]), expected)


@pytest.mark.parametrize("variant", ["gqa", "two_groups", "biases", "qwen3_moe", "gpt_oss"])
def test_deterministic_mode_matches_too(tmp_path: Path, variant: str) -> None:
    directory = write_tiny(tmp_path, seed=3, **VARIANTS[variant])
    loaded = load_model(directory, deterministic=True)
    assert_parity(run_logits(loaded.model, IDS), oracle_logits(oracle(directory), IDS))


@pytest.mark.parametrize("variant", ["gqa", "tied", "two_groups", "qwen3", "qwen3_moe", "gpt_oss"])
def test_deterministic_bits_do_not_depend_on_chunks(tmp_path: Path, variant: str) -> None:
    model = load_model(write_tiny(tmp_path, seed=3, **VARIANTS[variant]), deterministic=True).model
    whole = run_logits(model, IDS)
    assert torch.equal(whole, run_logits(model, IDS, chunks=[1] * 20 + [33, 2]))


@pytest.mark.parametrize("variant", ["gqa", "two_groups", "qwen3_moe", "gpt_oss"])
def test_greedy_tokens_match(tmp_path: Path, variant: str) -> None:
    directory = write_tiny(tmp_path, seed=3, **VARIANTS[variant])
    found = run_greedy(load_model(directory).model, IDS[:20], 64)
    assert len(set(found)) > 8, "a constant continuation would prove little"
    expected = oracle(directory).generate(torch.tensor([IDS[:20]]), max_new_tokens=64, do_sample=False, eos_token_id=None, use_cache=True)
    assert found == expected[0, 20:].tolist()


@pytest.mark.parametrize("variant", ["gqa", "qwen3_moe", "gpt_oss"])
def test_taps_are_the_residual_stream(tmp_path: Path, variant: str) -> None:
    """Tap j equals transformers' hidden_states[j]; the last one is taken before the final norm."""
    from tests.oracle import PlainKV

    directory = write_tiny(tmp_path, seed=3, **VARIANTS[variant] | {"num_hidden_layers": 3, "layer_types": None})
    model = load_model(directory).model
    with torch.inference_mode():
        kv = PlainKV(model.config, len(IDS))
        hidden, taps = model.forward(kv.batch(IDS), kv, taps=(2, 0, 3))
        reference = oracle(directory)(torch.tensor([IDS]), output_hidden_states=True).hidden_states
    assert taps is not None and taps.shape == (len(IDS), 3 * 64)
    two, zero, last = taps.split(64, dim=-1)
    torch.testing.assert_close(two, reference[2][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(zero, reference[0][0])
    torch.testing.assert_close(model.norm(last.contiguous()), reference[3][0], atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(hidden, reference[3][0], atol=1e-4, rtol=1e-4)
