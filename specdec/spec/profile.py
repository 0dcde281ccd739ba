"""What a drafter's trees win and what its steps take, by shape: known of trees that nobody looked at before they were verified.

A drafted tree tells of every smaller one too: its likeliest nodes no deeper than so many levels are the tree that would have been drafted
instead. So means over what was drafted say what each shape wins, and one size more is guessed from how the chances fall. How honest the
chances are is seen from what was accepted lately. What a step of a shape takes is measured whole, from one commit to the next, since behind
a step in flight nothing in it can be timed by itself; it is kept as what it takes beyond the target's pass.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np

from specdec.config import MAX_NODES
from specdec.spec.median import Median

HOPED = 0.65  # chance of a node, given its parent, of a drafter that has drafted nothing yet
FALLS = 0.95  # largest share that the next node is guessed to have of the chance of the last
LEARN = 0.15  # weight of the latest trees in the means
EVERY = 2  # trees of every so many steps are looked at, once some have been
FRESH = 0.95  # of what was promised and accepted a step later
DOUBT = 1.0  # promised tokens a sequence that honesty is taken for granted for
GENEROUS = 8.0  # most that chances may have been too low
ENOUGH, WINDOW = 5, 15  # steps that say what a shape takes, the first of which may have recorded it; steps that a median is of
TRIAL = 8  # steps over which what is hoped of a drafter gives way to what it showed


class Shape(NamedTuple):
    """Of a tree: most nodes, root included, and most levels below the root."""

    nodes: int
    depth: int


class Profile:
    """Chances of acceptance of the likeliest nodes of a drafter's trees, and how honest they proved.

    mass[d, k]: of the k-th likeliest node among those of depth 1 … d, a mean, k from 0. spine[d]: of the likeliest node at depth d.
    """

    def __init__(self) -> None:
        self._mass, self._spine = np.zeros((MAX_NODES, MAX_NODES - 1)), np.ones(MAX_NODES)
        self._seen = np.zeros((MAX_NODES, MAX_NODES - 1), dtype=np.int64)  # how often each was looked at
        self._steps = 0
        self._promised = self._accepted = 0.0
        self._verified = 0
        self._table: np.ndarray | None = None

    def learn(self, scores: np.ndarray, depths: np.ndarray, counts: np.ndarray, shape: Shape) -> None:
        """Trees that were allowed this shape: scores [B, N] f32 along their paths, depths [B, N], counts [B] of their nodes."""
        self._steps += 1
        if self._steps > 2 * EVERY and self._steps % EVERY:
            return
        width = min(shape.nodes, MAX_NODES) - 1
        node = np.arange(scores.shape[1])
        values = np.where((node > 0) & (node < counts[:, None]), scores, 0.0)
        levels = np.arange(1, shape.depth + 1)
        at = np.where(depths == levels[:, None, None], values, 0.0)  # [D, B, N]
        until = np.where(depths <= levels[:, None, None], values, 0.0)
        best = -np.sort(-until, axis=2)[:, :, :width].mean(axis=1)
        best = np.pad(best, ((0, 0), (0, width - best.shape[1])))  # what a tree has no node for has no chance
        spine, rows = at.max(axis=2).mean(axis=1), slice(1, shape.depth + 1)
        weight = np.maximum(LEARN, 1.0 / (self._seen[rows, :width] + 1))
        self._mass[rows, :width] += weight * (best - self._mass[rows, :width])
        self._spine[rows] += weight[:, 0] * (spine - self._spine[rows])
        self._seen[rows, :width] += 1
        self._table = None

    def verified(self, promised: float, accepted: float) -> None:
        """Of a step, per sequence: the chances of all its nodes, and how many were accepted."""
        self._verified += 1
        self._promised = FRESH * self._promised + promised
        self._accepted = FRESH * self._accepted + accepted

    @property
    def honesty(self) -> float:
        """What was accepted lately of what was promised."""
        return min(GENEROUS, (self._accepted + DOUBT) / (self._promised + DOUBT))

    def wins(self, shape: Shape) -> float:
        """Tokens that a draft of this shape is expected to have accepted."""
        if self._table is None or len(self._table) <= shape.depth:
            self._table = self._guessed(shape.depth)
        shown = min(shape.depth, self.honesty * float(self._table[shape.depth, shape.nodes - 1]))
        trust = min(1.0, self._verified / TRIAL)
        return shown if trust == 1.0 else trust * shown + (1.0 - trust) * sum(HOPED**depth for depth in range(1, shape.depth + 1))

    def _guessed(self, most: int) -> np.ndarray:
        """[D, N] tokens of a tree of N nodes besides the root, no deeper than D, which is at most `most`."""
        known = int(np.nonzero(self._seen[:, 0])[0].max(initial=0))
        total, spine, row = np.zeros((most + 1, MAX_NODES)), self._spine.copy(), np.zeros(0)
        for depth in range(1, most + 1):
            if depth <= known:
                row = self._mass[depth, : np.count_nonzero(self._seen[depth])]
            else:  # one node more on the likeliest path
                falls = spine[depth - 1] / max(spine[depth - 2], 1e-9) if depth > 1 else HOPED
                spine[depth] = spine[depth - 1] * min(FALLS, falls)
                row = -np.sort(-np.append(row, spine[depth]))
            total[depth, 1:] = np.cumsum(_continued(row))
        return np.maximum.accumulate(total, axis=0)


def _continued(row: np.ndarray) -> np.ndarray:
    """Chances of the nodes after those known, which fall as they did there."""
    row = row[: MAX_NODES - 1]
    known, missing = len(row), MAX_NODES - 1 - len(row)
    if known < 2 or row[-1] <= 0.0 or row[-2] <= 0.0:
        return np.append(row, np.zeros(missing))
    falls = min(FALLS, row[-1] / row[-2])
    return np.append(row, row[-1] * falls ** np.arange(1, missing + 1))


class Pace:
    """Seconds that steps of each shape take beyond the target's pass, medians of the latest, by size of the batch."""

    def __init__(self) -> None:
        self._recent: dict[tuple[int, Shape], Median] = {}
        self._counts: Counter[tuple[int, Shape]] = Counter()
        self._known: dict[tuple[int, Shape], float] = {}

    def add(self, shape: Shape, batch: int, seconds: float) -> None:
        """One step of `batch` sequences, less the pass that the cost model expects."""
        key = batch.bit_length(), shape
        median = self._recent.setdefault(key, Median(WINDOW)).add(seconds)
        self._counts[key] += 1
        if self._counts[key] >= ENOUGH:
            self._known[key] = median

    def beyond(self, shape: Shape, batch: int) -> float | None:
        """Of such a step; from the nearest that is known where this one is not, as if what is not depth took as long as one. None = none
        is known."""
        if not self._known:
            return None
        size = batch.bit_length()
        near = min(self._known, key=lambda key: (key[1] != shape, abs(key[1].depth - shape.depth), abs(key[0] - size)))
        return self._known[near] * (1 + shape.depth) / (1 + near[1].depth)
