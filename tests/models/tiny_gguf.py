"""A tiny GGUF file as llama.cpp's converter would write it, and the same model as a Hugging Face directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf.quants import dequantize, quantize
from safetensors.torch import save_file

from tests.tiny import CHAT_TEMPLATE, tiny_config, tiny_tokenizer, tiny_weights

TOP = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    if name in TOP:
        return TOP[name]
    _, _, layer, *middle, kind = name.split(".")
    return f"blk.{layer}.{LAYER['.'.join(middle)]}.{kind}"


def interleave(values: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k from half-split to the interleaved order llama.cpp stores."""
    return values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def write_tiny_gguf(
    path: Path, *, kind: str = "Q4_1", drop: str | None = None, meta: dict[str, Any] | None = None, pre: str = "smollm", **options: Any
) -> Path:
    """Write `path`, and beside it `<stem>-hf/` with the dequantised values; return the latter.

    kind: format of the layer matrices (the embedding is Q8_0). drop: GGUF tensor to leave out. meta: keys to override;
    None removes one. options: as of `tiny_config`.
    """
    arch = "qwen2" if options.get("model_type") == "qwen2" else "llama"
    config = tiny_config(tied=options.pop("tied", True), **options)
    writer = gguf.GGUFWriter(str(path), arch)
    for key, value in _metadata(arch, config, pre, meta or {}).items():
        _add(writer, key, value)
    exact = {}
    for name, tensor in tiny_weights(config, seed=5).items():
        values, target = tensor.numpy(), gguf_name(name)
        heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}.get(name.split(".")[-2], 0)
        values = interleave(values, heads) if heads and arch == "llama" else values
        as_kind = "F32" if values.ndim == 1 else "Q8_0" if name == "model.embed_tokens.weight" else kind
        packed = quantize(values, gguf.GGMLQuantizationType[as_kind])
        if target != drop:
            writer.add_tensor(target, packed, raw_dtype=gguf.GGMLQuantizationType[as_kind])
        plain = dequantize(packed, gguf.GGMLQuantizationType[as_kind]).astype(np.float32).reshape(tensor.shape)
        exact[name] = torch.from_numpy(plain if not heads or arch != "llama" else _half_split(plain, heads)).contiguous()
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    directory = path.parent / f"{path.stem}-hf"
    directory.mkdir(exist_ok=True)
    save_file(exact, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def _half_split(values: np.ndarray, heads: int) -> np.ndarray:
    return values.reshape(heads, values.shape[0] // heads // 2, 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def _metadata(arch: str, config: dict[str, Any], pre: str, changes: dict[str, Any]) -> dict[str, Any]:
    tokenizer = tiny_tokenizer(config["vocab_size"])
    tokens = list(tokenizer["model"]["vocab"])
    values: dict[str, Any] = {
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.context_length": config["max_position_embeddings"],
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": config["rope_theta"],
        f"{arch}.rope.dimension_count": config["head_dim"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if i < 3 else 1 for i in range(len(tokens))],
        "tokenizer.ggml.merges": [" ".join(m) for m in tokenizer["model"]["merges"]],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }
    return {k: v for k, v in (values | changes).items() if v is not None}


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)
