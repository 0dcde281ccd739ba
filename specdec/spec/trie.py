"""Draft trees on the host: a trie of continuations with a calibrated acceptance estimate at every node.

Both host drafters describe a node by a *cell*, a small integer that says how trustworthy the evidence behind it is (match
length, depth, rank among its siblings …). `Calibration` learns from verdicts how often nodes of each cell are accepted once
their parent is. The product along a path is the node's score.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from collections.abc import Sequence as Seq
from typing import NamedTuple

from specdec.types import DraftTree, Verdict

MATCH_BUCKETS = 9
_MATCH_BUCKET = [0, 0, 1, 2, 3, 4, 4, 5, 5] + [6] * 7 + [7] * 16 + [8]
DEPTH_BUCKETS = 6
_DEPTH_BUCKET = [0, 0, 1, 2, 3, 3, 4, 4, 4, 4, 4, 5]


def match_bucket(length: int) -> int:
    """Match length 1, 2, 3, 4, 5–6, 7–8, 9–15, 16–31, 32+ → 0 … 8 (length ≥ 1)."""
    return _MATCH_BUCKET[min(length, 32)]


def depth_bucket(depth: int) -> int:
    """Depth 1, 2, 3, 4–5, 6–10, 11+ → 0 … 5 (depth ≥ 1)."""
    return _DEPTH_BUCKET[min(depth, 11)]


class Calibration:
    """Rates of acceptance per cell, given that the parent was accepted; a Beta posterior that forgets slowly.

    prior: expected rate per cell. weight: trials the prior counts for. horizon: trials after which the past is halved.
    """

    def __init__(self, prior: Seq[float], *, weight: float = 4.0, horizon: int = 400):
        self._hits = [p * weight for p in prior]
        self._trials = [weight] * len(self._hits)
        self._horizon = horizon
        self.rates = array("d", prior)  # [cell], read by the drafters, compiled ones through the buffer

    def record(self, cell: int, accepted: bool) -> None:
        """One trial: a node of this cell whose parent was accepted."""
        self._trials[cell] += 1.0
        if accepted:
            self._hits[cell] += 1.0
        if self._trials[cell] > self._horizon:
            self._trials[cell] *= 0.5
            self._hits[cell] *= 0.5
        self.rates[cell] = self._hits[cell] / self._trials[cell]


class DraftTrie:
    """Continuations of one root merged into a tree, in order of insertion. Node 0 is the root; lists are by node."""

    __slots__ = ("cells", "children", "depths", "limit", "parents", "scores", "tokens", "width")

    def __init__(self, root: int, *, limit: int, width: int):
        self.tokens, self.parents, self.depths, self.scores, self.cells = [root], [-1], [0], [1.0], [-1]
        self.children: list[dict[int, int]] = [{}]  # token -> node
        self.limit = limit  # most nodes, root included
        self.width = width

    def child(self, node: int, token: int) -> int | None:
        """The child of `node` that drafts `token`, if it is there."""
        return self.children[node].get(token)

    def add(self, node: int, token: int, cell: int, rate: float) -> int | None:
        """A new child of `node`; None when the tree or the node is full. `rate`: acceptance given that `node` is."""
        if len(self.tokens) >= self.limit or len(self.children[node]) >= self.width:
            return None
        new = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(node)
        self.depths.append(self.depths[node] + 1)
        self.scores.append(self.scores[node] * rate)
        self.cells.append(cell)
        self.children.append({})
        self.children[node][token] = new
        return new

    def select(self, nodes: int) -> DraftTrie:
        """The `nodes` likeliest nodes (root included), best path numbered first, then parents before children."""
        return self.renumbered(self.best(nodes))

    def best(self, nodes: int) -> list[int]:
        """The nodes of `select`, in its order."""
        kept = sorted(range(len(self.tokens)), key=lambda i: (-self.scores[i], i))[:nodes]
        inside = set(kept)
        path, node = [0], 0
        while True:
            options = [c for c in self.children[node].values() if c in inside]
            if not options:
                break
            node = max(options, key=lambda c: (self.scores[c], -c))
            path.append(node)
        return path + sorted(inside.difference(path))

    def renumbered(self, order: Seq[int]) -> DraftTrie:
        """The nodes `order` (root first, parents before children) as a tree of their own, in that order."""
        new = DraftTrie(self.tokens[0], limit=max(self.limit, 1), width=self.width)
        number = {0: 0}
        for old in order[1:]:
            parent = number[self.parents[old]]
            number[old] = len(new.tokens)
            new.tokens.append(self.tokens[old])
            new.parents.append(parent)
            new.depths.append(self.depths[old])
            new.scores.append(self.scores[old])
            new.cells.append(self.cells[old])
            new.children.append({})
            new.children[parent][self.tokens[old]] = number[old]
        return new

    def draft(self) -> Draft:
        """What remains of the tree once it is grown."""
        return Draft(self.tokens, self.parents, self.scores, self.cells)


class Draft(NamedTuple):
    """A grown tree, lists by node (root first): tokens, parents (root's is -1), cumulative scores, cells (root's is -1)."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]
    cells: list[int]

    def learn(self, kept: Iterable[tuple[int, int, bool]], calibration: Calibration) -> None:
        """Record the trials in a verified subset of this tree: (parent, token, accepted) per node, in tree order.

        `kept` numbers parents as the verified tree does; nodes are recognised by their path, since siblings are distinct.
        """
        number = {edge: i for i, edge in enumerate(zip(self.parents, self.tokens, strict=True))}
        mine, accepted_nodes = [0], [True]
        for parent, token, accepted in kept:
            node = number.get((mine[parent], token), -1) if mine[parent] >= 0 else -1
            mine.append(node)
            accepted_nodes.append(accepted)
            if node > 0 and accepted_nodes[parent]:
                calibration.record(self.cells[node], accepted)


def outcomes(tree: DraftTree, verdict: Verdict) -> list[list[tuple[int, int, bool]]]:
    """Per sequence: (parent, token, accepted) of every draft node that was verified, in tree order."""
    drafted, decided, result = tree.host, verdict.host, []
    for b, count in enumerate(drafted.num_nodes):
        taken = set(decided.path[b][: decided.num_accepted[b]])
        result.append([(drafted.parents[b][i], drafted.tokens[b][i], i in taken) for i in range(1, count)])
    return result
