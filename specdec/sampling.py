"""`SamplingState`: the sampling parameters of all running sequences, and the processing of logits at every tree node.

Everything is an array indexed by request slot. `process` turns target logits into *scores*, whose argmax (with noise, if the
request samples) is the next token, with the history of each row's own path:

    token mask (grammar) → allowed_token_ids → bad_words → min_tokens → logit_bias → repetition, frequency, presence
    penalties → temperature → min_p → top_k → top_p → typical_p

Greedy rows stop before the temperature: truncation cannot change an argmax. Repetition looks at prompt and output,
frequency and presence at the output alone, bad words at the output alone, all including the draft tokens above the row.
A row's scores depend on its own logits and its own request only, bit for bit; a feature costs the rows that use it, and
when nobody uses any the logits are returned as they are.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as Seq

import torch
from torch import Tensor

from specdec import truncation
from specdec.config import forbids
from specdec.penalties import Penalties
from specdec.rng import to_key
from specdec.rows import RowInfo
from specdec.sequence import Sequence
from specdec.transfer import constant

_NEUTRAL = {"temperature": 1.0, "min_p": 0.0, "top_p": 1.0, "typical_p": 1.0}
_BANS = ("allowed", "bad_words", "min_tokens", "bias")  # may forbid tokens
_BY_ID = (*_BANS, "penalty")  # work on token ids
_BY_RANK = ("temperature", "min_p", "top_k", "top_p", "typical_p")  # work on a row of scores, whatever its ids
_FEATURES = (*_BY_ID, *_BY_RANK)


class SamplingState:
    """Device state of `max_num_seqs` request slots for a vocabulary of V tokens.

    `add` when a sequence gets its request slot (its tokens may already hold output, after preemption), `commit` after its tokens
    grew, `remove` when it leaves. Wide tables ([S, V]) exist only once a request needs them. Token ids are in [0, V).

    Arrays, S = max_num_seqs: temperature, min_p, top_p, typical_p [S] f32; top_k [S] i64 (V = off);
    seed, choice, length (tokens so far), min_total, max_total [S] i64; noisy [S] bool; end_ids [S, E] i64, padded with -1.
    """

    def __init__(self, max_num_seqs: int, vocab_size: int, max_stop_ids: int = 4, device: torch.device | str = "cpu"):
        self.max_num_seqs, self.vocab_size, self.device = max_num_seqs, vocab_size, torch.device(device)
        self.temperature, self.min_p, self.top_p, self.typical_p = (
            torch.full((max_num_seqs,), value, device=self.device) for value in _NEUTRAL.values()
        )
        self.top_k, self.seed, self.choice, self.length, self.min_total, self.max_total = (
            torch.zeros(max_num_seqs, dtype=torch.int64, device=self.device) for _ in range(6)
        )
        self.noisy = torch.zeros(max_num_seqs, dtype=torch.bool, device=self.device)
        self.end_ids = self._table((max(max_stop_ids, 1),), torch.int64, -1)
        self._uses: dict[str, set[int]] = {name: set() for name in (*_FEATURES, "noise")}
        self._top_k: dict[int, int] = {}
        self._allowed = self._table((0,), torch.bool, True)  # [S, V] once needed
        self._penalties = Penalties(max_num_seqs, vocab_size, self.device)
        self._bias_ids, self._bias = self._table((0,), torch.int64, 0), self._table((0,), torch.float32, 0.0)  # [S, W]
        self._bad_prefix = self._table((0, 0), torch.int64, -1)  # [S, W, L] right-aligned, -1 = matches anything
        self._bad_last = self._table((0,), torch.int64, -1)  # [S, W], -1 = no word
        self._tail = self._table((0,), torch.int64, -2)  # [S, L] newest output tokens, right-aligned

    def _table(self, shape: tuple[int, ...], dtype: torch.dtype, fill: float) -> Tensor:
        return torch.full((self.max_num_seqs, *shape), fill, dtype=dtype, device=self.device)

    def _grown(self, table: Tensor, shape: tuple[int, ...], fill: float, *, right: bool = False) -> Tensor:
        """`table` with every dimension after the first at least as in `shape`; old entries stay (at the right end of the last)."""
        target = tuple(max(a, b) for a, b in zip(table.shape[1:], shape, strict=True))
        if target == tuple(table.shape[1:]):
            return table
        new = self._table(target, table.dtype, fill)
        where = tuple(slice(0, n) for n in table.shape)
        if right and table.shape[-1]:
            where = (*where[:-1], slice(target[-1] - table.shape[-1], None))
        if table.numel():
            new[where] = table
        return new

    def _ids(self, values: Collection[int]) -> Tensor:
        return torch.tensor(list(values), dtype=torch.int64, device=self.device)

    # -- life of a sequence -----------------------------------------------------------------------------------------

    def add(self, seq: Sequence, bad_words_ids: Seq[Seq[int]] = ()) -> None:
        """Take over `seq.request_slot` for `seq`. bad_words_ids: its `bad_words` as token sequences (empty ones are ignored)."""
        p, slot = seq.params, seq.request_slot
        self.remove(slot)
        numbers = {"temperature": 1.0 if p.greedy else p.temperature, "min_p": p.min_p, "top_p": p.top_p, "typical_p": p.typical_p}
        for name, value in numbers.items():
            getattr(self, name)[slot] = value
            if value != _NEUTRAL[name] and not p.greedy:
                self._uses[name].add(slot)
        top_k = p.top_k if 0 < p.top_k < self.vocab_size else self.vocab_size
        self.top_k[slot] = top_k
        if top_k < self.vocab_size and not p.greedy:
            self._uses["top_k"].add(slot)
            self._top_k[slot] = top_k
        self.seed[slot], self.choice[slot], self.noisy[slot] = to_key(seq.seed), seq.choice, not p.greedy
        self.length[slot], self.min_total[slot], self.max_total[slot] = len(seq.tokens), seq.num_prompt + p.min_tokens, seq.max_total
        if not p.greedy:
            self._uses["noise"].add(slot)
        if (p.repetition_penalty, p.frequency_penalty, p.presence_penalty) != (1.0, 0.0, 0.0):
            self._uses["penalty"].add(slot)
            self._penalties.add(seq)
        self._add_masks(seq, bad_words_ids)

    def _add_masks(self, seq: Sequence, bad_words_ids: Seq[Seq[int]]) -> None:
        p, slot = seq.params, seq.request_slot
        self.end_ids = self._grown(self.end_ids, (len(seq.end_ids),), -1)
        self.end_ids[slot] = -1
        self.end_ids[slot, : len(seq.end_ids)] = self._ids(sorted(seq.end_ids))
        if seq.end_ids and len(seq.tokens) < seq.num_prompt + p.min_tokens:
            self._uses["min_tokens"].add(slot)
        if p.allowed_token_ids is not None:
            self._allowed = self._grown(self._allowed, (self.vocab_size,), True)
            self._allowed[slot] = False
            self._allowed[slot, self._ids(p.allowed_token_ids)] = True
            self._uses["allowed"].add(slot)
        if p.logit_bias:
            self._bias_ids = self._grown(self._bias_ids, (len(p.logit_bias),), 0)
            self._bias = self._grown(self._bias, (len(p.logit_bias),), 0.0)
            self._bias[slot] = 0.0
            self._bias_ids[slot, : len(p.logit_bias)] = self._ids(p.logit_bias)
            amounts = [-math.inf if forbids(bias) else bias for bias in p.logit_bias.values()]
            self._bias[slot, : len(amounts)] = torch.tensor(amounts, dtype=torch.float32, device=self.device)
            self._uses["bias"].add(slot)
        words = [list(word) for word in bad_words_ids if len(word)]
        if words:
            self._add_bad_words(seq, words)

    def _add_bad_words(self, seq: Sequence, words: list[list[int]]) -> None:
        slot, reach = seq.request_slot, max(len(word) for word in words) - 1
        self._bad_prefix = self._grown(self._bad_prefix, (len(words), reach), -1, right=True)
        self._bad_last = self._grown(self._bad_last, (len(words),), -1)
        self._tail = self._grown(self._tail, (reach,), -2, right=True)
        self._bad_prefix[slot], self._bad_last[slot] = -1, -1
        width = self._bad_prefix.shape[-1]
        for w, word in enumerate(words):
            self._bad_last[slot, w] = word[-1]
            self._bad_prefix[slot, w, width - len(word) + 1 :] = self._ids(word[:-1])
        self._uses["bad_words"].add(slot)
        self._keep_tail(seq)

    def advance(self, request_slots: Seq[int], num_committed: Tensor) -> None:
        """A verdict ([B] i64 tokens) lengthens its sequences, before the host knows of it."""
        self.length.index_add_(0, constant(tuple(request_slots), self.device), num_committed)

    def commit(self, seq: Sequence, new_tokens: Seq[int]) -> None:
        """After `seq.append`: `new_tokens` are the last of `seq.tokens`. Their number is known here since `advance`."""
        slot = seq.request_slot
        if slot in self._uses["penalty"] and len(new_tokens):
            self._penalties.commit(slot, new_tokens)
        if slot in self._uses["bad_words"]:
            self._keep_tail(seq)
        if slot in self._uses["min_tokens"] and len(seq.tokens) >= seq.num_prompt + seq.params.min_tokens:
            self._uses["min_tokens"].discard(slot)

    def _keep_tail(self, seq: Sequence) -> None:
        reach = self._tail.shape[-1]
        tail = seq.tokens[max(seq.num_prompt, len(seq.tokens) - reach) :] if reach else []
        self._tail[seq.request_slot] = self._ids([-2] * (reach - len(tail)) + tail)

    def remove(self, request_slot: int) -> None:
        """The request slot is free again; harmless when it already was."""
        for used in self._uses.values():
            used.discard(request_slot)
        self._top_k.pop(request_slot, None)
        self._penalties.remove(request_slot)

    def samples(self, request_slots: Seq[int]) -> bool:
        """Whether any of them has a temperature above 0."""
        return not self._uses["noise"].isdisjoint(request_slots)

    def noise(self, rows: RowInfo) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Arguments of `ops.gumbel_argmax` for the token each row produces: seeds, positions, choices [R] i64, noisy [R] bool."""
        return self.seed[rows.slot], self.position(rows), self.choice[rows.slot], self.noisy[rows.slot]

    def position(self, rows: RowInfo) -> Tensor:
        """[R] i64, absolute position of the token each row produces."""
        return self.length[rows.slot] + rows.depth

    # -- processing -------------------------------------------------------------------------------------------------

    def process(self, logits: Tensor, rows: RowInfo, token_mask: Tensor | None = None) -> Tensor:
        """Scores [R, V] f32 of logits [R, V] f32, which stay untouched. token_mask [R, V] bool: True = allowed.

        A forbidden token is at -inf, and so is a whole row where nothing is allowed: see `stuck`.
        """
        scores = logits if token_mask is None else logits.masked_fill(~token_mask, -torch.inf)
        return self._stages(_FEATURES, scores, logits, rows)

    def stuck(self, scores: Tensor, rows: RowInfo, token_mask: Tensor | None = None) -> Tensor | None:
        """[R] bool: the rows of processed scores [R, V] in which no token is allowed; None where no request forbids any.

        The output ends before such a row. Knowing costs a pass over the rows that may be stuck, and no look from the host.
        """
        index = rows.of(set().union(*(self._uses[name] for name in _BANS))) if token_mask is None else slice(None)
        if index is None or isinstance(index, slice):
            return None if index is None else _nothing(scores)
        none = torch.zeros(rows.num_rows, dtype=torch.bool, device=scores.device)
        return none.index_copy_(0, index, _nothing(scores.index_select(0, index)))

    def truncate(self, logits: Tensor, rows: RowInfo) -> Tensor:
        """Temperature and truncation alone, for logits [R, any] f32 of a draft vocabulary. A copy, or the logits themselves."""
        return self._stages(_BY_RANK, logits, logits, rows)

    def working_by_id(self) -> set[int]:
        """Request slots whose processing works on token ids: their scores must cover the whole vocabulary."""
        return set().union(*(self._uses[name] for name in _BY_ID))

    def follows(self, request_slots: Seq[int]) -> bool:
        """Whether the laws of a step need nothing of the tokens of the one before but their number."""
        return (self._uses["penalty"] | self._uses["bad_words"]).isdisjoint(request_slots)

    def only_temperature(self, request_slot: int) -> bool:
        """Whether nothing but a temperature, 0 included, shapes the request's law."""
        return not any(request_slot in self._uses[name] for name in _FEATURES if name != "temperature")

    def only_temperatures(self, request_slots: Seq[int]) -> bool:
        """`only_temperature` of all of them."""
        return set().union(*(self._uses[name] for name in _FEATURES if name != "temperature")).isdisjoint(request_slots)

    def _stages(self, names: Seq[str], scores: Tensor, logits: Tensor, rows: RowInfo) -> Tensor:
        used = {name: i for name in names if self._uses[name] and (i := rows.of(self._uses[name])) is not None}
        for name, index in used.items():
            stage = getattr(self, f"_apply_{name}")
            if isinstance(index, slice):
                scores = stage(scores, rows.slot, rows, index)
            else:
                scores = scores.clone() if scores is logits else scores
                scores.index_copy_(0, index, stage(scores.index_select(0, index), rows.slot[index], rows, index))
        return scores

    def _apply_allowed(self, scores: Tensor, slot: Tensor, rows: RowInfo, index: slice | Tensor) -> Tensor:
        return scores.masked_fill(~self._allowed.index_select(0, slot), -torch.inf)

    def _apply_bad_words(self, scores: Tensor, slot: Tensor, rows: RowInfo, index: slice | Tensor) -> Tensor:
        reach = self._tail.shape[-1]
        history = torch.cat([self._tail[slot], rows.path_tokens[index]], dim=1)
        window = rows.depth[index][:, None] + torch.arange(reach, device=self.device)
        prefix, last = self._bad_prefix[slot], self._bad_last[slot]
        match = ((prefix == -1) | (prefix == history.gather(1, window)[:, None, :])).all(dim=-1)
        return _ban(scores, last, match & (last >= 0))

    def _apply_min_tokens(self, scores: Tensor, slot: Tensor, rows: RowInfo, index: slice | Tensor) -> Tensor:
        early = self.length[slot] + rows.depth[index] < self.min_total[slot]
        ends = self.end_ids[slot]
        return _ban(scores, ends, early[:, None] & (ends >= 0))

    def _apply_bias(self, scores: Tensor, slot: Tensor, rows: RowInfo, index: slice | Tensor) -> Tensor:
        return scores.scatter_add(1, self._bias_ids[slot], self._bias[slot])

    def _apply_penalty(self, scores: Tensor, slot: Tensor, rows: RowInfo, index: slice | Tensor) -> Tensor:
        return self._penalties.apply(scores, slot, rows.path_tokens[index])

    def _apply_temperature(self, scores: Tensor, slot: Tensor, rows: RowInfo, index: slice | Tensor) -> Tensor:
        return scores / self.temperature[slot][:, None]

    def _apply_min_p(self, scores: Tensor, slot: Tensor, rows: RowInfo, index: slice | Tensor) -> Tensor:
        return truncation.min_p(scores, self.min_p[slot])

    def _apply_top_k(self, scores: Tensor, slot: Tensor, rows: RowInfo, index: slice | Tensor) -> Tensor:
        largest = max(k for s in rows.request_slots if (k := self._top_k.get(s)) is not None)
        return truncation.top_k(scores, self.top_k[slot], largest)

    def _apply_top_p(self, scores: Tensor, slot: Tensor, rows: RowInfo, index: slice | Tensor) -> Tensor:
        return truncation.top_p(scores, self.top_p[slot])

    def _apply_typical_p(self, scores: Tensor, slot: Tensor, rows: RowInfo, index: slice | Tensor) -> Tensor:
        return truncation.typical_p(scores, self.typical_p[slot])


def _ban(scores: Tensor, ids: Tensor, active: Tensor) -> Tensor:
    """-inf at ids [r, W] i64 where active [r, W]."""
    # adding 0 where inactive lets several words share a last token without write conflicts
    loss = torch.where(active, -torch.inf, 0.0).to(scores.dtype)
    return scores.scatter_add(1, ids.clamp(min=0), loss)


def _nothing(scores: Tensor) -> Tensor:
    """[r] bool: rows of scores [r, V] that are -inf throughout."""
    return torch.isneginf(scores.amax(dim=-1))
