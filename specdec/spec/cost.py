"""`CostModel`: seconds of one step as a function of rows and context. Measured at start-up, corrected online.

A step of B sequences with n_b tree rows over c_b committed keys costs

    base(Σ n_b) + Σ_b slope(n_b) · c_b, corrected

where base (weights, small ops) and slope (attention: seconds per key for a tree of that many rows) come from timing the
target pass at a few row counts and two context lengths. The correction compares steps that really ran with this table: a
factor for the speed of the machine now, and one per row bucket, relative to that speed when the bucket was visited, so that
a bucket last seen in a slow minute does not look dear for ever. Medians, because a shared machine stutters; recent steps
only. Row counts that have not been visited for a while are taken for somewhat cheaper than the table says.
"""

from __future__ import annotations

import bisect
import hashlib
import itertools
import json
import logging
import math
import platform
import statistics
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Protocol

import torch

from specdec.files import write_bytes
from specdec.spec.median import Median

ROW_COUNTS = (1, 2, 4, 8, 16, 32, 64)
WIDE = (96, 128, 192, 256)  # of several sequences, where that many are recorded
FAR_ROWS = (1, 8, 32)  # row counts timed at the longer context too
PAIRS = 3  # timings per ratio
MEASURE_SECONDS = 3.0  # after that long, larger row counts are extrapolated; real steps correct them
HOPE = 0.8  # share of the table's difference to the nearest visited bucket that an unvisited one is expected to cost
FORMAT = 3  # of the cached table; 3: attention timed over distinct blocks
SETTLED = 0.01  # a factor that moved by less is not worth telling the other row counts every step
TRUST = 1.4  # a kept ratio may differ from a fresh one by this factor
STEADY = 1.5  # median over least of the timings of one row, above which others were using the machine


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
        self.slopes = [between(known, steep, r) for r in rows]
        self.bases = _capped([max(t - s * contexts[0], 0.05 * t) for t, s in zip(lower, self.slopes, strict=True)])

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


def between(rows: Seq[int], values: Seq[float], at: int) -> float:
    """Piecewise linear, the last piece continued beyond the last point."""
    if len(rows) == 1 or at <= rows[0]:
        return values[0]
    i = min(bisect.bisect_right(rows, at), len(rows) - 1) - 1
    share = (at - rows[i]) / (rows[i + 1] - rows[i])
    return values[i] + share * (values[i + 1] - values[i])


class CostModel:
    """A `StepCost` over a measured table. Lookups are list reads: they happen for every draft node of every step."""

    WINDOW = 25  # steps that a factor is the median of
    STALE = 400  # steps after which an unconfirmed factor is dropped

    def __init__(self, table: CostTable, sizes: Seq[int] = ()):
        """sizes: row counts that passes are recorded for, rising; any other costs what the next of them does."""
        count = len(table.rows)
        self.table = table
        padded = [sizes[i] if (i := bisect.bisect_left(sizes, r)) < len(sizes) else r for r in range(257)]
        self._base = [between(table.rows, table.bases, r) for r in padded]
        self._slope = [between(table.rows, table.slopes, n) for n in range(65)]
        self._bucket = [self._bucket_of(r) for r in range(257)]
        self._speed = 1.0  # real time / table, whatever the bucket
        self._speeds = Median(self.WINDOW)
        self._recent = [Median(self.WINDOW) for _ in range(count)]  # real / table / speed then
        self._own = [1.0] * count  # factor of each bucket from its own steps
        self._seen = [-1] * count  # step of the last observation
        self._correction = [(1.0, 0.0)] * count  # (factor, seconds added) at normal speed
        self._steps = 0

    def base(self, rows: int, batch: int) -> float:
        """See `StepCost`; the batch size plays no part of its own here."""
        factor, added = self._correction[self._bucket[rows] if rows <= 256 else -1]
        return self._speed * (factor * self._plain(rows) + added)

    def attention(self, nodes: int, context: int) -> float:
        """See `StepCost`."""
        return self._speed * self._slope[min(nodes, 64)] * context

    def _plain(self, rows: int) -> float:
        return self._base[rows] if rows <= 256 else between(self.table.rows, self.table.bases, rows)

    def observe(self, rows: int, batch: int, context: int, seconds: float) -> None:
        """Take in one real step; trees are taken to be equally wide."""
        if rows < 1 or batch < 1 or not 0.0 < seconds < math.inf:
            return
        bucket = self._bucket_of(rows)
        recent = self._recent[bucket]
        self._steps += 1
        if self._seen[bucket] >= 0 and self._steps - self._seen[bucket] > self.STALE:
            recent.clear()
            self._own[bucket], self._seen[bucket] = 1.0, -1
        ratio = seconds / (self._plain(rows) + self._slope[min(64, round(rows / batch))] * context)
        self._speed = self._speeds.add(ratio / self._own[bucket])
        before, own = self._own[bucket], recent.add(ratio / self._speed)
        known, self._seen[bucket] = self._seen[bucket] >= 0, self._steps
        if not known or abs(own - before) > SETTLED * before or self._steps % self.WINDOW == 0:
            self._own[bucket] = own
            self._spread()

    def _spread(self) -> None:
        """A bucket without fresh observations follows the nearest one that has them, with some hope: see `HOPE`."""
        fresh = [i for i, seen in enumerate(self._seen) if seen >= 0 and self._steps - seen <= self.STALE]
        near = 0
        for i in range(len(self._correction)):
            while near + 1 < len(fresh) and fresh[near + 1] - i < i - fresh[near]:
                near += 1
            anchor = fresh[near]
            factor, added = self._own[anchor], 0.0
            if anchor != i:
                hope = HOPE if i > anchor else 1 / HOPE
                added = factor * self._plain(self.table.rows[anchor]) * (1 - hope)
                factor *= hope
            self._correction[i] = (factor, added)

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
    sizes: Seq[int] = (),
) -> CostModel:
    """Time the target pass, or read the table kept from an earlier start on this machine.

    measure: (rows of one tree, or of several beyond 64, context keys) → seconds. cache: directory for tables, None = do not keep. key:
    names model, dtype and whatever else changes timings; the machine is added. sizes: as in `CostModel`. A table that cannot be read, or
    that fresh timings contradict (other kernels), is measured anew; one that time cut short, or that was taken while others used the
    machine, serves this process and is not kept.
    """
    recorded = "|recorded" if sizes else ""
    name = hashlib.sha256(f"{key}|{machine_key()}|{max_rows}|{max_context}{recorded}".encode()).hexdigest()[:20]
    path = None if cache is None else cache / f"{name}.json"
    rows = tuple(r for r in (*ROW_COUNTS, *WIDE) if r <= max(1, max_rows))
    near, far = min(64, max(1, max_context // 4)), max(2, max_context)
    measure(1, near)  # the first pass allocates and warms caches
    if path is not None:
        try:
            table = CostTable.from_json(path.read_text())
            if table.rows == rows and table.contexts == (near, far) and _confirmed(table, measure):
                return CostModel(table, sizes)
        except (OSError, ValueError, KeyError, TypeError, IndexError):
            pass
    logging.getLogger("specdec").info(
        "measuring what a step costs on this machine (some seconds; kept for the next start if the machine is quiet)"
    )
    ones: list[float] = []
    times, start, whole = {1: 1.0}, time.monotonic(), True
    longer = {1: _ratio(measure, (1, near), (1, far))}
    for r, before in zip(rows[1:], rows, strict=False):
        if time.monotonic() - start > MEASURE_SECONDS * (2 if sizes else 1):  # what is recorded takes a while to record
            times[r], whole = times[before] * r / before, False  # rows beyond some count cost in proportion, at worst
            continue
        times[r] = _ratio(measure, (1, near), (r, near), ones)
        if r in FAR_ROWS:
            longer[r] = _ratio(measure, (r, near), (r, far))
    one = statistics.median(ones or [measure(1, near)])
    table = CostTable(rows, (near, far), [one * times[r] for r in rows], {r: one * times[r] * x for r, x in longer.items()})
    if path is not None and whole and one <= STEADY * min(ones, default=one):
        _write(path, table.to_json())
    return CostModel(table, sizes)


def _ratio(measure: Callable[[int, int], float], one: tuple[int, int], other: tuple[int, int], ones: list[float] | None = None) -> float:
    """Median of other ÷ one over alternating timings: holds on a machine whose speed changes. `ones` collects the first."""
    pairs = [(measure(*one), measure(*other)) for _ in range(PAIRS)]
    if ones is not None:
        ones.extend(a for a, _ in pairs)
    return statistics.median(b / a for a, b in pairs)


def _confirmed(table: CostTable, measure: Callable[[int, int], float]) -> bool:
    """Whether some rows still cost as many single rows as the table says. The scale is learnt from real steps."""
    context = table.contexts[0]
    for few in sorted({min(r, table.rows[-1]) for r in (2, 8)}):
        known = table.near[table.rows.index(few)] / table.near[0]
        if not 1 / TRUST < _ratio(measure, (1, context), (few, context)) / known < TRUST:
            return False
    return True


def _write(path: Path, text: str) -> None:
    """Atomic; a cache that cannot be written is no error."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(path, text.encode())
    except OSError:
        pass
