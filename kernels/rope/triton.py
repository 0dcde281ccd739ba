"""Rotary embedding of q and k, and the write of k and v into the paged cache, in one pass over the projection."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.kv_fp8 import UNSCALED, Scales, inverse
from specdec.kernels.triton_common import after_launches, early
from specdec.kernels.triton_e4m3 import handed, to_cache

_HEADS = 16  # heads a program takes


def rejects(
    qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, *_: Tensor, **__: object
) -> str | None:
    """Why this kernel cannot run the call, or None."""
    if not (qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous() and k_cache.is_contiguous() and v_cache.is_contiguous()):
        return "tensors must be dense"
    return "head size must be even" if k_cache.shape[3] % 2 else None


def rope_write_kv(
    qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, kv_scales: Scales = UNSCALED
) -> Tensor:
    """Shapes in `specdec.ops.rope_write_kv`."""
    tokens = qkv.shape[0]
    kv_heads, hd = k_cache.shape[2:]
    heads = qkv.shape[1] // hd
    q = qkv.new_empty(tokens, heads - 2 * kv_heads, hd)
    if tokens:
        grid = (tokens, triton.cdiv(heads, _HEADS))
        _rope[grid](
            qkv, positions, cos, sin, handed(k_cache), handed(v_cache), slots, q, inverse(kv_scales[0]), inverse(kv_scales[1]),
            HEADS=heads, KV=kv_heads, HALF=hd // 2, COLUMNS=triton.next_power_of_2(hd // 2), TILE=_HEADS, **early(qkv.device),
        )  # fmt: skip
    return q


@triton.jit
def _rope(
    qkv, positions, cos, sin, k_cache, v_cache, slots, q, k_inverse, v_inverse,
    HEADS: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, head tiles). Heads in the projection's order: q, k, v."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    mask = (head < HEADS) & (column < HALF)
    source = qkv + token * (HEADS * HALF * 2) + head * (HALF * 2) + column
    after_launches(EARLY)
    angle = tl.load(positions + token) * HALF + column
    slot = tl.load(slots + token)  # asked for with the rest: a load does not pass the stores
    first = tl.load(source, mask=mask)
    second = tl.load(source + HALF, mask=mask)
    c = tl.load(cos + angle, mask=column < HALF)
    s = tl.load(sin + angle, mask=column < HALF)
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    turned_first = (wide_first * c - wide_second * s).to(first.dtype)
    turned_second = (wide_second * c + wide_first * s).to(first.dtype)

    to_q = q + token * ((HEADS - 2 * KV) * HALF * 2) + head * (HALF * 2) + column
    is_q = mask & (head < HEADS - 2 * KV)
    tl.store(to_q, turned_first, mask=is_q)
    tl.store(to_q + HALF, turned_second, mask=is_q)

    cached = slot * (KV * HALF * 2) + column
    is_k = mask & (head >= HEADS - 2 * KV) & (head < tl.where(slot >= 0, HEADS - KV, 0))
    to_k = k_cache + cached + (head - (HEADS - 2 * KV)) * (HALF * 2)
    tl.store(to_k, to_cache(turned_first, k_inverse, k_cache.dtype.element_ty), mask=is_k)
    tl.store(to_k + HALF, to_cache(turned_second, k_inverse, k_cache.dtype.element_ty), mask=is_k)
    is_v = mask & (head >= HEADS - KV) & (head < tl.where(slot >= 0, HEADS, 0))
    to_v = v_cache + cached + (head - (HEADS - KV)) * (HALF * 2)
    tl.store(to_v, to_cache(first, v_inverse, v_cache.dtype.element_ty), mask=is_v)
    tl.store(to_v + HALF, to_cache(second, v_inverse, v_cache.dtype.element_ty), mask=is_v)
