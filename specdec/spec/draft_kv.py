"""The draft model's forward pass over its own KV, which shares block ids with the target's full-attention group.

A sequence's draft KV lies in the same blocks and offsets as the target's. How much of it is right is tracked per sequence,
as a number of leading positions; whole blocks are marked with the draft model's id, so that a prefix hit or a preempted
sequence that returns finds them again, and a block that was handed out anew is never mistaken for them. What is missing is
computed from the committed tokens in one ragged pass before drafting: a sequence that was not drafted for costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.cache.kv import Companion
from specdec.types import Batch

if TYPE_CHECKING:
    from specdec.models.registry import Model
    from specdec.sequence import Sequence

MAX_ROWS = 512  # of one catch-up pass, bounds its memory


class DraftStore:
    """The companion as a model sees a KV cache: one group."""

    def __init__(self, companion: Companion):
        self._companion = companion

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """(K, V) of layer `index`, each [NB, bs, nkv, hd]."""
        return self._companion.layer(index)

    def group_of(self, index: int) -> int:
        """All layers share the one table."""
        return 0


@dataclass(slots=True)
class _Progress:
    """seen: leading positions whose draft KV is right. marked: whole blocks recorded as such. fed: draft tokens whose KV was
    written at positions `start`, `start + 1`, … when the sequence had `start` tokens."""

    seen: int
    marked: int
    start: int = 0
    fed: list[int] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Rows:
    """Tokens of one sequence to run at positions start, start + 1, …"""

    seq: Sequence
    start: int
    tokens: list[int]


class DraftRunner:
    """Runs the draft model. group: index of the target's group whose blocks are shared. epoch: names the draft weights."""

    def __init__(self, model: Model, companion: Companion, *, group: int, block_size: int, epoch: str):
        self.model = model
        self.group = group
        self.block_size = block_size
        self.epoch = epoch
        self._companion = companion
        self._store = DraftStore(companion)
        self._progress: dict[Sequence, _Progress] = {}

    def catch_up(self, seqs: list[Sequence]) -> Tensor:
        """Logits [B, V] f32 after the newest token of each sequence; afterwards the draft KV of all its tokens is there."""
        jobs = []
        for seq in seqs:
            progress = self._updated(seq)
            start = min(progress.seen, len(seq.tokens) - 1)
            jobs.append(Rows(seq, start, seq.tokens[start:]))
        logits: list[Tensor | None] = [None] * len(jobs)
        for chunk in _chunks(jobs):
            last = [(j, i) for i, (j, rows) in enumerate(chunk) if rows.start + len(rows.tokens) == len(rows.seq.tokens)]
            out = self.run([rows for _, rows in chunk], [i for _, i in last])
            for row, (j, _) in enumerate(last):
                logits[j] = out[row]
        for seq in seqs:
            self._seen(seq, len(seq.tokens))
        return torch.stack([row for row in logits if row is not None])

    def feed(self, tips: list[tuple[Sequence, int]]) -> Tensor:
        """Run one more draft token per sequence behind those fed since `catch_up`; logits [B, V] f32 after it."""
        rows = []
        for seq, token in tips:
            progress = self._progress[seq]
            rows.append(Rows(seq, progress.start + len(progress.fed), [token]))
            progress.fed.append(token)
        return self.run(rows, list(range(len(rows))))

    def run(self, rows: list[Rows], wanted: list[int]) -> Tensor:
        """One ragged pass; logits [len(wanted), V] f32 after the last token of the wanted entries."""
        batch = self._batch(rows, wanted)
        hidden, _ = self.model.forward(batch, self._store)
        return self.model.logits(hidden.index_select(0, batch.logit_rows))

    def forget(self, seq: Sequence) -> None:
        """The sequence lost its blocks or finished; marked blocks keep their content as long as nobody takes them."""
        self._progress.pop(seq, None)

    def _updated(self, seq: Sequence) -> _Progress:
        """Progress after the last verdict: what was fed and then committed counts. A new sequence starts with marked blocks."""
        progress = self._progress.get(seq)
        if progress is None:
            table, whole = seq.block_tables[self.group], seq.num_computed // self.block_size
            found = next((i for i in range(whole) if not self._companion.valid(table[i], self.epoch)), whole)
            progress = self._progress[seq] = _Progress(found * self.block_size, found)
        for i, token in enumerate(progress.fed):
            if progress.start + i >= len(seq.tokens) or seq.tokens[progress.start + i] != token:
                break
            progress.seen = progress.start + i + 1
        progress.start, progress.fed = len(seq.tokens), []
        return progress

    def _seen(self, seq: Sequence, positions: int) -> None:
        progress = self._progress[seq]
        progress.seen = positions
        whole = positions // self.block_size
        self._companion.mark(seq.block_tables[self.group][progress.marked : whole], self.epoch)
        progress.marked = max(progress.marked, whole)

    def _batch(self, rows: list[Rows], wanted: list[int]) -> Batch:
        device, size = self.model.device, self.block_size
        positions = [p for r in rows for p in range(r.start, r.start + len(r.tokens))]
        tables = [r.seq.block_tables[self.group] for r in rows]
        slots = [t[p // size] * size + p % size for t, r in zip(tables, rows, strict=True) for p in range(r.start, r.start + len(r.tokens))]
        ends = [0]
        for r in rows:
            ends.append(ends[-1] + len(r.tokens))
        width = max((r.start + len(r.tokens) - 1) // size + 1 for r in rows)
        padded = [[*t[:width], *[0] * (width - len(t))] for t in tables]
        return Batch(
            input_ids=torch.tensor([t for r in rows for t in r.tokens], dtype=torch.long, device=device),
            positions=torch.tensor(positions, dtype=torch.long, device=device),
            cu_query=torch.tensor(ends, dtype=torch.int32, device=device),
            ctx_lens=torch.tensor([r.start for r in rows], dtype=torch.int32, device=device),
            tree_len=torch.zeros(len(rows), dtype=torch.int32, device=device),
            tree_mask=torch.zeros(ends[-1], dtype=torch.long, device=device),
            block_tables=torch.tensor([padded], dtype=torch.int32, device=device),
            slot_mapping=torch.tensor([slots], dtype=torch.long, device=device),
            logit_rows=torch.tensor([ends[i + 1] - 1 for i in wanted], dtype=torch.long, device=device),
            max_ctx=max(r.start for r in rows),
        )


def _chunks(jobs: list[Rows]) -> list[list[tuple[int, Rows]]]:
    """Split the rows into passes of at most `MAX_ROWS`, in order; entries carry the index of their job."""
    passes: list[list[tuple[int, Rows]]] = [[]]
    room = MAX_ROWS
    for j, job in enumerate(jobs):
        done = 0
        while done < len(job.tokens):
            if room == 0:
                passes.append([])
                room = MAX_ROWS
            take = min(room, len(job.tokens) - done)
            passes[-1].append((j, Rows(job.seq, job.start + done, job.tokens[done : done + take])))
            done += take
            room -= take
    return passes
