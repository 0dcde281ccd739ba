"""Where a recorded draft starts: on which sequences, and behind which pass of the head.

All that changes from step to step lies in tensors at fixed addresses, and the layout of rows follows from it on the device: the newest
position from the device's own lengths, which it knows before the host does. A draft starts behind a pass that the host laid out (`Given`)
or behind the pairs that the verdict in flight has accepted (`Accepted`), which only the device can count: as many rows as there can be
run for every sequence, and those beyond write nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec import ops
from specdec.kernels.draft_layout.reference import DraftLayout
from specdec.transfer import send
from specdec.types import Batch

if TYPE_CHECKING:
    from specdec.sampling import SamplingState
    from specdec.sequence import Sequence
    from specdec.spec.head_kv import HeadRunner


class Places:
    """The sequences of a recording: what the host sends, by one copy. columns [B, 3 + M] i64: request slot, newest token,
    first key, table."""

    def __init__(self, size: int, runner: HeadRunner, device: torch.device):
        self._runner = runner
        self._columns = torch.zeros((size, 3 + runner.blocks), dtype=torch.int64, device=device)

    def fill(self, padded: Seq[Sequence]) -> None:
        """Those sequences, as many as the recording has."""
        sent = send(self._runner.rows.places(padded), self._columns.device)
        self._columns[:, : sent.shape[1]].copy_(sent)

    def read(self, sampling: SamplingState, depth: int, passes: int, width: int) -> DraftLayout:
        """Within the recording: of trees so deep, whose nodes run in `passes` passes of `width`."""
        laws = sampling.temperature, sampling.seed, sampling.length, sampling.choice, sampling.noisy, sampling.end_ids
        return ops.draft_layout(self._columns, laws, depth, passes, width, self._runner.block_size)


def padded_copy(own: Tensor, values: Tensor) -> None:
    """Into own [B, any] the fewer rows of values, then copies of the first."""
    own[: len(values)].copy_(values)
    if len(values) < len(own):
        own[len(values) :].copy_(values[:1].expand(len(own) - len(values), *values.shape[1:]))


class Given:
    """States of a pass that the host had run. depth: states of each sequence."""

    def __init__(self, size: int, depth: int, runner: HeadRunner):
        head = runner.head
        self._states = torch.zeros((size, depth, head.config.hidden_size), dtype=head.dtype, device=head.device)
        self._feedback = torch.zeros_like(self._states)

    def fill(self, states: Tensor, feedback: Tensor) -> None:
        """Each [b * depth, Hd], of b sequences."""
        for own, values in ((self._states, states), (self._feedback, feedback)):
            padded_copy(own, values.view(-1, *own.shape[1:]))

    def __call__(self, layout: DraftLayout) -> tuple[Tensor, Tensor, Tensor]:
        """Within the recording: (newest tokens [B], hidden states [B, 1 + masks, Hd] behind them and the masks, feedback [B, Hd])."""
        return layout.tokens, self._states, self._feedback[:, 0]


class Accepted:
    """The pairs of a verdict's tokens, run within the recording. most: tokens that a verdict may commit. masks: rows behind them.

    Pair r of a sequence is the feature of the r-th node on its path, the root first, and the r-th token committed.
    """

    def __init__(self, size: int, most: int, masks: int, runner: HeadRunner):
        head = runner.head
        self._runner, self._most, self._masks = runner, most, masks
        self._said = torch.ones((size, most + 1), dtype=torch.int64, device=head.device)  # the tokens, and how many there are
        self._taps = torch.zeros((size, most, head.config.tap_size), dtype=head.dtype, device=head.device)
        width = most + masks
        self._cu = torch.arange(0, size * width + 1, width, dtype=torch.int32, device=head.device)
        self._tree_len = torch.zeros(size, dtype=torch.int32, device=head.device)
        self._words = torch.zeros(size * width, dtype=torch.int64, device=head.device)
        if masks:
            assert head.mask_feature is not None
            self._features = head.mask_feature.expand(size, width, -1).clone()  # of the pairs overwritten, of the masks always this

    def fill(self, committed: Tensor, num_committed: Tensor, path: Tensor, taps: Tensor, roots: Tensor) -> None:
        """Of b sequences: committed [b, D + 1], num_committed [b], path [b, D]; D + 1 <= most. taps: of all rows of the target's pass;
        roots [b]: those of the roots."""
        ops.gather_pairs(self._said, self._taps, committed, num_committed, path, taps, roots, self._runner.columns)

    def __call__(self, layout: DraftLayout) -> tuple[Tensor, Tensor, Tensor]:
        """As of `Given`."""
        head, runner, most = self._runner.head, self._runner, self._most
        rows = ops.accepted_pairs(self._said, layout.newest, layout.tables, self._masks, head.config.mask_token_id or 0, runner.block_size)
        features = head.fuse(self._taps.flatten(0, 1))
        if self._masks:
            assert head.mask_feature is not None
            pairs, fused = rows.pair[:, :most, None], features.view(len(self._said), most, -1)
            torch.where(pairs, fused, head.mask_feature, out=self._features[:, :most])
            features = self._features.flatten(0, 1)
        batch = Batch(
            rows.tokens.flatten(),
            rows.positions.flatten(),
            self._cu,
            rows.seen,
            self._tree_len,
            self._words,
            layout.tables[None],
            rows.slots.view(1, -1),
            self._words[:0],
            first_key=layout.first,
        )
        hidden, feedback = runner.run_rows(batch, features)
        return rows.roots, hidden[rows.last], feedback[rows.last[:, 0]]
