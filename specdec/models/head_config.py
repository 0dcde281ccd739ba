"""`HeadConfig`: a draft head in the one form every dialect is turned into (`head_dialect` reads them, reference §1.0–1.6)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from specdec.errors import UnsupportedCheckpoint
from specdec.models.config import ModelConfig, RopeConfig
from specdec.types import KVGroup

KINDS = ("eagle3", "peagle")
TRANSITION = "transition"  # what the names of its tensors begin with
NOISE_SHARE = 0.75  # best for both heads of the default model at every depth and width, by up to 6 % of the tokens a step


def default_taps(num_layers: int) -> tuple[int, int, int]:
    """The taps of a head whose file names none, for a target of that many layers."""
    return 2, num_layers // 2, num_layers - 3


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A draft head of the EAGLE-3 family. Sizes in elements.

    kind: "eagle3" feeds its own state back, "peagle" drafts all positions in one pass from mask rows.
    taps: the target's residual stream on entry to these layers (number of target layers = before the final norm).
    norm_before_residual: the residual branch starts from the normalised feature. norm_before_fc: one norm over all taps.
    fc_norm: one norm per tap. norm_output: the state after the final norm is fed back, else the one before it.
    max_positions: length it was trained for, 0 = unknown; num_depths: drafts it was trained for, 0 = unknown.
    transition: hidden size of the correction of P-EAGLE's drafts by the draft before them (`DraftHead.follow`), 0 = none.
    noise_share: how much of the target's noise its candidates listen to where requests sample, in (0, 1] (`spec.candidates`).
    own_embedding, own_lm_head: False = the target's. fingerprint: of the target it was trained on (`head_fingerprint`).
    """

    kind: str
    hidden_size: int
    target_hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    rope: RopeConfig
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    max_positions: int = 0
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    windows: tuple[int | None, ...] = ()
    mask_token_id: int | None = None
    num_depths: int = 0
    transition: int = 0
    noise_share: float = NOISE_SHARE
    own_embedding: bool = False
    own_lm_head: bool = True
    dialect: str = "speculators"
    fingerprint: Mapping[str, Any] | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of_target(cls, kind: str, target: ModelConfig, **others: Any) -> HeadConfig:
        """A head of the target's own sizes. others: the fields in which it differs, and those that the target does not say."""
        own = {
            "hidden_size": target.hidden_size,
            "intermediate_size": target.intermediate_size,
            "num_layers": 1,
            "num_heads": target.num_heads,
            "num_kv_heads": target.num_kv_heads,
            "head_dim": target.head_dim,
            "eps": target.eps,
            "rope": target.rope,
            "draft_vocab_size": target.vocab_size,
        }
        return cls(kind=kind, target_hidden_size=target.hidden_size, vocab_size=target.vocab_size, **{**own, **others})

    def __post_init__(self) -> None:
        if not self.windows:
            object.__setattr__(self, "windows", (None,) * self.num_layers)
        problem = self._problem()
        if problem is not None:
            raise UnsupportedCheckpoint(f"draft head: {problem}")

    def _problem(self) -> str | None:
        """What is wrong with the head taken alone, naming the field, or None."""
        if self.kind not in KINDS:
            return f"kind must be one of {', '.join(KINDS)}, got {self.kind!r}"
        if self.num_layers < 1 or len(self.windows) != self.num_layers:
            return f"num_layers: {self.num_layers} layers with {len(self.windows)} windows"
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            return f"num_kv_heads: {self.num_kv_heads} does not divide num_heads {self.num_heads}"
        if not self.taps:
            return "taps: at least one tap is needed"
        if self.norm_before_fc and self.fc_norm:
            return "norm_before_fc and fc_norm exclude each other"
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            return f"draft_vocab_size: {self.draft_vocab_size} is not between 1 and vocab_size {self.vocab_size}"
        if self.kind == "peagle" and self.mask_token_id is None:
            return "mask_token_id is missing; a P-EAGLE head needs the id of its placeholder token"
        if self.transition < 0 or (self.transition and self.kind != "peagle"):
            return f"transition: {self.transition}; a P-EAGLE head has one of a size ≥ 0, other heads have none"
        if not 0.0 < self.noise_share <= 1.0:
            return f"noise_share: {self.noise_share} is not in (0, 1]"
        if self.mask_token_id is not None and not 0 <= self.mask_token_id < self.vocab_size:
            return f"mask_token_id: {self.mask_token_id} is not a token id below vocab_size {self.vocab_size}"
        return None

    def check_target(self, target: ModelConfig, origin: str) -> None:
        """Raises UnsupportedCheckpoint naming the field and both sizes when the head cannot sit on this target."""
        if self.target_hidden_size != target.hidden_size:
            name = "hidden_size" if self.target_hidden_size == self.hidden_size else "target_hidden_size"
            raise UnsupportedCheckpoint(
                f"{origin}: {name}: the head reads features of size {self.target_hidden_size}, the target's have {target.hidden_size}"
            )
        if self.vocab_size != target.vocab_size:
            raise UnsupportedCheckpoint(
                f"{origin}: vocab_size: the head is for a vocabulary of {self.vocab_size}, the target's has {target.vocab_size}"
            )
        for tap in self.taps:
            if not 0 <= tap <= target.num_layers:
                raise UnsupportedCheckpoint(
                    f"{origin}: eagle_aux_hidden_state_layer_ids: tap {tap} of {list(self.taps)} is outside 0…{target.num_layers}, "
                    f"the target has {target.num_layers} layers"
                )
        shared = [n for n, own in (("embed_tokens.weight", self.own_embedding), ("lm_head.weight", self.own_lm_head)) if not own]
        if shared and self.hidden_size != target.hidden_size:
            raise UnsupportedCheckpoint(
                f"{origin}: {shared[0]} is missing and the target's cannot stand in: hidden_size {self.hidden_size} "
                f"of the head is not the target's {target.hidden_size}"
            )
        if not self.own_lm_head and self.draft_vocab_size != target.vocab_size:
            raise UnsupportedCheckpoint(
                f"{origin}: lm_head.weight [{self.draft_vocab_size}, {self.hidden_size}] is missing and the target's cannot stand in: "
                f"draft_vocab_size {self.draft_vocab_size} is not its vocab_size {target.vocab_size}"
            )

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def tap_size(self) -> int:
        """Numbers in one position's taps: the inputs of fc."""
        return len(self.taps) * self.target_hidden_size

    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Draft KV of all layers lies under one block table; windows are applied per layer."""
        return (KVGroup(self.kind, self.num_layers, self.num_kv_heads, self.head_dim),)

    @property
    def layer_group(self) -> tuple[int, ...]:
        """Layer -> index into `kv_groups()`."""
        return (0,) * self.num_layers
