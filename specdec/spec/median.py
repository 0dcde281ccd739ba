"""`Median`: of the latest values, kept in order so that one more costs a search and not a sort."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque


class Median:
    """Of the last `size` values added."""

    __slots__ = ("_latest", "_ordered", "_size")

    def __init__(self, size: int):
        self._size = size
        self._latest: deque[float] = deque()
        self._ordered: list[float] = []

    def add(self, value: float) -> float:
        """The median with `value` among them, that of two in the middle their mean."""
        ordered, latest = self._ordered, self._latest
        if len(latest) == self._size:
            del ordered[bisect_left(ordered, latest.popleft())]
        latest.append(value)
        insort(ordered, value)
        half = len(ordered) // 2
        return ordered[half] if len(ordered) % 2 else (ordered[half - 1] + ordered[half]) / 2

    def clear(self) -> None:
        """As if nothing had been added."""
        self._latest.clear()
        self._ordered.clear()
