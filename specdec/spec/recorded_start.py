"""Where a recorded draft starts: on which sequences, and behind which pass of the head.

All that changes from step to step lies in tensors at fixed addresses, and the layout of rows follows from it on the device: the newest
position from the device's own lengths, which it knows before the host does. A draft starts behind a pass that the host laid out (`Given`)
or behind the pairs that the verdict in flight has accepted (`Accepted`), which only the device can count: as many rows as there can be
run for every sequence, and those beyond write nothing.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from specdec import ops
from specdec.cache.tables import device_slots
from specdec.spec.beam import BeamRows
from specdec.transfer import send
from specdec.types import Batch

if TYPE_CHECKING:
    from specdec.sampling import SamplingState
    from specdec.sequence import Sequence
    from specdec.spec.head_kv import HeadRunner


class Place(NamedTuple):
    """B sequences: request slots, newest positions and newest tokens as the host knows them [B] i64, first visible keys [B] i32, block
    tables [1, B, M] i32."""

    request_slots: Tensor
    newest: Tensor
    tokens: Tensor
    first: Tensor
    tables: Tensor
    block_size: int

    def slots(self, cells: Tensor, inside: Tensor | None = None) -> Tensor:
        """[B, n] i64 flat slots of cells [B, n], -1 where not inside; there they may be any."""
        last = self.tables.shape[2] * self.block_size - 1
        return device_slots(self.tables, cells.clamp(max=last), self.block_size, inside)[0]

    def beam_rows(self, width: int, depth: int) -> BeamRows:
        """As `beam.beam_rows` where all sequences have the same beam and depth."""
        passes, device = depth - 1, self.newest.device
        nodes, newest = torch.arange(passes * width, device=device), self.newest[:, None]
        shape = (passes, len(newest), width)
        bits = (torch.ones_like(nodes) << nodes).view(passes, 1, width).expand(shape)
        positions = (newest + 1 + nodes // width).view(len(newest), passes, width).transpose(0, 1).contiguous()
        slots = self.slots(newest + 1 + nodes).view(len(newest), passes, width).transpose(0, 1).contiguous()
        context = (self.newest + 1).int()
        return BeamRows(bits, positions, slots, torch.stack((context, torch.full_like(context, len(nodes)), self.first)), self.tables)


class Places:
    """`Place` of a recording: what the host sends, by one copy. columns [B, 3 + M] i64: request slot, newest token, first key, table."""

    def __init__(self, size: int, runner: HeadRunner, device: torch.device):
        self._runner = runner
        self._columns = torch.zeros((size, 3 + runner.blocks), dtype=torch.int64, device=device)

    def fill(self, padded: Seq[Sequence]) -> None:
        """Those sequences, as many as the recording has."""
        sent = send(self._runner.rows.places(padded), self._columns.device)
        self._columns[:, : sent.shape[1]].copy_(sent)

    def read(self, sampling: SamplingState) -> Place:
        """Within the recording."""
        slots, tokens, first = self._columns[:, :3].t().contiguous()  # kernels read each of them as it lies
        tables = self._columns[:, 3:].int().contiguous()[None]
        return Place(slots, sampling.length[slots] - 1, tokens, first.int(), tables, self._runner.block_size)


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

    def __call__(self, place: Place) -> tuple[Tensor, Tensor, Tensor]:
        """Within the recording: (newest tokens [B], hidden states [B, 1 + masks, Hd] behind them and the masks, feedback [B, Hd])."""
        return place.tokens, self._states, self._feedback[:, 0]


class Accepted:
    """The pairs of a verdict's tokens, run within the recording. most: tokens that a verdict may commit. masks: rows behind them.

    Pair r of a sequence is the feature of the r-th node on its path, the root first, and the r-th token committed.
    """

    def __init__(self, size: int, most: int, masks: int, runner: HeadRunner):
        head = runner.head
        self._runner, self._most, self._masks = runner, most, masks
        self._said = torch.ones((size, most + 1), dtype=torch.int64, device=head.device)  # the tokens, and how many there are
        self._taps = torch.zeros((size, most, head.config.tap_size), dtype=head.dtype, device=head.device)

    def fill(self, committed: Tensor, num_committed: Tensor, path: Tensor, taps: Tensor, roots: Tensor) -> None:
        """Of b sequences: committed [b, D + 1], num_committed [b], path [b, D]; D + 1 <= most. taps: of all rows of the target's pass;
        roots [b]: those of the roots."""
        ops.gather_pairs(self._said, self._taps, committed, num_committed, path, taps, roots, self._runner.columns)

    def __call__(self, place: Place) -> tuple[Tensor, Tensor, Tensor]:
        """As of `Given`."""
        head, masks, count = self._runner.head, self._masks, self._said[:, -1:]
        size, width, device = len(count), self._most + masks, head.device
        row = torch.arange(width, device=device)
        pair, seen = row < count, place.newest[:, None] + 1 - count
        positions, features = seen + row, head.fuse(self._taps.flatten(0, 1)).view(size, self._most, -1)
        tokens = torch.nn.functional.pad(self._said[:, :-1], (0, masks))
        if masks:
            assert head.mask_feature is not None
            features = torch.nn.functional.pad(features, (0, 0, 0, masks))
            features = torch.where(pair[:, :, None], features, head.mask_feature)
        none = torch.zeros(size * width, dtype=torch.int64, device=device)
        batch = Batch(
            torch.where(pair, tokens, head.config.mask_token_id or 0).flatten(),
            positions.flatten(),
            torch.arange(0, size * width + 1, width, dtype=torch.int32, device=device),
            seen[:, 0].int(),
            torch.zeros(size, dtype=torch.int32, device=device),
            none,
            place.tables,
            place.slots(positions, row < count + masks).view(1, -1),
            none[:0],
            first_key=place.first,
        )
        hidden, feedback = self._runner.run_rows(batch, features.flatten(0, 1))
        last = torch.arange(0, size * width, width, device=device)[:, None] + count - 1
        newest = tokens.gather(1, count - 1)[:, 0]
        return newest, hidden[last + torch.arange(1 + masks, device=device)], feedback[last[:, 0]]
