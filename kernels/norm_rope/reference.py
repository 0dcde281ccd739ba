"""Norms of the query and key heads, RoPE, and the write of K and V, in one op (Qwen3: reference §7.2)."""

from __future__ import annotations

import torch
from torch import Tensor

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
) -> Tensor:
    """`rope_write_kv` of qkv [T,(nh+2*nkv)*hd] with every q head normed by q_weight [hd], every k head by k_weight [hd] -> q [T,nh,hd]."""
    nkv, hd = k_cache.shape[-2:]
    heads = qkv.view(qkv.shape[0], qkv.shape[1] // hd, hd)
    q, k, v = heads.split((heads.shape[1] - 2 * nkv, nkv, nkv), dim=1)
    normed = torch.cat((rms_norm(q, q_weight, eps), rms_norm(k, k_weight, eps), v), dim=1)
    return rope_write_kv(normed.flatten(1), positions, cos, sin, k_cache, v_cache, slots)
