"""A draft of several sequences grown depth by depth, whatever the network that names the candidates (`Stepper`).

At every depth a beam of the likeliest nodes of all sequences gives `width` candidates each. A node's score is the product of
calibrated chances along its path; the next beam are the best candidates of the depth, and the tree the best of all. A chain
is a beam of 1. Under rejection verification the shape is fixed instead: a chain of first draws with siblings.
Source: reference §3, scores as in `head_drafter`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from specdec.budget import beam
from specdec.kernels.draft_grow.reference import likeliest
from specdec.spec.candidates import TINY, Race, TipRows, spine_first
from specdec.spec.head_drafter import HeadDrafter, HostDraft, depth_cells, numbered
from specdec.transfer import send
from specdec.types import Scheduled

if TYPE_CHECKING:
    from specdec.sampling import SamplingState

HOPELESS = 0.1  # a beam whose best node is less likely than this is not worth another step


class Stepper(Protocol):
    """Gives the draft laws of a beam, a depth at a time, as logits over the draft vocabulary."""

    def begin(self) -> Tensor:
        """[B, Vd] behind the newest token of each sequence."""
        ...

    def keep(self, index: Tensor) -> None:
        """Go on with the sequences `index` [b] i64 alone."""
        ...

    def advance(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """[B * width, Vd] behind the draft tokens [B, width], children of the rows `parents` [B, width] of the step before."""
        ...


@dataclass(frozen=True, slots=True)
class Layer:
    """Candidates of one depth. live: the B sequences they belong to; the rest [B, C], C = rows of the pass × width.

    parents: index into the sequence's candidates of the depth before (0 at depth 1: the root). scores: 0 = cannot be right.
    """

    live: list[int]
    tokens: Tensor
    parents: Tensor
    scores: Tensor
    cells: Tensor


class Growth:
    """One draft of B sequences. depths: of each tree. looks: stop where no node is likely enough to go on (reads the device)."""

    def __init__(
        self,
        drafter: HeadDrafter,
        stepper: Stepper,
        shares: list[Scheduled],
        depths: list[int],
        sampling: SamplingState,
        *,
        beams: list[int],
        looks: bool,
    ):
        head = drafter.head
        self.rated, self.stepper = drafter.scores, stepper
        self.shares, self.depths, self.sampling = shares, depths, sampling
        self.device = head.device
        self.coupled = drafter.noise_coupled
        self.hopeless = max(HOPELESS, min(s.budget.floor for s in shares)) if looks else 0.0
        self.race = Race(sampling, self.coupled, head.target_ids, head.config.noise_share)
        self.live = list(range(len(shares)))
        self.width = min(max(s.budget.width for s in shares), head.config.draft_vocab_size)
        self.beams = beams
        self.slots = [s.seq.request_slot for s in shares]
        self.by_id = any(slot in sampling.working_by_id() for slot in self.slots)
        self._laws: list[tuple[list[int], Tensor]] = []  # per depth: log q [B, V] of the draws below the chain's tip
        self._load()

    def _load(self) -> None:
        """Per-sequence constants of the live sequences, on the device."""
        slots = send(np.array([self.slots[b] for b in self.live], dtype=np.int64), self.device)
        self.ends = self.sampling.end_ids[slots]
        self.base = self.rated.base(self.sampling.noisy[slots], self.width)[:, None]  # [B, 1, width]
        self.ranked = self._within([self.shares[b].budget.width for b in self.live], self.width)
        self.allowed = self._within([self.beams[b] for b in self.live], max(self.beams))

    def _within(self, limits: list[int], width: int) -> Tensor | None:
        """[B, width] bool: column below the sequence's limit; None = everywhere."""
        if min(limits) >= width:
            return None
        return torch.arange(width, device=self.device) < send(np.array(limits, dtype=np.int64), self.device)[:, None]

    def drafts(self) -> tuple[list[HostDraft], Mapping[tuple[int, int], Tensor]]:
        """The trees; and, where drafts were drawn, the law by (tree, node) of its children."""
        layers, roots, nodes = self._run(), [s.seq.tokens[-1] for s in self.shares], [s.budget.nodes for s in self.shares]
        if self.coupled:
            return rerank(layers, roots, nodes), {}
        drafts = assemble(layers, roots)
        orders = [spine_first(d.parents, n) for d, n in zip(drafts, nodes, strict=True)]
        return [d.select(order) for d, order in zip(drafts, orders, strict=True)], self._laws_of(orders)

    def _run(self) -> list[Layer]:
        """The candidates of every depth."""
        logits = self.stepper.begin()
        batch, deepest = len(self.shares), max(self.depths)
        scores = torch.ones((batch, 1), device=self.device)
        parents = torch.zeros((batch, 1), dtype=torch.int64, device=self.device)
        path = torch.zeros((batch, 1, 0), dtype=torch.int64, device=self.device)
        layers: list[Layer] = []
        for depth in range(1, deepest + 1):
            layers.append(self._candidates(logits, path, scores, parents, depth))
            if depth == deepest:
                break
            scores, parents = self._next_beam(layers[-1])
            if self.hopeless and float(scores.max()) < self.hopeless:
                break
            stay = [i for i, b in enumerate(self.live) if self.depths[b] > depth]
            tokens = layers[-1].tokens.gather(1, parents)
            if self.by_id:
                path = torch.cat((path.gather(1, self._rows(parents)[:, :, None].expand(-1, -1, depth - 1)), tokens[:, :, None]), dim=2)
            if len(stay) < len(self.live):
                index = send(np.array(stay, dtype=np.int64), self.device)
                scores, parents, tokens, path = scores[index], parents[index], tokens[index], path[index]
                self.live = [self.live[i] for i in stay]
                self.stepper.keep(index)
                self._load()
            logits = self.stepper.advance(tokens, self._rows(parents))
        return layers

    def _rows(self, candidates: Tensor) -> Tensor:
        """Row of the pass that gave each candidate: `width` of them come from a row."""
        return candidates // self.width

    def _candidates(self, logits: Tensor, path: Tensor, scores: Tensor, parents: Tensor, depth: int) -> Layer:
        """Children of the beam: logits [B * rows, Vd]; path [B, rows, depth - 1], scores and parents [B, rows] of its nodes."""
        batch, rows = scores.shape
        request_slots = [self.slots[b] for b in self.live for _ in range(rows)]
        tips = TipRows(request_slots, path.flatten(0, 1), depth - 1, self.device)
        ids, chances = self._choose(logits, tips)
        chances, above = chances.view(batch, rows, -1), scores[:, :, None]
        rates, cells = self.rated.rate(chances, self.base + depth_cells(depth))
        possible = chances > 0 if self.ranked is None else (chances > 0) & self.ranked[:, None]
        total = above * rates
        if not self.coupled:  # which nodes there are must not depend on how small a score is
            total, possible = total.clamp(min=TINY), possible & (above > 0)
        above_ids = parents[:, :, None].expand_as(cells).flatten(1)
        return Layer(self.live, ids.view(batch, -1), above_ids, torch.where(possible, total, 0.0).flatten(1), cells.flatten(1))

    def _choose(self, logits: Tensor, tips: TipRows) -> tuple[Tensor, Tensor]:
        if self.coupled:
            return self.race(logits, tips, self.width)
        log_q = self.race.law(logits, tips)
        self._laws.append((self.live, log_q))
        return self.race.pick(log_q, tips, self.width)

    def _next_beam(self, layer: Layer) -> tuple[Tensor, Tensor]:
        """(scores, candidates), each [B, beam], to run next: the likeliest, or in a tree of fixed shape the first draw, whatever it is."""
        if not self.coupled:
            return layer.scores[:, :1], torch.zeros_like(layer.parents[:, :1])
        scores, columns = likeliest(layer.scores, layer.tokens, self.ends, max(self.beams))
        return scores if self.allowed is None else torch.where(self.allowed, scores, 0.0), columns

    def _laws_of(self, orders: list[list[int]]) -> dict[tuple[int, int], Tensor]:
        """log q by (tree, node) of the children of each node of the chain that stayed in the tree, for requests that sample."""
        found: dict[tuple[int, int], Tensor] = {}
        for depth, (live, log_q) in enumerate(self._laws):
            for i, b in enumerate(live):
                if not self.shares[b].seq.params.greedy and depth < len(orders[b]):
                    found[b, depth] = log_q[i]
        return found


def beam_widths(shares: list[Scheduled], drafter: HeadDrafter) -> list[int]:
    """Per sequence, how many nodes of a depth get children."""
    widest = min(max(s.budget.width for s in shares), drafter.head.config.draft_vocab_size)
    return [min(beam(s.budget), widest) if drafter.noise_coupled else 1 for s in shares]


def rerank(layers: list[Layer], roots: list[int], nodes: list[int]) -> list[HostDraft]:
    """Per sequence the `nodes` likeliest nodes (root included): the best path first, then parents before children."""
    picked, drafts = best_of(layers, len(roots), max(nodes)).tolist(), []
    for b, (root, n) in enumerate(zip(roots, nodes, strict=True)):
        place, score, token, parent, cell = (column[b][: n - 1] for column in picked)
        places, tokens, parents, cells = ([int(value) for value in column] for column in (place, token, parent, cell))
        drafts.append(numbered(root, list(zip(places, score, tokens, parents, cells, strict=True))))
    return drafts


class Pool(NamedTuple):
    """The candidates of all depths of B sequences, each [B, C]. parents: places in the pool, -1 = the root."""

    tokens: Tensor
    parents: Tensor
    scores: Tensor
    cells: Tensor


def pooled(layers: list[Layer], batch: int) -> Pool:
    """The candidates of every depth side by side."""
    columns: list[list[Tensor]] = [[], [], [], []]  # of the pool's fields; each [B, C] per depth
    before, start = -1, 0  # place of the first candidate of the depth before, and of this one
    for layer in layers:
        above = layer.parents + before
        for column, values in zip(columns, (layer.tokens, above, layer.scores, layer.cells), strict=True):
            column.append(values if len(layer.live) == batch else _spread(values, layer.live, batch))
        before, start = start, start + layer.tokens.shape[1]
    return Pool(*(torch.cat(column, dim=1) for column in columns))


def best_of(layers: list[Layer], batch: int, nodes: int) -> Tensor:
    """[5, B, nodes - 1] f64 (integers are exact): place in the pool of candidates, score, token, place of the parent (-1 = root), cell."""
    tokens, parents, scores, cells = pooled(layers, batch)
    top = scores.topk(min(nodes - 1, scores.shape[1]), dim=1)
    return torch.stack([top.indices.double(), top.values.double(), *(t.gather(1, top.indices).double() for t in (tokens, parents, cells))])


def _spread(values: Tensor, live: list[int], batch: int) -> Tensor:
    """Rows of the sequences `live` among those of all, zeros elsewhere."""
    return values.new_zeros((batch, values.shape[1])).index_copy_(0, send(np.array(live, dtype=np.int64), values.device), values)


def assemble(layers: list[Layer], roots: list[int]) -> list[HostDraft]:
    """The candidates of all depths as one tree per sequence; what cannot be right is left out, with all below it."""
    drafts = [HostDraft([root], [-1], [1.0], [-1]) for root in roots]
    numbers: list[list[int]] = [[0] for _ in roots]  # per sequence, node of each candidate of the depth before; -1 = left out
    for layer in layers:
        columns = (layer.tokens.tolist(), layer.parents.tolist(), layer.scores.tolist(), layer.cells.tolist())
        for b, tokens, parents, scores, cells in zip(layer.live, *columns, strict=True):
            draft, above, here = drafts[b], numbers[b], []
            for token, parent, score, cell in zip(tokens, parents, scores, cells, strict=True):
                if score <= 0.0 or above[parent] < 0:
                    here.append(-1)
                    continue
                here.append(len(draft.tokens))
                draft.tokens.append(token)
                draft.parents.append(above[parent])
                draft.scores.append(score)
                draft.cells.append(cell)
            numbers[b] = here
    return drafts
