"""`LookupDrafter`: what the n-gram and the suffix drafter share: indexes per sequence, sources, and learning.

A source is an index and how to read it. Every sequence has its own text (prompt and output, indexed as it grows) and
perhaps a prediction; all sequences share an optional corpus file and, if the drafter keeps one, a memory of past outputs.

Searching and growing the tree have two backends: the reference (`index.py`, `trie.py` and the drafters' `_grow`) and the
extension (`csrc/lookup.cpp`). They draft the same trees.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from specdec import ops
from specdec.errors import ConfigError
from specdec.spec.index import TokenIndex
from specdec.spec.proposer import DrafterContext
from specdec.spec.tree import tree_from_lists
from specdec.spec.trie import Calibration, Draft, DraftTrie, outcomes
from specdec.types import DraftTree, Forward, Scheduled, StepPlan, Verdict

if TYPE_CHECKING:
    from specdec.sampling import SamplingState
    from specdec.sequence import Sequence

LONGEST = 32  # match lengths beyond this tell nothing more


class Match(NamedTuple):
    """An earlier occurrence of the newest tokens: how many agree, and the tokens that followed it."""

    length: int
    continuation: list[int]


class Query(NamedTuple):
    """What one sequence may draft: nodes (root included), depth and width bound the tree; paths stop at `end_ids`.

    guess: tokens expected next whatever the text says: the prediction, before anything was written.
    """

    depth: int
    nodes: int
    width: int
    end_ids: tuple[int, ...]
    guess: tuple[int, ...]


@dataclass(slots=True)
class _State:
    own: TokenIndex
    prediction: TokenIndex | None


Compiled = Callable[[list[TokenIndex], Query, "array[float]"], tuple[list[int], list[int], list[float], list[int]]]
"""Sources, query, rates by cell → the lists of a `Draft`. The sources are compiled indexes, one of them over the text."""


class LookupDrafter(ABC):
    """Base of the host drafters. Subclasses write `_grow` and hand over its compiled twin, if there is one.

    levels: n-gram lengths indexed. candidates: occurrences looked at per source. calibration: rates per cell.
    oldest_first: prefer the oldest occurrence. compiled: searches and grows in place of the reference.
    """

    needs_hidden = False
    max_len: int | None = None

    def __init__(
        self,
        name: str,
        context: DrafterContext,
        levels: Seq[int],
        calibration: Calibration,
        *,
        candidates: int,
        compiled: Compiled | None,
        oldest_first: bool = False,
    ):
        self.name = name
        self.vocab_size = context.vocab_size
        self.levels = tuple(levels)
        self.calibration = calibration
        self.candidates = candidates
        self.oldest_first = oldest_first
        self._compiled = compiled
        self._states: dict[Sequence, _State] = {}
        self._drafts: dict[Sequence, Draft] = {}  # what was proposed last, until observed
        self.corpus = self._read_corpus(context)

    def outlook(self, seq: Sequence) -> float:
        """About how likely the first token drafted would be: as the longest match found at once lets expect. 0: no match, no draft."""
        state = self._current(seq)
        if self._guess(seq, state):
            return self._expected(LONGEST)
        newest = seq.tokens[-LONGEST:]
        hits = [hit for index in self._sources(state) for hit in index.matches(newest, 1, LONGEST)]
        return self._expected(max(hits)[0]) if hits else 0.0

    def propose(self, shares: tuple[Scheduled, ...], sampling: SamplingState | None) -> DraftTree:
        """Trees for `shares`; a lookup that finds nothing gives the root alone."""
        drafts = [self._draft(share) for share in shares]
        names = [self.name if len(d.tokens) > 1 else None for d in drafts]
        return tree_from_lists([(d.tokens, d.parents, d.scores) for d in drafts], names)

    def observe(self, plan: StepPlan, tree: DraftTree, forward: Forward, verdict: Verdict) -> None:
        """Learn acceptance rates from what was verified; a cut by an end token or a limit says nothing."""
        if not self._drafts:
            return
        for share, kept, done in zip(plan.sampling, outcomes(tree, verdict), verdict.host.finish, strict=True):
            draft = self._drafts.pop(share.seq, None)
            if draft is not None and kept and not done:
                draft.learn(kept, self.calibration)

    def reset(self, seq: Sequence) -> None:
        """Forget the index of a sequence; it is rebuilt from its tokens if it comes back."""
        self._states.pop(seq, None)
        self._drafts.pop(seq, None)

    def new_index(self, tokens: list[int] | None = None) -> TokenIndex:
        """An empty index in this drafter's backend; over `tokens` when given, a list that only grows."""
        if self._compiled is None:
            return TokenIndex(self.levels, tokens, keep_first=self.oldest_first)
        made: TokenIndex = extension().TokenIndex(self.levels, tokens)
        return made

    def _read_corpus(self, context: DrafterContext) -> TokenIndex | None:
        """Index of `SpecConfig.corpus`, or None. ConfigError when it cannot be read or there is no tokenizer."""
        path = context.config.corpus
        if path is None:
            return None
        if context.tokenize is None:
            raise ConfigError("corpus needs a model with a tokenizer; remove it", param="corpus")
        try:
            text = Path(path).read_text(encoding="utf-8", errors="replace")
        except OSError as err:
            raise ConfigError(f"corpus {path!r} cannot be read: {err.strerror}; name a text file", param="corpus") from None
        index = self.new_index()
        index.extend([t for t in context.tokenize(text) if 0 <= t < context.vocab_size])
        return index

    def _draft(self, share: Scheduled) -> Draft:
        seq, budget = share.seq, share.budget
        state = self._current(seq)
        depth = min(budget.depth, seq.remaining - 1, budget.nodes - 1)
        query = Query(depth, budget.nodes, budget.width, tuple(seq.end_ids), self._guess(seq, state))
        if depth < 1:
            return Draft([seq.tokens[-1]], [-1], [1.0], [-1])
        draft = self._search(self._sources(state), query, seq)
        if len(draft.tokens) > 1:
            self._drafts[seq] = draft
        return draft

    def _current(self, seq: Sequence) -> _State:
        state = self._states.get(seq) or self._open(seq)
        state.own.update(len(seq.tokens) - 1)  # without the newest token: the suffix must not find itself
        return state

    def _guess(self, seq: Sequence, state: _State) -> tuple[int, ...]:
        return seq.prediction if state.prediction is not None and seq.num_output == 0 else ()

    def _sources(self, state: _State) -> list[TokenIndex]:
        predicted = [] if state.prediction is None else [state.prediction]
        return [*predicted, state.own, *self._shared()]

    def _open(self, seq: Sequence) -> _State:
        prediction = None
        if seq.prediction:
            prediction = self.new_index()
            prediction.extend(seq.prediction)
        state = self._states[seq] = _State(self.new_index(seq.tokens), prediction)
        return state

    def _search(self, sources: list[TokenIndex], query: Query, seq: Sequence) -> Draft:
        """Occurrences in all sources in order (the prediction's first: it is what the caller expects), then the tree."""
        if self._compiled is not None:
            return Draft(*self._compiled(sources, query, self.calibration.rates))
        matches = [Match(LONGEST, list(query.guess[: query.depth]))] if query.guess else []
        for index in sources:
            own = index.tokens is seq.tokens
            hits = index.matches(seq.tokens, self.candidates, LONGEST, oldest_first=own and self.oldest_first)
            matches += [Match(length, index.continuation(position, query.depth, cyclic=own)) for length, position in hits]
        trie = DraftTrie(seq.tokens[-1], limit=4 * query.nodes, width=query.width)
        self._grow(trie, matches, query)
        return (trie.select(query.nodes) if query.width > 1 else trie).draft()

    def _shared(self) -> list[TokenIndex]:
        return [] if self.corpus is None else [self.corpus]

    @abstractmethod
    def _expected(self, length: int) -> float:
        """Rate of a first token that nothing speaks against, after a match of `length` tokens."""

    @abstractmethod
    def _grow(self, trie: DraftTrie, matches: list[Match], query: Query) -> None:
        """Fill `trie` from the matches, best continuation first."""

    def _usable(self, token: int) -> bool:
        return 0 <= token < self.vocab_size


def extension() -> Any:
    """The compiled backend. Only where `ops.compiled()`."""
    from specdec import _C

    return _C


def use_compiled(wanted: bool | None) -> bool:
    """Whether a drafter takes the compiled backend: as `wanted`, by default wherever the extension is usable."""
    return ops.compiled() if wanted is None else wanted
