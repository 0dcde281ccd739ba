"""Truncation of a law: min_p, top_k, top_p, typical_p over rows of scores.

Each function takes scores [R, V] f32 (logits already divided by the temperature, -inf = impossible) with one parameter per
row, and returns scores with what is cut off at -inf. The law is the softmax of a row, renormalised after each cut.

A row's result depends on that row alone, bit for bit: sums run along the row in one order (`cumsum`, `log_softmax`), and
boundaries are values of the row, ties resolved towards the lowest id.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CANDIDATES = 512  # the mass of nearly every top_p lies in so many tokens; selecting them costs 1/20 of a full sort


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
    """Keep the fewest likeliest tokens whose mass reaches p; among equals the lowest ids. p [R] f32 in (0, 1].

    On the CPU the mass is first looked for among `_CANDIDATES` tokens; rows that need more are sorted whole. Both find the
    same boundary, because a prefix of the cumulative sum does not depend on what follows.
    """
    peak, where = scores.max(dim=-1, keepdim=True)
    log_mass = peak - scores.log_softmax(dim=-1).gather(-1, where)
    vocab = scores.shape[-1]
    width = vocab if scores.is_cuda else min(_CANDIDATES, vocab)
    bound, ties, found = _boundary(scores.topk(width, dim=-1).values, log_mass, p)
    if width < vocab and not bool(found.all()):
        rest = (~found).nonzero().squeeze(-1)
        ordered = scores[rest].sort(dim=-1, descending=True).values
        bound[rest], ties[rest], _ = _boundary(ordered, log_mass[rest], p[rest])
    equal = scores == bound
    kept = scores > bound
    return scores.masked_fill(~(kept | (equal & (equal.cumsum(dim=-1) <= ties))), -torch.inf)


def _boundary(ordered: Tensor, log_mass: Tensor, p: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Where the mass of descending scores [R, W] reaches p: its score [R, 1], how many equal to it stay [R, 1], reached [R]."""
    mass = (ordered - log_mass).double().exp().cumsum(dim=-1)
    short = mass < p.double()[:, None]
    last = short.sum(dim=-1, keepdim=True).clamp(max=ordered.shape[-1] - 1)
    bound = ordered.gather(-1, last)
    return bound, last + 1 - (ordered > bound).sum(dim=-1, keepdim=True), ~short[:, -1]


def typical_p(scores: Tensor, p: Tensor) -> Tensor:
    """Keep the tokens whose surprise is nearest to the entropy, until their mass reaches p. p [R] f32 in (0, 1].

    Locally typical sampling (Meister et al. 2022, arXiv 2202.00666); needs a full stable sort.
    """
    log_p = scores.log_softmax(dim=-1)
    probability = log_p.exp()
    surprise = torch.where(probability > 0, -log_p, 0.0)
    entropy = (probability * surprise).double().cumsum(dim=-1)[:, -1:].float()
    distance = torch.where(probability > 0, (surprise - entropy).abs(), torch.inf)
    order = distance.sort(dim=-1, stable=True).indices
    mass = probability.gather(-1, order).double().cumsum(dim=-1)
    last = (mass < p.double()[:, None]).sum(dim=-1, keepdim=True)
    inside = torch.arange(scores.shape[-1], device=scores.device) <= last
    return scores.masked_fill(~torch.zeros_like(inside).scatter(-1, order, inside), -torch.inf)
