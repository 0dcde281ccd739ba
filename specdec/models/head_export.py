"""Write a draft head in a published layout. Layouts: reference §1.2 ("eagle"), §1.3 ("specforge"), §1.4 ("speculators")."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from specdec.errors import ConfigError
from specdec.files import write_tensors
from specdec.models.head_config import HeadConfig
from specdec.models.head_dialect import FEEDBACK_KEY
from specdec.models.head_files import SIDE_FILE
from specdec.models.rope_config import rope_to_hf
from specdec.quant.quantize import quantize, unpack_q8

LAYOUTS = ("speculators", "specforge", "eagle")
STORAGES = ("float32", "bfloat16", "float16", "int8")
_DEFAULT_PROPOSAL = 5  # draft tokens a speculators file proposes when the head does not know


def export_head(
    directory: Path,
    config: HeadConfig,
    tensors: Mapping[str, Tensor],
    layout: str = "speculators",
    *,
    fingerprint: Mapping[str, Any] | None = None,
    provenance: Mapping[str, Any] | None = None,
    storage: str = "float32",
    verifier: str = "",
) -> Path:
    """Write config.json, weights and the side file into `directory` (made if absent); return it.

    tensors: by internal name. fingerprint: of the target (`head_fingerprint.measure`). storage: format of the matrices,
    "int8" = blocks of 32 columns with fp16 scales, which only specdec reads; vectors become float16 then. verifier: the
    target's name. Raises ConfigError for an unknown layout or storage, or an unwritable directory.
    """
    for name, value, known in (("layout", layout, LAYOUTS), ("storage", storage, STORAGES)):
        if value not in known:
            raise ConfigError(f"{name} must be one of {', '.join(known)}, got {value!r}", param=name)
    stored = {_outer_name(name, layout): t for name, t in _stored(tensors, storage).items()}
    described = _speculators(config, verifier) if layout == "speculators" else _flat(config, layout)
    side = {
        "fingerprint": fingerprint if fingerprint is not None else config.fingerprint,
        "provenance": dict(provenance if provenance is not None else config.provenance),
        "num_depths": config.num_depths,
        "noise_share": config.noise_share,
        "storage": storage,
    }
    dtype = "float16" if storage == "int8" else storage
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if layout == "eagle":
            torch.save(stored, directory / "pytorch_model.bin")
        else:
            write_tensors(directory / "model.safetensors", stored, {"format": "pt"})
        for file, content in (("config.json", {**described, "torch_dtype": dtype}), (SIDE_FILE, side)):
            (directory / file).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    except (OSError, SafetensorError) as err:
        raise ConfigError(f"{directory} cannot be written: {err}", param="directory") from err
    return directory


def _stored(tensors: Mapping[str, Tensor], storage: str) -> dict[str, Tensor]:
    """The tensors as they go to the file: maps as they are, matrices in `storage`."""
    written: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        value = tensor.detach().cpu()
        if not value.is_floating_point():
            written[name] = value.contiguous()
        elif storage == "int8" and value.dim() == 2:
            written[name], written[f"{name}_scale"] = unpack_q8(quantize(value, "Q8_0"))
        else:
            written[name] = value.to(torch.float16 if storage == "int8" else getattr(torch, storage)).contiguous()
    return written


def _outer_name(name: str, layout: str) -> str:
    return name if layout == "speculators" else name.replace("layers.0.", "midlayer.", 1)


def _layer_config(c: HeadConfig) -> dict[str, Any]:
    """The draft layers as a plain Hugging Face config."""
    scaling = {key: value for key, value in rope_to_hf(c.rope).items() if key != "rope_theta"}
    layer: dict[str, Any] = {
        "model_type": "qwen3" if c.qk_norm else "llama",
        "hidden_size": c.hidden_size,
        "intermediate_size": c.intermediate_size,
        "num_hidden_layers": c.num_layers,
        "num_attention_heads": c.num_heads,
        "num_key_value_heads": c.num_kv_heads,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": c.eps,
        "rope_theta": c.rope.theta,
        "rope_scaling": None if c.rope.kind == "default" else scaling,
        "vocab_size": c.vocab_size,
        "attention_bias": c.qkv_bias,
        "mlp_bias": c.mlp_bias,
        "tie_word_embeddings": False,
    }
    if c.max_positions:
        layer["max_position_embeddings"] = c.max_positions
    windows = {window for window in c.windows if window is not None}
    if len(windows) > 1:
        raise ConfigError(f"windows {sorted(windows)}: the layouts can express one window size only", param="windows")
    if windows:
        layer |= {"sliding_window": windows.pop(), "use_sliding_window": True}
        layer["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in c.windows]
    return layer


def _common(c: HeadConfig) -> dict[str, Any]:
    """Keys of all layouts. A null `target_hidden_size` would not be the same as none to every reader."""
    keys = {
        "draft_vocab_size": c.draft_vocab_size,
        "norm_before_residual": c.norm_before_residual,
        "norm_before_fc": c.norm_before_fc,
        "fc_norm": c.fc_norm,
    }
    return keys if c.target_hidden_size == c.hidden_size else {**keys, "target_hidden_size": c.target_hidden_size}


def _speculators(c: HeadConfig, verifier: str) -> dict[str, Any]:
    name = {"eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator"}[c.kind]
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": c.num_depths or _DEFAULT_PROPOSAL,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    config = {
        "speculators_model_type": c.kind,
        "architectures": [name],
        "transformer_layer_config": _layer_config(c),
        **_common(c),
        "norm_output": c.norm_output,
        "embed_requires_grad": c.own_embedding,
        "eagle_aux_hidden_state_layer_ids": list(c.taps),
        "speculators_config": {
            "algorithm": c.kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": {"name_or_path": verifier, "architectures": []},
        },
    }
    return config if c.mask_token_id is None else {**config, "mask_token_id": c.mask_token_id}


def _flat(c: HeadConfig, layout: str) -> dict[str, Any]:
    """The two layouts of `midlayer` names.

    `norm_output` tells vLLM what to feed back and means something else, true by default, to SpecForge: written when true.
    """
    config: dict[str, Any] = {**_layer_config(c), **_common(c), "model_type": "llama", FEEDBACK_KEY: c.norm_output}
    config["architectures"] = ["LlamaForCausalLMEagle3"]
    if c.norm_output:
        config["norm_output"] = True
    if c.mask_token_id is not None:
        config["mask_token_id"] = c.mask_token_id
    if layout == "specforge":
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [tap - 1 for tap in c.taps], "use_aux_hidden_state": True}
        return config
    config["eagle_aux_hidden_state_layer_ids"] = list(c.taps)
    implied = {"head_dim": c.head_dim * c.num_heads == c.hidden_size, "fc_norm": not c.fc_norm}
    return {key: value for key, value in config.items() if not implied.get(key)}
