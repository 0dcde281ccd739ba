"""ModelConfig: what is read, what is refused and by which name."""

from __future__ import annotations

from copy import deepcopy  # transformers writes into the dicts it is given
from dataclasses import replace

import pytest
import torch

from specdec.errors import UnsupportedCheckpoint
from specdec.layers.rotary import Rotary, inverse_frequencies
from specdec.models.config import ModelConfig, RopeConfig
from specdec.models.moe_config import MoEConfig
from specdec.types import KVGroup
from tests.tiny import GPT_OSS, QWEN3_MOE, tiny_config

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def test_one_full_group() -> None:
    config = ModelConfig.from_hf(tiny_config())
    assert config.kv_groups() == (KVGroup("full", 2, 2, 16, None),)
    assert config.layer_group == (0, 0) and config.layer_in_group == (0, 1)


def test_groups_put_full_attention_first() -> None:
    types = ["sliding_attention", "full_attention", "sliding_attention"]
    config = ModelConfig.from_hf(tiny_config(two_groups=True, num_hidden_layers=3, layer_types=types))
    assert config.kv_groups() == (KVGroup("full", 1, 2, 16, None), KVGroup("sliding24", 2, 2, 16, 24))
    assert config.layer_group == (1, 0, 1) and config.layer_in_group == (0, 0, 1)


def test_windows_follow_each_family() -> None:
    qwen2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "sliding_window": 8}
    mistral = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    assert ModelConfig.from_hf(tiny_config(**qwen2)).windows == (None, None), "use_sliding_window is off"
    on = {**qwen2, "use_sliding_window": True}
    assert ModelConfig.from_hf(tiny_config(**on, max_window_layers=1)).windows == (None, 8)
    assert ModelConfig.from_hf(tiny_config(**mistral, sliding_window=8)).windows == (8, 8)
    assert ModelConfig.from_hf(tiny_config(**mistral, sliding_window=None)).windows == (None, None)
    assert ModelConfig.from_hf(tiny_config(**mistral)).windows == (4096, 4096), "the family's default"
    assert ModelConfig.from_hf(tiny_config(sliding_window=8)).windows == (None, None), "Llama has no such key"


def test_qwen3() -> None:
    """Norms of heads; a head size and a window of its own where the config names none."""
    qwen3 = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "mlp_bias": True}
    config = ModelConfig.from_hf(tiny_config(**qwen3, head_dim=None, sliding_window=8))
    assert config.qk_norm and config.head_dim == 128 and config.windows == (None, None) and not config.mlp_bias
    assert ModelConfig.from_hf(config.to_hf()) == config
    assert not ModelConfig.from_hf(tiny_config()).qk_norm


def test_end_tokens_are_a_union() -> None:
    config = ModelConfig.from_hf(tiny_config(eos_token_id=7), {"eos_token_id": [2, 7, 9]})
    assert config.eos_ids == (2, 7, 9)
    assert ModelConfig.from_hf(tiny_config(eos_token_id=None)).eos_ids == ()


@pytest.mark.parametrize(
    "rope",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": None, "rope_parameters": {"rope_theta": 5e5, **LLAMA3}},
        {"rope_theta": 5e5, "rope_scaling": {**LLAMA3, "type": "llama3", "rope_type": None}},
    ],
)
def test_both_rope_spellings(rope: dict) -> None:
    assert ModelConfig.from_hf(tiny_config(**rope)).rope == RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 8192)


YARN = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096}


@pytest.mark.parametrize(
    "scaling",
    [None, {"rope_type": "linear", "factor": 3.0}, LLAMA3, YARN, {**YARN, "truncate": False}, {**YARN, "beta_fast": 8.0, "beta_slow": 2.0}],
)
def test_frequencies_equal_transformers(scaling: dict | None) -> None:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    plain = tiny_config(head_dim=64, rope_theta=5e5, rope_scaling=scaling, max_position_embeddings=131072)
    found = inverse_frequencies(ModelConfig.from_hf(plain).rope, 64)
    if scaling is None:
        expected = 1.0 / 5e5 ** (torch.arange(0, 64, 2).float() / 64)
    else:
        expected, attention = ROPE_INIT_FUNCTIONS[scaling["rope_type"]](LlamaConfig(**deepcopy(plain)), torch.device("cpu"))
        assert ModelConfig.from_hf(plain).rope.attention_factor == attention
    torch.testing.assert_close(found, expected, rtol=3e-7 if scaling and "yarn" in scaling.values() else 0.0, atol=0.0)


def test_yarn_of_gpt_oss() -> None:
    """The bounds 8.093 and 17.398 of reference §7.4: frequencies below keep their value, those above are divided by 32."""
    scaling = {**YARN, "truncate": False, "beta_fast": 32.0, "beta_slow": 1.0}
    rope = ModelConfig.from_hf(tiny_config(rope_theta=150000.0, rope_scaling=scaling)).rope
    ratio = inverse_frequencies(rope, 64) * 150000.0 ** (torch.arange(32) / 32)
    torch.testing.assert_close(ratio[:9], torch.ones(9))
    torch.testing.assert_close(ratio[18:], torch.full((14,), 1 / 32))
    middle = 1 - (torch.arange(9, 18) - 8.093) / (17.398 - 8.093)
    torch.testing.assert_close(ratio[9:18], middle + (1 - middle) / 32, atol=1e-4, rtol=0.0)
    assert abs(rope.attention_factor - 1.34657) < 1e-5
    table = Rotary(rope, 64, 3, device=torch.device("cpu"))
    torch.testing.assert_close(table.cos.square() + table.sin.square(), torch.full((3, 32), rope.attention_factor**2))


def test_experts_of_both_families() -> None:
    qwen = ModelConfig.from_hf(tiny_config(**QWEN3_MOE))
    assert qwen.moe == MoEConfig(6, 2, 48, (True, False, True)) and qwen.qk_norm and not qwen.sinks and qwen.windows == (None,) * 3
    sparse = ModelConfig.from_hf(tiny_config(**QWEN3_MOE | {"decoder_sparse_step": 2, "norm_topk_prob": None, "mlp_only_layers": None}))
    assert sparse.moe == MoEConfig(6, 2, 48, (False, True, False), renormalise=False)
    oss = ModelConfig.from_hf(tiny_config(**GPT_OSS))
    assert oss.moe == MoEConfig(5, 2, 96, (True, True), limit=1.5, alpha=1.702, bias=True)
    assert oss.sinks and oss.qkv_bias and oss.o_bias and oss.windows == (24, None)
    plain = {k: v for k, v in GPT_OSS.items() if k not in ("layer_types", "sliding_window", "swiglu_limit", "attention_bias")}
    default = ModelConfig.from_hf({k: v for k, v in tiny_config(**plain).items() if k != "attention_bias"})
    assert default.windows == (128, None) and default.moe == replace(oss.moe, limit=7.0) and default.o_bias


@pytest.mark.parametrize(
    "options",
    [{}, {"two_groups": True}, {"rope_scaling": LLAMA3, "tied": True}, {"attention_bias": True, "mlp_bias": True}, QWEN3_MOE, GPT_OSS],
)
def test_to_hf_round_trips(options: dict) -> None:
    config = ModelConfig.from_hf(tiny_config(**options))
    assert ModelConfig.from_hf(config.to_hf()) == config


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["GPTNeoXForCausalLM"]}, r"GPTNeoXForCausalLM is not supported; supported: LlamaForCausalLM, Mistral"),
        ({"architectures": None, "model_type": "rwkv"}, "rwkv"),
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers"),
        ({"hidden_size": "64"}, "hidden_size"),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"vocab_size": True}, "vocab_size"),
        ({"num_key_value_heads": 3}, "num_key_value_heads"),
        ({"num_key_value_heads": 8}, "num_key_value_heads"),
        ({"head_dim": 15}, "head_dim"),
        ({"rms_norm_eps": -1.0}, "rms_norm_eps"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_theta": 0}, "rope_theta"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "longrope"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, "original_max_position_embeddings is missing"),
        ({"rope_scaling": {**YARN, "mscale": 1.0}}, "mscale"),
        ({"rope_scaling": {**YARN, "beta_fast": 1.0}}, "beta_slow"),
        ({**QWEN3_MOE, "num_experts": 0}, "num_experts"),
        ({**QWEN3_MOE, "num_experts_per_tok": 7}, "num_experts_per_tok"),
        ({**QWEN3_MOE, "moe_intermediate_size": None}, "moe_intermediate_size is missing"),
        ({**QWEN3_MOE, "shared_expert_intermediate_size": 64}, "shared_expert"),
        ({**QWEN3_MOE, "mlp_only_layers": 1}, "mlp_only_layers"),
        ({**GPT_OSS, "num_local_experts": None}, "num_local_experts is missing"),
        ({**GPT_OSS, "swiglu_limit": -1}, "swiglu_limit"),
        ({"rope_scaling": "llama3"}, "rope_scaling"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor is missing"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 4.0}}, "low_freq_factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"hidden_act": "gelu"}, "hidden_act"),
        ({"eos_token_id": 512}, "eos_token_id"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"torch_dtype": "int8"}, "torch_dtype"),
        ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types"),
        ({"layer_types": ["full_attention"], "sliding_window": 8}, "layer_types"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_absurd_values_are_named(change: dict, named: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=named):
        ModelConfig.from_hf(tiny_config(**change))
