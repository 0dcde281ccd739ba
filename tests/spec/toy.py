"""A toy target for verification tests: a fixed function from token history to logits, and steps without an engine."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from specdec.config import SamplingParams
from specdec.sampling import SamplingState
from specdec.sequence import Sequence
from specdec.spec.tree import HostTree, tree_from_lists
from specdec.spec.verify import Verifier
from specdec.types import NOTHING_ALLOWED, Scheduled, Verdict
from tests.spec.trees import path_to

Drafter = Callable[[Sequence], HostTree]


def toy_logits(history: list[int], vocab: int, *, sharpness: float = 1.5) -> Tensor:
    """Logits [V] after `history`: pseudo-random in its last three tokens, on a coarse grid so that ties happen."""
    key = 0
    for token in history[-3:]:
        key = (key * 1_000_003 + token + 17) % (2**31)
    gen = torch.Generator().manual_seed(key)
    return (torch.randn(vocab, generator=gen) * sharpness * 8).round() / 8


def new_sequence(slot: int, prompt: list[int], params: SamplingParams, *, seed: int = 1, choice: int = 0) -> Sequence:
    max_total = len(prompt) + (params.max_tokens or 1000)
    ends = frozenset(params.stop_token_ids or ())
    return Sequence("r", list(prompt), len(prompt), params, seed, max_total, choice=choice, end_ids=ends, request_slot=slot)


def root_drafts(seq: Sequence) -> HostTree:
    return [seq.tokens[-1]], [-1], None


def toy_step(
    verifier: Verifier,
    sampling: SamplingState,
    seqs: list[Sequence],
    drafts: list[HostTree],
    *,
    logits_of: Callable[[list[int]], Tensor] | None = None,
    token_mask: Tensor | None = None,
) -> Verdict:
    """Target rows of every node, one verification, commit."""
    vocab = sampling.vocab_size
    logits_of = logits_of or (lambda history: toy_logits(history, vocab))
    rows = []
    for seq, (tokens, parents, _) in zip(seqs, drafts, strict=True):
        for node in range(len(tokens)):
            rows.append(logits_of(seq.tokens + [tokens[i] for i in path_to(list(parents), node)[1:]]))
    logits = torch.stack(rows)
    before = logits.clone()
    shares = tuple(Scheduled(seq, 1, True) for seq in seqs)
    verdict = verifier.verify(tree_from_lists(drafts), logits, shares, sampling, token_mask)
    assert torch.equal(logits, before), "verification must not write to the logits"
    sampling.advance([seq.request_slot for seq in seqs], verdict.num_committed)
    for b, seq in enumerate(seqs):
        new = verdict.committed[b, : int(verdict.num_committed[b])].tolist()
        seq.append(new, int(verdict.num_accepted[b]))
        sampling.commit(seq, new)
        if verdict.finish[b]:
            seq.finish_reason = (None, "stop", "length", NOTHING_ALLOWED)[int(verdict.finish[b])]
    return verdict


def decode(
    params: SamplingParams,
    drafter: Drafter,
    *,
    prompt: list[int],
    vocab: int,
    seed: int = 1,
    choice: int = 0,
    bad_words_ids: list[list[int]] | None = None,
    verifier: Verifier | None = None,
) -> Sequence:
    """One sequence from prompt to finish, `drafter` deciding the tree of every step."""
    sampling = SamplingState(2, vocab)
    seq = new_sequence(1, prompt, params, seed=seed, choice=choice)
    sampling.add(seq, bad_words_ids or [])
    while seq.finish_reason is None:
        toy_step(verifier or Verifier(), sampling, [seq], [drafter(seq)])
    return seq
