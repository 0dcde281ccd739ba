"""How the rows of a draft head's passes are laid out: block tables, slots and first keys, as host arrays that travel together."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from specdec.cache.tables import flat_slots
from specdec.transfer import send_all
from specdec.types import Batch

if TYPE_CHECKING:
    from specdec.sequence import Sequence
    from specdec.spec.head_progress import Job, Progress


class HeadRows:
    """tables [S, M] i32: block tables of the shared group by request slot. progress: of the sequences, the runner's own."""

    def __init__(self, tables: np.ndarray, block_size: int, progress: Mapping[Sequence, Progress]):
        self._tables, self._size, self._progress = tables, block_size, progress

    def causal(self, jobs: list[Job], mask: int, device: torch.device) -> tuple[Batch, Tensor]:
        """The batch of a ragged pass, and the rows [R] i64 of the last pairs and masks. mask: token of the mask rows."""
        ids: list[int] = []
        last: list[int] = []
        starts, lengths, cu = [], [], [0]
        for job in jobs:
            start = self._progress[job.seq].seen
            ids += [*job.seq.tokens[start : start + job.count], *[mask] * job.masks]
            starts.append(start)
            lengths.append(job.count + job.masks)
            last += range(cu[-1] + job.count - 1, cu[-1] + lengths[-1])
            cu.append(cu[-1] + lengths[-1])
        cells = np.concatenate([np.arange(s, s + n) for s, n in zip(starts, lengths, strict=True)])
        owner = np.repeat([job.seq.request_slot for job in jobs], lengths)
        seqs = [job.seq for job in jobs]
        columns: list[np.ndarray] = [
            np.array([ids, cells, np.zeros_like(cells)], dtype=np.int64),
            np.array([starts, np.zeros_like(starts), self.first(seqs)], dtype=np.int32),
            np.array(cu, dtype=np.int32),
            self.table(seqs, int(cells.max())),
            self.slots(owner, cells),
            np.array(last, dtype=np.int64),
        ]
        linear, sizes, ends, tables, slots, rows = send_all(columns, device)
        input_ids, positions, words = linear.unbind()
        ctx_lens, tree_len, first_key = sizes.unbind()
        batch = Batch(
            input_ids=input_ids,
            positions=positions,
            cu_query=ends,
            ctx_lens=ctx_lens,
            tree_len=tree_len,
            tree_mask=words,
            block_tables=tables,
            slot_mapping=slots,
            logit_rows=rows,
            first_key=first_key,
        )
        return batch, rows

    def slots(self, request_slots: np.ndarray, cells: np.ndarray) -> np.ndarray:
        """[1, n] i64 flat slots of cells of the sequences in these request slots; cells below 0 are not written."""
        return flat_slots(self._tables[None], request_slots, cells, self._size)

    def table(self, seqs: list[Sequence], last_cell: int) -> np.ndarray:
        """[1, B, M] i32 block tables of the sequences, up to the block of `last_cell`."""
        rows = self._tables[[seq.request_slot for seq in seqs], : last_cell // self._size + 1]
        return np.ascontiguousarray(rows)[None]

    def first(self, seqs: list[Sequence]) -> np.ndarray:
        """[B] i32, the first key that draft rows of each sequence see."""
        return np.array([self._progress[seq].first for seq in seqs], dtype=np.int32)

    def places(self, seqs: Seq[Sequence]) -> np.ndarray:
        """[B, 3 + M] i64: request slot, newest token, first key and block table of each sequence, as far as the longest reaches."""
        slots = [seq.request_slot for seq in seqs]
        columns = np.array([slots, [seq.tokens[-1] for seq in seqs], self.first(list(seqs))], dtype=np.int64)
        longest = max(len(seq.block_tables[0]) for seq in seqs)
        return np.concatenate((columns.T, self._tables[slots, :longest]), axis=1)
