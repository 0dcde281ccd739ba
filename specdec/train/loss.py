"""What a head is taught: the target's law of each next token, at every depth of every chain.

Label j of a sequence is the law of the token at position j + 1, given by the target's hidden state at position j. It counts
when that token is the target's own (the answer, its end token included), and the law is the target's over its whole
vocabulary, restricted to the draft vocabulary and not renormalised: a position weighs as much as a draft of it could win.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec.train.attention import Rollouts
from specdec.train.capture import Capture
from specdec.train.data import TokenBatch

if TYPE_CHECKING:
    from specdec.train.model import TrainableHead

TRANSITION_STRIDE = 4  # a transition has few parameters; more rows teach it nothing new


@dataclass(frozen=True, slots=True)
class Labels:
    """The R labels of a batch. where [R] i64: flat places b·L + j. law [R, Vd]: the target's probabilities of the draft
    vocabulary. best [R] i64: the target's most likely token, of the whole vocabulary. rank [B·L] i64: label of a place, -1 = none."""

    where: Tensor
    law: Tensor
    best: Tensor
    rank: Tensor


@dataclass(frozen=True, slots=True)
class Entries:
    """E predictions to score. row: of the flat hidden states; label: of `Labels`; depth: 0 = first draft; place: anchor b·L + t."""

    row: Tensor  # [E] i64
    label: Tensor  # [E] i64
    depth: Tensor  # [E] i64
    place: Tensor  # [E] i64


def label_mask(batch: TokenBatch) -> Tensor:
    """[B, L] bool: label j counts, because the token at j + 1 exists and the target wrote it."""
    j = torch.arange(batch.tokens.shape[1], device=batch.tokens.device)
    return (j + 1 >= batch.prompt_len[:, None]) & (j + 1 < batch.lengths[:, None])


@torch.no_grad()
def make_labels(batch: TokenBatch, captured: Capture, lm_head: Tensor, *, rows: int = 8192) -> Labels:
    """lm_head [Vd, H] f32: the target's rows of the draft vocabulary. The law is kept in the captures' dtype."""
    mask = label_mask(batch).flatten()
    where = mask.nonzero().squeeze(1)
    rank = torch.where(mask, mask.cumsum(0) - 1, -1)
    hidden, log_z = captured.hidden.flatten(0, 1)[where], captured.log_z.flatten()[where]
    law = torch.empty(len(where), len(lm_head), dtype=hidden.dtype, device=hidden.device)
    for start in range(0, len(where), rows):
        logits = hidden[start : start + rows].float() @ lm_head.T
        law[start : start + rows] = (logits - log_z[start : start + rows, None]).exp()
    return Labels(where, law, captured.top.flatten()[where], rank)


def chain_entries(labels: Labels, length: int, steps: int) -> Entries:
    """Of an unrolled batch, hidden [steps, B, L, Hd] flat: step s of anchor t predicts label t + 1 + s."""
    step = torch.arange(steps, device=labels.where.device).repeat_interleave(len(labels.where))
    label = torch.arange(len(labels.where), device=labels.where.device).repeat(steps)
    place = labels.where[label] - 1 - step
    inside = labels.where[label] % length >= 1 + step  # the anchor lies in the same sequence
    step, label, place = step[inside], label[inside], place[inside]
    return Entries(step * len(labels.rank) + place, label, step, place)


def rollout_entries(labels: Labels, rollouts: Rollouts, kept: Tensor, length: int) -> Entries:
    """Of a parallel pass, hidden [B, L + Q, Hd] flat. kept [B, L]: depth of the deepest mask row of each anchor, 0 = none."""
    batch, deep = rollouts.anchor.shape
    b = torch.arange(batch, device=kept.device)[:, None]
    anchor = torch.cat([torch.arange(length, device=kept.device).expand(batch, -1), rollouts.anchor], 1)
    depth = torch.cat([rollouts.depth.new_zeros(length), rollouts.depth]).expand(batch, -1)
    place, row = b * length + anchor, b * (length + deep) + torch.arange(length + deep, device=kept.device)
    target = (anchor + 1 + depth).clamp(max=length - 1)
    label = labels.rank[b * length + target]
    use = (label >= 0) & (anchor + 1 + depth < length) & (kept[b, anchor] >= depth)
    return Entries(row[use], label[use], depth[use], place[use])


def _taught(logits: Tensor, law: Tensor, label: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """logits [e, Vd], law [R, Vd], label [e], scale [e, 1] -> (loss f32, argmax [e], the loss' gradient by the logits, their dtype)."""
    wide, p = logits.float(), law[label]
    log_z = wide.logsumexp(-1, keepdim=True)
    mass = p.sum(-1, keepdim=True, dtype=torch.float32)
    total = ((mass * log_z - (p * wide).sum(-1, keepdim=True)) * scale).sum()
    return total, wide.argmax(-1), (((wide - log_z).exp() * mass - p) * scale).to(logits.dtype)


@lru_cache(maxsize=1)
def _compiled() -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    """`_taught` in a few passes over the logits instead of a dozen, which are a third of a step on a card."""
    compiled: Callable[..., tuple[Tensor, Tensor, Tensor]] = torch.compile(_taught, dynamic=True)
    return compiled


class _SoftCrossEntropy(torch.autograd.Function):
    """Sum over entries of scale · (-Σ_v law(v) log q(v)), a few thousand entries at a time.

    The gradient is computed with the value, so the vocabulary-wide matrices never exist for all entries at once.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, law: Tensor, label: Tensor, scale: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        narrow = weight.to(hidden.dtype)
        taught = _compiled() if hidden.is_cuda else _taught
        d_hidden, d_weight = torch.empty_like(hidden), torch.zeros_like(weight)
        best = torch.empty_like(label)
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            loss, best[part], grad = taught(hidden[part] @ narrow.T, law, label[part], scale[part, None])
            total += loss
            d_hidden[part] = grad @ narrow
            if ctx.needs_input_grad[1]:
                d_weight += (grad.T @ hidden[part]).to(weight.dtype)
        ctx.save_for_backward(d_hidden, d_weight)
        ctx.mark_non_differentiable(best)
        return total, best

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_weight = ctx.saved_tensors
        return d_hidden * grads[0].to(d_hidden.dtype), d_weight * grads[0], None, None, None, None


def soft_cross_entropy(
    hidden: Tensor, weight: Tensor, law: Tensor, label: Tensor, scale: Tensor, *, rows: int = 8192
) -> tuple[Tensor, Tensor]:
    """hidden [E, Hd], weight [Vd, Hd] f32, law [R, Vd], label [E] i64, scale [E] f32 -> (loss f32, argmax draft ids [E] i64)."""
    loss, best = _SoftCrossEntropy.apply(hidden, weight, law, label, scale, rows)
    return loss, best


def token_before(entries: Entries, tokens: Tensor) -> Tensor:
    """[E] i64: of tokens [B, L], the one before the predicted one."""
    return tokens.flatten()[entries.place + 1 + entries.depth]


def transition_loss(
    head: TrainableHead, hidden: Tensor, entries: Entries, labels: Labels, tokens: Tensor, scale: Tensor, step: int
) -> Tensor:
    """Loss of mask rows whose states are corrected by the text's token before, on one row in TRANSITION_STRIDE.

    hidden [E, Hd] and scale [E] as for the loss of all entries. Only the correction learns: the head stays a head without.
    """
    some = (entries.depth > 0).nonzero().squeeze(1)[step % TRANSITION_STRIDE :: TRANSITION_STRIDE]
    corrected = head.follow(hidden[some].detach(), token_before(entries, tokens)[some])
    weight, scale = head.lm_head.weight.detach(), TRANSITION_STRIDE * scale[some]
    return soft_cross_entropy(corrected, weight, labels.law, entries.label[some], scale)[0]


def hits(entries: Entries, right: Tensor, places: int, depths: int) -> Tensor:
    """[4, depths] f64 counts: predictions, right ones, chains whole down to this depth, and those right all the way.

    right [E] bool. A chain is whole down to a depth when every prediction of its anchor down there was scored.
    """
    table = torch.zeros(2, depths, places, dtype=torch.bool, device=right.device)
    table[0, entries.depth, entries.place] = True
    table[1, entries.depth, entries.place] = right
    whole = table[0].cumprod(0)
    return torch.stack([table[0].sum(1), table[1].sum(1), whole.sum(1), (whole * table[1].cumprod(0)).sum(1)]).double()
