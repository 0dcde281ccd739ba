"""Tiny random checkpoints in Hugging Face layout: T0 of the case collection, and variants of it.

T0: Llama block, 2 layers, hidden 64, 4 query and 2 KV heads, vocabulary 512, 256 positions, float32. Weights are drawn
large enough that greedy output varies. `two_groups=True` gives a full and a sliding-window layer (window 24); it is
written as a Qwen2 checkpoint, the one published architecture with that layout and otherwise the same block. `QWEN3_MOE` and `GPT_OSS`
are overrides that make T0 a mixture of experts of those two kinds.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

EOS, BOS = 2, 1
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN3_MOE: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_hidden_layers": 3,
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 48,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [1],  # one dense layer
}
GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_hidden_layers": 2,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "intermediate_size": 96,
    "attention_bias": True,
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 24,
    "swiglu_limit": 1.5,  # so that it cuts
    "rope_theta": 150000.0,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 8.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 32,
    },
}
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def tiny_config(*, two_groups: bool = False, tied: bool = False, **overrides: Any) -> dict[str, Any]:
    """The config.json of T0 as a dict; `overrides` replace or add keys."""
    config: dict[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 512,
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "torch_dtype": "float32",
    }
    if two_groups:
        config |= {
            "architectures": ["Qwen2ForCausalLM"],
            "model_type": "qwen2",
            "layer_types": ["full_attention", "sliding_attention"],
            "use_sliding_window": True,
            "sliding_window": 24,
        }
    return config | overrides


def tiny_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Every tensor of a Llama-family checkpoint with this config, with its shape, in a fixed order."""
    h, vocab = config["hidden_size"], config["vocab_size"]
    hd = config.get("head_dim") or h // config["num_attention_heads"]
    nq, nkv = config["num_attention_heads"] * hd, config["num_key_value_heads"] * hd
    qwen2, qwen3 = config["model_type"] == "qwen2", config["model_type"] in ("qwen3", "qwen3_moe")
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, h)}
    for i in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{i}."
        linears = {"q_proj": (nq, h), "k_proj": (nkv, h), "v_proj": (nkv, h), "o_proj": (h, nq)}
        for name, shape in linears.items():
            shapes[f"{prefix}self_attn.{name}.weight"] = shape
            if (config.get("attention_bias") or qwen2) and not (qwen2 and name == "o_proj"):
                shapes[f"{prefix}self_attn.{name}.bias"] = shape[:1]
        shapes |= _mlp_shapes(config, f"{prefix}mlp.", i)
        if qwen3:
            shapes |= {f"{prefix}self_attn.{name}_norm.weight": (hd,) for name in "qk"}
        if config["model_type"] == "gpt_oss":
            shapes[f"{prefix}self_attn.sinks"] = (config["num_attention_heads"],)
        shapes[f"{prefix}input_layernorm.weight"] = (h,)
        shapes[f"{prefix}post_attention_layernorm.weight"] = (h,)
    shapes["model.norm.weight"] = (h,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, h)
    return shapes


def _mlp_shapes(config: dict[str, Any], prefix: str, layer: int) -> dict[str, tuple[int, ...]]:
    h, inner = config["hidden_size"], config["intermediate_size"]
    if config["model_type"] == "gpt_oss":
        e = config["num_local_experts"]
        router = {"router.weight": (e, h), "router.bias": (e,)}
        gate_up = {"experts.gate_up_proj": (e, h, 2 * inner), "experts.gate_up_proj_bias": (e, 2 * inner)}
        down = {"experts.down_proj": (e, inner, h), "experts.down_proj_bias": (e, h)}
        return {prefix + name: shape for name, shape in (router | gate_up | down).items()}
    if config["model_type"] == "qwen3_moe" and layer not in config["mlp_only_layers"]:
        inner, e = config["moe_intermediate_size"], config["num_experts"]
        shapes: dict[str, tuple[int, ...]] = {f"{prefix}gate.weight": (e, h)}
        for i in range(e):
            for name, shape in {"gate_proj": (inner, h), "up_proj": (inner, h), "down_proj": (h, inner)}.items():
                shapes[f"{prefix}experts.{i}.{name}.weight"] = shape
        return shapes
    shapes = {}
    for name, shape in {"gate_proj": (inner, h), "up_proj": (inner, h), "down_proj": (h, inner)}.items():
        shapes[f"{prefix}{name}.weight"] = shape
        if config.get("mlp_bias"):
            shapes[f"{prefix}{name}.bias"] = shape[:1]
    return shapes


def tiny_weights(config: dict[str, Any], *, seed: int = 0, scale: float = 1.5) -> dict[str, torch.Tensor]:
    """Random float32 tensors by checkpoint name. Linears keep the variance of their input times `scale`²."""
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in tiny_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            weights[name] = 1.0 + 0.1 * noise
        elif name.endswith("bias"):
            weights[name] = 0.2 * noise
        elif name in ("model.embed_tokens.weight", "lm_head.weight"):
            weights[name] = 3.0 * noise / config["hidden_size"] ** 0.5  # logits of standard deviation 3
        elif name.endswith("sinks"):
            weights[name] = noise
        else:
            weights[name] = scale * noise / shape[1] ** 0.5
    return weights


def _byte_alphabet() -> list[str]:
    """The 256 printable stand-ins of byte-level BPE, by byte value."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    chars = {b: chr(b) for b in printable}
    for b in range(256):
        chars.setdefault(b, chr(0x100 + len(chars) - len(printable)))
    return [chars[b] for b in range(256)]


def tiny_tokenizer(vocab_size: int = 512) -> dict[str, Any]:
    """A byte-level BPE tokenizer.json: 3 special tokens, 256 bytes, then letter pairs, cut at `vocab_size`."""
    vowels, consonants = "aeiou", "bcdfghjklmnpqrstvwxyz"[:20]
    pairs = [("Ġ", c) for c in "abcdefghijklmnopqrstuvwxyz"]
    pairs += [(c, v) for c in consonants for v in vowels] + [(v, c) for c in consonants for v in vowels]
    pairs += [("Ġt", "he"), ("in", "g"), ("an", "d"), ("e", "r"), ("e", "d"), ("Ġ", "Ġ"), ("t", "h"), ("s", "t"), ("n", "t")]
    pairs += [("0", d) for d in "0123456789"] + [("1", d) for d in "0123456789"]
    vocab: dict[str, int] = {}
    for token in [*SPECIALS, *_byte_alphabet(), *(a + b for a, b in pairs)]:
        vocab.setdefault(token, len(vocab))
    vocab = {token: i for token, i in vocab.items() if i < vocab_size}
    merges = [[a, b] for a, b in dict.fromkeys(pairs) if a in vocab and b in vocab and a + b in vocab]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": i, "content": s, **flags} for i, s in enumerate(SPECIALS)],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "vocab": vocab,
            "merges": merges,
        },
    }


def write_tiny(
    directory: Path | str,
    *,
    seed: int = 0,
    two_groups: bool = False,
    tied: bool = False,
    scale: float = 1.5,
    **overrides: Any,
) -> Path:
    """Write a tiny checkpoint (config, generation config, weights, tokenizer with chat template); return its directory."""
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    config = tiny_config(two_groups=two_groups, tied=tied, **overrides)
    save_file(tiny_weights(config, seed=seed, scale=scale), path / "model.safetensors", metadata={"format": "pt"})
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<|im_start|>",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    files = {
        "config.json": config,
        "generation_config.json": {"eos_token_id": config["eos_token_id"], "bos_token_id": config["bos_token_id"]},
        "tokenizer.json": tiny_tokenizer(config["vocab_size"]),
        "tokenizer_config.json": tokenizer_config,
    }
    for name, content in files.items():
        (path / name).write_text(json.dumps(content), encoding="utf-8")
    return path
