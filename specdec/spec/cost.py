"""`CostModel`: seconds of one step as a function of rows and context. Measured at start-up, corrected online.

A step of B sequences with n_b tree rows over c_b committed keys costs

    base(Σ n_b) + Σ_b slope(n_b) · c_b + correction

where base (weights, small ops) and slope (attention: seconds per key for a tree of that many rows) come from timing the
target pass at a few row counts and two context lengths, and the correction is the median difference between steps
that really ran and this table, per row bucket. Medians, because a shared machine stutters; recent steps only, because its
speed drifts; an estimate that has not been confirmed for a while is dropped, so that no bucket stays written off for ever.
"""

from __future__ import annotations

import bisect
import hashlib
import json
import math
import os
import platform
import statistics
import tempfile
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Protocol

import torch

ROW_COUNTS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
FORMAT = 1  # of the cached table


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
    """Timings of the target pass: `seconds[i][j]` for `rows[i]` rows over `contexts[j]` keys (two contexts)."""

    def __init__(self, rows: Seq[int], contexts: tuple[int, int], seconds: Seq[tuple[float, float]]):
        if not rows or list(rows) != sorted(set(rows)) or rows[0] != 1 or len(rows) != len(seconds) or not 0 <= contexts[0] < contexts[1]:
            raise ValueError("a cost table needs increasing row counts from 1, two increasing contexts, one pair of seconds per row count")
        if not all(len(pair) == 2 and all(math.isfinite(s) and s > 0 for s in pair) for pair in seconds):
            raise ValueError("a cost table needs positive finite seconds")
        self.rows, self.contexts, self.seconds = tuple(rows), contexts, [tuple(pair) for pair in seconds]
        width = contexts[1] - contexts[0]
        slopes = [max(0.0, (far - near) / width) for near, far in seconds]
        bases = [max(near - slope * contexts[0], 0.05 * near) for (near, _), slope in zip(seconds, slopes, strict=True)]
        self.bases = self._rising(bases)
        self.slopes = self._rising(slopes)

    @staticmethod
    def _rising(values: Seq[float]) -> list[float]:
        """More rows never cost less: timing noise must not make a wide step look cheap."""
        result, high = [], 0.0
        for value in values:
            high = max(high, value)
            result.append(high)
        return result

    def at(self, values: Seq[float], rows: int) -> float:
        """Piecewise linear in rows, continued beyond the last point with the slope of the last four."""
        if rows >= self.rows[-1]:
            back = max(0, len(self.rows) - 4)
            span = self.rows[-1] - self.rows[back]
            rise = (values[-1] - values[back]) / span if span else values[-1]
            return values[-1] + rise * (rows - self.rows[-1])
        i = bisect.bisect_right(self.rows, rows) - 1
        share = (rows - self.rows[i]) / (self.rows[i + 1] - self.rows[i])
        return values[i] + share * (values[i + 1] - values[i])

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "rows": self.rows, "contexts": self.contexts, "seconds": self.seconds})

    @classmethod
    def from_json(cls, text: str) -> CostTable:
        """ValueError, KeyError or TypeError when the text is not such a table."""
        data = json.loads(text)
        if data["format"] != FORMAT:
            raise ValueError("written by another version")
        return cls(data["rows"], (data["contexts"][0], data["contexts"][1]), [(s[0], s[1]) for s in data["seconds"]])


class CostModel:
    """A `StepCost` over a measured table. Lookups are list reads: they happen for every draft node of every step."""

    WINDOW = 25  # steps a correction is the median of
    STALE = 400  # steps after which an unconfirmed correction is dropped

    def __init__(self, table: CostTable):
        self.table = table
        self._base = [table.at(table.bases, max(1, r)) for r in range(257)]
        self._slope = [table.at(table.slopes, max(1, n)) for n in range(65)]
        self._recent: list[deque[float]] = [deque(maxlen=self.WINDOW) for _ in table.rows]
        self._seen = [-1] * len(table.rows)  # step of the last observation, per bucket
        self._median = [0.0] * len(table.rows)
        self._correction = [0.0] * len(table.rows)
        self._bucket = [self._bucket_of(r) for r in range(257)]
        self._steps = 0

    def base(self, rows: int, batch: int) -> float:
        """See `StepCost`; the batch size plays no part of its own here."""
        if rows <= 256:
            plain, bucket = self._base[rows], self._bucket[rows]
        else:
            plain, bucket = self.table.at(self.table.bases, rows), len(self._correction) - 1
        return max(plain + self._correction[bucket], 0.25 * plain)

    def attention(self, nodes: int, context: int) -> float:
        """See `StepCost`."""
        return self._slope[min(nodes, 64)] * context

    def observe(self, rows: int, batch: int, context: int, seconds: float) -> None:
        """Take in one real step; trees are taken to be equally wide."""
        if rows < 1 or batch < 1 or not seconds > 0.0:
            return
        plain = self._base[rows] if rows <= 256 else self.table.at(self.table.bases, rows)
        bucket = self._bucket_of(rows)
        self._steps += 1
        if self._seen[bucket] >= 0 and self._steps - self._seen[bucket] > self.STALE:
            self._recent[bucket].clear()
        self._recent[bucket].append(seconds - plain - self.attention(round(rows / batch), context))
        self._median[bucket] = statistics.median(self._recent[bucket])
        self._seen[bucket] = self._steps
        self._spread()

    def _spread(self) -> None:
        """A bucket without fresh observations takes the correction of the nearest one that has them."""
        fresh = [i for i, seen in enumerate(self._seen) if seen >= 0 and self._steps - seen <= self.STALE]
        near = 0
        for i in range(len(self._correction)):
            while near + 1 < len(fresh) and fresh[near + 1] - i < i - fresh[near]:
                near += 1
            self._correction[i] = self._median[fresh[near]]

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
    dtype, backend and whatever else changes timings; the machine is added. A file that cannot be read is measured anew.
    """
    name = hashlib.sha256(f"{key}|{machine_key()}|{max_rows}|{max_context}".encode()).hexdigest()[:20]
    path = None if cache is None else cache / f"{name}.json"
    if path is not None:
        try:
            return CostModel(CostTable.from_json(path.read_text()))
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            pass
    rows = tuple(r for r in ROW_COUNTS if r <= max(1, max_rows))
    near, far = min(64, max(1, max_context // 4)), max(2, max_context)
    measure(rows[-1], far)  # the first pass allocates and warms caches
    table = CostTable(rows, (near, far), [(measure(r, near), measure(r, far)) for r in rows])
    if path is not None:
        _write(path, table.to_json())
    return CostModel(table)


def _write(path: Path, text: str) -> None:
    """Atomic; a cache that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            file.write(text)
        os.replace(file.name, path)
    except OSError:
        pass
