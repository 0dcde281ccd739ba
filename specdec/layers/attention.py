"""Attention over the paged KV cache: project, rotate and write K and V, attend along positions or ancestors, project."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from specdec import ops
from specdec.kernels.kv_fp8 import UNSCALED, Scales
from specdec.layers.linear import Activations, Linear
from specdec.layers.norm import RMSNorm
from specdec.layers.rotary import Rotary
from specdec.types import Batch


class KVStore(Protocol):
    """The part of the KV cache the model sees. Layers by index in the model."""

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(K, V) of one layer, each [NB, block_size, nkv, hd]."""
        ...

    def group_of(self, index: int) -> int:
        """KV group of a layer: which block table and slot mapping of the batch it uses."""
        ...


@dataclass(slots=True)
class Attention:
    """Grouped-query attention of one layer. qkv: [columns] -> [(nh + 2 nkv) hd]; out: [nh hd] -> [H]; window: None = full.

    head_norms: norms [hd] of every query head and of every key head, before RoPE, with one eps. sinks [nh]: a logit per query head
    that takes part in the softmax and has no value.
    kv_scales: of K and of V in an FP8 cache.
    """

    qkv: Linear
    out: Linear
    rotary: Rotary
    scale: float
    window: int | None = None
    head_norms: tuple[RMSNorm, RMSNorm] | None = None
    sinks: Tensor | None = None
    kv_scales: Scales = UNSCALED

    def __call__(self, x: Activations, batch: Batch, table: Tensor, slots: Tensor, caches: tuple[Tensor, Tensor]) -> Tensor:
        """[T, columns] -> [T, H]; the rest as in `mix`."""
        return self.out(self.mix(self.qkv(x), batch, table, slots, caches))

    def mix(self, qkv: Tensor, batch: Batch, table: Tensor, slots: Tensor, caches: tuple[Tensor, Tensor]) -> Tensor:
        """Projections [T, (nh + 2 nkv) hd] -> [T, nh hd]; writes this step's K and V at `slots` before attending.

        table [B, M] i32 and slots [T] i64 are those of the layer's KV group; caches are K and V, each [NB, block_size, nkv, hd].
        """
        return self.attend(self._rotated(qkv, batch, slots, caches), batch, table, caches)

    def attend(self, q: Tensor, batch: Batch, table: Tensor, caches: tuple[Tensor, Tensor]) -> Tensor:
        """Turned queries [T, nh, hd] -> [T, nh hd] over caches that hold the rows' own keys and values."""
        k_cache, v_cache = caches
        attention = ops.prefill_attention if batch.causal else ops.tree_attention
        return attention(
            q,
            k_cache,
            v_cache,
            table,
            batch.cu_query,
            batch.ctx_lens,
            batch.tree_len,
            batch.tree_mask,
            batch.positions,
            scale=self.scale,
            window=self.window,
            sinks=self.sinks,
            first=batch.first_key,
            kv_scales=self.kv_scales,
        )

    def _rotated(self, qkv: Tensor, batch: Batch, slots: Tensor, caches: tuple[Tensor, Tensor]) -> Tensor:
        """q [T, nh, hd], normed where heads are and rotated; K and V go into the caches."""
        rotation = batch.positions, self.rotary.cos, self.rotary.sin, *caches, slots, self.kv_scales
        if self.head_norms is None:
            return ops.rope_write_kv(qkv, *rotation)
        q_norm, k_norm = self.head_norms
        return ops.norm_rope_write_kv(qkv, q_norm.weight, k_norm.weight, q_norm.eps, *rotation)
