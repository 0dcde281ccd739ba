"""Repetition, frequency and presence penalties with the history of every tree row.

Repetition divides positive and multiplies negative logits of tokens that occur in prompt or output; frequency subtracts once per
occurrence in the output, presence once if there is any. The draft tokens above a row count as output.
Only tokens of the history change, so only they are touched: the committed ones are listed per request slot, those of
the path come with the row and overwrite what the list said about them.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from specdec.sequence import Sequence


class Penalties:
    """History of the request slots that use penalties. Tables appear with the first such request.

    counts [S, V] i32 occurrences in the output; prompted [S, V] bool occurs in the prompt; ids [S, U] i64 the distinct tokens of the
    history in order of first appearance, filled up with 0, an id like any other: an entry too many changes nothing.
    rates [S, 3] f32: repetition, frequency, presence.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, device: torch.device):
        self.vocab_size = vocab_size
        self.rates = torch.zeros((max_num_seqs, 3), device=device)
        self.counts = torch.zeros((max_num_seqs, 0), dtype=torch.int32, device=device)
        self.prompted = torch.zeros((max_num_seqs, 0), dtype=torch.bool, device=device)
        self.ids = torch.zeros((max_num_seqs, 0), dtype=torch.int64, device=device)
        self._known: dict[int, set[int]] = {}  # request slot -> what its row of `ids` holds

    def add(self, seq: Sequence) -> None:
        """Start the history of `seq.request_slot` from prompt and output so far."""
        p, slot, device = seq.params, seq.request_slot, self.rates.device
        if not self.counts.shape[1]:
            shape = (self.counts.shape[0], self.vocab_size)
            self.counts, self.prompted = self.counts.new_zeros(shape), self.prompted.new_zeros(shape)
        self.rates[slot] = torch.tensor([p.repetition_penalty, p.frequency_penalty, p.presence_penalty], device=device)
        output = torch.tensor(seq.output, dtype=torch.int64, device=device)
        self.counts[slot] = torch.bincount(output, minlength=self.vocab_size).to(torch.int32)
        self.prompted[slot] = False
        self.prompted[slot, torch.tensor(seq.tokens[: seq.num_prompt], dtype=torch.int64, device=device)] = True
        self.ids[slot] = 0
        self._known[slot] = set()
        self._learn(slot, seq.tokens)

    def commit(self, request_slot: int, new_tokens: Seq[int]) -> None:
        """The output grew by `new_tokens`."""
        ids = torch.tensor(new_tokens, dtype=torch.int64, device=self.ids.device)
        self.counts[request_slot].index_add_(0, ids, torch.ones_like(ids, dtype=torch.int32))
        self._learn(request_slot, new_tokens)

    def remove(self, request_slot: int) -> None:
        self._known.pop(request_slot, None)

    def _learn(self, slot: int, tokens: Seq[int]) -> None:
        known = self._known[slot]
        new = [t for t in dict.fromkeys(tokens) if t not in known]
        if not new:
            return
        first, last = len(known), len(known) + len(new)
        if last > self.ids.shape[1]:
            grown = self.ids.new_zeros((self.ids.shape[0], max(64, 2 * last)))
            grown[:, : self.ids.shape[1]] = self.ids
            self.ids = grown
        self.ids[slot, first:last] = torch.tensor(new, dtype=torch.int64, device=self.ids.device)
        known.update(new)

    def apply(self, scores: Tensor, slot: Tensor, path: Tensor) -> Tensor:
        """Penalised copy of scores [r, V] f32. slot [r] i64; path [r, D] i64 draft tokens above the row, -1 = none."""
        ids = self.ids[slot]
        result = scores.scatter(1, ids, self._penalise(scores, slot, ids, 0))
        if path.shape[1]:
            # a missing entry becomes token 0 with the count it truly has, which writes what is already there
            own = path.clamp(min=0)
            times = ((path[:, None, :] == own[:, :, None]) & (path >= 0)[:, None, :]).sum(dim=-1)
            result = result.scatter(1, own, self._penalise(scores, slot, own, times))
        return result

    def _penalise(self, scores: Tensor, slot: Tensor, ids: Tensor, more: Tensor | int) -> Tensor:
        """New scores of ids [r, W], which occur `more` [r, W] times on the row's path besides the committed history."""
        value = scores.gather(1, ids)
        rate, frequency, presence = self.rates[slot][:, :, None].unbind(dim=1)
        counts = self.counts[slot[:, None], ids] + more
        said = counts > 0
        repeated = torch.where(value > 0, value / rate, value * rate)
        value = torch.where(said | self.prompted[slot[:, None], ids], repeated, value)
        return value - frequency * counts - presence * said
