"""A draft head's pass over pairs: the network's own ops, one after the other. Any device, dtype and weight format."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from specdec.layers.attention import KVStore
    from specdec.models.draft_heads import DraftHead
    from specdec.types import Batch


def draft_pass(features: Tensor, head: DraftHead, batch: Batch, kv: KVStore) -> tuple[Tensor, Tensor]:
    """Shapes and meaning in `specdec.ops.draft_pass`."""
    mixed, residual = attended(features, head, batch, kv)
    x, residual = head.wide.post_norm.add(head.wide.attention.out(mixed), residual)
    branch = head.wide.mlp(x)
    if head.stack is not None:
        return deeper(branch + residual, head, batch, kv)
    hidden, residual = head.norm.add(branch, residual)
    return hidden, hidden if head.config.norm_output else residual


def attended(features: Tensor, head: DraftHead, batch: Batch, kv: KVStore) -> tuple[Tensor, Tensor]:
    """The first layer's attention before its output layer [T, nh hd], and the stream [T, Hd] that its output is added to."""
    tokens = head.wide.input_norm(head.embedding(batch.input_ids).to(head.dtype))
    normed = head.feature_norm(features)
    table, slots = batch.block_tables[kv.group_of(0)], batch.slot_mapping[kv.group_of(0)]
    projected = head.wide.attention.qkv(torch.cat((tokens, normed), dim=1))
    mixed = head.wide.attention.mix(projected, batch, table, slots, kv.layer(0))
    return mixed, normed if head.config.norm_before_residual else features


def deeper(x: Tensor, head: DraftHead, batch: Batch, kv: KVStore) -> tuple[Tensor, Tensor]:
    """The layers behind the first, of a head that has some: x [T, Hd] as `draft_pass` returns."""
    assert head.stack is not None
    hidden, tapped = head.stack(x, batch, _Deeper(kv), (len(head.stack.layers),))
    assert tapped is not None  # asked for
    return hidden, hidden if head.config.norm_output else tapped


class _Deeper:
    """The KV of the layers after the first, counted from 0."""

    def __init__(self, kv: KVStore):
        self._kv = kv

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self._kv.layer(index + 1)

    def group_of(self, index: int) -> int:
        return self._kv.group_of(index + 1)
