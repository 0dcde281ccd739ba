"""Mixtures of experts: what a Hugging Face config says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec.errors import UnsupportedCheckpoint
from specdec.models.config_values import integer, number


@dataclass(frozen=True, slots=True)
class MoEConfig:
    """The mixture of experts of a model: `experts` of which every token takes `per_token`, each with `inner` units.

    layers: which layers have one, the others are dense. renormalise: the weights of the chosen experts add up to 1.
    limit, alpha: of GPT-OSS's clamped activation; limit None = SwiGLU. bias: of router and experts. mxfp4: the config says that the
    experts are stored so.
    """

    experts: int
    per_token: int
    inner: int
    layers: tuple[bool, ...]
    renormalise: bool = True
    limit: float | None = None
    alpha: float = 1.0
    bias: bool = False
    mxfp4: bool = False


def read_moe(config: Mapping[str, Any], kind: str | None, layers: int) -> MoEConfig | None:
    """The experts of Qwen3-MoE and GPT-OSS, which name and default things differently."""
    if kind is None:
        return None
    names = ("num_local_experts", "num_experts")
    key = next((name for name in (names if kind == "gpt_oss" else names[::-1]) if config.get(name) is not None), names[0])
    experts = integer(config, key, 1, 1 << 16)
    chosen = integer(config, "experts_per_token" if config.get("num_experts_per_tok") is None else "num_experts_per_tok", 1, experts)
    if kind == "gpt_oss":
        limit, alpha = number(config, "swiglu_limit", 0.0, 1e6, default=7.0), number(config, "swiglu_alpha", 0.0, 1e6, default=1.702)
        inner = integer(config, "intermediate_size", 1, 1 << 22)
        mxfp4 = (config.get("quantization_config") or {}).get("quant_method") == "mxfp4"
        return MoEConfig(experts, chosen, inner, (True,) * layers, limit=limit, alpha=alpha, bias=True, mxfp4=mxfp4)
    step, dense = integer(config, "decoder_sparse_step", 1, 1024, default=1), config.get("mlp_only_layers") or []
    if not isinstance(dense, list):
        raise UnsupportedCheckpoint(f"config.json: mlp_only_layers must be a list of layers, got {dense!r}")
    if config.get("shared_expert_intermediate_size"):
        raise UnsupportedCheckpoint("config.json: shared_expert_intermediate_size: shared experts are not supported")
    sparse = tuple(i not in dense and (i + 1) % step == 0 for i in range(layers))
    inner = integer(config, "moe_intermediate_size", 1, 1 << 22)
    return MoEConfig(experts, chosen, inner, sparse, renormalise=bool(config.get("norm_topk_prob", False)))


def moe_to_hf(moe: MoEConfig, kind: str | None) -> dict[str, Any]:
    if kind == "gpt_oss":
        config = {"num_local_experts": moe.experts, "num_experts_per_tok": moe.per_token, "intermediate_size": moe.inner}
        return config | {"swiglu_limit": moe.limit, "swiglu_alpha": moe.alpha}
    config = {"num_experts": moe.experts, "num_experts_per_tok": moe.per_token, "moe_intermediate_size": moe.inner}
    dense = [i for i, sparse in enumerate(moe.layers) if not sparse]
    return config | {"norm_topk_prob": moe.renormalise, "decoder_sparse_step": 1, "mlp_only_layers": dense}
