"""EAGLE-3 drafts of a batch as one replay: `growth` recorded for one shape, with everything that changes in tensors of its own.

Op by op a depth is some forty launches, which take longer than a small head's work. Recorded are all passes behind the first, the races
for candidates (`ops.draft_topk` over the head's output layer, the whole draft vocabulary), the next beams and the choice of nodes. A
shape is a number of sequences, one budget for all and whether anybody's noise is read; a batch is padded with copies of its first
sequence, which write what that writes anyway. Batches that differ within, and requests whose laws are more than a temperature, go op by op.
"""

from __future__ import annotations

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
    """The recorded drafts of one head."""

    def __init__(self, drafter: HeadDrafter, runner: HeadRunner, recorder: Callable[[], Recorder]):
        self._drafter, self._runner, self._record = drafter, runner, recorder()
        self._made: dict[Shape, tuple[_Inputs, Callable[[], Outputs]]] = {}

    def fit(self, shares: list[Scheduled], depths: list[int], sampling: SamplingState) -> bool:
        """Whether a recording can make these drafts."""
        head, budget = self._drafter.head, shares[0].budget
        alike = all(s.budget.width == budget.width and s.budget.nodes == budget.nodes for s in shares) and len(set(depths)) == 1
        plain = all(sampling.only_temperature(s.seq.request_slot) for s in shares)
        return (
            alike
            and plain
            and depths[0] > 1
            and self._drafter.noise_coupled
            and isinstance(head.lm_head.method, Dense)
            and head.lm_head.method.weight.dtype == head.dtype
            and fitting(SEQUENCES, len(shares)) is not None
        )

    def drafts(self, shares: list[Scheduled], depth: int, sampling: SamplingState) -> list[HostDraft]:
        """Trees within the budgets, which are all alike."""
        count, budget = len(shares), shares[0].budget
        size = fitting(SEQUENCES, count)
        assert size is not None
        samples = sampling.samples([s.seq.request_slot for s in shares])
        shape = Shape(size, budget.nodes, depth, budget.width, beam(budget), samples, sampling.end_ids.data_ptr())
        hidden, feedback = self._runner.extend([s.seq for s in shares])
        padded = shares + [shares[0]] * (size - count)
        rows = beam_rows(self._runner.rows, [s.seq for s in padded], beam_widths(padded, self._drafter), [depth] * size)
        table = self._drafter.scores.table()
        if shape not in self._made:
            inputs = _Inputs(rows, self._runner.blocks, hidden, size)
            inputs.fill(rows, padded, hidden, feedback)
            grown = _Recorded(self._drafter, inputs, self._runner, padded, depth, sampling)
            self._made[shape] = inputs, self._record(lambda: (likeliest(grown.layers(), size, budget.nodes),))
        inputs, replay = self._made[shape]
        inputs.fill(rows, padded, hidden, feedback)
        (picked,) = replay()
        assert picked is not None and table is self._drafter.scores.table()
        lists = Fetch([picked]).lists()[0] if picked.is_cuda else picked.tolist()
        return trees(lists, [s.seq.tokens[-1] for s in shares], [budget.nodes] * count)


class _Inputs:
    """What a recording reads, at fixed addresses. rows: of a batch of its shape. blocks: of the longest sequence."""

    def __init__(self, rows: list[np.ndarray], blocks: int, hidden: Tensor, batch: int):
        device = hidden.device
        shapes = [*(array.shape for array in rows[:-1]), (1, batch, blocks)]
        made = [torch.zeros(s, dtype=torch.from_numpy(a).dtype, device=device) for s, a in zip(shapes, rows, strict=True)]
        self.rows = BeamRows(*made)
        self.slots = torch.zeros(batch, dtype=torch.int64, device=device)
        self.hidden, self.feedback = (hidden.new_zeros((batch, hidden.shape[1])) for _ in range(2))

    def fill(self, rows: list[np.ndarray], shares: list[Scheduled], hidden: Tensor, feedback: Tensor) -> None:
        """hidden, feedback: of the sequences without padding."""
        slots = np.array([s.seq.request_slot for s in shares], dtype=np.int64)
        *sent, tables, places = send_all([*rows, slots], self.slots.device)
        for own, arrived in zip(self.rows[:-1], sent, strict=True):
            own.copy_(arrived)
        self.rows.tables[:, :, : tables.shape[2]].copy_(tables)
        self.slots.copy_(places)
        for own, values in ((self.hidden, hidden), (self.feedback, feedback)):
            own[: len(values)].copy_(values)
            own[len(values) :].copy_(values[:1].expand(len(own) - len(values), -1))


class _Recorded(Growth):
    """Growth over the inputs of a recording; instead of logits the steps hand over what the output layer reads."""

    def __init__(
        self, drafter: HeadDrafter, inputs: _Inputs, runner: HeadRunner, shares: list[Scheduled], depth: int, sampling: SamplingState
    ):
        self._inputs, self._runner = inputs, runner
        self._samples = sampling.samples([s.seq.request_slot for s in shares])
        method = drafter.head.lm_head.method
        assert isinstance(method, Dense)
        self._weight, self._ids = method.weight, drafter.head.target_ids
        super().__init__(drafter, self, shares, [depth] * len(shares), sampling, beams=beam_widths(shares, drafter), looks=False)

    def layers(self) -> list[Layer]:
        """The candidates of every depth."""
        self._load()
        return self._run()

    def _load(self) -> None:
        slots = self._inputs.slots
        self.ends = self.sampling.end_ids[slots][:, None, :]
        self.base = self.rated.base(self.sampling.noisy[slots], self.width)[:, None]
        self.ranked = self.allowed = None

    # -- the steps ------------------------------------------------------------------------------------------------------

    def begin(self) -> Tensor:
        """[B, Hd]"""
        self._beam, self._feedback = Beam(self._runner.run_rows, self._inputs.rows), self._inputs.feedback
        return self._inputs.hidden

    def keep(self, index: Tensor) -> None:
        """All trees are equally deep."""
        raise AssertionError

    def advance(self, tokens: Tensor, parents: Tensor) -> Tensor:
        """[B * width, Hd]"""
        hidden, self._feedback = self._beam.advance(self._feedback, tokens, parents)
        return hidden

    def _choose(self, logits: Tensor, tips: TipRows) -> tuple[Tensor, Tensor]:
        sampling, slots = self.sampling, self._inputs.slots
        slots = slots.repeat_interleave(len(logits) // len(slots)) if len(logits) > len(slots) else slots
        noisy = sampling.noisy[slots] if self._samples else None
        keys = sampling.seed[slots], sampling.length[slots] + tips.depth, sampling.choice[slots], noisy
        hidden = logits.to(self._weight.dtype)
        share = self.race.share
        ids, chances, _ = ops.draft_topk(hidden, self._weight, sampling.temperature[slots], self._ids, *keys, rng.TARGET, share, self.width)
        return ids, chances
