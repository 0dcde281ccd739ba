"""The suffix drafter: continue as *most* earlier texts did after the longest matching suffix, as long as they agree.

Where the n-gram drafter trusts one occurrence, this one counts: all recent occurrences of the longest suffix (up to 24
tokens) vote for the next token, then those that agree vote for the one after, and so on. A branch ends when its estimated
probability gets small or it is as long as the match allows (the longer the match, the longer the draft). Besides the
sequence's own text and prediction it looks into a memory of what finished sequences wrote, bounded first in first out, and
into a corpus. Occurrence lists come from the incremental index, so a token costs O(1) amortised; the votes take the place of
the counts in a suffix tree.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from specdec.spec.index import TokenIndex
from specdec.spec.lookup import LONGEST, LookupDrafter, Match, Query, extension, use_compiled
from specdec.spec.proposer import DrafterContext, register
from specdec.spec.trie import MATCH_BUCKETS, Calibration, DraftTrie, match_bucket

if TYPE_CHECKING:
    from specdec.sequence import Sequence

LEVELS = (2, 3, 5, 8, 14, 24)
CANDIDATES = 16
LENGTH_FACTOR, LENGTH_BONUS = 2, 2  # longest draft = factor · matched length + bonus
MIN_SCORE = 0.05  # of a node; less likely branches are not grown
MEMORY_TOKENS = 1 << 17  # per generation of the memory of past outputs
VOTES, SHARES = 3, 6
_SHARE_PRIOR = (0.04, 0.12, 0.3, 0.5, 0.7, 0.85)  # by share of the votes: ≤ 5 %, ≤ 20 %, ≤ 45 %, ≤ 70 %, < 100 %, all
_VOTE_PRIOR = (0.0, 0.3, 0.6)  # how much more to believe in 1, 2–3, 4+ votes


def _cell(length: int, votes: int, total: int) -> int:
    """Evidence for a node: effective match length (match plus depth), number and share of votes."""
    share = votes / total
    shares = 0 if share <= 0.05 else 1 if share <= 0.2 else 2 if share <= 0.45 else 3 if share <= 0.7 else 4 if share < 1.0 else 5
    count = 0 if votes == 1 else 1 if votes < 4 else 2
    return (match_bucket(length) * SHARES + shares) * VOTES + count


def _prior() -> list[float]:
    """More matching tokens and more votes move the share of the votes towards one."""
    rates = []
    for match in range(MATCH_BUCKETS):
        for share in _SHARE_PRIOR:
            for trust in _VOTE_PRIOR:
                doubt = (1 - share) * 0.85**match if share > 0.6 else 1 - share
                rates.append(1 - doubt * (1 - 0.5 * trust if share > 0.6 else 1))
    return rates


class PastOutputs:
    """What finished sequences wrote, in two generations: the old one is dropped when the young one is full.

    new_index: makes an empty index. capacity: tokens of a generation.
    """

    def __init__(self, new_index: Callable[[], TokenIndex], capacity: int = MEMORY_TOKENS):
        self._new_index = new_index
        self._capacity = capacity
        self._young, self._old = new_index(), new_index()

    def add(self, tokens: list[int]) -> None:
        """Remember one output; at most twice `capacity` tokens are kept."""
        if len(self._young) + len(tokens) > self._capacity and len(self._young):
            self._old, self._young = self._young, self._new_index()
        self._young.extend(tokens[-self._capacity :], separate=True)

    def indexes(self) -> list[TokenIndex]:
        return [index for index in (self._young, self._old) if len(index)]


class SuffixDrafter(LookupDrafter):
    """See the module. `past`: memory shared by all sequences of the engine. compiled: None = where the extension is usable."""

    def __init__(self, context: DrafterContext, *, memory_tokens: int = MEMORY_TOKENS, compiled: bool | None = None):
        draft = None
        if use_compiled(compiled):
            search = {"vocab": context.vocab_size, "candidates": CANDIDATES, "longest": LONGEST}
            draft = partial(extension().draft_suffix, **search, factor=LENGTH_FACTOR, bonus=LENGTH_BONUS, floor=MIN_SCORE)
        super().__init__("suffix", context, LEVELS, Calibration(_prior()), candidates=CANDIDATES, compiled=draft)
        self.past = PastOutputs(self.new_index, memory_tokens)

    def reset(self, seq: Sequence) -> None:
        """Forget the index of a sequence; what a finished one wrote goes into the memory of past outputs."""
        if seq.finish_reason in ("stop", "length") and seq.num_output and seq in self._states:
            self.past.add(seq.output)
        LookupDrafter.reset(self, seq)

    def _shared(self) -> list[TokenIndex]:
        return self.past.indexes() + LookupDrafter._shared(self)

    def _expected(self, length: int) -> float:
        return max(self.calibration.rates[_cell(length, votes, votes)] for votes in (1, 2, 4))

    def _grow(self, trie: DraftTrie, matches: list[Match], query: Query) -> None:
        """Vote level by level, best branch first, from the matches at least half as long as the longest."""
        if not matches:
            return
        longest = max(m.length for m in matches)
        voters = [m for m in matches if 2 * m.length >= longest]
        self._vote(trie, voters, min(query.depth, LENGTH_FACTOR * longest + LENGTH_BONUS), query.end_ids)

    def _vote(self, trie: DraftTrie, voters: list[Match], depth: int, end_ids: tuple[int, ...]) -> None:
        rates = self.calibration.rates
        open_nodes = [(0, voters)]
        while open_nodes:
            node, agreeing = open_nodes.pop()
            at = trie.depths[node]
            heard = [m for m in agreeing if len(m.continuation) > at]
            if at >= depth or not heard:
                continue
            votes = Counter(m.continuation[at] for m in heard)
            grown = []
            for token, count in votes.most_common(trie.width):
                length = max(m.length for m in heard if m.continuation[at] == token) + at
                cell = _cell(length, count, len(heard))
                if not self._usable(token) or trie.scores[node] * rates[cell] < MIN_SCORE:
                    continue
                child = trie.add(node, token, cell, rates[cell])
                if child is not None and token not in end_ids:
                    grown.append((child, [m for m in heard if m.continuation[at] == token]))
            open_nodes += reversed(grown)


register("suffix")(SuffixDrafter)
