"""Head norms, RoPE and the KV write in one pass over the projection: the norm of a head is a sum inside the tile that holds it.

Apart they are seven launches (two slices, two norms, a concatenation, RoPE) that move the projection five times; together one, that
reads it once and writes q, K and V once. 64 rows of Qwen3-32B (80 heads of 128) are 2.6 MB both ways, 0.6 µs at 4.2 TB/s: the launch is
what counts.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.kv_fp8 import UNSCALED, Scales, inverse
from specdec.kernels.triton_e4m3 import handed, to_cache

_HEADS = 16  # heads a program takes


def rejects(
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
) -> str | None:
    """Why this kernel cannot run the call, or None."""
    if not all(t.is_contiguous() for t in (qkv, q_weight, k_weight, cos, sin, k_cache, v_cache)):
        return "tensors must be dense"
    if q_weight.dtype is not qkv.dtype or k_weight.dtype is not qkv.dtype:
        return "weights must be of the projection's dtype"
    return "head size must be even" if k_cache.shape[3] % 2 else None


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
) -> Tensor:
    """Shapes in `specdec.ops.norm_rope_write_kv`."""
    tokens = qkv.shape[0]
    kv_heads, hd = k_cache.shape[2:]
    heads = qkv.shape[1] // hd
    q = qkv.new_empty(tokens, heads - 2 * kv_heads, hd)
    if tokens:
        grid = (tokens, triton.cdiv(heads, _HEADS))
        _norm_rope[grid](
            qkv, q_weight, k_weight, eps, positions, cos, sin, handed(k_cache), handed(v_cache), slots, q,
            inverse(kv_scales[0]), inverse(kv_scales[1]),
            HEADS=heads, KV=kv_heads, HALF=hd // 2, COLUMNS=triton.next_power_of_2(hd // 2), TILE=_HEADS,
        )  # fmt: skip
    return q


@triton.jit
def _norm_rope(
    qkv, q_weight, k_weight, eps, positions, cos, sin, k_cache, v_cache, slots, q, k_inverse, v_inverse,
    HEADS: tl.constexpr, KV: tl.constexpr, HALF: tl.constexpr, COLUMNS: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (tokens, head tiles). Heads in the projection's order: q, k, v. Rounds where norm and rotation apart round."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * TILE + tl.arange(0, TILE)[:, None]
    column = tl.arange(0, COLUMNS)[None, :]
    inside = column < HALF
    mask = (head < HEADS) & inside
    source = qkv + token * (HEADS * HALF * 2) + head * (HALF * 2) + column
    first = tl.load(source, mask=mask, other=0.0)
    second = tl.load(source + HALF, mask=mask, other=0.0)
    dtype = first.dtype

    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    squares = tl.sum(wide_first * wide_first + wide_second * wide_second, 1)
    scale = tl.rsqrt(squares / (2 * HALF) + eps)[:, None]
    is_query = head < HEADS - 2 * KV
    w_first = tl.where(is_query, tl.load(q_weight + column, mask=inside, other=0.0), tl.load(k_weight + column, mask=inside, other=0.0))
    other_half = column + HALF
    w_second = tl.where(
        is_query, tl.load(q_weight + other_half, mask=inside, other=0.0), tl.load(k_weight + other_half, mask=inside, other=0.0)
    )
    normed_first = ((wide_first * scale).to(dtype).to(tl.float32) * w_first.to(tl.float32)).to(dtype).to(tl.float32)
    normed_second = ((wide_second * scale).to(dtype).to(tl.float32) * w_second.to(tl.float32)).to(dtype).to(tl.float32)

    angle = tl.load(positions + token) * HALF + column
    c = tl.load(cos + angle, mask=inside, other=0.0)
    s = tl.load(sin + angle, mask=inside, other=0.0)
    turned_first = (normed_first * c - normed_second * s).to(dtype)
    turned_second = (normed_second * c + normed_first * s).to(dtype)
    to_q = q + token * ((HEADS - 2 * KV) * HALF * 2) + head * (HALF * 2) + column
    tl.store(to_q, turned_first, mask=mask & is_query)
    tl.store(to_q + HALF, turned_second, mask=mask & is_query)

    slot = tl.load(slots + token)
    cached = slot * (KV * HALF * 2) + column
    is_k = mask & (head >= HEADS - 2 * KV) & (head < tl.where(slot >= 0, HEADS - KV, 0))
    to_k = k_cache + cached + (head - (HEADS - 2 * KV)) * (HALF * 2)
    tl.store(to_k, to_cache(turned_first, k_inverse, k_cache.dtype.element_ty), mask=is_k)
    tl.store(to_k + HALF, to_cache(turned_second, k_inverse, k_cache.dtype.element_ty), mask=is_k)
    is_v = mask & (head >= HEADS - KV) & (head < tl.where(slot >= 0, HEADS, 0))
    to_v = v_cache + cached + (head - (HEADS - KV)) * (HALF * 2)
    tl.store(to_v, to_cache(first, v_inverse, v_cache.dtype.element_ty), mask=is_v)
    tl.store(to_v + HALF, to_cache(second, v_inverse, v_cache.dtype.element_ty), mask=is_v)
