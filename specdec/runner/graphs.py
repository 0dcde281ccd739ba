"""Passes of a network as CUDA graphs: one replay in place of the hundreds of launches that at few rows cost more than their work.

A graph holds one shape: as many rows and sequences as the next sizes of two lists, tables for the longest context. A batch is copied into
its inputs and padded: padding sequences have no rows, padding rows belong to no sequence, so they write no K and V, see none, and nobody
reads what becomes of them. Rows of an op do not look at each other, hence padding changes results only where a kernel is
chosen by the number of rows; the fixed-order ones are not, and `deterministic` promises the same bits either way.

Graphs are made when their shape is first needed. Those of one `Passes` share memory: each may overwrite what the one before returned.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.types import Batch

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # 32 sequences of 6 or 8 rows: chains of heads at batch 32
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128)
Outputs = tuple[Tensor | None, ...]  # each with a row for every row of the batch
Recorder = Callable[[Callable[[], Outputs]], Callable[[], Outputs]]  # turns a pass into its replay
logger = logging.getLogger(__name__)


def fitting(sizes: tuple[int, ...], n: int) -> int | None:
    """The smallest of the rising `sizes` that holds n, or None."""
    index = bisect_left(sizes, n)
    return sizes[index] if index < len(sizes) else None


@dataclass(frozen=True, slots=True)
class Widths:
    """What inputs have beside rows and sequences. tables: (KV groups, blocks of the longest sequence). features: columns of the features
    that a draft head reads beside the batch, and `dtype` their type; None = a target, which reads none and sees all keys."""

    tables: tuple[int, int]
    features: int | None = None
    dtype: torch.dtype = torch.float32


class Inputs:
    """The batch (and features) that a graph reads, at fixed addresses, for up to `rows` rows of `sequences` sequences."""

    def __init__(self, rows: int, sequences: int, widths: Widths, device: torch.device):
        groups, blocks = widths.tables
        longs = torch.zeros((3 + groups, rows), dtype=torch.int64, device=device)
        lengths = torch.zeros((3, sequences), dtype=torch.int32, device=device)
        longs[3:] = -1
        drafts = widths.features is not None
        self.features = torch.zeros((rows, widths.features or 0), dtype=widths.dtype, device=device) if drafts else None
        self.batch = Batch(
            input_ids=longs[0],
            positions=longs[1],
            cu_query=torch.zeros(sequences + 1, dtype=torch.int32, device=device),
            ctx_lens=lengths[0],
            tree_len=lengths[1],
            tree_mask=longs[2],
            block_tables=torch.zeros((groups, sequences, blocks), dtype=torch.int32, device=device),
            slot_mapping=longs[3:],
            logit_rows=torch.arange(rows, device=device),
            first_key=lengths[2] if drafts else None,
        )

    def fill(self, batch: Batch, features: Tensor | None) -> None:
        """Copies in. What is left of a batch before it is harmless: no sequence has those rows or reads those tables."""
        own, rows, sequences = self.batch, len(batch.input_ids), len(batch.ctx_lens)
        fields = ((own.input_ids, batch.input_ids), (own.positions, batch.positions), (own.tree_mask, batch.tree_mask))
        _copy_all([*fields, *zip(own.slot_mapping, batch.slot_mapping, strict=True)])
        lengths = [(own.ctx_lens, batch.ctx_lens), (own.tree_len, batch.tree_len), (own.cu_query, batch.cu_query)]
        if own.first_key is not None and batch.first_key is not None:
            lengths.append((own.first_key, batch.first_key))
        _copy_all(lengths)
        own.block_tables[:, :sequences, : batch.block_tables.shape[2]].copy_(batch.block_tables)
        if rows < len(own.input_ids):
            own.slot_mapping[:, rows:].fill_(-1)
        if sequences < len(own.ctx_lens):
            own.cu_query[sequences + 1 :].fill_(rows)
        if self.features is not None and features is not None:
            self.features[:rows].copy_(features)


def _copy_all(pairs: list[tuple[Tensor, Tensor]]) -> None:
    """Into each first tensor as much as the second has: one launch for all, which have one dtype."""
    torch._foreach_copy_([own[: len(values)] for own, values in pairs], [values for _, values in pairs])


class Passes:
    """Recorded passes of one network. run: the pass, from its inputs to its outputs. Outputs are valid until the next pass."""

    def __init__(self, run: Callable[[Inputs], Outputs], widths: Widths, device: torch.device, record: Recorder):
        self._run, self._widths, self._device, self._record = run, widths, device, record
        self._recorded: dict[tuple[int, int], tuple[Inputs, Callable[[], Outputs]]] = {}
        self.last: Callable[[], Outputs] | None = None  # the replay of the last batch that had one, to be timed

    def __len__(self) -> int:
        return len(self._recorded)

    def __call__(self, batch: Batch, features: Tensor | None = None) -> Outputs | None:
        """The outputs for the batch's rows, or None where no graph holds such a batch."""
        count = len(batch.input_ids)
        rows, sequences = fitting(ROWS, count), fitting(SEQUENCES, len(batch.ctx_lens))
        if rows is None or sequences is None:
            return None
        if (rows, sequences) not in self._recorded:
            logger.debug("recording a pass of %d rows, %d sequences", rows, sequences)
            inputs = Inputs(rows, sequences, self._widths, self._device)
            self._recorded[rows, sequences] = inputs, self._record(lambda: self._run(inputs))
        inputs, replay = self._recorded[rows, sequences]
        self.last = replay
        inputs.fill(batch, features)
        return tuple(None if output is None else output[:count] for output in replay())


class CudaRecorder:
    """Records passes as CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pool: Any = None  # a handle, of a type without a name

    def __call__(self, run: Callable[[], Outputs]) -> Callable[[], Outputs]:
        """Runs `run` twice, to compile kernels and to let libraries allocate, and records the third run."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                run()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = run()
        self._pool = graph.pool()

        def replay() -> Outputs:
            graph.replay()
            return outputs

        return replay
