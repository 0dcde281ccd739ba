"""What the EAGLE-3 and P-EAGLE drafters share: the head with its KV, calibrated scores, and what verdicts teach."""

from __future__ import annotations

from abc import ABC, abstractmethod
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specdec.config import MAX_NODES
from specdec.errors import ConfigError
from specdec.kernels.draft_grow.reference import BUCKETS, RANKS, rated
from specdec.spec.candidates import drawn_tree, noise_coupled
from specdec.spec.head_kv import HeadRunner
from specdec.spec.head_progress import Pick
from specdec.spec.limits import uses
from specdec.spec.tree import root_only, tree_from_lists
from specdec.spec.trie import DEPTH_BUCKETS, Calibration, depth_bucket
from specdec.transfer import send_into
from specdec.types import DraftTree, Forward, Scheduled, StepPlan, Verdict

if TYPE_CHECKING:
    from specdec.models.draft_heads import DraftHead
    from specdec.sampling import SamplingState
    from specdec.sequence import Sequence
    from specdec.spec.proposer import DrafterContext
    from specdec.spec.recorded_growth import Grown, RecordedDrafts

_TRUST = (0.9, 0.6, 0.5, 0.4)  # by rank (RANKS): acceptance over claimed chance by rank, before anything is known
_CELLS = RANKS * BUCKETS  # per (sampled or not, depth bucket)
NOISY_CELLS = DEPTH_BUCKETS * _CELLS  # cells before those of requests that sample
PROMISE = 1.0  # tokens per step that a head made for this very target is expected to win


def rank_cells(width: int) -> list[int]:
    """Cells before those of each candidate ranked along a row."""
    return [min(rank, RANKS - 1) * BUCKETS for rank in range(width)]


def depth_cells(depth: int) -> int:
    """Cells before those of candidates at `depth` (≥ 1)."""
    return depth_bucket(depth) * _CELLS


@dataclass(frozen=True, slots=True)
class HostDraft:
    """One draft tree on the host; node 0 is the root. cells: of `Scores`, the root's means nothing."""

    tokens: list[int]
    parents: list[int]
    scores: list[float]
    cells: list[int]

    def select(self, order: list[int]) -> HostDraft:
        """The nodes `order` (root first, parents before children), renumbered in that order."""
        number = {old: new for new, old in enumerate(order)}
        parents = [-1, *(number[self.parents[old]] for old in order[1:])]
        return HostDraft([self.tokens[i] for i in order], parents, [self.scores[i] for i in order], [self.cells[i] for i in order])


def numbered(root: int, picked: list[Pick]) -> HostDraft:
    """The tree of picked nodes, which come by falling score: the best path first, then parents before children.

    What cannot be right, and what hangs on a node that was not picked, is left out.
    """
    kept: dict[int, tuple[float, int, int, int]] = {-1: (1.0, root, -1, -1)}
    best: dict[int, int] = {}  # place -> that of its likeliest child
    for place, score, token, parent, cell in picked:
        if score > 0.0 and parent in kept:
            kept[place] = (score, token, parent, cell)
            best.setdefault(parent, place)
    path = [-1]
    while path[-1] in best:
        path.append(best[path[-1]])
    order = path + sorted(set(kept).difference(path))
    number = {place: i for i, place in enumerate(order)}
    scores, tokens, parents, cells = (list(column) for column in zip(*(kept[place] for place in order), strict=True))
    return HostDraft(tokens, [-1, *(number[p] for p in parents[1:])], scores, cells)


class Scores:
    """Chance of acceptance of a candidate given that its parent is accepted, learned per (sampled, depth, rank, claimed chance)."""

    def __init__(self, device: torch.device):
        prior = [(0.5 + b) / BUCKETS * trust for trust in _TRUST for b in range(BUCKETS)]
        self._calibration = Calibration(prior * (2 * DEPTH_BUCKETS))
        self._device = device
        self._table: Tensor | None = None
        self._current = False
        self._ranks: dict[int, Tensor] = {}

    @property
    def rates(self) -> array[float]:
        """Calibrated rate by cell, for compiled drafting."""
        return self._calibration.rates

    def base(self, noisy: Tensor, width: int) -> Tensor:
        """[R, width] i64: first cells of candidates ranked along the row; noisy [R] bool. The depth comes on top (`depth_cells`)."""
        if width not in self._ranks:
            self._ranks[width] = torch.tensor(rank_cells(width), device=self._device)
        return self._ranks[width] + noisy[:, None] * NOISY_CELLS

    def table(self) -> Tensor:
        """[cells] f32, calibrated rate by cell, always in the same place."""
        if not self._current:
            rates = np.asarray(self._calibration.rates, dtype=np.float32)
            if self._table is None:
                self._table = torch.empty(len(rates), device=self._device)
            send_into(self._table, rates)
            self._current = True
        assert self._table is not None
        return self._table

    def rate(self, chances: Tensor, base: Tensor) -> tuple[Tensor, Tensor]:
        """(rates f32, cells i64), like chances: of candidates with these first cells, depth included. What cannot be right keeps
        the rate of its cell."""
        return rated(chances, base, self.table())

    def learn(self, draft: HostDraft, tokens: list[int], parents: list[int], taken: set[int]) -> None:
        """tokens, parents, taken: the verified tree, a subset of `draft`, and its accepted nodes."""
        places = {(parent, token): i for i, (parent, token) in enumerate(zip(draft.parents, draft.tokens, strict=True))}
        mine = {0: 0}  # accepted nodes of the verified tree -> nodes of the draft
        for i in range(1, len(tokens)):
            if parents[i] in mine:
                node = places[mine[parents[i]], tokens[i]]
                self._calibration.record(draft.cells[node], i in taken)
                if i in taken:
                    mine[i] = node
        self._current = False


class HeadDrafter(ABC):
    """Base of the drafters with a draft head; subclasses set `name` and write `_draft`.

    Needs `heads[name]`, `kv`, `pools` and `tables` in its context. disabled: why it must not draft (a head of another target), or None.
    """

    name: str
    needs_hidden = True
    feeds = False
    _recorded: RecordedDrafts | None

    def __init__(self, context: DrafterContext):
        head = context.heads.get(self.name)
        if head is None:
            raise ConfigError(f"speculation method {self.name!r} needs `head`, a draft head for this model", param="head")
        if context.kv is None or context.tables is None or not context.pools:
            raise ConfigError("a draft head needs an engine with a KV cache", param="method")
        group = next((i for i, g in enumerate(context.kv.groups) if g.window is None), None)
        if group is None:
            raise ConfigError("a draft head needs a target with full-attention layers", param="method")
        c = head.config
        companion = context.kv.attach(
            self.name, context.pools[group], c.num_layers, c.num_kv_heads, c.head_dim, group=group, dtype=head.dtype
        )
        self.head: DraftHead = head
        self.max_len: int | None = c.max_positions or None
        self.disabled = head.warning if not head.trusted else None
        self.promise = PROMISE if head.trusted and c.fingerprint is not None else 0.0
        self.noise_coupled = noise_coupled(context.config)
        self._device = context.device
        wants = uses(self.name, self.max_len) if head.trusted else lambda seq: False
        columns = _columns(head, context)
        self._runner = HeadRunner(head, companion, context.tables, group=group, wants=wants, columns=columns, recorder=context.recorder)
        self.scores = Scores(context.device)
        self._drafts: dict[Sequence, HostDraft] = {}
        self._lessons: list[tuple[HostDraft, list[int], list[int], set[int]]] = []  # of the last verdicts, see `_settle`

    @torch.inference_mode()
    def propose(self, shares: tuple[Scheduled, ...], sampling: SamplingState) -> DraftTree:
        """Trees for `shares`; the root alone for a sequence whose newest feature is not there."""
        depths = [max(0, min(s.budget.depth, s.budget.nodes - 1, s.seq.remaining - 1)) for s in shares]
        live = [b for b, depth in enumerate(depths) if depth > 0 and self._runner.ready(shares[b].seq)]
        if not live:
            return root_only([s.seq.tokens[-1] for s in shares])
        drafts, laws = self._draft([shares[b] for b in live], [depths[b] for b in live], sampling)
        mine = dict(zip(live, drafts, strict=True))
        trees = []
        for b, share in enumerate(shares):
            draft = mine.get(b) or HostDraft([share.seq.tokens[-1]], [-1], [1.0], [-1])
            if len(draft.tokens) > 1:
                self._drafts[share.seq] = draft
            trees.append((draft.tokens, draft.parents, draft.scores))
        tree = tree_from_lists(trees, [self.name if len(tokens) > 1 else None for tokens, _, _ in trees])
        return drawn_tree(tree, {(live[i], node): law for (i, node), law in laws.items()}, self._device)

    def owes(self, seq: Sequence) -> float:
        """Seconds that the next draft takes besides drafting: the pairs of the steps in which the head was not asked."""
        return self._runner.owes(seq)

    @abstractmethod
    def _draft(
        self, shares: list[Scheduled], depths: list[int], sampling: SamplingState
    ) -> tuple[list[HostDraft], Mapping[tuple[int, int], Tensor]]:
        """Trees within the budgets, depths at least 1; and, where drafts were drawn, the law by (tree, node) of its children."""

    def observe(self, plan: StepPlan, tree: DraftTree, forward: Forward, verdict: Verdict) -> None:
        """Keep the hidden states of committed positions, and learn how often candidates are accepted."""
        self._runner.observe(plan, tree, forward, verdict)
        if not self._drafts:
            return
        self._settle()
        drafted, decided = tree.host, verdict.host
        for b, share in enumerate(plan.sampling):
            draft, n = self._drafts.pop(share.seq, None), drafted.num_nodes[b]
            if draft is not None and n > 1 and not decided.finish[b]:  # a cut says nothing about the head
                taken = set(decided.path[b][: decided.num_accepted[b]])
                self._lessons.append((draft, drafted.tokens[b][:n], drafted.parents[b][:n], taken))

    def _settle(self) -> None:
        """Learn what verdicts before the last have taught. A draft that is begun before the last is known reads no less than another."""
        for lesson in self._lessons:
            self.scores.learn(*lesson)
        self._lessons.clear()

    # -- behind a step in flight --------------------------------------------------------------------------------------

    @property
    def width_ahead(self) -> int:
        """How wide its trees may be behind a verdict that nobody knows yet, 0 = it cannot draft there."""
        return MAX_NODES if self._recorded is not None and self._recorded.able else 0

    def can_follow(self, shares: list[Scheduled], sampling: SamplingState) -> bool:
        """Whether it can draft for these shares, which have one budget, behind the verdict of their step in flight."""
        depth = self._depth(shares[0].budget.depth)
        if self._recorded is None or not all(self._runner.current(s.seq) for s in shares):
            return False
        return self._replays(shares, [depth] * len(shares), sampling) and self._recorded.fit(shares, [depth] * len(shares), sampling)

    def follow(self, shares: list[Scheduled], sampling: SamplingState, said: Seq[Tensor], taps: Tensor, roots: Tensor) -> Grown:
        """Trees behind a verdict in flight. said: of it `committed`, `num_committed` and `path` of these sequences, no deeper than their
        budget. taps: of all rows of its pass; roots [B] i64: those of the roots."""
        assert self._recorded is not None
        self._settle()
        depth = self._depth(shares[0].budget.depth)
        self._runner.ahead = {share.seq for share in shares}
        return self._recorded.follow(shares, depth, sampling, (*said, taps, roots))

    def drew(self, seq: Sequence, draft: HostDraft) -> None:
        """What `follow` drafted for the sequence, now that it is known here."""
        if len(draft.tokens) > 1:
            self._drafts[seq] = draft

    def _depth(self, depth: int) -> int:
        """Of a draft that may be so deep."""
        return depth

    def _replays(self, shares: list[Scheduled], depths: list[int], sampling: SamplingState) -> bool:
        """Whether a recording would make these drafts, if it fits."""
        return True

    def retap(self, context: DrafterContext) -> None:
        """The target's passes return other taps from the next step on."""
        self._runner.read_taps(_columns(self.head, context))

    @torch.inference_mode()
    def reset(self, seq: Sequence) -> None:
        """Forget the sequence; its draft KV stays in the blocks that the prefix cache keeps."""
        self._drafts.pop(seq, None)
        self._runner.forget(seq)


def _columns(head: DraftHead, context: DrafterContext) -> Tensor | None:
    """Where the head's taps lie among those of all heads; None = they are all there is, in order."""
    if context.taps == head.config.taps or not head.trusted:
        return None
    size = head.config.target_hidden_size
    places = [context.taps.index(tap) for tap in head.config.taps]
    return torch.cat([torch.arange(p * size, (p + 1) * size, device=context.device) for p in places])
