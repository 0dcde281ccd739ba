"""The router's choice: the k best experts of every row and their weights. Softmax in float32."""

from __future__ import annotations

import torch
from torch import Tensor


def moe_route(logits: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """logits [T,E] -> (ids [T,k] i32, best first, ties by lowest id; weights [T,k] f32).

    The weights are the softmax over the k chosen (`renormalise`) or over all E. NaN counts as -inf.
    """
    wide = logits.float()
    wide = torch.where(wide.isnan(), -torch.inf, wide)
    best, ids = wide.sort(dim=-1, descending=True, stable=True)
    best, ids = best[:, :k], ids[:, :k]
    mass = (best if renormalise else wide) - best[:, :1]
    weights = torch.exp(best - best[:, :1]) / torch.exp(mass).sum(-1, keepdim=True)
    return ids.int(), weights
