"""Truncation of a law: min_p, top_k, top_p, typical_p over rows of scores.

Each function takes scores [R, V] f32 (logits already divided by the temperature, -inf = impossible) with one parameter per
row, and returns scores with what is cut off at -inf. The law is the softmax of a row, renormalised after each cut.

A row's result depends on that row alone, bit for bit: sums run along the row in one order (`cumsum`, `log_softmax`), and
ties at a boundary are resolved in a fixed way.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CANDIDATES = (512, 8192)  # selecting so many costs 1/20 and 1/4 of a full sort; the first holds the mass of nearly every top_p


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
    """Keep tokens by falling rank [R, V], equals by rising id, until their mass reaches p [R]. log_p [R, V]: their log-probabilities.

    On the CPU the mass is first looked for among few candidates, then, for the rows that need more, among many and among all.
    Every width finds the same set, because a prefix of a cumulative sum does not depend on what follows.
    """
    vocab = scores.shape[-1]
    widths = (vocab,) if scores.is_cuda else (*(w for w in _CANDIDATES if w < vocab), vocab)
    result, found = _among_first(widths[0], scores, log_p, rank, p)
    for width in widths[1:]:
        rest = (~found).nonzero().squeeze(-1)
        if not len(rest):
            break
        kept, found[rest] = _among_first(width, *(t.index_select(0, rest) for t in (scores, log_p, rank, p)))
        result.index_copy_(0, rest, kept)
    return result


def _among_first(width: int, scores: Tensor, log_p: Tensor, rank: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """The cut as it follows from the `width` best-ranked tokens, and whether it is final.

    It is not if their mass falls short, or if the last of them ties with the boundary: a lower id may be missing.
    """
    if width == scores.shape[-1]:
        rank, ids = rank.sort(dim=-1, descending=True, stable=True)
    else:
        rank, ids = rank.topk(width, dim=-1)
        ids, order = ids.sort(dim=-1)  # lowest id first, then stably by rank
        rank, order = rank.gather(-1, order).sort(dim=-1, descending=True, stable=True)
        ids = ids.gather(-1, order)
    short = log_p.gather(-1, ids).double().exp().cumsum(dim=-1) < p.double()[:, None]
    last = short.sum(dim=-1, keepdim=True).clamp(max=width - 1)
    inside = torch.arange(width, device=scores.device) <= last
    kept = torch.where(inside, scores.gather(-1, ids), -torch.inf)
    return torch.full_like(scores, -torch.inf).scatter(-1, ids, kept), rank.gather(-1, last)[:, 0] > rank[:, -1]
