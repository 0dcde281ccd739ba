"""Depth-wise beam of a draft head: which nodes run next, and where their keys lie.

At every depth but the last, `width` nodes of each tree run through the head in one pass for all sequences. The i-th of depth
d is *fed node* (d - 1) * width + i: that is its bit in ancestor words and its slot behind the newest token. Slots never move;
what is accepted is written again from the target's features.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specdec.spec.tree import BIT_TABLE
from specdec.types import Batch

if TYPE_CHECKING:
    from specdec.sequence import Sequence
    from specdec.spec.head_kv import HeadRunner


class Beam:
    """The running nodes of B sequences, `width` each. limits: per sequence, how many of them have slots. depth: of the tree."""

    def __init__(self, runner: HeadRunner, seqs: list[Sequence], width: int, limits: list[int], depth: int):
        self.width, self.depth = width, 0
        self._runner = runner
        self._limits = np.asarray(limits)
        device = runner.head.device
        newest = np.asarray([seq.num_computed for seq in seqs])
        self._owner = np.asarray([seq.request_slot for seq in seqs])
        self._newest = newest
        fed = width * (depth - 1)
        last = int(newest.max()) + fed
        context = torch.from_numpy(newest + 1).to(device, torch.int32)
        empty = torch.zeros(0, dtype=torch.int64, device=device)
        self._frame = Batch(
            input_ids=empty,
            positions=empty,
            cu_query=torch.arange(0, (len(seqs) + 1) * width, width, dtype=torch.int32, device=device),
            ctx_lens=context,
            tree_len=torch.full_like(context, fed),
            tree_mask=empty,
            block_tables=runner.table(seqs, last),
            slot_mapping=empty[None],
            logit_rows=empty,
            first_key=runner.first(seqs),
        )
        self.words = torch.zeros((len(seqs), 1), dtype=torch.int64, device=device)  # [B, rows] of the nodes that ran last
        self._bits = BIT_TABLE.to(device)

    def advance(self, features: Tensor, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        """Run the next depth: tokens [B, width] below the rows `parents` [B, width] of the pass before.

        features [B * rows, Hd]: feedback of that pass. Returns (hidden, feedback), each [B * width, Hd].
        """
        batch, rows = self.words.shape
        start = self.depth * self.width
        self.depth += 1
        self.words = self.words.gather(1, parents) | self._bits[start : start + self.width]
        flat = (parents + torch.arange(0, batch * rows, rows, device=parents.device)[:, None]).flatten()
        cells = self._newest[:, None] + 1 + start + np.arange(self.width)
        cells = np.where(np.arange(self.width) < self._limits[:, None], cells, -1)
        positions = np.repeat(self._newest + self.depth, self.width)
        step = replace(
            self._frame,
            input_ids=tokens.flatten(),
            positions=torch.from_numpy(positions).to(tokens.device),
            tree_mask=self.words.flatten(),
            slot_mapping=self._runner.slots(np.repeat(self._owner, self.width), cells.flatten()),
        )
        return self._runner.feed(step, features[flat])

    def keep(self, live: Tensor) -> None:
        """Go on with the sequences `live` [b] i64 alone."""
        index = live.cpu().numpy()
        self._limits, self._owner, self._newest = self._limits[index], self._owner[index], self._newest[index]
        self.words = self.words[live]
        frame = self._frame
        self._frame = replace(
            frame,
            cu_query=frame.cu_query[: len(index) + 1],
            ctx_lens=frame.ctx_lens[live],
            tree_len=frame.tree_len[live],
            block_tables=frame.block_tables[:, live],
            first_key=None if frame.first_key is None else frame.first_key[live],
        )
