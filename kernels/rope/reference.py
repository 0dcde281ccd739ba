"""Rotary embedding of q and k, and the write of k and v into the paged cache, in one op."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.kv_fp8 import UNSCALED, Scales, encode, raw


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [T,n,hd], cos and sin [T,hd/2] f32: element j of the first half pairs with element j of the second (half-split)."""
    first, second = x.float().chunk(2, dim=-1)
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def rope_write_kv(
    qkv: Tensor,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    kv_scales: Scales = UNSCALED,
) -> Tensor:
    """qkv [T,(nh+2*nkv)*hd], positions [T] i64, cos and sin [P,hd/2] f32, caches [NB,bs,nkv,hd], slots [T] i64 -> q [T,nh,hd].

    Writes rotated K and V at flat slot (block * bs + offset); slot -1 writes nothing. Valid slots are distinct. kv_scales: `kv_fp8`.
    """
    tokens = qkv.shape[0]
    nkv, hd = k_cache.shape[-2:]
    heads = qkv.view(tokens, qkv.shape[1] // hd, hd)
    q, k, v = heads.split((heads.shape[1] - 2 * nkv, nkv, nkv), dim=1)
    if tokens == 0:
        return q
    cos_rows, sin_rows = cos[positions], sin[positions]
    write_slots(encode(rotate(k, cos_rows, sin_rows), k_cache.dtype, kv_scales[0]), k_cache, slots)
    write_slots(encode(v, v_cache.dtype, kv_scales[1]), v_cache, slots)
    return rotate(q, cos_rows, sin_rows)


def write_slots(values: Tensor, cache: Tensor, slots: Tensor) -> None:
    """values [T,nkv,hd] of the cache's dtype -> cache[slots], skipping -1 without a host synchronisation.

    A skipped row repeats the write of the first valid row; with no valid row at all, it rewrites slot 0 with its own content.
    """
    flat, values = raw(cache).view(-1, *cache.shape[-2:]), raw(values)
    valid = slots >= 0
    first = valid.int().argmax()
    spare_slot = slots[first].clamp(min=0)
    spare_value = torch.where(valid.any(), values[first], flat[spare_slot])
    target = torch.where(valid, slots, spare_slot)
    flat.index_copy_(0, target, torch.where(valid.view(-1, 1, 1), values, spare_value))
