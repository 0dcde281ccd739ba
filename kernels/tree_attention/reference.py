"""Attention of a ragged batch over the paged cache, causal rows and tree rows alike.

Terms: a row's *logical* keys are numbered 0, 1, 2, …: committed positions, then (tree rows) the row's ancestors by depth,
itself last. The key of logical position p is in slot position p, or, for an ancestor node j, in slot position ctx + j; its
logical position is ctx + the number of ancestors before it, i.e. of lower bits set in the row's word. The rows of a tree need
not be all of its nodes: a draft head runs one depth at a time over what it wrote before.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.kernels.kv_fp8 import UNSCALED, Scales, gather

TILE = 64


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
    """Shapes in `specdec.ops.tree_attention`. Logical keys in fixed tiles of 64 from 0, merged in order.

    Only elementwise ops and halving sums, so that bits depend on nothing but the row's own keys.
    """
    out = q.new_zeros(q.shape[0], q.shape[1], q.shape[2])
    starts, trees = cu_query.tolist(), tree_len.tolist()
    for b in range(len(trees)):
        rows = slice(starts[b], starts[b + 1])
        if rows.start == rows.stop:
            continue
        place = _logical_slots(positions[rows], tree_mask[rows], int(ctx_lens[b]), trees[b])
        begin = 0 if first is None else int(first[b])
        block = k_cache.shape[1]
        slots = block_table[b].long()[place // block] * block + place % block
        mixed = _rows(q[rows], k_cache, v_cache, slots, positions[rows], scale * kv_scales[0], window, sinks, begin)
        out[rows] = (mixed * kv_scales[1]).to(q.dtype)
    return out.flatten(1)


def _logical_slots(positions: Tensor, words: Tensor, ctx: int, tree: int) -> Tensor:
    """Slot positions [n, L] of logical keys 0…L-1 per row, L a multiple of TILE; entries beyond the row's own are 0."""
    length = -(-(int(positions.max()) + 1) // TILE) * TILE
    column = torch.arange(length + 1, device=positions.device)  # one spare column takes what is not an ancestor
    place = column.repeat(positions.numel(), 1)
    if tree:
        nodes = column.new_tensor(range(tree))
        ancestor = (words.unsqueeze(1) >> nodes) & 1 == 1
        logical = ctx + ancestor.cumsum(1) - 1
        place.scatter_(1, torch.where(ancestor, logical, length), (ctx + nodes).expand_as(ancestor))
    return torch.where(column <= positions.unsqueeze(1), place, 0)[:, :length]


def halving_sum(x: Tensor, dim: int) -> Tensor:
    """Sum over `dim` by adding halves: one fixed order on every device. The size is padded with zeros to a power of two."""
    size = 1 << max(x.shape[dim] - 1, 0).bit_length()
    if size != x.shape[dim]:
        x = torch.cat((x, x.new_zeros(*x.shape[:dim], size - x.shape[dim], *x.shape[dim + 1 :])), dim)
    while size > 1:
        size //= 2
        x = x.narrow(dim, 0, size) + x.narrow(dim, size, size)
    return x.squeeze(dim)


def _rows(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    positions: Tensor,
    scale: float,
    window: int | None,
    sinks: Tensor | None,
    begin: int,
) -> Tensor:
    """q [n,nh,hd], slots [n,L] -> [n,nh,hd] f32: online softmax over the tiles."""
    n, heads, hd = q.shape
    group = heads // k_cache.shape[2]
    keys, values = (c.view(-1, *c.shape[-2:]) for c in (k_cache, v_cache))
    wide = q.float() * scale
    top = q.new_full((n, heads), -torch.inf, dtype=torch.float32) if sinks is None else sinks.float().expand(n, heads)
    norm = torch.zeros_like(top) if sinks is None else torch.ones_like(top)
    acc = q.new_zeros((n, heads, hd), dtype=torch.float32)
    for start in range(0, slots.shape[1], TILE):
        index = torch.arange(start, start + TILE, device=q.device)
        seen = (index <= positions.unsqueeze(1)) & (index >= begin)
        if window is not None:
            seen &= positions.unsqueeze(1) - index < window
        tile = slots[:, start : start + TILE]
        k, v = (gather(c, tile).repeat_interleave(group, dim=2) for c in (keys, values))  # [n, TILE, nh, hd]
        scores = halving_sum(wide.unsqueeze(1) * k, 3).masked_fill(~seen.unsqueeze(2), -torch.inf)  # [n, TILE, nh]
        new_top = torch.maximum(top, scores.amax(1))
        base = torch.where(new_top == -torch.inf, 0.0, new_top)  # a tile before the first visible key changes nothing
        p, shrink = torch.exp(scores - base.unsqueeze(1)), torch.exp(top - base)
        norm = norm * shrink + halving_sum(p, 1)
        v = torch.where(seen[:, :, None, None], v, 0.0)  # unseen slots may hold anything, NaN included
        acc = acc * shrink.unsqueeze(2) + halving_sum(p.unsqueeze(3) * v, 1)
        top = new_top
    return acc / norm.unsqueeze(2)
