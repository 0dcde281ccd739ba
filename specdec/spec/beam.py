"""Depth-wise beam of a draft head: which nodes run next, and where their keys lie.

At every depth but the last, up to `width` nodes of each tree run through the head, in one pass for all sequences. A sequence
whose own beam has w places numbers them (d - 1) * w + i, the i-th of depth d: that is the bit in its ancestor words and the
slot behind the newest token. Slots never move; what is accepted is written again from the target's features.
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
    """The running nodes of B sequences. places: of each sequence's own beam; rows beyond it run along and are written nowhere.

    depths: of each tree. words [B, rows] i64: ancestor words of the nodes that ran last.
    """

    def __init__(self, runner: HeadRunner, seqs: list[Sequence], places: list[int], depths: list[int]):
        self.width, self.depth = max(places), 0
        self._runner = runner
        device = runner.head.device
        self._places = np.asarray(places)
        self._newest = np.asarray([seq.num_computed for seq in seqs])
        self._owner = np.asarray([seq.request_slot for seq in seqs])
        fed = self._places * (np.asarray(depths) - 1)
        empty = torch.zeros(0, dtype=torch.int64, device=device)
        self._frame = Batch(
            input_ids=empty,
            positions=empty,
            cu_query=torch.arange(0, (len(seqs) + 1) * self.width, self.width, dtype=torch.int32, device=device),
            ctx_lens=torch.from_numpy(self._newest + 1).to(device, torch.int32),
            tree_len=torch.from_numpy(fed).to(device, torch.int32),
            tree_mask=empty,
            block_tables=runner.table(seqs, int((self._newest + fed).max())),
            slot_mapping=empty[None],
            logit_rows=empty,
            first_key=runner.first(seqs),
        )
        self.words = torch.zeros((len(seqs), 1), dtype=torch.int64, device=device)
        self._bits = BIT_TABLE.to(device)

    def advance(self, features: Tensor, tokens: Tensor, parents: Tensor) -> tuple[Tensor, Tensor]:
        """Run the next depth: tokens [B, width] below the rows `parents` [B, width] of the pass before.

        features [B * rows, Hd]: feedback of that pass. Returns (hidden, feedback), each [B * width, Hd].
        """
        batch, rows = self.words.shape
        column = np.arange(self.width)
        nodes = self.depth * self._places[:, None] + np.minimum(column, self._places[:, None] - 1)
        self.depth += 1
        self.words = self.words.gather(1, parents) | self._bits[torch.from_numpy(nodes).to(tokens.device)]
        flat = (parents + torch.arange(0, batch * rows, rows, device=parents.device)[:, None]).flatten()
        cells = np.where(column < self._places[:, None], self._newest[:, None] + 1 + nodes, -1)
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
        self._places, self._owner, self._newest = self._places[index], self._owner[index], self._newest[index]
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
