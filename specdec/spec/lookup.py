"""`LookupDrafter`: what the n-gram and the suffix drafter share: indexes per sequence, sources, and learning.

A source is an index and how to read it. Every sequence has its own text (prompt and output, indexed as it grows) and
perhaps a prediction; all sequences share an optional corpus file and, if the drafter keeps one, a memory of past outputs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from specdec.errors import ConfigError
from specdec.spec.index import TokenIndex
from specdec.spec.proposer import DrafterContext
from specdec.spec.tree import tree_from_lists
from specdec.spec.trie import Calibration, DraftTrie, outcomes
from specdec.types import DraftTree, Forward, Scheduled, SpecBudget, StepPlan, Verdict

if TYPE_CHECKING:
    from specdec.sampling import SamplingState
    from specdec.sequence import Sequence

LONGEST = 32  # match lengths beyond this tell nothing more


class Match(NamedTuple):
    """An earlier occurrence of the newest tokens: how many agree, and the tokens that followed it."""

    length: int
    continuation: list[int]


@dataclass(slots=True)
class _State:
    own: TokenIndex
    prediction: TokenIndex | None
    trie: DraftTrie | None = None  # what was proposed last, until observed


def read_corpus(context: DrafterContext, levels: Seq[int]) -> TokenIndex | None:
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
    index = TokenIndex(levels)
    index.extend([t for t in context.tokenize(text) if 0 <= t < context.vocab_size])
    return index


@dataclass(slots=True)
class LookupDrafter(ABC):
    """Base of the host drafters. Subclasses set `name` and write `_grow`.

    levels: n-gram lengths indexed. candidates: occurrences looked at per source. calibration: rates per cell.
    oldest_first: prefer the oldest occurrence. vocab_size: drafts stay below it.
    """

    name: str
    vocab_size: int
    levels: tuple[int, ...]
    calibration: Calibration
    candidates: int
    corpus: TokenIndex | None = None
    oldest_first: bool = False
    needs_hidden: bool = False
    max_len: int | None = None
    _states: dict[Sequence, _State] = field(default_factory=dict)

    def propose(self, shares: tuple[Scheduled, ...], sampling: SamplingState | None) -> DraftTree:
        """Trees for `shares`; a lookup that finds nothing gives the root alone."""
        tries = [self._draft(share) for share in shares]
        names = [self.name if len(t.tokens) > 1 else None for t in tries]
        return tree_from_lists([(t.tokens, t.parents, t.scores) for t in tries], names)

    def observe(self, plan: StepPlan, tree: DraftTree, forward: Forward, verdict: Verdict) -> None:
        """Learn acceptance rates from what was verified; a cut by an end token or a limit says nothing."""
        shares = plan.sampling
        if not any(state is not None and state.trie is not None for state in map(self._states.get, (share.seq for share in shares))):
            return
        finish = verdict.finish.tolist()
        for share, kept, done in zip(shares, outcomes(tree, verdict), finish, strict=True):
            state = self._states.get(share.seq)
            if state is None or state.trie is None:
                continue
            if kept and not done:
                state.trie.learn(kept, self.calibration)
            state.trie = None

    def reset(self, seq: Sequence) -> None:
        """Forget the index of a sequence; it is rebuilt from its tokens if it comes back."""
        self._states.pop(seq, None)

    def _draft(self, share: Scheduled) -> DraftTrie:
        seq, budget = share.seq, share.budget
        state = self._states.get(seq)
        if state is None:
            prediction = None
            if seq.prediction:
                prediction = TokenIndex(self.levels)
                prediction.extend(seq.prediction)
            state = self._states[seq] = _State(TokenIndex(self.levels, seq.tokens, keep_first=self.oldest_first), prediction)
        state.own.update(len(seq.tokens) - 1)  # without the newest token: the suffix must not find itself
        depth = min(budget.depth, seq.remaining - 1, budget.nodes - 1)
        trie = DraftTrie(seq.tokens[-1], limit=4 * budget.nodes, width=budget.width)
        if depth > 0:
            self._grow(trie, self._matches(seq, state, depth, budget), depth, seq)
        if len(trie.tokens) == 1:
            state.trie = None
            return trie
        state.trie = trie.select(budget.nodes) if budget.width > 1 else trie
        return state.trie

    def _matches(self, seq: Sequence, state: _State, depth: int, budget: SpecBudget) -> list[Match]:
        """Occurrences in all sources; the prediction's first (it is what the caller expects), then the text's own."""
        found: list[Match] = []
        if state.prediction is not None:
            if seq.num_output == 0:
                found.append(Match(LONGEST, list(seq.prediction[:depth])))
            found += self._search(state.prediction, seq.tokens, depth)
        found += self._search(state.own, seq.tokens, depth, own=True)
        for shared in self._shared():
            found += self._search(shared, seq.tokens, depth)
        return found

    def _search(self, index: TokenIndex, tokens: list[int], depth: int, *, own: bool = False) -> list[Match]:
        hits = index.matches(tokens, self.candidates, LONGEST, oldest_first=own and self.oldest_first)
        return [Match(length, index.continuation(position, depth, cyclic=own)) for length, position in hits]

    def _shared(self) -> list[TokenIndex]:
        return [] if self.corpus is None else [self.corpus]

    @abstractmethod
    def _grow(self, trie: DraftTrie, matches: list[Match], depth: int, seq: Sequence) -> None:
        """Fill `trie` from the matches, best continuation first."""

    def _usable(self, token: int) -> bool:
        return 0 <= token < self.vocab_size
