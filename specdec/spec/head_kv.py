"""A draft head's passes over its own KV, which shares block ids and hashes with the target's full-attention group.

Slot rule: the pair (target feature of position j - 1, token of position j) stands at position j and in slot j. What slot j
holds depends on tokens up to j only, so blocks and hashes of the target serve the draft KV too; slot 0 has no pair and is
hidden. Features come with the target's passes and cannot be had later, so every sequence that may use the head keeps those
it has not run yet (*pending*): prefill chunks are run at once, the tokens of a decode step with the next draft, or never if
nobody drafts. What is missing for good (blocks that another request filled without a head, pending features beyond
MAX_PENDING) moves `first`, before which no draft row looks; there are no silent holes.
Source: reference §2; the slot rule replaces its §2.4.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from specdec.cache.kv import Companion
from specdec.runner.graphs import Inputs, Outputs, Passes, Recorder, Widths
from specdec.spec.draft_kv import DraftStore
from specdec.spec.head_progress import Job, Pick, Progress, is_plain, keep_rows
from specdec.spec.head_rows import HeadRows
from specdec.spec.median import Median
from specdec.spec.tree import rows_of
from specdec.transfer import send
from specdec.types import Batch, DraftTree, Forward, Scheduled, StepPlan, Verdict

if TYPE_CHECKING:
    from specdec.models.draft_heads import DraftHead
    from specdec.sequence import Sequence

MAX_ROWS = 2048  # of one pass, bounds its memory
MANY_PAIRS = 16  # of a pass that tells what one costs


class HeadRunner:
    """Runs one head for all sequences. wants: whether a sequence may use it. tables [G, S, M] i32: block tables by request slot.

    group: index of the target's group whose blocks are shared. columns: of `Forward.taps` that are the head's, None = all.
    recorder: of `DrafterContext`.
    """

    def __init__(
        self,
        head: DraftHead,
        companion: Companion,
        tables: Tensor,
        *,
        group: int,
        wants: Callable[[Sequence], bool],
        columns: Tensor | None = None,
        recorder: Callable[[], Recorder] | None = None,
    ):
        self.head = head
        self._companion = companion
        self._store = DraftStore(companion)
        self._group, self.block_size = group, companion.block_size
        self._progress: dict[Sequence, Progress] = {}
        self.rows = HeadRows(tables.numpy()[group], companion.block_size, self._progress)
        self._wants, self.columns = wants, columns
        self.blocks = tables.shape[2]  # of the longest sequence
        widths = Widths((1, self.blocks), head.config.hidden_size, head.dtype)
        self._passes = Passes(self._recordable, widths, head.device, recorder()) if recorder is not None else None
        self._pair_times, self._pair_seconds = Median(15), 0.0
        self.ahead: Collection[Sequence] = ()  # whose pairs of the step that is committed next have been run by the one begun behind it

    def read_taps(self, columns: Tensor | None) -> None:
        """From now on the head's taps are these columns of `Forward.taps`; None = all."""
        self.columns = columns

    # -- what the target's passes bring -------------------------------------------------------------------------------

    def observe(self, plan: StepPlan, tree: DraftTree, forward: Forward, verdict: Verdict) -> None:
        """Keep the taps of committed positions; run those of prefill chunks, and of what a finished sequence leaves behind."""
        if tree.tokens.shape[1] == 1 and tree.uniform is None and not self.ahead and is_plain(plan, self._progress, self._wants):
            assert forward.taps is not None
            keep_rows(plan, self._progress, self.own(forward.taps))
            return
        owners, rows = self._committed_rows(plan, tree, verdict)
        self.ahead = ()
        if not owners:
            return
        assert forward.taps is not None  # the runner taps what heads need
        whole = len(rows) == len(forward.taps) and rows == list(range(len(rows)))
        taps = self.own(forward.taps if whole else forward.taps[send(np.array(rows, dtype=np.int64), forward.taps.device)])
        jobs = []
        parts = taps.split([count for *_, count in owners]) if len(owners) > 1 else (taps,)
        for (seq, prefill, count), own in zip(owners, parts, strict=True):
            progress = self._progress[seq]
            progress.add(own if 4 * count >= len(taps) else own.clone(), count)  # a small view would keep all of them alive
            due = self._due(seq, progress, prefill)
            if due > 0:
                jobs.append(Job(seq, due))
        if jobs:
            self._timed(jobs)

    def _timed(self, jobs: list[Job]) -> None:
        """Run pairs that no draft waits for, and see what a pair costs."""
        begin, count = time.perf_counter(), sum(job.count for job in jobs)
        self.run(jobs)
        if count >= MANY_PAIRS:
            self._pair_seconds = self._pair_times.add((time.perf_counter() - begin) / count)

    def owes(self, seq: Sequence) -> float:
        """Seconds that its pending pairs but the newest, which are run with the next draft, will take; 0 = not known yet."""
        progress = self._progress.get(seq)
        return 0.0 if progress is None else max(0, progress.pending - 1) * self._pair_seconds

    def own(self, taps: Tensor) -> Tensor:
        """Of the target's taps the columns of the head."""
        return taps if self.columns is None else taps[..., self.columns]

    def _committed_rows(self, plan: StepPlan, tree: DraftTree, verdict: Verdict) -> tuple[list[tuple[Sequence, bool, int]], list[int]]:
        """(sequence, was it a prefill chunk, committed positions) and the rows of the batch that computed them, in order."""
        counts, accepted, paths = rows_of(tree), verdict.host.num_accepted, verdict.host.path
        owners: list[tuple[Sequence, bool, int]] = []
        rows: list[int] = []
        row, b = 0, 0
        for share in plan.scheduled:
            seq, linear, path, size = share.seq, share.rerun + share.num_new, [], share.rerun + share.num_new
            if share.samples:
                path, size, b = paths[b][: accepted[b]], size + counts[b] - 1, b + 1
            if self._wants(seq):
                new = seq.num_computed - self._start(seq, share, len(path))
                if seq in self.ahead and seq.finish_reason is None:
                    self._advanced(Job(seq, new))
                    new = 0
                # a node's row is counted from the root's, which is the only linear one where there are nodes
                rows += [*range(row, row + linear), *(row + node for node in path)][:new]
                owners += [(seq, share.num_new > 1 or not share.samples, new)] if new else []
            else:
                self._progress.pop(seq, None)
            row += size
        return owners, rows

    def _start(self, seq: Sequence, share: Scheduled, accepted: int) -> int:
        """Position of the first feature of this step; opens the progress of a sequence that is new."""
        progress = self._progress.get(seq)
        if progress is not None:
            return progress.seen - 1 + progress.pending
        start = seq.num_computed - share.num_new - accepted
        if start == 0:
            self._progress[seq] = Progress(first=1, seen=1)
        elif not share.rerun:  # the feature before the first new position is lost
            self._progress[seq] = Progress(first=start + 1, seen=start + 1)
        else:
            whole, rest = divmod(start, self.block_size)
            table = seq.block_tables[self._group]
            filled = all(self._companion.valid(block, self.head.epoch) for block in table[:whole])
            filled &= rest == 0 or self._companion.filled(table[whole], self.head.epoch) >= rest
            self._progress[seq] = Progress(first=1 if filled else start, seen=start, marked=whole)
        return start - share.rerun

    def _due(self, seq: Sequence, progress: Progress, prefill: bool) -> int:
        """Pairs to run now: all that have a slot in a prefill, those that complete a findable block at the end."""
        if prefill:
            return seq.num_computed - progress.seen
        if seq.finish_reason is None or progress.first > 1:
            return 0
        return min(progress.pending, seq.num_hashed_cached * self.block_size - progress.seen)

    # -- passes -------------------------------------------------------------------------------------------------------

    def ready(self, seq: Sequence) -> bool:
        """Whether the pair of the newest token can be run: a draft can start from it."""
        progress = self._progress.get(seq)
        return progress is not None and progress.pending > 0

    def current(self, seq: Sequence) -> bool:
        """Whether all its pairs are run but those of the step in flight."""
        progress = self._progress.get(seq)
        return progress is not None and progress.pending == 0 and progress.seen == seq.num_computed + 1

    def extend(self, seqs: list[Sequence], masks: list[int] | None = None) -> tuple[Tensor, Tensor]:
        """Run all pending pairs. (hidden, feedback), each [R, Hd]: per sequence its newest token and the `masks` rows behind."""
        jobs = []
        for seq, extra in zip(seqs, masks or [0] * len(seqs), strict=True):
            jobs.append(Job(seq, self._progress[seq].pending, extra))
        if sum(job.count for job in jobs) > MAX_ROWS:
            for seq in seqs:
                self._catch_up(seq)
            jobs = [Job(job.seq, 1, job.masks) for job in jobs]
        return self.run(jobs)

    def _catch_up(self, seq: Sequence) -> None:
        """All pending pairs but the last."""
        pending = self._progress[seq].pending
        if pending > 1:
            self.run([Job(seq, pending - 1)])

    def run(self, jobs: list[Job]) -> tuple[Tensor, Tensor]:
        """One ragged causal pass; afterwards the pairs have KV. Returns (hidden, feedback) of each job's last pair and masks."""
        taps: list[Tensor] = []
        for job in jobs:
            taps += self._progress[job.seq].take(job.count)
        features = self.head.fuse(taps[0] if len(taps) == 1 else torch.cat(taps))
        batch, last = self.rows.causal(jobs, self.head.config.mask_token_id or 0, self.head.device)
        if any(job.masks for job in jobs):
            features = self._with_masks(features, jobs)
        hidden, feedback = self.feed(batch, features)
        for job in jobs:
            self._advanced(job)
        return hidden.index_select(0, last), feedback.index_select(0, last)

    def grow(self, plan: Any, seq: Sequence, cells: int, **options: Any) -> list[Pick]:
        """One sequence's draft in one compiled call of the head's `plan`: runs all pending pairs, then what the tree needs.

        cells: slots behind the newest token that the call may write. options: the rest of what it takes (`compiled_growth`).
        """
        progress = self._progress[seq]
        job = Job(seq, progress.pending)
        start, end = progress.seen, progress.seen + job.count
        picks: list[Pick] = plan.grow(
            [self._store.layer(i) for i in range(self.head.config.num_layers)],
            taps=progress.take(job.count),
            tokens=seq.tokens[start:end],
            start=start,
            first=progress.first,
            table=torch.from_numpy(self.rows.table([seq], end - 1 + cells)),
            target_ids=self.head.target_ids,
            **options,
        )
        self._advanced(job)
        return picks

    def feed(self, batch: Batch, features: Tensor) -> tuple[Tensor, Tensor]:
        """One pass over rows laid out here or by `Beam`; (hidden, feedback) [T, Hd], valid until the next pass."""
        recorded = self._passes(batch, features) if self._passes is not None else None
        if recorded is None:
            return self.run_rows(batch, features)
        hidden, feedback = recorded
        assert hidden is not None and feedback is not None
        return hidden, feedback

    def run_rows(self, batch: Batch, features: Tensor) -> tuple[Tensor, Tensor]:
        """The pass itself, op by op: what recordings are made of."""
        return self.head.forward(batch, features, self._store)

    def _recordable(self, inputs: Inputs) -> Outputs:
        assert inputs.features is not None
        return self.run_rows(inputs.batch, inputs.features)

    def forget(self, seq: Sequence) -> None:
        """The sequence loses its blocks, or is done. What completes blocks that others may find is run first."""
        progress = self._progress.get(seq)
        if progress is None:
            return
        due = min(progress.pending, seq.num_hashed_cached * self.block_size - progress.seen)
        if due > 0 and progress.first == 1 and seq.block_tables:
            self.run([Job(seq, due)])
        del self._progress[seq]

    def _advanced(self, job: Job) -> None:
        progress = self._progress[job.seq]
        progress.seen += job.count
        if progress.taps and job.count > 4 * progress.pending:
            progress.taps = [torch.cat(progress.taps)]  # a small view would keep the whole chunk alive
        if progress.first > 1:
            return
        whole, rest = divmod(progress.seen, self.block_size)
        table = job.seq.block_tables[self._group]
        self._companion.mark(table[progress.marked : whole], self.head.epoch)
        self._companion.mark(table[whole : whole + 1] if rest else (), self.head.epoch, rest)
        progress.marked = whole

    def _with_masks(self, features: Tensor, jobs: list[Job]) -> Tensor:
        """Features [T, Hd] with the mask feature for every mask row."""
        assert self.head.mask_feature is not None
        index, first = [], 0
        for job in jobs:
            index += [*range(first, first + job.count), *[len(features)] * job.masks]
            first += job.count
        return torch.cat((features, self.head.mask_feature[None]))[send(np.array(index, dtype=np.int64), features.device)]
