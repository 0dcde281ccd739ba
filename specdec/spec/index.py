"""`TokenIndex`: where the n-grams of a growing token list occurred before; the memory of the host drafters.

For a few lengths n ("levels") a hash map holds the newest position at which each n-gram ends, and every position links to
the previous one with the same n-gram, as in an LZ77 matcher. A token costs one map operation per level, whatever the length
of the text; long stretches (a prompt, a corpus) are indexed at once with sorted numpy keys. Hash collisions cost time only:
every match is confirmed token by token.

This is the reference; `specdec._C.TokenIndex` (csrc/include/token_index.h) is the same class, compiled, without `keep_first`:
it always remembers the oldest occurrence.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from collections.abc import Sequence as Seq

import numpy as np

SEPARATOR = -1  # between texts of one index: never part of a match, ends every continuation
_MULTIPLIER = 0x9E3779B97F4A7C5
_MASK = (1 << 60) - 1  # divides 2**64, so that numpy's wrapping arithmetic and Python's agree
_BULK = 128  # stretches longer than this are indexed with numpy


def spread_levels(low: int, high: int, count: int = 6) -> tuple[int, ...]:
    """At most `count` n-gram lengths from `low` to `high`, both included, evenly spread in the logarithm."""
    if high - low < count:
        return tuple(range(low, high + 1))
    ratio = (high / low) ** (1 / (count - 1))
    return tuple(sorted({low, high} | {round(low * ratio**i) for i in range(1, count - 1)}))


class TokenIndex:
    """Index over `tokens` (a list owned by the caller that only grows, or None for a list of its own).

    levels: increasing n-gram lengths ≥ 1. keep_first: also remember the oldest occurrence of each n-gram.
    """

    def __init__(self, levels: Seq[int], tokens: list[int] | None = None, *, keep_first: bool = False):
        self.tokens: list[int] = [] if tokens is None else tokens
        self.levels = tuple(levels)
        self.size = 0  # n-grams that end before this position are indexed
        self._newest: list[dict[int, int]] = [{} for _ in self.levels]
        self._oldest: list[dict[int, int]] | None = [{} for _ in self.levels] if keep_first else None
        self._previous = [array("i") for _ in self.levels]  # [level][position] -> earlier position or -1

    def __len__(self) -> int:
        """Number of tokens, separators included."""
        return len(self.tokens)

    def extend(self, tokens: Seq[int], *, separate: bool = False) -> None:
        """Append to the index's own list and index it; `separate` puts a boundary before the new text."""
        if separate and self.tokens:
            self.tokens.append(SEPARATOR)
        self.tokens.extend(tokens)
        self.update(len(self.tokens))

    def update(self, end: int) -> None:
        """Index the n-grams that end before position `end` (≤ len(tokens)); amortised O(levels) per token."""
        if end - self.size > _BULK:
            self._update_bulk(self.size, end)
            self.size = end
            return
        while self.size < end:
            self._insert(self.size)
            self.size += 1

    def _insert(self, position: int) -> None:
        keys = self._keys(self.tokens, position)
        for level, key in enumerate(keys):
            newest = self._newest[level]
            self._previous[level].append(newest.get(key, -1))
            newest[key] = position
            if self._oldest is not None:
                self._oldest[level].setdefault(key, position)
        for level in range(len(keys), len(self.levels)):  # no n-gram of this length ends so early
            self._previous[level].append(-1)

    def _keys(self, tokens: Seq[int], position: int) -> list[int]:
        """Hashes of the n-grams that end at `position`, for each level that fits: Horner, from the end backwards."""
        keys: list[int] = []
        key, done = 0, 0
        for n in self.levels:
            if n > position + 1:
                break
            for at in range(position - done, position - n, -1):
                key = (key * _MULTIPLIER + tokens[at] + 1) & _MASK
            done = n
            keys.append(key)
        return keys

    def _update_bulk(self, start: int, end: int) -> None:
        base = max(0, start - self.levels[-1] + 1)
        tokens = np.asarray(self.tokens[base:end], dtype=np.int64).astype(np.uint64)
        keys = np.zeros(end - base, dtype=np.uint64)
        done = 0
        for level, n in enumerate(self.levels):
            while done < n and done < len(keys):
                keys[done:] = (keys[done:] * np.uint64(_MULTIPLIER) + tokens[: len(keys) - done] + np.uint64(1)) & np.uint64(_MASK)
                done += 1
            first = max(start, n - 1)  # first position with a full n-gram
            self._previous[level].extend([-1] * (min(first, end) - start))
            if first < end:
                self._link(level, keys[first - base :], first)

    def _link(self, level: int, keys: np.ndarray, first: int) -> None:
        """Chain equal keys of positions first, first + 1, … and join them to the chains that exist."""
        order = np.argsort(keys, kind="stable")
        ordered = keys[order]
        same = ordered[1:] == ordered[:-1]
        previous = np.full(len(keys), -1, dtype=np.int32)
        previous[order[1:][same]] = order[:-1][same] + first
        heads = np.concatenate(([True], ~same))
        tails = np.concatenate((~same, [True]))
        newest, head_keys, head_at = self._newest[level], ordered[heads].tolist(), order[heads]
        if newest:
            previous[head_at] = [newest.get(key, -1) for key in head_keys]
        if self._oldest is not None:
            known = self._oldest[level]
            self._oldest[level] = dict(zip(head_keys, (head_at + first).tolist(), strict=True)) | known
        newest.update(zip(head_keys, (order[tails] + first).tolist(), strict=True))
        self._previous[level].frombytes(previous.tobytes())

    def matches(self, context: Seq[int], limit: int, longest: int, *, oldest_first: bool = False) -> list[tuple[int, int]]:
        """Earlier ends of the last tokens of `context`, as (matched length ≤ `longest`, position), longest level first.

        Within a level newest first (the oldest in front with `oldest_first`, which needs keep_first). Stops at `limit`
        matches or a fixed number of links, so the cost is bounded. Positions at the end of the indexed text are included:
        index one token less than the context holds when the index is over the context itself.
        """
        found: list[tuple[int, int]] = []
        seen: set[int] = set()
        keys = self._keys(context, len(context) - 1)
        for level in range(len(keys) - 1, -1, -1):
            for position in self._chain(level, keys[level], 2 * limit, oldest_first):
                if position in seen:
                    continue
                seen.add(position)
                length = self._common(context, position, longest)
                if length >= self.levels[level]:
                    found.append((length, position))
                    if len(found) == limit:
                        return found
        return found

    def _chain(self, level: int, key: int, links: int, oldest_first: bool) -> Iterator[int]:
        position = self._newest[level].get(key, -1)
        if position < 0:
            return
        if oldest_first and self._oldest is not None:
            yield self._oldest[level][key]
        previous = self._previous[level]
        while position >= 0 and links > 0:
            yield position
            position = previous[position]
            links -= 1

    def _common(self, context: Seq[int], position: int, longest: int) -> int:
        """Length of the common ending of `context` and tokens[: position + 1], at most `longest`."""
        tokens, shift = self.tokens, len(context) - 1 - position
        bound = min(longest, position + 1, len(context))
        length = 0
        while length < bound and tokens[position - length] == context[position - length + shift]:
            length += 1
        return length

    def continuation(self, position: int, length: int, *, cyclic: bool) -> list[int]:
        """Up to `length` tokens that followed `position`, stopping before a separator.

        cyclic: the index is over the context itself, so a continuation that reaches the present goes on with the tokens
        it has just drafted, i.e. repeats with the period of the overlap.
        """
        tokens = self.tokens[position + 1 : position + 1 + length]
        if SEPARATOR in tokens:
            return tokens[: tokens.index(SEPARATOR)]
        period = len(self.tokens) - (position + 1)
        if cyclic and period > 0:
            while len(tokens) < length:
                tokens.append(tokens[-period])
        return tokens
