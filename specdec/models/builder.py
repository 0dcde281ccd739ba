"""From checkpoint tensors to layers: shared by the targets and the draft heads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from specdec.errors import UnsupportedCheckpoint
from specdec.layers.attention import Attention
from specdec.layers.decoder import Layer
from specdec.layers.linear import Linear, RawWeight, make_linear
from specdec.layers.norm import RMSNorm
from specdec.layers.rotary import Rotary
from specdec.models.kv_scales import kv_scales
from specdec.models.weights import Weights


class LayerSizes(Protocol):
    """What a config says about its decoder layers."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def q_size(self) -> int: ...
    @property
    def kv_size(self) -> int: ...
    @property
    def eps(self) -> float: ...
    @property
    def qkv_bias(self) -> bool: ...
    @property
    def o_bias(self) -> bool: ...
    @property
    def mlp_bias(self) -> bool: ...
    @property
    def qk_norm(self) -> bool: ...
    @property
    def windows(self) -> tuple[int | None, ...]: ...


class Builder:
    """Turns checkpoint tensors into layers and remembers which were used. Norms and biases are never packed.

    keep, act_fp8: see `make_linear`.
    """

    def __init__(
        self,
        sizes: LayerSizes,
        weights: Weights,
        rotary: Rotary,
        *,
        device: torch.device,
        dtype: torch.dtype,
        deterministic: bool,
        keep: bool = False,
        act_fp8: bool = False,
    ):
        self.sizes, self.weights, self.rotary = sizes, weights, rotary
        self.device, self.dtype, self.deterministic = device, dtype, deterministic
        self.keep, self.act_fp8 = keep, act_fp8
        self.used: set[str] = set()
        self.names = frozenset(weights.names())

    def raw(self, name: str, *shape: int) -> RawWeight:
        self.used.add(name)
        return self.weights.get(name, shape)

    def dense(self, name: str, *shape: int) -> Tensor:
        """A tensor of plain numbers, on the device in the activation dtype."""
        raw = self.raw(name, *shape)
        if not isinstance(raw, Tensor):
            raise UnsupportedCheckpoint(f"{self.weights.origin}: tensor {name} is packed as {raw.kind}; expected plain numbers")
        return raw.to(self.device, self.dtype)

    def norm(self, name: str, size: int | None = None) -> RMSNorm:
        """size: None = the hidden size."""
        return RMSNorm(self.dense(f"{name}.weight", size or self.sizes.hidden_size), self.sizes.eps)

    def linear(self, names: Sequence[str], rows: Sequence[int], columns: int, bias: bool = False) -> Linear:
        """One linear of several checkpoint matrices stacked along rows."""
        shards = [self.raw(f"{name}.weight", n, columns) for name, n in zip(names, rows, strict=True)]
        biases = [self.dense(f"{name}.bias", n) for name, n in zip(names, rows, strict=True)] if bias else None
        stacked = torch.cat(biases) if biases else None
        return make_linear(
            shards,
            stacked,
            device=self.device,
            dtype=self.dtype,
            deterministic=self.deterministic,
            keep=self.keep,
            act_fp8=self.act_fp8,
        )

    def layer(self, prefix: str, index: int, *, columns: int | None = None) -> Layer:
        """Decoder layer `index`, whose tensors are called `prefix`.*; `columns`: inputs of q, k and v, None = the hidden size."""
        c = self.sizes
        gate_up = [f"{prefix}.mlp.gate_proj", f"{prefix}.mlp.up_proj"]
        return Layer(
            input_norm=self.norm(f"{prefix}.input_layernorm"),
            attention=self.attention(f"{prefix}.self_attn", index, columns or c.hidden_size),
            post_norm=self.norm(f"{prefix}.post_attention_layernorm"),
            gate_up=self.linear(gate_up, [c.intermediate_size] * 2, c.hidden_size, c.mlp_bias),
            down=self.linear([f"{prefix}.mlp.down_proj"], [c.hidden_size], c.intermediate_size, c.mlp_bias),
        )

    def attention(self, prefix: str, index: int, columns: int) -> Attention:
        """Attention of layer `index` over inputs of `columns`; its tensors are called `prefix`.*"""
        c = self.sizes
        return Attention(
            qkv=self.linear([f"{prefix}.{p}_proj" for p in "qkv"], [c.q_size, c.kv_size, c.kv_size], columns, c.qkv_bias),
            out=self.linear([f"{prefix}.o_proj"], [c.hidden_size], c.q_size, c.o_bias),
            rotary=self.rotary,
            scale=c.head_dim**-0.5,
            window=c.windows[index],
            head_norms=(self.norm(f"{prefix}.q_norm", c.head_dim), self.norm(f"{prefix}.k_norm", c.head_dim)) if c.qk_norm else None,
            kv_scales=kv_scales(self.weights, prefix, self.used),
        )
