"""Which rollouts of a parallel draft are trained: conditional drop (COD), nested, so a kept mask row has all shallower ones."""

from __future__ import annotations

import torch
from torch import Tensor


def sample_depths(mask: Tensor, depths: int, keep: float, floor: float, generator: torch.Generator) -> Tensor:
    """Draw the deepest mask row kept for every anchor: [B, L] i64, 0 = only its real row.

    mask [B, L] bool: labels that count, on the generator's device. Of the anchors kept at depth d - 1 (depth
    0: all whose own label counts) whose label at depth d counts, depth d keeps ⌊(n - d) · max(keep^d, floor)⌋, n the
    sequence's labels. depths: drafts, so mask rows have depths 1 … depths - 1.
    """
    batch, length = mask.shape
    chance = torch.rand(batch, length, generator=generator, device=mask.device)
    count = mask.sum(1)
    kept = torch.zeros(batch, length, dtype=torch.int64, device=mask.device)
    padded = torch.cat([mask, mask.new_zeros(batch, depths)], 1)
    alive = padded[:, 1 : 1 + length]
    for depth in range(1, depths):
        valid = padded[:, 1 + depth : 1 + depth + length]
        wanted = ((count - depth).clamp(min=0) * max(keep**depth, floor)).long()
        order = torch.where(alive & valid, chance, 2.0).argsort(1).argsort(1)  # rank of each anchor among the candidates
        alive = alive & valid & (order < wanted[:, None])
        kept[alive] = depth
    return kept


def arrange(kept: Tensor, depths: int) -> tuple[Tensor, list[int]]:
    """Anchors by depth of their rollout, deepest first: (place [B, n] i64, mask rows of each depth 1 … depths - 1)."""
    depth = torch.arange(1, depths, device=kept.device)
    counts: list[int] = (kept[..., None] >= depth).sum(1).amax(0).tolist()
    while counts and counts[-1] == 0:
        counts.pop()
    order = kept.argsort(dim=1, descending=True, stable=True)
    return order[:, : counts[0] if counts else 0], counts
