"""The Llama decoder: also Mistral and Qwen2, which differ in biases and windows only."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

from specdec import ops
from specdec.errors import UnsupportedCheckpoint
from specdec.layers.attention import Attention, KVStore
from specdec.layers.decoder import DecoderStack, Layer
from specdec.layers.embedding import make_embedding
from specdec.layers.linear import Linear, RawWeight, make_linear
from specdec.layers.norm import RMSNorm
from specdec.layers.rotary import Rotary
from specdec.models.config import ModelConfig
from specdec.models.weights import Weights, check_all_used
from specdec.quant.tiled import gather
from specdec.types import Batch


class LlamaModel:
    """Weights and forward pass. All tensors on `device`; activations in `dtype`; logits always float32."""

    def __init__(self, config: ModelConfig, weights: Weights, *, device: torch.device, dtype: torch.dtype, deterministic: bool = False):
        self.config = config
        self.device = device
        self.dtype = dtype
        self.deterministic = deterministic
        build = _Builder(config, weights, device, dtype, deterministic)
        embedding = build.raw("model.embed_tokens.weight", config.vocab_size, config.hidden_size)
        self.embedding = make_embedding(embedding, device=device, dtype=dtype, deterministic=deterministic)
        layers = [build.layer(i) for i in range(config.num_layers)]
        self.lm_head = self.embedding.head() if config.tied else build.head()
        linears = [linear for layer in layers for linear in (layer.attention.qkv, layer.attention.out, layer.gate_up, layer.down)]
        gather(dict.fromkeys([*(linear.method for linear in linears), self.lm_head.method, self.embedding.method]))
        self.stack = DecoderStack(layers, build.norm("model.norm"))
        check_all_used(weights, build.used, tied=config.tied)

    def forward(self, batch: Batch, kv: KVStore, *, taps: Sequence[int] = ()) -> tuple[Tensor, Tensor | None]:
        """(hidden [T, H] after the final norm, tapped [T, len(taps)·H] or None); K and V of the rows go into `kv`.

        Tap j is the residual stream on entry to layer j (j = number of layers: before the final norm), concatenated in
        the order given.
        """
        with self._numerics():
            return self.stack(self.embedding(batch.input_ids), batch, kv, taps)

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, H] hidden states after the final norm -> [R, V] f32."""
        with self._numerics():
            return self.lm_head(hidden).float()

    def _numerics(self) -> AbstractContextManager[None]:
        """In deterministic mode, only backends with a fixed order of reduction may run."""
        return ops.deterministic(self.device.type) if self.deterministic else nullcontext()

    @property
    def layers(self) -> list[Layer]:
        return self.stack.layers

    @property
    def norm(self) -> RMSNorm:
        """The final norm."""
        return self.stack.norm


class _Builder:
    """Turns checkpoint tensors into layers and remembers which were used."""

    def __init__(self, config: ModelConfig, weights: Weights, device: torch.device, dtype: torch.dtype, deterministic: bool):
        self.config, self.weights, self.device, self.dtype, self.deterministic = config, weights, device, dtype, deterministic
        self.rotary = Rotary(config.rope, config.head_dim, config.max_positions, device=device)
        self.used: set[str] = set()

    def raw(self, name: str, *shape: int) -> RawWeight:
        self.used.add(name)
        return self.weights.get(name, shape)

    def dense(self, name: str, *shape: int) -> Tensor:
        """A tensor that is never packed (norms, biases), on the device in the activation dtype."""
        raw = self.raw(name, *shape)
        if not isinstance(raw, Tensor):
            raise UnsupportedCheckpoint(f"{self.weights.origin}: tensor {name} is packed as {raw.kind}; expected plain numbers")
        return raw.to(self.device, self.dtype)

    def norm(self, name: str) -> RMSNorm:
        return RMSNorm(self.dense(f"{name}.weight", self.config.hidden_size), self.config.eps)

    def linear(self, names: Sequence[str], rows: Sequence[int], columns: int, bias: bool) -> Linear:
        """One linear of several checkpoint matrices stacked along rows."""
        shards = [self.raw(f"{name}.weight", n, columns) for name, n in zip(names, rows, strict=True)]
        biases = [self.dense(f"{name}.bias", n) for name, n in zip(names, rows, strict=True)] if bias else None
        stacked = torch.cat(biases) if biases else None
        return make_linear(shards, stacked, device=self.device, dtype=self.dtype, deterministic=self.deterministic)

    def head(self) -> Linear:
        return self.linear(["lm_head"], [self.config.vocab_size], self.config.hidden_size, False)

    def layer(self, index: int) -> Layer:
        c, prefix = self.config, f"model.layers.{index}"
        qkv = [f"{prefix}.self_attn.{p}_proj" for p in "qkv"]
        attention = Attention(
            qkv=self.linear(qkv, [c.q_size, c.kv_size, c.kv_size], c.hidden_size, c.qkv_bias),
            out=self.linear([f"{prefix}.self_attn.o_proj"], [c.hidden_size], c.q_size, c.o_bias),
            rotary=self.rotary,
            scale=c.head_dim**-0.5,
            window=c.windows[index],
        )
        gate_up = [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"]
        return Layer(
            input_norm=self.norm(f"{prefix}.input_layernorm"),
            attention=attention,
            post_norm=self.norm(f"{prefix}.post_attention_layernorm"),
            gate_up=self.linear(gate_up, [c.intermediate_size] * 2, c.hidden_size, c.mlp_bias),
            down=self.linear([f"{prefix}.mlp.down_proj"], [c.hidden_size], c.intermediate_size, c.mlp_bias),
        )
