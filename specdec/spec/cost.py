"""`CostModel`: seconds of one step as a function of rows and context. Measured at start-up, corrected online.

A step of B sequences with n_b tree rows over c_b committed keys costs

    base(Σ n_b) + Σ_b slope(n_b) · c_b, corrected

where base (weights, small ops) and slope (attention: seconds per key for a tree of that many rows) come from timing the
target pass at a few row counts and two context lengths. The correction compares steps that really ran with this table, per
row bucket: what is slower by less than half is taken for a fixed overhead and added, anything else for a change of speed
and multiplied. Medians, because a shared machine stutters; recent steps only, because its speed drifts; an estimate that
has not been confirmed for a while is dropped, so that no bucket stays written off for ever.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import math
import os
import platform
import statistics
import tempfile
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Protocol

import torch

ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
FAR_ROWS = (1, 4, 16, 64)  # row counts timed at the longer context too
FORMAT = 2  # of the cached table
TRUST = 1.6  # a kept table may differ from fresh timings by this factor


class StepCost(Protocol):
    """What the policy asks of a cost model; tests bring their own."""

    def base(self, rows: int, batch: int) -> float:
        """Seconds of a step with `rows` rows over `batch` sequences, attention over the context aside."""
        ...

    def attention(self, nodes: int, context: int) -> float:
        """Seconds that one sequence's tree of `nodes` rows adds for `context` committed keys."""
        ...

    def observe(self, rows: int, batch: int, context: int, seconds: float) -> None:
        """A step of pure decoding ran: `context` keys summed over the batch, `seconds` without drafting."""
        ...


class CostTable:
    """Timings of the target pass, in seconds: `near[i]` for `rows[i]` rows over `contexts[0]` keys, `far[rows]` over
    `contexts[1]` keys for some of the row counts. Timings err upwards only, so each is capped by those of more rows."""

    def __init__(self, rows: Seq[int], contexts: tuple[int, int], near: Seq[float], far: Mapping[int, float]):
        if not rows or list(rows) != sorted(set(rows)) or rows[0] != 1 or len(rows) != len(near) or not 0 <= contexts[0] < contexts[1]:
            raise ValueError("a cost table needs increasing row counts from 1, two increasing contexts, seconds per row count")
        if 1 not in far or not set(far) <= set(rows) or not all(math.isfinite(s) and s > 0 for s in (*near, *far.values())):
            raise ValueError("a cost table needs positive finite seconds, those of one row at both contexts")
        self.rows, self.contexts, self.near, self.far = tuple(rows), contexts, tuple(near), dict(far)
        lower = _capped(near)
        known = sorted(far)
        steep = _capped([max(0.0, (far[r] - lower[self.rows.index(r)]) / (contexts[1] - contexts[0])) for r in known])
        self.slopes = [_between(known, steep, r) for r in rows]
        self.bases = _capped([max(t - s * contexts[0], 0.05 * t) for t, s in zip(lower, self.slopes, strict=True)])

    def at(self, values: Seq[float], rows: int) -> float:
        """Piecewise linear in rows, continued beyond the last point with the slope of the last four."""
        if rows < self.rows[-1]:
            return _between(self.rows, values, rows)
        back = max(0, len(self.rows) - 4)
        span = self.rows[-1] - self.rows[back]
        rise = (values[-1] - values[back]) / span if span else values[-1]
        return values[-1] + rise * (rows - self.rows[-1])

    def to_json(self) -> str:
        data = {"format": FORMAT, "rows": self.rows, "contexts": self.contexts, "near": self.near, "far": sorted(self.far.items())}
        return json.dumps(data)

    @classmethod
    def from_json(cls, text: str) -> CostTable:
        """ValueError, KeyError, IndexError or TypeError when the text is not such a table."""
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise ValueError("written by another version")
        return cls(data["rows"], (data["contexts"][0], data["contexts"][1]), data["near"], dict(data["far"]))


def _capped(values: Seq[float]) -> list[float]:
    """Each value lowered to the least of those after it: more rows never cost less."""
    return list(itertools.accumulate(reversed(values), min))[::-1]


def _between(rows: Seq[int], values: Seq[float], at: int) -> float:
    """Linear interpolation, constant outside."""
    i = bisect.bisect_right(rows, at) - 1
    if i < 0 or i + 1 >= len(rows):
        return values[max(i, 0)]
    share = (at - rows[i]) / (rows[i + 1] - rows[i])
    return values[i] + share * (values[i + 1] - values[i])


class CostModel:
    """A `StepCost` over a measured table. Lookups are list reads: they happen for every draft node of every step."""

    WINDOW = 25  # steps a correction is the median of
    STALE = 400  # steps after which an unconfirmed correction is dropped

    def __init__(self, table: CostTable):
        count = len(table.rows)
        self.table = table
        self._base = [table.at(table.bases, max(1, r)) for r in range(257)]
        self._slope = [table.at(table.slopes, max(1, n)) for n in range(65)]
        self._bucket = [self._bucket_of(r) for r in range(257)]
        self._recent: list[deque[tuple[float, float]]] = [deque(maxlen=self.WINDOW) for _ in range(count)]  # (real, table)
        self._own = [(1.0, 0.0)] * count  # (factor, seconds added) from a bucket's own steps
        self._correction = [(1.0, 0.0)] * count  # the same, of the nearest bucket with fresh steps
        self._seen = [-1] * count  # step of the last observation
        self._attention = 1.0  # factor of the attention term
        self._steps = 0

    def base(self, rows: int, batch: int) -> float:
        """See `StepCost`; the batch size plays no part of its own here."""
        factor, added = self._correction[self._bucket[rows] if rows <= 256 else -1]
        return factor * self._plain(rows) + added

    def attention(self, nodes: int, context: int) -> float:
        """See `StepCost`."""
        return self._attention * self._slope[min(nodes, 64)] * context

    def _plain(self, rows: int) -> float:
        return self._base[rows] if rows <= 256 else self.table.at(self.table.bases, rows)

    def observe(self, rows: int, batch: int, context: int, seconds: float) -> None:
        """Take in one real step; trees are taken to be equally wide."""
        if rows < 1 or batch < 1 or not 0.0 < seconds < math.inf:
            return
        bucket = self._bucket_of(rows)
        recent = self._recent[bucket]
        self._steps += 1
        if self._seen[bucket] >= 0 and self._steps - self._seen[bucket] > self.STALE:
            recent.clear()
        recent.append((seconds, self._plain(rows) + self._slope[min(64, round(rows / batch))] * context))
        factor = statistics.median(real / table for real, table in recent)
        overhead = statistics.median(real - table for real, table in recent)
        self._own[bucket] = (1.0, overhead) if 1.0 <= factor <= 1.5 else (factor, 0.0)
        self._seen[bucket] = self._steps
        self._attention = self._own[bucket][0]
        self._spread()

    def _spread(self) -> None:
        """A bucket without fresh observations takes the correction of the nearest one that has them."""
        fresh = [i for i, seen in enumerate(self._seen) if seen >= 0 and self._steps - seen <= self.STALE]
        near = 0
        for i in range(len(self._correction)):
            while near + 1 < len(fresh) and fresh[near + 1] - i < i - fresh[near]:
                near += 1
            self._correction[i] = self._own[fresh[near]]

    def _bucket_of(self, rows: int) -> int:
        """The nearest measured row count, the larger of two."""
        return min(bisect.bisect_left(self.table.rows, max(1, rows)), len(self.table.rows) - 1)


def machine_key() -> str:
    """Names what a timing depends on besides the model: processor or GPU, threads, torch."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else _processor()
    return f"{device}/{torch.get_num_threads()} threads/torch {torch.__version__}"


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def measure_costs(
    measure: Callable[[int, int], float],
    *,
    max_rows: int = 64,
    max_context: int = 1024,
    cache: Path | None = None,
    key: str = "",
) -> CostModel:
    """Time the target pass, or read the table kept from an earlier start on this machine.

    measure: (rows of one tree, context keys) → seconds. cache: directory for tables, None = do not keep. key: names model,
    dtype and whatever else changes timings; the machine is added. A table that cannot be read, or that two fresh timings
    contradict (other kernels, another clock), is measured anew.
    """
    name = hashlib.sha256(f"{key}|{machine_key()}|{max_rows}|{max_context}".encode()).hexdigest()[:20]
    path = None if cache is None else cache / f"{name}.json"
    rows = tuple(r for r in ROW_COUNTS if r <= max(1, max_rows))
    near, far = min(64, max(1, max_context // 4)), max(2, max_context)
    measure(rows[-1], far)  # the first pass allocates and warms caches
    if path is not None:
        try:
            table = CostTable.from_json(path.read_text())
            if table.rows == rows and table.contexts == (near, far) and _confirmed(table, measure):
                return CostModel(table)
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            pass
    first, second = (
        {(r, c): measure(r, c) for r in order for c in ((near, far) if r in FAR_ROWS else (near,))} for order in (rows, rows[::-1])
    )
    least = {point: min(seconds, second[point]) for point, seconds in first.items()}
    table = CostTable(rows, (near, far), [least[r, near] for r in rows], {r: least[r, far] for r in rows if r in FAR_ROWS})
    if path is not None:
        _write(path, table.to_json())
    return CostModel(table)


def _confirmed(table: CostTable, measure: Callable[[int, int], float]) -> bool:
    """Whether one row and about eight still take what the table says: within TRUST, and so their ratio."""
    few = max(r for r in table.rows if r <= 8)
    one, some = measure(1, table.contexts[0]) / table.near[0], measure(few, table.contexts[0]) / table.near[table.rows.index(few)]
    return all(1 / TRUST < x < TRUST for x in (one, some, one / some))


def _write(path: Path, text: str) -> None:
    """Atomic; a cache that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError:
        pass
