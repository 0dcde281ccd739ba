"""Norms of the query and key heads, RoPE, and the write of K and V, in one op (Qwen3: reference §7.2)."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.kernels.kv_fp8 import UNSCALED, Scales, scaled
from specdec.kernels.rms_norm.reference import rms_norm
from specdec.kernels.rope.reference import rope_write_kv


def norm_rope_write_kv(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    kv_scales: Scales = UNSCALED,
    *,
    norm: Callable[..., Tensor] = rms_norm,
    write: Callable[..., Tensor] = rope_write_kv,
) -> Tensor:
    """`rope_write_kv` of qkv [T,(nh+2*nkv)*hd] with every q head normed by q_weight [hd], every k head by k_weight [hd] -> q [T,nh,hd].

    norm, write: what does the two halves; the compiled ones do where this is the CPU's backend.
    """
    nkv, hd = k_cache.shape[-2:]
    heads = qkv.view(qkv.shape[0], qkv.shape[1] // hd, hd)
    q, k, v = heads.split((heads.shape[1] - 2 * nkv, nkv, nkv), dim=1)
    normed = (norm(part.reshape(-1, hd), weight, eps).view(part.shape) for part, weight in ((q, q_weight), (k, k_weight)))
    joined = torch.cat((*normed, v), dim=1).flatten(1)
    return write(joined, positions, cos, sin, k_cache, v_cache, slots, **scaled(k_cache, kv_scales))
