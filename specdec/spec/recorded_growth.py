"""Drafts of a batch as one replay: `growth` recorded for one shape, with everything that changes in tensors of its own.

Op by op a depth is some forty launches, which take longer than a small head's work. Recorded are all passes behind the first, the races
for candidates (`ops.draft_topk` over the head's output layer, the whole draft vocabulary), the next beams and the choice of nodes. A
shape is a number of sequences, one budget for all and whether anybody's noise is read; a batch is padded with copies of its first
sequence, which write what that writes anyway. Batches that differ within, and requests whose laws are more than a temperature, go op by op.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specdec import ops, rng
from specdec.budget import beam
from specdec.quant.none import Dense
from specdec.runner.graphs import SEQUENCES, Outputs, Recorder, fitting
from specdec.spec.beam import Beam, BeamRows, beam_rows
from specdec.spec.candidates import TipRows
from specdec.spec.growth import Growth, Layer, beam_widths, likeliest, trees
from specdec.spec.head_drafter import HeadDrafter, HostDraft
from specdec.transfer import Fetch, send_all
from specdec.types import Scheduled

if TYPE_CHECKING:
    from specdec.sampling import SamplingState
    from specdec.spec.head_kv import HeadRunner


@dataclass(frozen=True, slots=True)
class Shape:
    """Of a recorded draft. ends: address of the table of end tokens, which moves when it grows."""

    batch: int
    nodes: int
    depth: int
    width: int
    beam: int
    samples: bool
    ends: int


class RecordedDrafts:
    """The recorded drafts of one head. A head that feeds its own state back runs a beam, the other one has all its rows already."""

    def __init__(self, drafter: HeadDrafter, runner: HeadRunner, recorder: Callable[[], Recorder]):
        self._drafter, self._runner, self._record = drafter, runner, recorder()
        self._made: dict[Shape, tuple[Recorded, Callable[[], Outputs]]] = {}

    def fit(self, shares: list[Scheduled], depths: list[int], sampling: SamplingState) -> bool:
        """Whether a recording can make these drafts."""
        head, budget = self._drafter.head, shares[0].budget
        method = head.lm_head.method
        alike = all(s.budget.width == budget.width and s.budget.nodes == budget.nodes for s in shares) and len(set(depths)) == 1
        plain = all(sampling.only_temperature(s.seq.request_slot) for s in shares)
        dense = isinstance(method, Dense) and method.weight.dtype == head.dtype
        return alike and plain and dense and depths[0] > 1 and self._drafter.noise_coupled and len(shares) <= SEQUENCES[-1]

    def drafts(self, shares: list[Scheduled], depth: int, sampling: SamplingState) -> list[HostDraft]:
        """Trees within the budgets, which are all alike."""
        count, budget = len(shares), shares[0].budget
        size = fitting(SEQUENCES, count) or count
        samples = sampling.samples([s.seq.request_slot for s in shares])
        shape = Shape(size, budget.nodes, depth, budget.width, beam(budget), samples, sampling.end_ids.data_ptr())
        self._drafter.scores.table()  # up to date before it is read
        padded = shares + [shares[0]] * (size - count)
        if shape not in self._made:
            kind = Fed if self._drafter.feeds else Followed
            made = kind(self._drafter, self._runner, padded, depth, sampling)
            made.fill(shares, padded)
            self._made[shape] = made, self._record(lambda: (likeliest(made.layers(), size, budget.nodes),))
        else:
            self._made[shape][0].fill(shares, padded)
        (picked,) = self._made[shape][1]()
        assert picked is not None
        lists = Fetch([picked]).lists()[0] if picked.is_cuda else picked.tolist()
        return trees(lists, [s.seq.tokens[-1] for s in shares], [budget.nodes] * count)


class Recorded(Growth):
    """Growth over tensors at fixed addresses; instead of logits the steps hand over what the output layer reads.

    padded: the sequences of the recording's size, as in `fill`. It is a stepper too, its own.
    """

    def __init__(self, drafter: HeadDrafter, runner: HeadRunner, padded: list[Scheduled], depth: int, sampling: SamplingState):
        head, method = drafter.head, drafter.head.lm_head.method
        assert isinstance(method, Dense)
        self._runner, self._head, self._depth, self._drafter = runner, head, depth, drafter
        self._weight, self._ids = method.weight, head.target_ids
        self._samples = sampling.samples([s.seq.request_slot for s in padded])
        self._slots = torch.zeros(len(padded), dtype=torch.int64, device=head.device)
        super().__init__(drafter, self, padded, [depth] * len(padded), sampling, beams=beam_widths(padded, drafter), looks=False)

    @abstractmethod
    def fill(self, shares: list[Scheduled], padded: list[Scheduled]) -> None:
        """Run what is pending of the sequences, and set the inputs. padded: shares, then copies of the first."""

    @abstractmethod
    def begin(self) -> Tensor:
        """[B, Hd] behind the newest token of each sequence."""

    @abstractmethod
    def advance(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """[B * width, Hd], as in `Stepper`."""

    def layers(self) -> list[Layer]:
        """The candidates of every depth."""
        self._load()
        return self._run()

    def keep(self, index: Tensor) -> None:
        """All trees are equally deep."""
        raise AssertionError

    def _load(self) -> None:
        self.ends = self.sampling.end_ids[self._slots][:, None, :]
        self.base = self.rated.base(self.sampling.noisy[self._slots], self.width)[:, None]
        self.ranked = self.allowed = None

    def _choose(self, logits: Tensor, tips: TipRows) -> tuple[Tensor, Tensor]:
        sampling, slots = self.sampling, self._slots
        slots = slots.repeat_interleave(len(logits) // len(slots)) if len(logits) > len(slots) else slots
        keys = sampling.seed[slots], sampling.length[slots] + tips.depth, sampling.choice[slots]
        noisy, hidden = sampling.noisy[slots] if self._samples else None, logits.to(self._weight.dtype)
        law = hidden, self._weight, sampling.temperature[slots], self._ids
        ids, chances, _ = ops.draft_topk(*law, *keys, noisy, rng.TARGET, self.race.share, self.width)
        return ids, chances


def _padded(own: Tensor, values: Tensor) -> None:
    """Into own [B, any] the fewer rows of values, then copies of the first."""
    own[: len(values)].copy_(values)
    own[len(values) :].copy_(values[:1].expand(len(own) - len(values), *values.shape[1:]))


def _request_slots(shares: list[Scheduled]) -> np.ndarray:
    return np.array([s.seq.request_slot for s in shares], dtype=np.int64)


class Fed(Recorded):
    """EAGLE-3: every depth but the last is a pass of the head over a beam."""

    def __init__(self, drafter: HeadDrafter, runner: HeadRunner, padded: list[Scheduled], depth: int, sampling: SamplingState):
        super().__init__(drafter, runner, padded, depth, sampling)
        rows, device, size = self._layout(padded), self._head.device, (len(padded), self._head.config.hidden_size)
        shapes = [*(array.shape for array in rows[:-1]), (1, len(padded), runner.blocks)]
        dtypes = [torch.from_numpy(array).dtype for array in rows]
        self._beam_rows = BeamRows(*(torch.zeros(shape, dtype=d, device=device) for shape, d in zip(shapes, dtypes, strict=True)))
        self._hidden, self._first_feedback = (torch.zeros(size, dtype=self._head.dtype, device=device) for _ in range(2))

    def _layout(self, padded: list[Scheduled]) -> list[np.ndarray]:
        return beam_rows(self._runner.rows, [s.seq for s in padded], beam_widths(padded, self._drafter), [self._depth] * len(padded))

    def fill(self, shares: list[Scheduled], padded: list[Scheduled]) -> None:
        """See `Recorded`."""
        hidden, feedback = self._runner.extend([s.seq for s in shares])
        *sent, tables, slots = send_all([*self._layout(padded), _request_slots(padded)], self._head.device)
        for own, arrived in zip(self._beam_rows[:-1], sent, strict=True):
            own.copy_(arrived)
        self._beam_rows.tables[:, :, : tables.shape[2]].copy_(tables)
        self._slots.copy_(slots)
        _padded(self._hidden, hidden)
        _padded(self._first_feedback, feedback)

    def begin(self) -> Tensor:
        """[B, Hd]"""
        self._beam, self._feedback = Beam(self._runner.run_rows, self._beam_rows), self._first_feedback
        return self._hidden

    def advance(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """[B * width, Hd]"""
        hidden, self._feedback = self._beam.advance(self._feedback, tokens, parents)
        return hidden


class Followed(Recorded):
    """P-EAGLE: the rows of all depths come from one pass; the transition, where there is one, is recorded."""

    def __init__(self, drafter: HeadDrafter, runner: HeadRunner, padded: list[Scheduled], depth: int, sampling: SamplingState):
        super().__init__(drafter, runner, padded, depth, sampling)
        size = (len(padded), depth, self._head.config.hidden_size)
        self._hidden = torch.zeros(size, dtype=self._head.dtype, device=self._head.device)

    def fill(self, shares: list[Scheduled], padded: list[Scheduled]) -> None:
        """See `Recorded`."""
        states, _ = self._runner.extend([s.seq for s in shares], [self._depth - 1] * len(shares))
        _padded(self._hidden, states.view(len(shares), self._depth, -1))
        self._slots.copy_(send_all([_request_slots(padded)], self._head.device)[0])

    def begin(self) -> Tensor:
        """[B, Hd]"""
        self._row = 0
        return self._hidden[:, 0].contiguous()

    def advance(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """[B * width, Hd]"""
        self._row += 1
        return self._head.follow(self._hidden[:, self._row].repeat_interleave(tokens.shape[1], 0), tokens.flatten())
