"""`Meter`: corrects what steps are taken to cost with the steps of decoding alone, and tells what speculation gains."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from specdec.spec.cost import StepCost
from specdec.types import StepStats

if TYPE_CHECKING:
    from specdec.spec.shared import Shared

WINDOW = 128  # steps that the gain is told of


class Meter:
    """cost: the model to correct, None = nothing is measured."""

    def __init__(self, cost: StepCost | None):
        self._cost = cost
        self._last_step = -1
        self._window: deque[tuple[float, float]] = deque()  # (plain seconds for what was committed, real seconds)
        self._plain, self._real = 0.0, 0.0  # their sums

    def stepped(self, stats: StepStats | None, shared: Shared | None) -> None:
        """`stats` are of the last step, counted once. shared: learns of it instead, where steps follow each other."""
        if stats is None or self._cost is None or stats.step == self._last_step:
            return
        self._last_step = stats.step
        if stats.num_sampling == 0 or not stats.alone or stats.preempted:
            if shared is not None:
                shared.interrupted()
            return
        if shared is not None:
            shared.took(stats)
        else:
            self._cost.observe(stats.num_rows, stats.num_sampling, stats.context, stats.step_seconds - stats.drafter_seconds)
        mean = stats.context // stats.num_sampling
        plain = self._cost.base(stats.num_sampling, stats.num_sampling) + stats.num_sampling * self._cost.attention(1, mean)
        self._measured(plain * stats.committed / stats.num_sampling, stats.step_seconds)

    def _measured(self, plain: float, real: float) -> None:
        """One more step; the sums go along, since they are read in every step."""
        self._window.append((plain, real))
        self._plain, self._real = self._plain + plain, self._real + real
        if len(self._window) > WINDOW:
            before = self._window.popleft()
            self._plain, self._real = self._plain - before[0], self._real - before[1]

    def gain(self) -> float | None:
        """Speed over what plain decoding should take for the same tokens, over recent steps; None before any."""
        return self._plain / self._real if self._window and self._real > 0 else None
