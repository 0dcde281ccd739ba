"""The P-EAGLE drafter: all depths from one pass of the head.

Behind the newest token the head runs mask rows, one per further depth; row j gives a law of the token j places on that knows
nothing of the drafts before it. The tree holds the likeliest combinations: a node's score is the product of the calibrated
chances of its path, and best-first search takes them in falling order. A chain is width 1. Mask rows write K and V behind the
newest token, where the next real pairs overwrite them. With a transition (`specdec.models.transition`) the law of a row is
corrected by the draft before, and the tree grows depth by depth (`growth`) from the same one pass. Source: reference §4.3 and §4.5.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.spec.candidates import Race, TipRows, spine_first
from specdec.spec.growth import Growth, beam_widths
from specdec.spec.head_drafter import HeadDrafter, HostDraft, Pick, depth_cells, numbered
from specdec.spec.head_kv import HeadRunner
from specdec.spec.proposer import register
from specdec.spec.recorded_growth import RecordedDrafts
from specdec.types import Scheduled

if TYPE_CHECKING:
    from specdec.sampling import SamplingState
    from specdec.sequence import Sequence
    from specdec.spec.proposer import DrafterContext

Choice = tuple[int, float, int]
"""A candidate of one depth: token, rate, cell."""


class PEagle(HeadDrafter):
    """See the module, and `HeadDrafter` for what it needs."""

    name = "peagle"

    def __init__(self, context: DrafterContext):
        super().__init__(context)
        self._recorded = RecordedDrafts(self, self._runner, context.recorder) if context.recorder is not None else None

    def _draft(
        self, shares: list[Scheduled], depths: list[int], sampling: SamplingState
    ) -> tuple[list[HostDraft], Mapping[tuple[int, int], Tensor]]:
        depths = [self._depth(d) for d in depths]
        if self._recorded is not None and self._replays(shares, depths, sampling) and self._recorded.fit(shares, depths, sampling):
            return self._recorded.drafts(shares, depths[0], sampling), {}
        if self.head.config.transition > 0:
            stepper = _Transitions(self._runner, [s.seq for s in shares], depths)
            beams = beam_widths(shares, self)
            return Growth(self, stepper, shares, depths, sampling, beams=beams, looks=False).drafts()
        return self._product(shares, depths, sampling)

    def _depth(self, depth: int) -> int:
        return min(depth, self.head.config.num_depths or depth)

    @property
    def width_ahead(self) -> int:
        """Trees of laws that know nothing of each other are searched on the host."""
        return super().width_ahead if self.head.config.transition > 0 else min(1, super().width_ahead)

    def _replays(self, shares: list[Scheduled], depths: list[int], sampling: SamplingState) -> bool:
        return self.head.config.transition > 0 or chain(shares)

    def _product(
        self, shares: list[Scheduled], depths: list[int], sampling: SamplingState
    ) -> tuple[list[HostDraft], Mapping[tuple[int, int], Tensor]]:
        """Trees of laws that know nothing of each other."""
        hidden, _ = self._runner.extend([s.seq for s in shares], [d - 1 for d in depths])
        slots = [share.seq.request_slot for share, d in zip(shares, depths, strict=True) for _ in range(d)]
        depth = torch.tensor([d for deepest in depths for d in range(deepest)], dtype=torch.int64, device=self._device)
        unknown = torch.full((len(slots), max(depths)), -1, dtype=torch.int64, device=self._device)
        rows = TipRows(slots, unknown, depth, self._device)
        width = min(max(s.budget.width for s in shares), self.head.config.draft_vocab_size)
        ids, chances, law = self._choose(self.head.logits(hidden), rows, width, sampling)
        above = torch.tensor([depth_cells(d + 1) for deepest in depths for d in range(deepest)], device=self._device)
        rates, cells = self.scores.rate(chances, self.scores.base(sampling.noisy[rows.slots], width) + above[:, None])
        rates = torch.where(chances > 0, rates, 0.0)
        columns = [t.tolist() for t in (ids, rates, cells)]
        drafts, first = [], 0
        laws: dict[tuple[int, int], Tensor] = {}
        for i, (share, deepest) in enumerate(zip(shares, depths, strict=True)):
            own = slice(first, first + deepest)
            options = [[*zip(*level, strict=True)][: share.budget.width] for level in zip(*(c[own] for c in columns), strict=True)]
            root, nodes = share.seq.tokens[-1], share.budget.nodes
            if self.noise_coupled:
                drafts.append(best_first(root, options, nodes, share.seq.end_ids))
            else:
                draft = fixed(root, options)
                order = spine_first(draft.parents, nodes)
                drafts.append(draft.select(order))
                if law is not None and not share.seq.params.greedy:
                    laws |= {(i, d): law[first + d] for d in range(min(deepest, len(order)))}
            first += deepest
        return drafts, laws

    def _choose(self, logits: Tensor, rows: TipRows, width: int, sampling: SamplingState) -> tuple[Tensor, Tensor, Tensor | None]:
        """(ids, chances) [R, width]; and log q [R, V] where candidates are drawn, one depth at a time."""
        race = Race(sampling, self.noise_coupled, self.head.target_ids, self.head.config.noise_share)
        if self.noise_coupled:
            return *race(logits, rows, width), None
        law = race.law(logits, rows)
        ids, chances = torch.zeros((len(law), width), dtype=torch.int64, device=self._device), law.new_zeros((len(law), width))
        for d in range(int(rows.depth.max()) + 1):
            index = (rows.depth == d).nonzero()[:, 0]
            ids[index], chances[index] = race.pick(law[index], rows.select(index), width)
        return ids, chances, law


class _Transitions:
    """Steps through the mask rows of one pass: hidden [D, B, Hd], those of row d corrected by the drafts of depth d."""

    def __init__(self, runner: HeadRunner, seqs: list[Sequence], depths: list[int]):
        self._head, self._row = runner.head, 0
        states, _ = runner.extend(seqs, [d - 1 for d in depths])
        first = torch.tensor([0, *depths[:-1]], device=states.device).cumsum(0)
        row = torch.arange(max(depths), device=states.device)[:, None]  # of trees that are not so deep nobody asks
        self._hidden = states[(first + row).clamp(max=len(states) - 1)]

    def begin(self) -> Tensor:
        return self._head.logits(self._hidden[0])

    def keep(self, index: Tensor) -> None:
        self._hidden = self._hidden[:, index]

    def advance(self, tokens: Tensor, parents: Tensor) -> Tensor:
        self._row += 1
        rows = self._hidden[self._row].repeat_interleave(tokens.shape[1], 0)
        return self._head.logits(self._head.follow(rows, tokens.flatten()))


def chain(shares: list[Scheduled]) -> bool:
    """Whether all trees are: then laws that know nothing of each other grow depth by depth as any do."""
    return all(s.budget.width == 1 for s in shares)


def best_first(root: int, options: list[list[Choice]], nodes: int, end_ids: frozenset[int]) -> HostDraft:
    """The `nodes` likeliest nodes (root included) of the product of `options`, one list per depth; nothing below an end token.

    A popped node pushes its next sibling and its first child, so the heap never holds more than two entries per node.
    """
    levels = [sorted((o for o in level if o[1] > 0), key=lambda o: -o[1]) for level in options]
    picked: list[Pick] = []
    heap: list[tuple[float, int, int, int]] = []  # minus score, parent, depth, rank

    def push(score: float, parent: int, depth: int, rank: int) -> None:
        if depth < len(levels) and rank < len(levels[depth]):
            heapq.heappush(heap, (-score * levels[depth][rank][1], parent, depth, rank))

    push(1.0, -1, 0, 0)
    while heap and len(picked) < nodes - 1:
        score, parent, depth, rank = heapq.heappop(heap)
        token, _, cell = levels[depth][rank]
        picked.append((len(picked), -score, token, parent, cell))
        push(picked[parent][1] if parent >= 0 else 1.0, parent, depth, rank + 1)
        if token not in end_ids:
            push(-score, len(picked) - 1, depth + 1, 0)
    return numbered(root, picked)


def fixed(root: int, options: list[list[Choice]]) -> HostDraft:
    """A chain of first choices with their siblings, in draw order: a shape that does not depend on what was drawn."""
    draft, tip = HostDraft([root], [-1], [1.0], [-1]), 0
    for level in options:
        base = len(draft.tokens)
        for token, rate, cell in level:
            if rate > 0:
                draft.tokens.append(token)
                draft.parents.append(tip)
                draft.scores.append(draft.scores[tip] * rate)
                draft.cells.append(cell)
        tip = base
    return draft


register("peagle")(PEagle)
