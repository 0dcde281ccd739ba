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

from specdec import ops
from specdec.kernels.pad_batch.reference import zeroed
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
        drafts = widths.features is not None
        self._fields = zeroed(rows, sequences, *widths.tables, device, first_key=drafts)
        ids, positions, words, slots, contexts, trees, ends, tables, *first = self._fields
        self.features = torch.zeros((rows, widths.features or 0), dtype=widths.dtype, device=device) if drafts else None
        self.batch = Batch(
            input_ids=ids,
            positions=positions,
            cu_query=ends,
            ctx_lens=contexts,
            tree_len=trees,
            tree_mask=words,
            block_tables=tables,
            slot_mapping=slots,
            logit_rows=torch.arange(rows, device=device),
            first_key=first[0] if first else None,
        )

    def fill(self, batch: Batch, features: Tensor | None) -> None:
        """Copies in. What is left of a batch before it is harmless: no sequence has those rows or reads those tables."""
        rows = batch.input_ids, batch.positions, batch.tree_mask, batch.slot_mapping
        first = () if batch.first_key is None or self.features is None else (batch.first_key,)
        ops.pad_batch(self._fields, (*rows, batch.ctx_lens, batch.tree_len, batch.cu_query, batch.block_tables, *first))
        if self.features is not None and features is not None:
            self.features[: len(features)].copy_(features)


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
