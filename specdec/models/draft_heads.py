"""`DraftHead`: the EAGLE-3 and P-EAGLE draft network for inference. Source: reference §1.0 and §4.2."""

from __future__ import annotations

import hashlib
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields

import torch
from torch import Tensor

from specdec import ops
from specdec.layers.attention import KVStore
from specdec.layers.decoder import DecoderStack
from specdec.layers.embedding import make_embedding
from specdec.layers.norm import RMSNorm
from specdec.layers.rotary import SLACK, Rotary
from specdec.models.builder import Builder
from specdec.models.head_config import HeadConfig
from specdec.models.head_vocabulary import target_ids
from specdec.models.llama import LlamaModel
from specdec.models.transition import Transition
from specdec.models.weights import DictWeights, check_all_used
from specdec.types import Batch


class DraftHead:
    """Weights and forward pass. Activations in `dtype`; logits float32, in draft vocabulary order.

    weights: by internal name, which is that of the speculators layout. Embedding and lm_head are the target's where the
    head has none. RoPE tables have the target's length (and slack): the head's own says what it was trained for, not where it may run.
    keep: weights stay in a storage smaller than `dtype` on every device (`make_linear`).
    target_ids [Vd] i64: target id of each draft id. mask_feature [Hd]: the feature of a P-EAGLE mask row, else None.
    epoch: digest of config and weights; names the draft KV. trusted: False when the target is not the one it was trained on;
    `warning` says why. plan: the network prepared for one compiled call, or None, with the reason in `why_not`.
    Raises UnsupportedCheckpoint naming tensor or field and both sizes.
    """

    def __init__(
        self,
        config: HeadConfig,
        weights: DictWeights,
        target: LlamaModel,
        *,
        device: torch.device,
        dtype: torch.dtype,
        deterministic: bool = False,
        keep: bool = False,
    ):
        config.check_target(target.config, weights.origin)
        self.config, self.device, self.dtype, self.deterministic = config, device, dtype, deterministic
        self.trusted = True
        self.warning: str | None = None
        self.epoch = _digest(config, weights)
        rotary = Rotary(config.rope, config.head_dim, target.config.max_positions + SLACK, device=device)
        build = Builder(config, weights, rotary, device=device, dtype=dtype, deterministic=deterministic, keep=keep)
        self._build_input(build, target)
        self._build_layers(build)
        vocab, hidden = config.draft_vocab_size, config.hidden_size
        self.lm_head = build.linear(["lm_head"], [vocab], hidden) if config.own_lm_head else target.lm_head
        self._head_dtype = dtype if config.own_lm_head else target.dtype
        self.plan, self.why_not = ops.prepare_draft(self)
        self._transition = Transition(build, config, self.embedding) if config.transition else None
        self.target_ids = _vocabulary(config, weights, build.used).to(device)
        self.mask_feature: Tensor | None = None
        if config.kind == "peagle":
            with torch.inference_mode():
                self.mask_feature = self.fuse(build.dense("mask_hidden", 1, 1, config.tap_size).view(1, -1))[0]
        check_all_used(weights, build.used, tied=False)

    def _build_input(self, build: Builder, target: LlamaModel) -> None:
        """What turns tokens and taps into the first layer's input."""
        c = self.config
        self.embedding = target.embedding
        if c.own_embedding:
            own = build.raw("embed_tokens.weight", c.vocab_size, c.hidden_size)
            self.embedding = make_embedding(own, device=self.device, dtype=self.dtype, deterministic=self.deterministic, keep=build.keep)
        norms = range(len(c.taps)) if c.fc_norm else ()
        self.tap_norms = [build.norm(f"fc_norm.{i}", c.target_hidden_size) for i in norms]
        self.input_norm = build.norm("input_norm", c.tap_size) if c.norm_before_fc else None
        self.fc = build.linear(["fc"], [c.hidden_size], c.tap_size)

    def _build_layers(self, build: Builder) -> None:
        c = self.config
        self.feature_norm = build.norm("layers.0.hidden_norm")
        self.wide = build.layer("layers.0", 0, columns=2 * c.hidden_size)
        self.norm: RMSNorm = build.norm("norm")
        deeper = [build.layer(f"layers.{i}", i) for i in range(1, c.num_layers)]
        self.stack = DecoderStack(deeper, self.norm) if deeper else None

    @property
    def nbytes(self) -> int:
        """Memory of the head's own matrices: what it shares with the target, norms and biases left out."""
        layers = [self.wide, *(self.stack.layers if self.stack else [])]
        linears = [self.fc, *(linear for layer in layers for linear in layer.linears)]
        linears += [self.lm_head] if self.config.own_lm_head else []
        own = self.embedding.method.nbytes if self.config.own_embedding else 0
        own += self._transition.nbytes if self._transition is not None else 0
        return own + sum(linear.method.nbytes for linear in linears)

    def fuse(self, taps: Tensor) -> Tensor:
        """[T, n·Ht] taps of the target, in the order of `config.taps` -> [T, Hd] features. Once per target position."""
        with self._numerics():
            x = taps.to(self.dtype)
            if self.input_norm is not None:
                x = self.input_norm(x)
            elif self.tap_norms:
                parts = x.chunk(len(self.tap_norms), dim=1)
                x = torch.cat([norm(part.contiguous()) for norm, part in zip(self.tap_norms, parts, strict=True)], dim=1)
            return self.fc(x)

    def forward(self, batch: Batch, features: Tensor, kv: KVStore) -> tuple[Tensor, Tensor]:
        """One pass over pairs: row = (feature of position j − 1, token of position j), at position j, K and V to its slot.

        batch.input_ids: *target* ids. features [T, Hd]: of `fuse`, of an earlier pass, or `mask_feature`. Returns
        (hidden [T, Hd] for `logits`, feedback [T, Hd]: the feature of the row's children).
        """
        with self._numerics():
            return ops.draft_pass(features, self, batch, kv)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, Hd] of `forward` -> [R, Vd] f32."""
        with self._numerics():
            return self.lm_head(hidden.to(self._head_dtype)).float()

    def follow(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """Hidden states of mask rows [R, Hd] given that the draft before is ids [R], *target* ids -> [R, Hd] for `logits`."""
        with self._numerics():
            return hidden if self._transition is None else self._transition(hidden, ids)

    def _numerics(self) -> AbstractContextManager[None]:
        """In deterministic mode, only backends with a fixed order of reduction may run."""
        return ops.deterministic(self.device.type) if self.deterministic else nullcontext()


def _vocabulary(config: HeadConfig, weights: DictWeights, used: set[str]) -> Tensor:
    """The validated draft vocabulary, from what the head has of d2t and t2d."""
    maps: dict[str, Tensor] = {}
    held = set(weights.names())
    for name, size in (("d2t", config.draft_vocab_size), ("t2d", config.vocab_size)):
        if name in held:
            raw = weights.get(name, (size,))
            assert isinstance(raw, Tensor)  # one dimension cannot be packed
            maps[name] = raw
            used.add(name)
    return target_ids(maps.get("d2t"), maps.get("t2d"), config.draft_vocab_size, config.vocab_size, weights.origin)


def _digest(config: HeadConfig, weights: DictWeights) -> str:
    """Hex digest of everything that the draft KV depends on."""
    apart = ("dialect", "noise_share", "fingerprint", "provenance")
    described = [f"{f.name}={getattr(config, f.name)}" for f in fields(config) if f.name not in apart]
    digest = hashlib.blake2b("\n".join(described).encode(), digest_size=16)
    for name, tensor in sorted(weights.items()):
        digest.update(name.encode())
        data = tensor if isinstance(tensor, Tensor) else tensor.data
        digest.update(data.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()
