"""How far a head has run each sequence, which of the target's features it still owes, and what a pass is asked for."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from specdec.sequence import Sequence
    from specdec.types import StepPlan

MAX_PENDING = 512  # features a sequence keeps while nobody drafts for it

Pick = tuple[int, float, int, int, int]
"""A node chosen for a tree: its place among all candidates, score, token, place of its parent (-1 = the root), cell."""


@dataclass(slots=True)
class Progress:
    """Slots first … seen - 1 hold draft KV; `taps` are the target's of positions seen - 1 and on, `pending` rows in all.

    Between steps seen - 1 + pending == num_computed: one pair is pending at least, that of the newest token, until it is run.
    """

    first: int
    seen: int
    taps: list[Tensor] = field(default_factory=list)
    pending: int = 0
    marked: int = 0  # whole blocks recorded as holding the head's KV

    def add(self, taps: Tensor, count: int) -> None:
        """Taps of the next `count` positions. Beyond MAX_PENDING the oldest are dropped, and with them everything before."""
        self.taps.append(taps)
        self.pending += count
        excess = self.pending - MAX_PENDING
        if excess > 0:
            self.take(excess)
            self.seen += excess
            self.first = self.seen

    def take(self, count: int) -> list[Tensor]:
        """The oldest `count` rows of taps, which are pending no more."""
        taken: list[Tensor] = []
        self.pending -= count
        while count:
            rows = self.taps[0]
            if len(rows) > count:
                taken.append(rows[:count])
                self.taps[0] = rows[count:]
                break
            taken.append(self.taps.pop(0))
            count -= len(rows)
        return taken


@dataclass(frozen=True, slots=True)
class Job:
    """Pairs of one sequence to run in slots seen, seen + 1, …; then `masks` mask rows behind them."""

    seq: Sequence
    count: int
    masks: int = 0


def is_plain(plan: StepPlan, progress: Mapping[Sequence, Progress], wants: Callable[[Sequence], bool]) -> bool:
    """Whether every sequence of a step without drafts ran one row, goes on, and is known here: plain decoding, as most steps are."""
    for share in plan.scheduled:
        seq = share.seq
        if not share.samples or share.num_new + share.rerun > 1 or seq.finish_reason is not None:
            return False
        if seq not in progress or not wants(seq):
            return False
    return True


def keep_rows(plan: StepPlan, progress: Mapping[Sequence, Progress], taps: Tensor) -> None:
    """All that a head does in a plain step: row b is the feature of sequence b, and none is run."""
    rows = (taps,) if len(plan.scheduled) == 1 else taps.split(1)
    for share, row in zip(plan.scheduled, rows, strict=True):
        progress[share.seq].add(row if len(rows) <= 4 else row.clone(), 1)  # a small view would keep all of them alive
