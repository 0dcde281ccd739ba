"""The corpus: token sequences of (prompt, target's answer), in shards on disk and flat in memory, and batches of them.

A shard is one safetensors file: tokens [N] i32 flat, offsets [S + 1] i64, prompt_len [S] i32, temperature [S] f32,
ended [S] u8 (1 = the answer came to its natural end), and in its metadata the prompt ids and domains as JSON lists.
"""

from __future__ import annotations

import json
import os
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from specdec.errors import ConfigError
from specdec.files import write_tensors

BUCKET = 128  # lengths are rounded up to a multiple of this


@dataclass(frozen=True, slots=True)
class Answer:
    """One training sequence: `tokens[:prompt_len]` is the prompt, the rest was written by the target (end token included)."""

    tokens: list[int]
    prompt_len: int
    temperature: float
    ended: bool
    prompt_id: str
    domain: str


@dataclass(frozen=True, slots=True)
class Corpus:
    """S sequences, flat. Sequence i is `tokens[offsets[i]:offsets[i + 1]]`; position p ≥ prompt_len[i] is the target's own."""

    tokens: Tensor  # [N] i64
    offsets: Tensor  # [S + 1] i64
    prompt_len: Tensor  # [S] i64
    temperature: Tensor  # [S] f32
    ended: Tensor  # [S] bool
    prompt_ids: tuple[str, ...]
    domains: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.prompt_len)

    @property
    def lengths(self) -> Tensor:
        """[S] i64."""
        return self.offsets[1:] - self.offsets[:-1]

    @property
    def num_answer_tokens(self) -> int:
        return int((self.lengths - self.prompt_len).sum())

    def take(self, indices: Sequence[int]) -> Corpus:
        """The sequences named, in that order."""
        parts = [self.tokens[int(self.offsets[i]) : int(self.offsets[i + 1])] for i in indices]
        chosen = torch.tensor(indices, dtype=torch.int64)
        lengths = torch.tensor([0, *(len(p) for p in parts)], dtype=torch.int64)
        return Corpus(
            torch.cat(parts) if parts else self.tokens[:0],
            lengths.cumsum(0),
            self.prompt_len[chosen],
            self.temperature[chosen],
            self.ended[chosen],
            tuple(self.prompt_ids[i] for i in indices),
            tuple(self.domains[i] for i in indices),
        )

    def cut(self, max_len: int, unended: int = 0) -> Corpus:
        """Every sequence cut after `max_len` tokens, and answers that never ended after `unended` tokens of theirs (0 = not at all).

        Sequences without an answer token left are dropped.
        """
        limit = self.lengths.clamp(max=max_len)
        if unended:
            limit = torch.where(self.ended, limit, torch.minimum(limit, self.prompt_len + unended))
        keep = (limit > self.prompt_len) & (self.prompt_len >= 1)
        kept, lengths = self.take(keep.nonzero().squeeze(1).tolist()), limit[keep]
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        inside = torch.arange(int(offsets[-1])) - torch.repeat_interleave(offsets[:-1], lengths)
        tokens = kept.tokens[inside + torch.repeat_interleave(kept.offsets[:-1], lengths)]
        ended = kept.ended & (kept.lengths == lengths)
        return replace(kept, tokens=tokens, offsets=offsets, ended=ended)


def make_corpus(answers: Sequence[Answer]) -> Corpus:
    """Answers, flat."""
    lengths = torch.tensor([0, *(len(a.tokens) for a in answers)], dtype=torch.int64)
    return Corpus(
        torch.tensor([t for a in answers for t in a.tokens], dtype=torch.int64),
        lengths.cumsum(0),
        torch.tensor([a.prompt_len for a in answers], dtype=torch.int64),
        torch.tensor([a.temperature for a in answers], dtype=torch.float32),
        torch.tensor([a.ended for a in answers], dtype=torch.bool),
        tuple(a.prompt_id for a in answers),
        tuple(a.domain for a in answers),
    )


def write_shard(file: Path, corpus: Corpus) -> None:
    """Write one shard; it appears under its name only when whole."""
    tensors = {
        "tokens": corpus.tokens.to(torch.int32),
        "offsets": corpus.offsets,
        "prompt_len": corpus.prompt_len.to(torch.int32),
        "temperature": corpus.temperature,
        "ended": corpus.ended.to(torch.uint8),
    }
    write_tensors(file, tensors, {"prompt_ids": json.dumps(corpus.prompt_ids), "domains": json.dumps(corpus.domains)})


def read_corpus(directory: str | os.PathLike[str]) -> Corpus:
    """All shards of a directory, by name. ConfigError when there is none, or naming the one that is broken."""
    files = sorted(Path(directory).glob("*.safetensors"))
    if not files:
        raise ConfigError(f"{directory}: no shards (*.safetensors) in it; write some with `specdec train generate`", param="data")
    return join([_read_shard(file) for file in files])


def join(parts: Sequence[Corpus]) -> Corpus:
    """Corpora, one after the other."""
    starts = torch.tensor([0, *(len(p.tokens) for p in parts)]).cumsum(0)
    offsets = [p.offsets[:-1] + start for p, start in zip(parts, starts, strict=False)]
    return Corpus(
        torch.cat([p.tokens for p in parts]),
        torch.cat([*offsets, starts[-1:]]),
        torch.cat([p.prompt_len for p in parts]),
        torch.cat([p.temperature for p in parts]),
        torch.cat([p.ended for p in parts]),
        tuple(i for p in parts for i in p.prompt_ids),
        tuple(d for p in parts for d in p.domains),
    )


def _read_shard(file: Path) -> Corpus:
    try:
        with safe_open(file, framework="pt") as shard:
            get, metadata = shard.get_tensor, shard.metadata()
            return Corpus(
                get("tokens").long(),
                get("offsets").long(),
                get("prompt_len").long(),
                get("temperature").float(),
                get("ended").bool(),
                tuple(json.loads(metadata["prompt_ids"])),
                tuple(json.loads(metadata["domains"])),
            )
    except (SafetensorError, OSError, KeyError, TypeError, json.JSONDecodeError) as err:
        raise ConfigError(f"{file}: not a shard of training data: {err}; delete it and generate again", param="data") from err


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """B sequences padded on the right to L tokens."""

    tokens: Tensor  # [B, L] i64, padding 0
    lengths: Tensor  # [B] i64
    prompt_len: Tensor  # [B] i64
    index: Tensor  # [B, L] i64: place of each token in the flat corpus, padding 0

    def to(self, device: torch.device) -> TokenBatch:
        moved = (t.to(device, non_blocking=True) for t in (self.tokens, self.lengths, self.prompt_len, self.index))
        return TokenBatch(*moved)


def pad(corpus: Corpus, members: Sequence[int], rows: int, length: int) -> TokenBatch:
    """The sequences named as one batch of shape [rows, length]."""
    chosen = torch.tensor(members, dtype=torch.int64)
    lengths, prompt_len, start = torch.zeros(3, rows, dtype=torch.int64)
    lengths[: len(members)] = corpus.lengths[chosen]
    prompt_len[: len(members)] = corpus.prompt_len[chosen]
    start[: len(members)] = corpus.offsets[:-1][chosen]
    column = torch.arange(length)
    index = torch.where(column < lengths[:, None], start[:, None] + column, 0)
    tokens = torch.where(column < lengths[:, None], corpus.tokens[index], 0)
    return TokenBatch(tokens, lengths, prompt_len, index)


def epoch(corpus: Corpus, max_tokens: int, seed: int, number: int) -> Iterator[TokenBatch]:
    """One pass over the corpus in a random order fixed by (seed, number): batches of rows × length ≤ max_tokens.

    Lengths are rounded up to multiples of BUCKET, and what is left over of one length is padded to the next, so nearly all
    batches of a length have one shape.
    """
    return (pad(corpus, members, rows, length) for members, rows, length in epoch_plan(corpus, max_tokens, seed, number))


def epoch_plan(corpus: Corpus, max_tokens: int, seed: int, number: int) -> list[tuple[list[int], int, int]]:
    """(sequences, rows, length) of every batch of an epoch, shuffled."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + number)
    buckets: dict[int, deque[int]] = {}
    lengths = corpus.lengths.tolist()
    for i in torch.randperm(len(corpus), generator=generator).tolist():
        buckets.setdefault(-(-lengths[i] // BUCKET) * BUCKET, deque()).append(i)
    plan: list[tuple[list[int], int, int]] = []
    left: deque[int] = deque()
    for length in sorted(buckets):
        waiting = left + buckets[length]
        rows = max(1, max_tokens // length)
        while len(waiting) >= rows:
            plan.append(([waiting.popleft() for _ in range(rows)], rows, length))
        left = waiting
        if length == max(buckets) and left:
            plan.append((list(left), len(left), length))
    return [plan[i] for i in torch.randperm(len(plan), generator=generator).tolist()]


def draft_vocabulary(corpus: Corpus, size: int, vocab_size: int, always: Sequence[int]) -> Tensor:
    """The `size` target ids that the answers use most, ascending [size] i64; `always` (end tokens) are in it in any case.

    Ties and the unused rest go by lowest id.
    """
    if not len(set(always)) <= size <= vocab_size:
        raise ConfigError(f"draft_vocab must lie in [{len(set(always))}, {vocab_size}], got {size}", param="draft_vocab")
    counts = answer_counts(corpus, vocab_size)
    counts[torch.tensor(sorted(set(always)), dtype=torch.int64)] = counts.max() + 1
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def coverage(corpus: Corpus, target_ids: Tensor, vocab_size: int) -> float:
    """Share of the answers' tokens that are in the draft vocabulary: no drafter with it can accept more."""
    counts = answer_counts(corpus, vocab_size)
    return float(counts[target_ids].sum() / counts.sum().clamp(min=1))


def answer_counts(corpus: Corpus, vocab_size: int) -> Tensor:
    """[V] i64: how often the answers use each token."""
    inside = torch.arange(len(corpus.tokens)) - torch.repeat_interleave(corpus.offsets[:-1], corpus.lengths)
    answer = inside >= torch.repeat_interleave(corpus.prompt_len, corpus.lengths)
    return torch.bincount(corpus.tokens[answer], minlength=vocab_size)
