"""How far a head has run each sequence, which of the target's features it still owes, and what a pass is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from specdec.sequence import Sequence

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
