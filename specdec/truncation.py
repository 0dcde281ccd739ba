"""Truncation of a law: min_p, top_k, top_p, typical_p over rows of scores.

Each function takes scores [R, V] f32 (logits already divided by the temperature, -inf = impossible) with one parameter per
row, and returns scores with what is cut off at -inf. The law is the softmax of a row, renormalised after each cut.

A row's result depends on that row alone, bit for bit: sums are exact or run along the row in one order (`log_softmax`,
`cumsum`), and ties at a boundary are resolved in a fixed way.
"""

from __future__ import annotations

import torch
from torch import Tensor

from specdec import ops


def min_p(scores: Tensor, p: Tensor) -> Tensor:
    """Keep tokens whose probability is at least p times that of the likeliest. p [R] f32 in (0, 1]; 0 keeps all."""
    bound = scores.max(dim=-1, keepdim=True).values + p.log()[:, None]
    return scores.masked_fill(scores < bound, -torch.inf)


def top_k(scores: Tensor, k: Tensor, largest: int) -> Tensor:
    """Keep the k likeliest tokens and all that tie with the last of them. k [R] i64 ≥ 1, `largest` = max(k) on the host."""
    width = min(largest, scores.shape[-1])
    values = scores.topk(width, dim=-1).values
    bound = values.gather(-1, (k.clamp(max=width) - 1)[:, None])
    return scores.masked_fill(scores < bound, -torch.inf)


def top_p(scores: Tensor, p: Tensor) -> Tensor:
    """Keep the fewest likeliest tokens whose mass reaches p; among equals the lowest ids. p [R] f32 in (0, 1]."""
    return _until_mass(scores, scores.log_softmax(dim=-1), scores, p)


def typical_p(scores: Tensor, p: Tensor) -> Tensor:
    """Keep the tokens whose surprise is nearest to the entropy, until their mass reaches p. p [R] f32 in (0, 1].

    Locally typical sampling (Meister et al. 2022, arXiv 2202.00666).
    """
    log_p = scores.log_softmax(dim=-1)
    terms = torch.where(torch.isneginf(log_p), 0.0, log_p.exp() * log_p)
    entropy = -terms.cumsum(dim=-1, dtype=torch.float64)[:, -1:].float()
    return _until_mass(scores, log_p, -(log_p + entropy).abs(), p)


def _until_mass(scores: Tensor, log_p: Tensor, rank: Tensor, p: Tensor) -> Tensor:
    """Keep tokens by falling rank [R, V], equals by rising id, until their mass reaches p [R]. log_p [R, V]: their log-probabilities."""
    return torch.where(ops.mass_cut(log_p, rank, p), scores, -torch.inf)
