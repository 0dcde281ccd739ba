"""Tree attention with library matrix products: faster than the reference, but bits may change with the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.kv_fp8 import UNSCALED, Scales, gather


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_query: Tensor,
    ctx_lens: Tensor,
    tree_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    first: Tensor | None = None,
    kv_scales: Scales = UNSCALED,
) -> Tensor:
    """Shapes in `specdec.ops.tree_attention`. One masked softmax per sequence over its keys in slot order."""
    out = torch.zeros_like(q)
    starts, contexts, trees = cu_query.tolist(), ctx_lens.tolist(), tree_len.tolist()
    begins = [0] * len(contexts) if first is None else first.tolist()
    for b, ctx in enumerate(contexts):
        rows = slice(starts[b], starts[b + 1])
        n = rows.stop - rows.start
        if n:
            total = ctx + (trees[b] or n)
            place = torch.arange(total, device=q.device)
            block = k_cache.shape[1]
            slots = block_table[b].long()[place // block] * block + place % block
            keys, values = (gather(c.view(-1, *c.shape[-2:]), slots) for c in (k_cache, v_cache))
            seen = _visible(positions[rows], tree_mask[rows], place, ctx, trees[b] > 0, window, begins[b])
            out[rows] = (_attend(q[rows], keys, values, seen, scale * kv_scales[0], sinks) * kv_scales[1]).to(q.dtype)
    return out.flatten(1)


def _visible(positions: Tensor, words: Tensor, place: Tensor, ctx: int, tree: bool, window: int | None, begin: int) -> Tensor:
    """[n, total] bool: which slot positions each row sees."""
    if tree:
        ancestor = (words.unsqueeze(1) >> (place[ctx:] - ctx)) & 1 == 1
        seen = torch.cat((ancestor.new_ones(len(positions), ctx), ancestor), dim=1)
        logical = torch.cat((place[:ctx].expand(len(positions), -1), ctx + ancestor.cumsum(1) - 1), dim=1)
    else:
        seen, logical = place <= positions.unsqueeze(1), place
    seen = seen & (logical >= begin)
    return seen if window is None else seen & (positions.unsqueeze(1) - logical < window)


def _attend(q: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float, sinks: Tensor | None) -> Tensor:
    """q [n,nh,hd], keys and values [L,nkv,hd] f32, seen [n,L] -> [n,nh,hd] f32."""
    n, heads, hd = q.shape
    nkv = keys.shape[1]
    grouped = q.float().view(n, nkv, heads // nkv, hd)
    scores = torch.einsum("nkgd,lkd->nkgl", grouped, keys).reshape(n, heads, -1) * scale
    scores = scores.masked_fill(~seen.unsqueeze(1), -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().view(1, heads, 1).expand(n, heads, 1)), dim=-1)
    p = torch.softmax(scores, dim=-1)[..., : keys.shape[0]].reshape(n, nkv, heads // nkv, -1)
    return torch.einsum("nkgl,lkd->nkgd", p, values).reshape(n, heads, hd)
