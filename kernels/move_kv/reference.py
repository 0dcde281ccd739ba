"""Compaction of accepted tree nodes: copies KV slots, in every layer."""

from __future__ import annotations

from torch import Tensor

from specdec.kernels.kv_fp8 import raw


def move_kv(k_caches: list[Tensor], v_caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """caches [NB,bs,nkv,hd] per layer; src, dst [n] i64 flat slots: slot dst[i] gets what slot src[i] held before the call.

    Everything is read before anything is written, so chains of overlapping moves are safe. dst entries are distinct.
    """
    if src.numel() == 0:
        return
    for cache in (*k_caches, *v_caches):
        flat = raw(cache).view(-1, *cache.shape[-2:])
        flat.index_copy_(0, dst, flat.index_select(0, src))
