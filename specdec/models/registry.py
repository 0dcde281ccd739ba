"""Which architectures of a config.json the model code can run, where they differ, and what every model offers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from specdec.errors import UnsupportedCheckpoint

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from specdec.layers.attention import KVStore
    from specdec.models.config import ModelConfig
    from specdec.types import Batch


class Model(Protocol):
    """A target or drafter as the runner sees it."""

    config: ModelConfig
    device: torch.device
    dtype: torch.dtype
    deterministic: bool

    def forward(self, batch: Batch, kv: KVStore, *, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """(hidden [T, H] after the final norm, taps [T, len(taps)·H] or None); writes K and V of the rows into `kv`."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] -> [R, V] f32."""
        ...


@dataclass(frozen=True, slots=True)
class Family:
    """One architecture built on the Llama block.

    qkv_bias: True when q, k and v always carry biases (and o never), None when `attention_bias` of the config decides.
    mlp_bias: whether `mlp_bias` of the config means anything. qk_norm: queries and keys are normalised head by head.
    sinks: every query head has an attention sink. experts: whose mixture of experts the layers have, "qwen3" or "gpt_oss".
    head_dim: when the config does not say; None = hidden size over heads.
    bias_by_default, tied_by_default: `attention_bias` and `tie_word_embeddings` when the config does not say.
    window: what `sliding_window` means: "always" what it says, "switched" with `use_sliding_window` only and from layer
    `max_window_layers` on, "switched for all" in every layer, "alternating" in every other layer, None nothing by itself.
    """

    architecture: str
    model_type: str
    qkv_bias: bool | None = None
    mlp_bias: bool = False
    qk_norm: bool = False
    sinks: bool = False
    experts: str | None = None
    head_dim: int | None = None
    bias_by_default: bool = False
    tied_by_default: bool = False
    window: str | None = None


FAMILIES: Mapping[str, Family] = {
    family.architecture: family
    for family in (
        Family("LlamaForCausalLM", "llama", mlp_bias=True),
        Family("MistralForCausalLM", "mistral", qkv_bias=False, window="always"),
        Family("Qwen2ForCausalLM", "qwen2", qkv_bias=True, window="switched"),
        Family("Qwen3ForCausalLM", "qwen3", qk_norm=True, head_dim=128, window="switched"),
        Family("Qwen3MoeForCausalLM", "qwen3_moe", qk_norm=True, experts="qwen3", window="switched for all"),
        Family("GptOssForCausalLM", "gpt_oss", bias_by_default=True, sinks=True, experts="gpt_oss", window="alternating"),
    )
}


def family_of(config: Mapping[str, Any]) -> Family:
    """The family of a Hugging Face config; UnsupportedCheckpoint lists the supported architectures."""
    names = config.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            return FAMILIES[name]
    model_type = config.get("model_type")
    if not names:
        for family in FAMILIES.values():
            if family.model_type == model_type:
                return family
    found = ", ".join(map(str, names)) or f"of model_type {model_type!r}"
    raise UnsupportedCheckpoint(f"architecture {found} is not supported; supported: {', '.join(FAMILIES)}")
