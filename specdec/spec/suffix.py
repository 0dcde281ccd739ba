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
from typing import TYPE_CHECKING

from specdec.spec.index import TokenIndex
from specdec.spec.lookup import LookupDrafter, Match, read_corpus
from specdec.spec.proposer import DrafterContext, register
from specdec.spec.trie import MATCH_BUCKETS, Calibration, DraftTrie, match_bucket

if TYPE_CHECKING:
    from specdec.sequence import Sequence

LEVELS = (2, 3, 5, 8, 14, 24)
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
    """What finished sequences wrote, in two generations: the old one is dropped when the young one is full."""

    __slots__ = ("_capacity", "_old", "_young")

    def __init__(self, capacity: int = MEMORY_TOKENS):
        self._capacity = capacity
        self._young, self._old = TokenIndex(LEVELS), TokenIndex(LEVELS)

    def add(self, tokens: list[int]) -> None:
        """Remember one output; at most twice `capacity` tokens are kept."""
        if len(self._young.tokens) + len(tokens) > self._capacity and self._young.tokens:
            self._old, self._young = self._young, TokenIndex(LEVELS)
        self._young.extend(tokens[-self._capacity :], separate=True)

    def indexes(self) -> list[TokenIndex]:
        return [index for index in (self._young, self._old) if index.tokens]


class SuffixDrafter(LookupDrafter):
    """See the module. `past`: memory shared by all sequences of the engine."""

    __slots__ = ("past",)

    def __init__(self, context: DrafterContext, *, memory_tokens: int = MEMORY_TOKENS):
        super().__init__(
            name="suffix",
            vocab_size=context.vocab_size,
            levels=LEVELS,
            calibration=Calibration(_prior()),
            candidates=16,
            corpus=read_corpus(context, LEVELS),
        )
        self.past = PastOutputs(memory_tokens)

    def reset(self, seq: Sequence) -> None:
        """Forget the index of a sequence; what a finished one wrote goes into the memory of past outputs."""
        if seq.finish_reason in ("stop", "length") and seq.num_output and seq in self._states:
            self.past.add(seq.output)
        LookupDrafter.reset(self, seq)

    def _shared(self) -> list[TokenIndex]:
        return self.past.indexes() + LookupDrafter._shared(self)

    def _grow(self, trie: DraftTrie, matches: list[Match], depth: int, seq: Sequence) -> None:
        """Vote level by level, best branch first, from the matches at least half as long as the longest."""
        if not matches:
            return
        longest = max(m.length for m in matches)
        voters = [m for m in matches if 2 * m.length >= longest]
        depth = min(depth, LENGTH_FACTOR * longest + LENGTH_BONUS)
        self._vote(trie, 0, voters, depth, seq)

    def _vote(self, trie: DraftTrie, start: int, voters: list[Match], depth: int, seq: Sequence) -> None:
        rates = self.calibration.rates
        open_nodes = [(start, voters)]
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
                if child is not None and token not in seq.end_ids:
                    grown.append((child, [m for m in heard if m.continuation[at] == token]))
            open_nodes += reversed(grown)


register("suffix")(SuffixDrafter)
