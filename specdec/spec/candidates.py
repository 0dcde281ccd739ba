"""Candidates: which tokens a draft law proposes after each node, and how likely each is to be right.

Coupled (default verification): the target's next token is argmax(log p + g) with noise g that only depends on seed, position
and target token id. So the best guesses are the top tokens of log q + share · g with the *same* g, q being the draft's law under the
request's own processing; at temperature 0 there is no noise and they are the top tokens of q. The share would be 1 if q were
p. A trained head's q is flatter than p: part of it says what the target may draw, which the noise decides, and part what the
head cannot know of the target, where the noise would only lead astray (share · g ranks as g does against q sharpened to
q^(1/share)). Under verify="rejection" |
"block" they are drawn from q with noise of their own (purpose DRAFT), without replacement among siblings, and q is handed
over to verification.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from specdec import ops, rng
from specdec.config import SpecConfig
from specdec.rows import RowInfo
from specdec.sampling import SamplingState
from specdec.types import DraftTree

TINY = 1e-30  # least chance of what is possible at all: 0 is kept for what is not
FIELD = 256  # tokens of largest q that enter the noisy race; the rest are too unlikely to be worth their noise


def noise_coupled(config: SpecConfig) -> bool:
    """Whether drafts read the target's noise; the proofs of the other modes need draws of their own."""
    return config.verify not in ("rejection", "block")


class TipRows(RowInfo):
    """Nodes about to get children, a row each, before there is a tree: row r belongs to `request_slots[r]`.

    path [R, D] i64: the draft tokens from depth 1 down to the node, -1 = unknown or none. depth: of all rows, or [R] i64.
    """

    def __init__(self, request_slots: list[int], path: Tensor, depth: int | Tensor, device: torch.device):
        self.request_slots, self.device, self.root_only = request_slots, device, True
        self.counts, self.num_rows = [1] * len(request_slots), len(request_slots)
        self.path_tokens = path.to(device)
        self._depth = depth

    @cached_property
    def depth(self) -> Tensor:
        """[R] i64."""
        if isinstance(self._depth, Tensor):
            return self._depth
        return torch.full((self.num_rows,), self._depth, dtype=torch.int64, device=self.device)

    def select(self, index: Tensor) -> TipRows:
        """The rows `index` [r] i64 alone."""
        return TipRows([self.request_slots[i] for i in index.tolist()], self.path_tokens[index], self.depth[index], self.device)


@dataclass(frozen=True, slots=True)
class Race:
    """Turns draft logits into candidates for one step.

    target_ids: target id of each draft id [Vd] i64, None = the draft has the target's vocabulary. coupled, share: see the module.
    """

    sampling: SamplingState
    coupled: bool
    target_ids: Tensor | None = None
    share: float = 1.0

    def __call__(self, logits: Tensor, rows: TipRows, width: int) -> tuple[Tensor, Tensor]:
        """(target ids [R, width] i64, chances [R, width] f32) of logits [R, Vd] f32, best first, distinct within a row.

        The chance is what the draft believes; 0 marks a token that cannot be right. Where a request works on token ids (bias,
        penalties, …) its rows are processed in the target's vocabulary; other rows never are.
        """
        by_id = None if self.target_ids is None else rows.of(self.sampling.working_by_id())
        if self.target_ids is None or isinstance(by_id, slice):
            return self.pick(self.law(logits, rows), rows, width)
        ids, chances = self._narrow(logits, rows, width)
        if by_id is not None:
            own = rows.select(by_id)
            wide_ids, wide_chances = self.pick(self.law(logits[by_id], own), own, width)
            ids, chances = ids.index_copy(0, by_id, wide_ids), chances.index_copy(0, by_id, wide_chances)
        return ids, chances

    def law(self, logits: Tensor, rows: TipRows) -> Tensor:
        """log q [R, V] f32 over the target's vocabulary, after the request's processing; -inf outside the draft's.

        A row has no mass where the request allows nothing, or nothing that the draft knows.
        """
        if self.target_ids is not None:
            wide = logits.new_full((logits.shape[0], self.sampling.vocab_size), -torch.inf)
            logits = wide.index_copy_(1, self.target_ids, logits)
        law = torch.log_softmax(self.sampling.process(logits, rows), dim=-1)
        if self.target_ids is None and self.sampling.working_by_id().isdisjoint(rows.request_slots):
            return law
        return torch.where(law.isnan(), -torch.inf, law)

    def pick(self, log_q: Tensor, rows: TipRows, width: int) -> tuple[Tensor, Tensor]:
        """(ids, chances) from log q [R, V] over the target's vocabulary; a row without mass has no possible candidate."""
        if not self.sampling.samples(rows.request_slots):
            ids, chances = _top(log_q, width)
        elif self.coupled:
            ids, chances = self._noisy(log_q, None, rows, width)
        else:
            every = torch.arange(log_q.shape[-1], device=log_q.device).expand_as(log_q).contiguous()
            seeds, positions, choices, noisy = self.sampling.noise(rows)
            purpose = rng.draft_purpose(int(rows.depth[0]) + 1)  # drawn one depth at a time
            noise = ops.gumbel_noise(seeds, positions - rows.depth, choices, every, purpose)
            ids, chances = _drawn(log_q + torch.where(noisy[:, None], noise, 0.0), width)
        return ids, chances.nan_to_num_(0.0)

    def _narrow(self, logits: Tensor, rows: TipRows, width: int) -> tuple[Tensor, Tensor]:
        """Candidates in the draft's own vocabulary: temperature and truncation do not need to know ids."""
        assert self.target_ids is not None
        if self.sampling.samples(rows.request_slots):
            return self._noisy(self.sampling.truncate(logits, rows), self.target_ids, rows, width)
        ids, chances = _top(logits, width)
        return self.target_ids[ids], chances

    def _noisy(self, scores: Tensor, target_ids: Tensor | None, rows: TipRows, width: int) -> tuple[Tensor, Tensor]:
        """The race with the target's noise among the likeliest tokens. scores [R, V']: log q up to a constant per row."""
        field = scores.topk(max(width, min(FIELD, scores.shape[-1])), dim=-1)
        ids = field.indices if target_ids is None else target_ids[field.indices]
        seeds, positions, choices, noisy = self.sampling.noise(rows)
        noise = ops.gumbel_noise(seeds, positions, choices, ids, rng.TARGET)
        winners, chances = _top(field.values + torch.where(noisy[:, None], self.share * noise, 0.0), width)
        return ids.gather(1, winners), chances


def _top(scores: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Columns and softmax shares, each [R, width], of the best of scores [R, W]. Shares that float32 cannot hold are 0."""
    top = torch.softmax(scores, dim=-1).topk(width, dim=-1)
    return top.indices, top.values


def _drawn(race: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """As `_top`; a share is 0 only where the race is -inf, so that which children there are does not depend on the draws."""
    top = race.topk(width, dim=-1)
    shares = (top.values - race.logsumexp(dim=-1, keepdim=True)).exp().clamp(min=TINY)
    return top.indices, shares.masked_fill(torch.isneginf(top.values), 0.0)


def drawn_tree(tree: DraftTree, laws: dict[tuple[int, int], Tensor], device: torch.device) -> DraftTree:
    """`tree` with the laws its children were drawn from, by (tree, node); nodes without one get no mass: point masses."""
    if not laws:
        return tree
    vocab = next(iter(laws.values())).shape[-1]
    log_q = torch.full((*tree.tokens.shape, vocab), -torch.inf, device=device)
    for (b, node), law in laws.items():
        log_q[b, node] = law
    return DraftTree(tree.tokens, tree.parents, tree.depth, tree.num_nodes, tree.score, log_q, tree.drafters)


def spine_first(parents: Seq[int], nodes: int) -> list[int]:
    """Order of a tree of fixed shape, cut to `nodes`: the chain of first children, then the others as they are numbered.

    Nothing in it depends on the drawn tokens, as rejection verification demands. parents: of every node, the root's is -1.
    """
    first = {p: i for i, p in reversed(list(enumerate(parents)))}
    chain, node = [0], 0
    while node in first:
        node = first[node]
        chain.append(node)
    inside = set(chain)
    return (chain + [i for i in range(len(parents)) if i not in inside])[:nodes]
