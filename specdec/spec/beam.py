"""Depth-wise beam of a draft head: which nodes run next, and where their keys lie.

At every depth but the last, up to `width` nodes of each tree run through the head, in one pass for all sequences. A sequence
whose own beam has w places numbers them (d - 1) * w + i, the i-th of depth d: that is the bit in its ancestor words and the
slot behind the newest token. Slots never move; what is accepted is written again from the target's features.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from specdec.spec.tree import BIT_TABLE
from specdec.types import Batch

if TYPE_CHECKING:
    from specdec.sequence import Sequence
    from specdec.spec.head_rows import HeadRows


class BeamRows(NamedTuple):
    """Where the nodes of B sequences run, for each of P passes. bits, positions, slots [P, B, rows] i64; sizes [3, B] i32: committed keys,
    places of the tree, first visible key; tables [1, B, M] i32."""

    bits: Tensor
    positions: Tensor
    slots: Tensor
    sizes: Tensor
    tables: Tensor


def beam_rows(layout: HeadRows, seqs: list[Sequence], places: list[int], depths: list[int]) -> list[np.ndarray]:
    """The fields of BeamRows as host arrays. places: of each sequence's own beam. depths: of each tree."""
    width = max(places)
    own, newest = np.asarray(places)[:, None], np.asarray([seq.num_computed for seq in seqs])
    fed = own[:, 0] * (np.asarray(depths) - 1)
    column, passes = np.arange(width), np.arange(max(depths) - 1)[:, None, None]
    nodes = passes * own + np.minimum(column, own - 1)  # [passes, B, width]
    inside = (column < own) & (nodes < fed[:, None])
    cells = np.where(inside, newest[:, None] + 1 + nodes, -1)
    owner = np.repeat([seq.request_slot for seq in seqs], width)
    return [
        BIT_TABLE.numpy()[np.minimum(nodes, 63)],
        newest[:, None] + 1 + passes + 0 * column,
        layout.slots(np.tile(owner, len(passes)), cells.reshape(-1)).reshape(len(passes), len(seqs), width),
        np.array([newest + 1, fed, layout.first(seqs)], dtype=np.int32),
        layout.table(seqs, int((newest + fed).max())),
    ]


class Beam:
    """The running nodes of B sequences; rows beyond a sequence's own beam run along and are written nowhere.

    feed: runs rows of the head, (batch, features) -> (hidden, feedback). words [B, rows] i64: ancestor words of the nodes that ran last.
    """

    def __init__(self, feed: Callable[[Batch, Tensor], tuple[Tensor, Tensor]], rows: BeamRows):
        _, batch, self.width = rows.slots.shape
        self.depth = 0
        self._feed = feed
        self._device = device = rows.slots.device
        self._bits, self._positions, self._slots, sizes, self._tables = rows
        self._context, self._fed, self._first = sizes.unbind()
        self._cu = torch.arange(0, (batch + 1) * self.width, self.width, dtype=torch.int32, device=device)
        self._none = torch.zeros(0, dtype=torch.int64, device=device)
        self.words = torch.zeros((batch, 1), dtype=torch.int64, device=device)

    def advance(self, features: Tensor, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        """Run the next depth: tokens [B, width] below the rows `parents` [B, width] of the pass before.

        features [B * rows, Hd]: feedback of that pass. Returns (hidden, feedback), each [B * width, Hd].
        """
        batch, rows = self.words.shape
        self.words = self.words.gather(1, parents) | self._bits[self.depth]
        if batch > 1:
            parents = parents + torch.arange(0, batch * rows, rows, device=self._device)[:, None]
        step = Batch(
            tokens.flatten(),
            self._positions[self.depth].flatten(),
            self._cu,
            self._context,
            self._fed,
            self.words.flatten(),
            self._tables,
            self._slots[self.depth].view(1, -1),
            self._none,
            first_key=self._first,
        )
        self.depth += 1
        return self._feed(step, features[parents.flatten()])

    def keep(self, live: Tensor) -> None:
        """Go on with the sequences `live` [b] i64 alone."""
        self.words, self._cu = self.words[live], self._cu[: len(live) + 1]
        self._slots, self._bits, self._positions = self._slots[:, live], self._bits[:, live], self._positions[:, live]
        self._context, self._fed, self._first = self._context[live], self._fed[live], self._first[live]
        self._tables = self._tables[:, live]
