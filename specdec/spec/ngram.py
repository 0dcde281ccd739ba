"""The n-gram drafter (prompt lookup): continue as the text did after the last occurrence of its newest n tokens.

Longest match first, up to `ngram_max` tokens, at least `ngram_min`; among equals the newest occurrence. With a budget of
width 1 the draft is a chain; wider budgets merge several distinct continuations into a tree.
"""

from __future__ import annotations

from functools import partial

from specdec.spec.index import spread_levels
from specdec.spec.lookup import LONGEST, LookupDrafter, Match, Query, extension, use_compiled
from specdec.spec.proposer import DrafterContext, register
from specdec.spec.trie import DEPTH_BUCKETS, MATCH_BUCKETS, Calibration, DraftTrie, depth_bucket, match_bucket

CANDIDATES = 8
RANKS = 3  # first, second, any later child of a node
_PRIOR = (0.35, 0.45, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)  # by match bucket, first child


def _cell(length: int, depth: int, rank: int) -> int:
    return (match_bucket(length) * DEPTH_BUCKETS + depth_bucket(depth)) * RANKS + rank


def _prior() -> list[float]:
    """First children continue as `_PRIOR`, a little better once some drafts were accepted; later ones share what is left."""
    rates = []
    for match in range(MATCH_BUCKETS):
        for depth in range(DEPTH_BUCKETS):
            first = 1 - (1 - _PRIOR[match]) * 0.85**depth
            rates += [first, 0.3 * (1 - first), 0.1 * (1 - first)]
    return rates


class NgramDrafter(LookupDrafter):
    """See the module. `ngram_max`: matches longer than this are equals. compiled: None = where the extension is usable."""

    def __init__(self, context: DrafterContext, *, oldest_first: bool = False, compiled: bool | None = None):
        low, high = context.config.ngram_min, context.config.ngram_max
        draft = None
        if use_compiled(compiled):
            search = {"vocab": context.vocab_size, "candidates": CANDIDATES, "longest": LONGEST, "oldest_first": oldest_first}
            draft = partial(extension().draft_ngram, **search, ngram_max=high)
        levels, calibration = spread_levels(low, high), Calibration(_prior())
        super().__init__("ngram", context, levels, calibration, candidates=CANDIDATES, compiled=draft, oldest_first=oldest_first)
        self.ngram_max = high

    def _expected(self, length: int) -> float:
        return self.calibration.rates[_cell(length, 1, 0)]

    def _grow(self, trie: DraftTrie, matches: list[Match], query: Query) -> None:
        rates = self.calibration.rates
        for length, continuation in sorted(matches, key=lambda m: -min(m.length, self.ngram_max)):
            node = 0
            for token in continuation:
                known = trie.child(node, token)
                if known is None:
                    if not self._usable(token):
                        break
                    cell = _cell(length, trie.depths[node] + 1, min(len(trie.children[node]), RANKS - 1))
                    known = trie.add(node, token, cell, rates[cell])
                    if known is None:
                        break
                node = known
                if token in query.end_ids:
                    break
            if trie.width == 1 and len(trie.tokens) > 1:
                return


register("ngram")(NgramDrafter)
