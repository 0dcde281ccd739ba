"""`ModelConfig`: what the model code needs to know of a checkpoint, read from a Hugging Face config or GGUF metadata."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specdec.errors import UnsupportedCheckpoint
from specdec.models.config_values import integer, number
from specdec.models.moe_config import MoEConfig, moe_to_hf, read_moe
from specdec.models.registry import FAMILIES, Family, family_of
from specdec.models.rope_config import RopeConfig, read_rope, rope_to_hf
from specdec.types import KVGroup

DTYPES = ("float32", "float16", "bfloat16")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A decoder of the Llama family. Sizes in elements; `windows[i]` is layer i's attention window, None = full.

    eos_ids: end tokens, the union of config.json and generation_config.json. dtype: the checkpoint's own.
    """

    architecture: str
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int
    eps: float
    rope: RopeConfig
    tied: bool
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False  # RMSNorm of each query and key head before RoPE
    sinks: bool = False  # a learned logit per query head that takes part in the softmax and has no value
    moe: MoEConfig | None = None
    windows: tuple[int | None, ...] = ()
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    dtype: str = "float32"
    layer_group: tuple[int, ...] = field(init=False)  # layer -> index into kv_groups()
    layer_in_group: tuple[int, ...] = field(init=False)  # layer -> its index inside that group

    def __post_init__(self) -> None:
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        order = list(dict.fromkeys(sorted(self.windows, key=lambda w: (w is not None, w or 0))))
        groups = tuple(order.index(w) for w in self.windows)
        object.__setattr__(self, "layer_group", groups)
        object.__setattr__(self, "layer_in_group", tuple(groups[:i].count(g) for i, g in enumerate(groups)))

    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Layers by window, full attention first; `layer_group` indexes this tuple."""
        groups = []
        for index in range(max(self.layer_group) + 1):
            layers = [i for i, g in enumerate(self.layer_group) if g == index]
            window = self.windows[layers[0]]
            name = "full" if window is None else f"sliding{window}"
            groups.append(KVGroup(name, len(layers), self.num_kv_heads, self.head_dim, window))
        return tuple(groups)

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @classmethod
    def from_hf(cls, config: Mapping[str, Any], generation_config: Mapping[str, Any] | None = None) -> ModelConfig:
        """Read config.json (and generation_config.json). Raises UnsupportedCheckpoint naming the key that is wrong."""
        family = family_of(config)
        act = config.get("hidden_act", "silu")
        if act not in ("silu", "swish"):
            raise UnsupportedCheckpoint(f"hidden_act: {act!r} is not supported, only 'silu'")
        layers = integer(config, "num_hidden_layers", 1, 1024)
        heads = integer(config, "num_attention_heads", 1, 4096)
        hidden = integer(config, "hidden_size", 1, 1 << 20)
        kv_heads = integer(config, "num_key_value_heads", 1, heads, default=heads)
        if heads % kv_heads:
            raise UnsupportedCheckpoint(f"num_key_value_heads: {kv_heads} does not divide num_attention_heads {heads}")
        head_dim = integer(config, "head_dim", 2, 4096, default=family.head_dim or hidden // heads)
        if head_dim % 2:
            raise UnsupportedCheckpoint(f"head_dim: {head_dim} is odd, RoPE rotates pairs")
        vocab = integer(config, "vocab_size", 1, 1 << 24)
        attention_bias = bool(config.get("attention_bias", family.bias_by_default))
        return cls(
            architecture=family.architecture,
            hidden_size=hidden,
            intermediate_size=integer(config, "intermediate_size", 1, 1 << 22),
            num_layers=layers,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=head_dim,
            vocab_size=vocab,
            max_positions=integer(config, "max_position_embeddings", 1, 1 << 26),
            eps=number(config, "rms_norm_eps", 0.0, 1.0, default=1e-6),
            rope=read_rope(config),
            tied=bool(config.get("tie_word_embeddings", family.tied_by_default)),
            qkv_bias=family.qkv_bias if family.qkv_bias is not None else attention_bias,
            o_bias=attention_bias and family.qkv_bias is None,
            mlp_bias=bool(config.get("mlp_bias", False)) and family.mlp_bias,
            qk_norm=family.qk_norm,
            sinks=family.sinks,
            moe=read_moe(config, family.experts, layers),
            windows=_windows(config, family, layers),
            eos_ids=_eos_ids(config, generation_config or {}, vocab),
            bos_id=config.get("bos_token_id"),
            dtype=_dtype(config),
        )

    def to_hf(self) -> dict[str, Any]:
        """The config.json that `from_hf` and transformers read back as this model."""
        family = FAMILIES[self.architecture]
        rope = rope_to_hf(self.rope)
        config: dict[str, Any] = {
            "architectures": [self.architecture],
            "model_type": family.model_type,
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab_size,
            "max_position_embeddings": self.max_positions,
            "rms_norm_eps": self.eps,
            "hidden_act": "silu",
            "rope_parameters": rope,
            "rope_theta": self.rope.theta,
            "rope_scaling": None if self.rope.kind == "default" else {k: v for k, v in rope.items() if k != "rope_theta"},
            "tie_word_embeddings": self.tied,
            "attention_bias": self.o_bias,
            "mlp_bias": self.mlp_bias,
            "eos_token_id": list(self.eos_ids) if len(self.eos_ids) != 1 else self.eos_ids[0],
            "bos_token_id": self.bos_id,
            "torch_dtype": self.dtype,
        }
        windows = [w for w in self.windows if w is not None]
        config |= {"sliding_window": None, "use_sliding_window": False}
        if windows:
            config |= {"sliding_window": windows[0], "use_sliding_window": True}
            config["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in self.windows]
        return config if self.moe is None else config | moe_to_hf(self.moe, family.experts)


def _windows(config: Mapping[str, Any], family: Family, layers: int) -> tuple[int | None, ...]:
    """Attention window by layer. Qwen lists one even when `use_sliding_window` is false; it then means nothing."""
    types = config.get("layer_types")
    if family.window is not None:  # what they mean when the key is absent
        config = {"sliding_window": 128 if family.window == "alternating" else 4096, **config}
    if family.window == "alternating" and config["sliding_window"] is not None:
        types = types or [("sliding_attention", "full_attention")[i % 2] for i in range(layers)]
    switched = family.window in ("switched", "switched for all")
    active = config.get("use_sliding_window", False) if switched else config.get("sliding_window") is not None
    if not active:
        if types and any(t != "full_attention" for t in types):
            raise UnsupportedCheckpoint(f"config.json: layer_types {sorted(set(types))} without an active sliding_window")
        return (None,) * layers
    window = integer(config, "sliding_window", 1, 1 << 26)
    if types is None:
        first = integer(config, "max_window_layers", 0, 1024, default=28) if family.window == "switched" else 0
        return tuple(window if family.window is not None and i >= first else None for i in range(layers))
    if len(types) != layers or any(t not in ("full_attention", "sliding_attention") for t in types):
        raise UnsupportedCheckpoint(f"config.json: layer_types must name full_attention or sliding_attention for each of {layers} layers")
    return tuple(window if t == "sliding_attention" else None for t in types)


def _eos_ids(config: Mapping[str, Any], generation: Mapping[str, Any], vocab: int) -> tuple[int, ...]:
    found: list[int] = []
    for source in (generation, config):
        value = source.get("eos_token_id")
        found += value if isinstance(value, list) else [] if value is None else [value]
    for token in found:
        if not isinstance(token, int) or not 0 <= token < vocab:
            raise UnsupportedCheckpoint(f"eos_token_id: {token!r} is not a token id below vocab_size {vocab}")
    return tuple(dict.fromkeys(found))


def _dtype(config: Mapping[str, Any]) -> str:
    name = str(config.get("dtype") or config.get("torch_dtype") or "float32").removeprefix("torch.")
    if name not in DTYPES:
        raise UnsupportedCheckpoint(f"config.json: torch_dtype {name!r} is not supported; known: {', '.join(DTYPES)}")
    return name
