"""The trainable draft head. Parameter names are the tensor names of an exported head (speculators layout)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec.errors import ConfigError
from specdec.layers.rotary import inverse_frequencies
from specdec.train.attention import Rollouts, Unroll
from specdec.train.capture import rotate

if TYPE_CHECKING:
    from specdec.models.head_config import HeadConfig

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]  # (layer, q, k, v), each [B, R, heads, hd] -> [B, R, nh, hd]


class Linear(nn.Linear):
    """Float32 weights, multiplied in the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class Norm(nn.Module):
    """RMSNorm; statistics in float32, output in the input's dtype."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)


class Projections(nn.Module):
    """q, k, v and o of one layer."""

    def __init__(self, config: HeadConfig, inputs: int):
        super().__init__()
        hd, q, kv = config.head_dim, config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = Linear(inputs, q, bias=config.qkv_bias)
        self.k_proj = Linear(inputs, kv, bias=config.qkv_bias)
        self.v_proj = Linear(inputs, kv, bias=config.qkv_bias)
        self.o_proj = Linear(q, config.hidden_size, bias=config.o_bias)
        self.q_norm = Norm(hd, config.eps) if config.qk_norm else nn.Identity()
        self.k_norm = Norm(hd, config.eps) if config.qk_norm else nn.Identity()
        self.head_dim = hd

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, R, inputs] -> q [B, R, nh, hd], k and v [B, R, nkv, hd], not rotated."""
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.q_norm(q), self.k_norm(k), v


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        hidden, inner, bias = config.hidden_size, config.intermediate_size, config.mlp_bias
        self.gate_proj = Linear(hidden, inner, bias=bias)
        self.up_proj = Linear(hidden, inner, bias=bias)
        self.down_proj = Linear(inner, hidden, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """One decoder layer of the head. The first one ("wide") reads token and feature side by side."""

    def __init__(self, config: HeadConfig, index: int):
        super().__init__()
        hidden, self.wide = config.hidden_size, index == 0
        self.norm_before_residual = config.norm_before_residual
        self.input_layernorm = Norm(hidden, config.eps)
        if self.wide:
            self.hidden_norm = Norm(hidden, config.eps)
        self.self_attn = Projections(config, 2 * hidden if self.wide else hidden)
        self.post_attention_layernorm = Norm(hidden, config.eps)
        self.mlp = Mlp(config)

    def forward(self, x: Tensor, embedded: Tensor, mix: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
        """x [B, R, Hd] (features for the wide layer), embedded [B, R, Hd] tokens -> [B, R, Hd]."""
        residual = x
        if self.wide:
            normed = self.hidden_norm(x)
            residual = normed if self.norm_before_residual else x
            inputs = torch.cat([self.input_layernorm(embedded), normed], -1)
        else:
            inputs = self.input_layernorm(x)
        x = residual + self.self_attn.o_proj(mix(*self.self_attn(inputs)).flatten(-2))
        return x + self.mlp(self.post_attention_layernorm(x))


class Transition(nn.Module):
    """Correction of a hidden state by the draft before, see `specdec.models.transition`. Nothing at first."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        hidden, size = config.hidden_size, config.transition
        self.token_norm = Norm(hidden, config.eps)
        self.token_proj = Linear(hidden, size, bias=False)
        self.hidden_proj = Linear(hidden, size, bias=False)
        self.out_proj = Linear(size, hidden, bias=False)
        nn.init.zeros_(self.out_proj.weight)

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """hidden [E, Hd], embedded [E, Hd] tokens -> [E, Hd]."""
        return hidden + self.out_proj(F.silu(self.token_proj(self.token_norm(embedded)) + self.hidden_proj(hidden)))


class TrainableHead(nn.Module):
    """The head's parameters, float32, and its two ways of training; both compute in the dtype of the taps they are given.

    embedding [V, Hd]: the target's, frozen and shared.
    """

    embedding: Tensor
    target_ids: Tensor
    frequencies: Tensor

    def __init__(self, config: HeadConfig, embedding: Tensor, target_ids: Tensor):
        """target_ids [Vd] i64: the target id of every draft id, ascending."""
        super().__init__()
        if config.own_embedding or embedding.shape[1] != config.hidden_size:
            raise ConfigError("a head is trained on the target's embedding; its hidden size must be the target's", param="hidden_size")
        self.config = config
        taps = len(config.taps) * config.target_hidden_size
        self.fc = Linear(taps, config.hidden_size, bias=False)
        if config.norm_before_fc:
            self.input_norm = Norm(taps, config.eps)
        if config.fc_norm:
            self.fc_norm = nn.ModuleList(Norm(config.target_hidden_size, config.eps) for _ in config.taps)
        self.layers = nn.ModuleList(DraftLayer(config, i) for i in range(config.num_layers))
        self.norm = Norm(config.hidden_size, config.eps)
        self.lm_head = Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        if config.kind == "peagle":
            self.mask_hidden = nn.Parameter(torch.randn(1, 1, taps))
        self.transition = Transition(config) if config.transition else None
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("target_ids", target_ids, persistent=False)
        self.register_buffer("frequencies", inverse_frequencies(config.rope, config.head_dim), persistent=False)

    @torch.no_grad()
    def start_from(self, final_norm: Tensor, lm_head: Tensor) -> None:
        """Begin with the target's own last step: its final norm [Hd] and the kept rows of its lm_head [V, Hd]."""
        self.norm.weight.copy_(final_norm)
        self.lm_head.weight.copy_(lm_head[self.target_ids.to(lm_head.device)])

    def fuse(self, taps: Tensor) -> Tensor:
        """[.., n·Ht] -> features [.., Hd]."""
        if self.config.norm_before_fc:
            taps = self.input_norm(taps)
        if self.config.fc_norm:
            parts = taps.chunk(len(self.config.taps), -1)
            taps = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        features: Tensor = self.fc(taps)
        return features

    def follow(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """hidden [E, Hd] of mask rows, target ids [E] of the drafts before -> [E, Hd] for lm_head; without a transition as they are."""
        if self.transition is None:
            return hidden
        corrected: Tensor = self.transition(hidden, F.embedding(ids, self.embedding).to(hidden.dtype))
        return corrected

    def decode(self, ids: Tensor, features: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """The layers on pairs (feature, token). ids [B, R] target ids, features [B, R, Hd], positions [R] or [B, R].

        -> (hidden [B, R, Hd] for lm_head, what the next step of a chain reads as its feature [B, R, Hd]).
        """
        angles = (positions.float()[..., None] * self.frequencies)[..., None, :]
        cos, sin = (part * self.config.rope.attention_factor for part in (angles.cos(), angles.sin()))
        embedded = F.embedding(ids, self.embedding).to(features.dtype)
        x = features
        for index, layer in enumerate(self.layers):
            x = layer(x, embedded, lambda q, k, v, i=index: attend(i, rotate(q, cos, sin), rotate(k, cos, sin), v))
        hidden = self.norm(x)
        return hidden, hidden if self.config.norm_output else x

    def unroll(self, tokens: Tensor, taps: Tensor, steps: int) -> Tensor:
        """Training-time test: tokens [B, L], taps [B, L, n·Ht] -> hidden [steps, B, L, Hd].

        Row t of step s continues the chain that starts with the pair (feature of position t, token t + 1): it reads token
        t + 1 + s and its own output of step s - 1, and predicts token t + 2 + s. Gradients flow through all steps. Rows
        that read past the end of a sequence are meaningless.
        """
        length = tokens.shape[1]
        attend = Unroll(self.config.windows, length, tokens.device)
        row = torch.arange(length, device=tokens.device)
        feature, outputs = self.fuse(taps), []
        for step in range(steps):
            attend.step = step
            ids = tokens[:, (row + 1 + step).clamp(max=length - 1)]
            hidden, feature = self.decode(ids, feature, row + 1 + step, attend)
            outputs.append(hidden)
        return torch.stack(outputs)

    def parallel(self, tokens: Tensor, taps: Tensor, place: Tensor, counts: list[int]) -> tuple[Tensor, Rollouts]:
        """Parallel drafts: one pass over the L real rows and the mask rows of the rollouts kept (see `Rollouts`).

        A mask row of depth d and anchor t stands at the position of token t + 1 + d and predicts token t + 2 + d.
        -> (hidden [B, L + Q, Hd], the rollouts with their rows' anchors and depths).
        """
        config = self.config
        if config.mask_token_id is None:
            raise ConfigError("a P-EAGLE head needs a mask token", param="mask_token_id")
        batch, length = tokens.shape
        rollouts = Rollouts(config.windows, length, place, counts)
        row = torch.arange(length, device=tokens.device)
        real = self.fuse(taps)
        masks = self.fuse(self.mask_hidden.to(taps.dtype)).to(real.dtype).expand(batch, rollouts.anchor.shape[1], -1)
        real_ids = tokens[:, (row + 1).clamp(max=length - 1)]
        ids = torch.cat([real_ids, torch.full_like(rollouts.anchor, config.mask_token_id)], 1)
        positions = torch.cat([(row + 1).expand(batch, -1), rollouts.anchor + 1 + rollouts.depth], 1)
        hidden, _ = self.decode(ids, torch.cat([real, masks], 1), positions, rollouts)
        return hidden, rollouts
