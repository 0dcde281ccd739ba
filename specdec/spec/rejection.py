"""Rejection and block verification: exact in distribution, for drafts that were drawn from a known law.

Letters: p(.) the target's law after a node, q(.) the law its children were drawn from, both after all processing, c a child.
All in log space and float64; a law [B, V] is normalised, -inf where impossible.

**One child** (Leviathan et al. 2211.17192, Chen et al. 2302.01318). Accept c with probability min(1, p(c) / q(c)), otherwise go
on with the residual p' = norm(max(p - q, 0)). Emitted mass of x: accepted q(x) min(1, p(x)/q(x)) = min(p, q)(x), and rejected
(1 - sum min(p, q)) p'(x) = p(x) - min(p, q)(x), since sum max(p - q, 0) = 1 - sum min(p, q). Together p(x).

**More children**, in draw order, each tested against the residual that the ones before it left: the identity above, with the
residual as target, says that what is emitted from the second child on has the law p'; so the node emits p, whatever the number
of children, provided that c_j, given its rejected elder siblings, has the law it is tested against. Draws without replacement
have the law q with the elder siblings removed; draws with replacement have q each time. Induction over depth: an accepted child
is a node whose own children were drawn independently of everything tested so far. This is why the shape of the tree must be fixed
before any token is drawn, why children must not be sorted or pruned after drawing, and why an invalid child (p = 0) must go
through the test and leave its residual instead of being dropped.

**Point masses** (deterministic drafts, `log_q` absent or without mass): q is one at the child itself. Then the test accepts with
p'(c), and the residual is p' without c.

**Block** (Sun et al. 2403.10444), chains of K drafts d_1..d_K: with M_0 = 1, M_i = min(1, M_{i-1} p_i(d_i) / q_i(d_i)) and
R_i = sum_x max(M_i p_{i+1}(x) - q_{i+1}(x), 0), keep the longest i whose coin is below h_i = R_i / (R_i + 1 - M_i), h_K = M_K; the
next token has the law norm(max(M_i p_{i+1} - q_{i+1}, 0)), p_{K+1} after all K. Every coin of the chain is read, also those
beyond the cut, so coins *and drafts* must be fresh in every step (`rng`: keyed by the length at the start of the step).

Coins, residual draws and drafts use three different purposes of the noise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec import ops, rng
from specdec.errors import ConfigError
from specdec.rows import RowInfo
from specdec.sampling import SamplingState

Law = Callable[[Tensor], Tensor]
"""Node of each sequence [B] i64 -> log law after it (target) or of its children (draft), [B, V] f64."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """accepted [B, N] bool, root included; law [B, V] f64 of the next token; rates [B, N] f64: the probability with which a
    node was accepted when its coin was read, NaN where it was not."""

    accepted: Tensor
    law: Tensor
    rates: Tensor


# -- the three formulas -----------------------------------------------------------------------------------------------------


def accept_rate(log_p: Tensor, log_q: Tensor, token: Tensor) -> Tensor:
    """min(1, p/q) at token [B] -> [B]; 0 where q is 0: a token that could not be drawn is rejected."""
    p, q = log_p.gather(1, token[:, None])[:, 0], log_q.gather(1, token[:, None])[:, 0]
    ratio = (p - q).clamp(max=0.0).exp()
    return torch.where(torch.isneginf(q) | torch.isneginf(p), 0.0, ratio)


def residual(log_p: Tensor, log_q: Tensor) -> Tensor:
    """log norm(max(p - q, 0)) [B, V]; p may carry a weight ≤ 1. Where nothing is left (p = q numerically) it is norm(p)."""
    # log(p - q) = log p + log(1 - q/p) keeps the small differences that p - q would lose
    less = log_q < log_p
    rest = torch.where(less, log_p + torch.log1p(-torch.where(less, log_q - log_p, -torch.inf).exp()), -torch.inf)
    empty = torch.isneginf(rest).all(dim=-1, keepdim=True)
    return torch.where(empty, log_p, rest).log_softmax(dim=-1)


def without(log_q: Tensor, token: Tensor) -> Tensor:
    """log q with token [B] removed and renormalised; stays without mass when it had no other."""
    rest = log_q.scatter(1, token[:, None], -torch.inf)
    mass = rest.logsumexp(dim=-1, keepdim=True)
    return torch.where(torch.isneginf(mass), rest, rest - mass)


def point_mass(token: Tensor, like: Tensor) -> Tensor:
    """The log law that is one at token [B], shaped like `like` [B, V]."""
    return torch.full_like(like, -torch.inf).scatter(1, token[:, None], 0.0)


# -- walks over given coins: pure, so that their emitted law can be enumerated --------------------------------------------------


def walk_tree(
    tokens: Tensor, parents: Tensor, num_nodes: Tensor, target: Law, draft: Law | None, coins: Tensor, *, replacement: bool = False
) -> Outcome:
    """Sequential accept/residual over trees. tokens, parents [B, N] i64, num_nodes [B] i64, coins [B, N] in (0, 1); float32
    coins change a rate by less than one part in 2**24.

    Nodes are visited by number: a node's children come after it and in draw order, and a node is tested iff its parent is the
    last accepted one. draft None = point masses.
    """
    count, width = tokens.shape
    current = torch.zeros(count, dtype=torch.int64, device=tokens.device)
    accepted = torch.zeros((count, width), dtype=torch.bool, device=tokens.device)
    accepted[:, 0] = True
    rates = torch.full((count, width), torch.nan, dtype=torch.float64, device=tokens.device)
    log_p = target(current)
    log_q, point = _draft_law(draft, current, log_p)
    for i in range(1, width):
        tested = (parents[:, i] == current) & (i < num_nodes)
        if not bool(tested.any()):  # one look from the host saves a pass over the vocabulary
            continue
        child = tokens[:, i]
        law = torch.where(point, point_mass(child, log_p), log_q)
        rate = accept_rate(log_p, law, child)
        taken = tested & (coins[:, i] < rate)
        rates[:, i] = torch.where(tested, rate, torch.nan)
        accepted[:, i] = taken
        failed = (tested & ~taken)[:, None]
        current = torch.where(taken, i, current)
        log_p = torch.where(taken[:, None], target(current), torch.where(failed, residual(log_p, law), log_p))
        if not replacement:
            log_q = torch.where(failed, without(log_q, child), log_q)
        fresh_q, fresh_point = _draft_law(draft, current, log_p)
        log_q, point = torch.where(taken[:, None], fresh_q, log_q), torch.where(taken[:, None], fresh_point, point)
    return Outcome(accepted, log_p, rates)


def walk_block(tokens: Tensor, num_nodes: Tensor, target: Law, draft: Law | None, coins: Tensor) -> Outcome:
    """Block verification of chains: node i follows node i - 1. Arguments as for `walk_tree`."""
    count, width = tokens.shape
    node = torch.zeros(count, dtype=torch.int64, device=tokens.device)
    kept, rates = node.clone(), torch.full((count, width), torch.nan, dtype=torch.float64, device=tokens.device)
    weight = torch.zeros(count, dtype=torch.float64, device=tokens.device)  # log M_i
    kept_weight, log_p = weight.clone(), target(node)
    law = _chain_law(draft, node, tokens, log_p)
    for i in range(1, width):
        valid, last = num_nodes > i, num_nodes == i + 1
        child = tokens[:, i : i + 1]
        p, q = log_p.gather(1, child)[:, 0], law.gather(1, child)[:, 0]
        weight = torch.where(torch.isneginf(q), -torch.inf, (weight + p - q).clamp(max=0.0))
        node = torch.where(valid, i, node)
        log_p = target(node)
        law = _chain_law(draft, node, tokens, log_p)
        rate = torch.where(last, weight.exp(), _block_rate(weight, log_p, law))
        rates[:, i] = torch.where(valid, rate, torch.nan)
        passed = valid & (coins[:, i] < rate)
        kept, kept_weight = torch.where(passed, i, kept), torch.where(passed, weight, kept_weight)
    log_p = target(kept)
    rest = residual(log_p + kept_weight[:, None], _chain_law(draft, kept, tokens, log_p))
    law = torch.where((kept == num_nodes - 1)[:, None], log_p, rest)
    return Outcome(torch.arange(width, device=tokens.device) <= kept[:, None], law, rates)


def _block_rate(weight: Tensor, log_p: Tensor, log_q: Tensor) -> Tensor:
    """R / (R + 1 - M). R = 0 with M = 1 means p = q: then a later draft is accepted for certain, and any value will do: 1."""
    excess = ((log_p + weight[:, None]).exp() - log_q.exp()).clamp(min=0.0).sum(dim=-1)
    total = excess + 1.0 - weight.exp()
    return torch.where(total > 0, excess / total, 1.0)


def _draft_law(draft: Law | None, node: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Law of the children of node [B], and whether they are point masses [B, 1]: a law without mass cannot have been drawn from."""
    law = torch.full_like(like, -torch.inf) if draft is None else draft(node)
    return law, torch.isneginf(law).all(dim=-1, keepdim=True)


def _chain_law(draft: Law | None, node: Tensor, tokens: Tensor, like: Tensor) -> Tensor:
    """The law the only child of node [B] was drawn from; for the last node of a chain it is not used."""
    law, point = _draft_law(draft, node, like)
    child = tokens.gather(1, (node + 1).clamp(max=tokens.shape[1] - 1)[:, None])[:, 0]
    return torch.where(point, point_mass(child, like), law)


# -- verification modes ---------------------------------------------------------------------------------------------------------


def rejection(scores: Tensor, rows: RowInfo, sampling: SamplingState) -> tuple[Tensor, Tensor]:
    """Accepted rows [R] bool (roots included) and the next token [B] i64. scores [R, V] f32."""
    tokens, parents, counts, target, draft, coins = _inputs(scores, rows, sampling)
    return _finish(walk_tree(tokens, parents, counts, target, draft, coins), rows, sampling)


def block(scores: Tensor, rows: RowInfo, sampling: SamplingState) -> tuple[Tensor, Tensor]:
    """As `rejection`, for chains; ConfigError for wider trees."""
    tokens, parents, counts, target, draft, coins = _inputs(scores, rows, sampling)
    column = torch.arange(tokens.shape[1], device=tokens.device)
    if bool(((parents != column - 1) & (column < counts[:, None])).any()):
        raise ConfigError("verify='block' works on chains; use a drafter with width=1, or verify='rejection'", param="verify")
    return _finish(walk_block(tokens, counts, target, draft, coins), rows, sampling)


def _inputs(scores: Tensor, rows: RowInfo, sampling: SamplingState) -> tuple[Tensor, Tensor, Tensor, Law, Law | None, Tensor]:
    tree, device = rows.tree, rows.device
    tokens, parents, counts = tree.tokens.to(device), tree.parents.to(device), tree.num_nodes.to(device)
    log_q = None if tree.log_q is None else tree.log_q.to(device)
    each = torch.arange(len(rows.counts), device=device)
    noisy = sampling.noisy[rows.slots][:, None]

    def target(node: Tensor) -> Tensor:
        own = scores[rows.starts + node].double()
        return torch.where(noisy, own.log_softmax(dim=-1), point_mass(own.argmax(dim=-1), own))

    def draft(node: Tensor) -> Tensor:
        assert log_q is not None
        return log_q[each, node].double()

    slots = rows.slots
    nodes = torch.arange(tokens.shape[1], device=device).expand_as(tokens).contiguous()
    coins = ops.philox_uniform(sampling.seed[slots], sampling.length[slots], sampling.choice[slots], nodes, rng.ACCEPT)
    return tokens, parents, counts, target, None if log_q is None else draft, coins


def _finish(outcome: Outcome, rows: RowInfo, sampling: SamplingState) -> tuple[Tensor, Tensor]:
    slots = rows.slots
    noisy = torch.ones_like(slots, dtype=torch.bool)  # at temperature 0 the law is one token: noise changes nothing
    final = ops.gumbel_argmax(
        outcome.law.float(), sampling.seed[slots], sampling.length[slots], sampling.choice[slots], noisy, rng.RESIDUAL
    )
    return outcome.accepted[rows.seq, rows.node], final
