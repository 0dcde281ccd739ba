"""Drafts of a batch as one replay: `growth` recorded for one shape, with everything that changes in tensors of its own.

Op by op a depth is some forty launches, which take longer than a small head's work. Recorded are the layout of rows, all passes behind
the first (or that one too: `recorded_start`), the races for candidates (`ops.draft_topk` over the head's output layer, the whole draft
vocabulary), the next beams and the tree, numbered (`ops.tree_build`). A shape is a number of sequences, one budget for all and whether
anybody's noise is read; a batch is padded with copies of its first sequence, which write what that writes anyway. Batches that differ
within, and requests whose laws are more than a temperature, go op by op.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec import ops, rng
from specdec.budget import beam
from specdec.config import MAX_NODES
from specdec.kernels.draft_grow.reference import NextBeam
from specdec.kernels.fp8_linear.weight import Fp8Weight
from specdec.quant.fp8 import Fp8Linear
from specdec.quant.none import Dense
from specdec.runner.graphs import SEQUENCES, Outputs, Recorder, fitting
from specdec.spec.growth import Pool, beam_widths
from specdec.spec.head_drafter import NOISY_CELLS, HeadDrafter, HostDraft, depth_cells
from specdec.spec.recorded_start import Accepted, Given, Places
from specdec.transfer import arrival
from specdec.types import Batch, Scheduled

if TYPE_CHECKING:
    from specdec.models.draft_heads import DraftHead
    from specdec.sampling import SamplingState
    from specdec.spec.head_kv import HeadRunner


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a recorded draft. ends: address of the table of end tokens, which moves when it grows. follows: starts behind a verdict."""

    batch: int
    nodes: int
    depth: int
    width: int
    beam: int
    samples: bool
    ends: int
    follows: bool


class Grown(NamedTuple):
    """B trees of up to N nodes on the device, valid until the next draft. What fills them up, at and beyond `num_nodes[b]`, is a child of
    the root that sees what the root sees and has the token -1: nobody accepts it.

    tokens, parents, depth, words (see `ancestor_words`), cells (of `Scores`) [B, N] i64, num_nodes [B] i64, score [B, N] f32.
    """

    tokens: Tensor
    parents: Tensor
    depth: Tensor
    num_nodes: Tensor
    words: Tensor
    score: Tensor
    cells: Tensor

    @property
    def told(self) -> tuple[Tensor, ...]:
        """What the host wants to know, for `host_drafts`, all i64."""
        return self.tokens, self.parents, self.cells, self.num_nodes, self.score.contiguous().view(torch.int32).long()


def host_drafts(told: list[Any]) -> list[HostDraft]:
    """The trees that `Grown.told` tells of, as lists."""
    tokens, parents, cells, counts, bits = told
    scores = np.array(bits, dtype=np.int32).view(np.float32).tolist()
    return [HostDraft(*(column[:n] for column in row)) for *row, n in zip(tokens, parents, scores, cells, counts, strict=True)]


def output_weight(head: DraftHead) -> Tensor | Fp8Weight | None:
    """Of its output layer, if `ops.draft_topk` takes it: of the head's dtype, or e4m3 with a scale a row."""
    method = head.lm_head.method
    if isinstance(method, Fp8Linear):
        weight = method.weight
        return weight if isinstance(weight, Fp8Weight) and not weight.blocked and not method.act_fp8 else None
    return method.weight if isinstance(method, Dense) and method.weight.dtype == head.dtype else None


class RecordedDrafts:
    """The recorded drafts of one head. A head that feeds its own state back runs a beam, the other one has all its rows already."""

    def __init__(self, drafter: HeadDrafter, runner: HeadRunner, recorder: Callable[[], Recorder]):
        self._drafter, self._runner, self._record = drafter, runner, recorder()
        self._made: dict[Shape, tuple[Recorded, Callable[[], Outputs]]] = {}

    @property
    def able(self) -> bool:
        """Whether a recording can make any drafts of this head."""
        return self._drafter.noise_coupled and output_weight(self._drafter.head) is not None

    def fit(self, shares: list[Scheduled], depths: list[int], sampling: SamplingState) -> bool:
        """Whether a recording can make these drafts."""
        budget = shares[0].budget
        alike = all(s.budget.width == budget.width and s.budget.nodes == budget.nodes for s in shares) and len(set(depths)) == 1
        plain = sampling.only_temperatures([s.seq.request_slot for s in shares])
        return alike and plain and self.able and len(shares) <= SEQUENCES[-1]

    def drafts(self, shares: list[Scheduled], depth: int, sampling: SamplingState) -> list[HostDraft]:
        """Trees within the budgets, which are all alike."""
        masks = 0 if self._drafter.feeds else depth - 1
        states = self._runner.extend([s.seq for s in shares], [masks] * len(shares))
        return host_drafts(arrival(self._run(shares, depth, sampling, states).told)())

    def follow(self, shares: list[Scheduled], depth: int, sampling: SamplingState, accepted: tuple[Tensor, ...]) -> Grown:
        """The same behind a verdict in flight, all of whose tokens are run first. accepted: see `Accepted.fill`."""
        return self._run(shares, depth, sampling, accepted, follows=True)

    def _run(
        self, shares: list[Scheduled], depth: int, sampling: SamplingState, values: tuple[Tensor, ...], *, follows: bool = False
    ) -> Grown:
        count, budget = len(shares), shares[0].budget
        size = fitting(SEQUENCES, count) or count
        samples = sampling.samples([s.seq.request_slot for s in shares])
        shape = Shape(size, budget.nodes, depth, budget.width, beam(budget), samples, sampling.end_ids.data_ptr(), follows)
        self._drafter.scores.table()  # up to date before it is read
        padded = shares + [shares[0]] * (size - count)
        if shape not in self._made:
            kind = Fed if self._drafter.feeds else Followed
            made = kind(self._drafter, self._runner, padded, depth, sampling, follows=follows)
            made.fill(padded, values)
            self._made[shape] = made, self._record(made.grown)
        else:
            self._made[shape][0].fill(padded, values)
        outputs = self._made[shape][1]()
        return Grown(*(output[:count] for output in outputs if output is not None))


class Recorded(ABC):
    """A beam search over tensors at fixed addresses: what `growth` does, in few launches. padded: sequences, as in `fill`."""

    _roots: Tensor  # [B] newest tokens, where the draft started

    def __init__(
        self, drafter: HeadDrafter, runner: HeadRunner, padded: list[Scheduled], depth: int, sampling: SamplingState, *, follows: bool
    ):
        head, weight, size, budget = drafter.head, output_weight(drafter.head), len(padded), padded[0].budget
        assert weight is not None
        self._runner, self._head, self._depth, self._most = runner, head, depth, budget.nodes
        self._weight, self._ids, self._share = weight, head.target_ids, head.config.noise_share
        self._sampling, self._rated = sampling, drafter.scores
        self._samples = sampling.samples([s.seq.request_slot for s in padded])
        self._width = min(budget.width, head.config.draft_vocab_size)
        self._beam, self._passes = max(beam_widths(padded, drafter)), depth - 1 if drafter.feeds else 0
        self._places = Places(size, runner, head.device)
        masks = 0 if drafter.feeds else depth - 1
        self._start: Given | Accepted
        self._start = Accepted(size, budget.depth + 1, masks, runner) if follows else Given(size, 1 + masks, runner)
        self._cu = torch.arange(0, (size + 1) * self._beam, self._beam, dtype=torch.int32, device=head.device)
        self._tree_len = torch.full((size,), self._passes * self._beam, dtype=torch.int32, device=head.device)
        self._none = torch.zeros(0, dtype=torch.int64, device=head.device)
        self._nodes = torch.full((size,), budget.nodes, dtype=torch.int64, device=head.device)
        ones = torch.ones((size, 1), dtype=torch.int64, device=head.device)
        self._root = NextBeam(ones.float(), -ones, ones, ones, ones - ones)  # the beam of depth 0; its own bit is nobody's

    def fill(self, padded: list[Scheduled], values: tuple[Tensor, ...]) -> None:
        """Set the inputs. padded: the sequences, then copies of the first. values: what the start is filled with, of the former alone."""
        self._places.fill([s.seq for s in padded])
        self._start.fill(*values)

    @abstractmethod
    def begin(self) -> Tensor:
        """[B, Hd] behind the newest token of each sequence: what the output layer reads."""

    @abstractmethod
    def advance(self, beam: NextBeam) -> Tensor:
        """[B * n, Hd] behind the beam's nodes."""

    def grown(self) -> Outputs:
        """The fields of `Grown`."""
        self._layout = self._places.read(self._sampling, self._depth, self._passes, self._beam)
        tokens, parents, scores, cells = self._pool()
        built = ops.tree_build(tokens, parents, scores, self._roots, self._nodes, self._most, self._depth)
        placed = cells.gather(1, built.places.clamp(min=0))
        return Grown(built.tokens, built.parents, built.depth, built.num_nodes, built.words, built.score, placed)

    def _pool(self) -> Pool:
        """The candidates of all depths."""
        layout, beam, start = self._layout, self._root, 0
        hidden, n, size = self.begin(), self._beam, len(self._nodes)
        room = self._width * (1 + (self._depth - 1) * n)
        whole = [torch.empty((size, room), dtype=torch.int64, device=hidden.device) for _ in range(3)]
        pool = Pool(whole[0], whole[1], torch.empty_like(whole[0], dtype=torch.float32), whole[2])
        for depth in range(1, self._depth + 1):
            ids, chances = self._choose(hidden, depth)
            cells, bit = (depth_cells(depth), NOISY_CELLS), min((depth - 1) * n, MAX_NODES - n)  # the last beam's bits are nobody's
            found = ids.view(size, -1), chances.view(size, -1)
            state = beam.scores, beam.places, beam.words, layout.noisy, layout.ends, self._rated.table()
            beam = ops.draft_grow(*found, *state, pool, start, cells, n, bit)
            start += found[0].shape[1]
            hidden = self.advance(beam) if depth < self._depth else hidden
        return pool

    def _choose(self, hidden: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """(target ids i64, chances f32) of the candidates at `depth`, each [rows, width]."""
        layout = self._layout
        keys = layout.seed, layout.drawn[depth - 1], layout.choice, layout.noisy if self._samples else None
        law = hidden.to(self._head.dtype), self._weight, layout.temperature, self._ids
        ids, chances, _ = ops.draft_topk(*law, *keys, rng.TARGET, self._share, self._width)
        return ids, chances


class Fed(Recorded):
    """EAGLE-3: every depth but the last is a pass of the head over a beam."""

    def begin(self) -> Tensor:
        """[B, Hd]"""
        self._roots, states, self._feedback = self._start(self._layout)
        self._pass = 0
        return states[:, 0].contiguous()

    def advance(self, beam: NextBeam) -> Tensor:
        """[B * n, Hd]"""
        layout, p = self._layout, self._pass
        batch = Batch(
            beam.tokens.flatten(),
            layout.positions[p].flatten(),
            self._cu,
            layout.context,
            self._tree_len,
            beam.words.flatten(),
            layout.tables[None],
            layout.slots[p].view(1, -1),
            self._none,
            first_key=layout.first,
        )
        self._pass += 1
        hidden, self._feedback = self._runner.run_rows(batch, self._feedback[beam.rows.flatten()])
        return hidden


class Followed(Recorded):
    """P-EAGLE: the rows of all depths come from one pass; the transition, where there is one, is recorded."""

    def begin(self) -> Tensor:
        """[B, Hd]"""
        self._roots, self._hidden, _ = self._start(self._layout)
        self._row = 0
        return self._hidden[:, 0].contiguous()

    def advance(self, beam: NextBeam) -> Tensor:
        """[B * n, Hd]"""
        self._row += 1
        return self._head.follow(self._hidden[:, self._row].repeat_interleave(self._beam, 0), beam.tokens.flatten())
