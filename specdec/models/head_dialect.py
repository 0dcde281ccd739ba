"""Reading the config.json of a draft head, in any published dialect, into a `HeadConfig`. Source: reference §1.1–1.6, §4.2.

Dialects: "speculators" (nested `transformer_layer_config`), and three flat ones that share tensor names up to spelling:
"vllm" (its architecture names), "specforge" (`eagle_config`, `fc_norm` or `head_dim`), "eagle" (the original).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.errors import UnsupportedCheckpoint
from specdec.models.config import ModelConfig
from specdec.models.head_config import NOISE_SHARE, TRANSITION, HeadConfig, default_taps

# In order of precedence; a dot leads into a nested object.
MASK_TOKEN_KEYS = ("dflash_config.mask_token_id", "mask_token_id", "dspark_noise_token_id", "pard_token", "ptd_token_id")
FEEDBACK_KEY = "feedback_post_norm"  # our exporter's, in flat dialects: `norm_output` means different things to its readers
_TAPS = "eagle_aux_hidden_state_layer_ids"


def read_head_config(
    config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], target: ModelConfig, *, extra: Mapping[str, Any], origin: str
) -> HeadConfig:
    """shapes: of the file's tensors by internal name; a tensor that is there overrides a flag. extra: our exporter's side file.

    Raises UnsupportedCheckpoint naming the field.
    """
    dialect = dialect_of(config)
    layer = _object(config, "transformer_layer_config", origin) if dialect == "speculators" else config
    eagle = _object(config, "eagle_config", origin)
    _refuse_unsupported(config, eagle, dialect, origin)
    sizes = _layer_sizes(layer, dialect == "speculators")
    kind, mask = _kind(config, shapes, origin)
    return HeadConfig(
        kind=kind,
        hidden_size=sizes.hidden_size,
        target_hidden_size=_size(config, "target_hidden_size", sizes.hidden_size, origin),
        intermediate_size=sizes.intermediate_size,
        num_layers=sizes.num_layers,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        eps=sizes.eps,
        rope=sizes.rope,
        vocab_size=sizes.vocab_size,
        draft_vocab_size=_size(config, "draft_vocab_size", sizes.vocab_size, origin),
        taps=_taps(config, eagle, target, origin),
        max_positions=sizes.max_positions if layer.get("max_position_embeddings") else 0,
        norm_before_residual=_norm_before_residual(config, dialect),
        norm_output=_feeds_back_normed(config, dialect),
        windows=sizes.windows,
        mask_token_id=mask,
        num_depths=_num_depths(config, kind, extra),
        transition=shapes.get(f"{TRANSITION}.out_proj.weight", (0, 0))[1],
        noise_share=_noise_share(extra, origin),
        dialect=dialect,
        fingerprint=_object(extra, "fingerprint", origin) or None,
        provenance=_object(extra, "provenance", origin),
        **_switches(config, eagle, layer, sizes, shapes),
    )


def _switches(
    config: Mapping[str, Any], eagle: Mapping[str, Any], layer: Mapping[str, Any], sizes: ModelConfig, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, bool]:
    """The flags that a tensor of the file can switch on."""
    attention = "layers.0.self_attn."
    return {
        "norm_before_fc": bool(config.get("norm_before_fc") or eagle.get("norm_before_fc")) or "input_norm.weight" in shapes,
        "fc_norm": bool(config.get("fc_norm") or eagle.get("fc_norm")) or "fc_norm.0.weight" in shapes,
        "qk_norm": str(layer.get("model_type", "")).startswith("qwen3") or f"{attention}q_norm.weight" in shapes,
        "qkv_bias": sizes.qkv_bias or bool(layer.get("qkv_bias")) or f"{attention}q_proj.bias" in shapes,
        "o_bias": f"{attention}o_proj.bias" in shapes,
        "mlp_bias": sizes.mlp_bias or "layers.0.mlp.gate_proj.bias" in shapes,
        "own_embedding": "embed_tokens.weight" in shapes,
        "own_lm_head": "lm_head.weight" in shapes,
    }


def _object(config: Mapping[str, Any], key: str, origin: str) -> Mapping[str, Any]:
    """A nested object, empty when absent."""
    value = config.get(key)
    if value is not None and not isinstance(value, Mapping):
        raise UnsupportedCheckpoint(f"{origin}: {key} must be an object, got {value!r}")
    return value or {}


def dialect_of(config: Mapping[str, Any]) -> str:
    """Name of the dialect a config.json is written in."""
    if "speculators_model_type" in config:
        return "speculators"
    architectures = config.get("architectures") or []
    if any(str(name).startswith("Eagle3") for name in architectures):
        return "vllm"
    if any(key in config for key in ("eagle_config", "fc_norm", "head_dim")):
        return "specforge"
    return "eagle"


def _layer_sizes(layer: Mapping[str, Any], nested: bool) -> ModelConfig:
    """The draft layers, read like a Llama: what differs (biases, head norms) shows in the tensors."""
    defaults: dict[str, Any] = {"num_hidden_layers": 1, "max_position_embeddings": 1}
    given = {key: value for key, value in layer.items() if value is not None}
    alias = {"attention_bias": given.get("attention_bias", False)}
    read = {**defaults, **given, **alias, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "eos_token_id": None}
    try:
        return ModelConfig.from_hf(read)
    except UnsupportedCheckpoint as err:
        raise UnsupportedCheckpoint(err.message.replace("config.json:", "transformer_layer_config:") if nested else err.message) from err


def _refuse_unsupported(config: Mapping[str, Any], eagle: Mapping[str, Any], dialect: str, origin: str) -> None:
    """Settings that would change the mathematics and are not implemented."""
    wanted: list[tuple[str, Any, Any]] = [
        ("logit_scale", config.get("logit_scale", 1.0), 1.0),
        ("eagle_config.use_aux_hidden_state", eagle.get("use_aux_hidden_state", True), True),
    ]
    if dialect == "specforge":
        wanted.append(("norm_output", config.get("norm_output", True), True))  # here: the norm before lm_head
    if dialect == "speculators" and config["speculators_model_type"] not in ("eagle3", "peagle"):
        wanted.append(("speculators_model_type", config["speculators_model_type"], "eagle3 or peagle"))
    for name, found, expected in wanted:
        if found is not None and found != expected:
            raise UnsupportedCheckpoint(f"{origin}: {name}: {found!r} is not supported, only {expected!r}")


def _kind(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], origin: str) -> tuple[str, int | None]:
    """("eagle3" | "peagle", mask token id). A flat config is P-EAGLE when it names a mask token or the file has `mask_hidden`."""
    mask = next((value for key in MASK_TOKEN_KEYS if (value := _lookup(config, key)) is not None), None)
    named = config.get("speculators_model_type")
    kind = named or ("peagle" if mask is not None or "mask_hidden" in shapes else "eagle3")
    if kind != "peagle":
        return kind, None
    if not isinstance(mask, int) or isinstance(mask, bool):
        raise UnsupportedCheckpoint(
            f"{origin}: a P-EAGLE head needs its mask token id under one of {', '.join(MASK_TOKEN_KEYS)}, got {mask!r}"
        )
    return kind, mask


def _lookup(config: Mapping[str, Any], path: str) -> Any:
    value: Any = config
    for key in path.split("."):
        value = value.get(key) if isinstance(value, Mapping) else None
    return value


def _taps(config: Mapping[str, Any], eagle: Mapping[str, Any], target: ModelConfig, origin: str) -> tuple[int, ...]:
    """Taps in our numbering (entry to a layer). The nested list of SpecForge counts layer *outputs*: one less."""
    found, shift = config.get(_TAPS), 0
    if found is None and eagle.get(_TAPS) is not None:
        found, shift = eagle[_TAPS], 1
    if found is None:
        found = eagle.get("layer_ids")
    if found is None:
        return default_taps(target.num_layers)
    if not isinstance(found, list) or not found or any(not isinstance(j, int) or isinstance(j, bool) for j in found):
        raise UnsupportedCheckpoint(f"{origin}: {_TAPS} must be a list of layer numbers, got {found!r}")
    return tuple(j + shift for j in found)


def _norm_before_residual(config: Mapping[str, Any], dialect: str) -> bool:
    """A speculators file without the key is taken as vLLM takes it, where such heads are served; flat files mean False."""
    value = config.get("norm_before_residual")
    return dialect == "speculators" if value is None else bool(value)


def _feeds_back_normed(config: Mapping[str, Any], dialect: str) -> bool:
    """Whether the recurrent feature is the state after the final norm. SpecForge's `norm_output` is about lm_head instead."""
    if config.get(FEEDBACK_KEY) is not None:
        return bool(config[FEEDBACK_KEY])
    return bool(config.get("norm_output")) and dialect in ("speculators", "vllm")


def _num_depths(config: Mapping[str, Any], kind: str, extra: Mapping[str, Any]) -> int:
    """Depth of training: from our side file, or what a P-EAGLE head of speculators proposes, which is the same number."""
    if isinstance(extra.get("num_depths"), int):
        return int(extra["num_depths"])
    methods = _lookup(config, "speculators_config.proposal_methods")
    first = methods[0] if kind == "peagle" and isinstance(methods, list) and methods else {}
    tokens = first.get("speculative_tokens") if isinstance(first, Mapping) else None
    return tokens if isinstance(tokens, int) else 0


def _noise_share(extra: Mapping[str, Any], origin: str) -> float:
    """What was measured for this head, from our side file, or the share of heads in general."""
    share = extra.get("noise_share", NOISE_SHARE)
    if not isinstance(share, (int, float)) or isinstance(share, bool) or not 0.0 < share <= 1.0:
        raise UnsupportedCheckpoint(f"{origin}: noise_share must be a number in (0, 1], got {share!r}")
    return float(share)


def _size(config: Mapping[str, Any], key: str, default: int, origin: str) -> int:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedCheckpoint(f"{origin}: {key} must be a positive integer, got {value!r}")
    return value
