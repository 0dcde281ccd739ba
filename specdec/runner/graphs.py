"""The target pass as CUDA graphs: one replay in place of the hundreds of launches that at few rows cost more than their work.

A graph holds one shape: as many rows and sequences as the next sizes of two lists, tables for the longest context. A batch is copied into
its inputs and padded: padding sequences have no rows, padding rows belong to no sequence, so they write no K and V, see none, and nobody
reads what becomes of them. Rows of an op do not look at each other, hence padding changes results only where a kernel is
chosen by the number of rows; the fixed-order ones are not, and `deterministic` promises the same bits either way.

Graphs are made when their shape is first needed and live in one memory pool: each may overwrite what the one before returned.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from specdec.layers.attention import KVStore
from specdec.models.registry import Model
from specdec.types import Batch, Forward

ROWS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128)
SEQUENCES = (1, 2, 4, 8, 16, 32, 64, 128)
Pass = tuple[Tensor, Tensor, Tensor | None]  # hidden [T, H], logits [T, V], taps
logger = logging.getLogger(__name__)


def fitting(sizes: tuple[int, ...], n: int) -> int | None:
    """The smallest of the rising `sizes` that holds n, or None."""
    index = bisect_left(sizes, n)
    return sizes[index] if index < len(sizes) else None


class Inputs:
    """The batch that a graph reads, at fixed addresses. rows, sequences: its size. tables [G, _, M]: how wide block tables get."""

    def __init__(self, rows: int, sequences: int, tables: tuple[int, int], device: torch.device):
        groups, width = tables
        longs = torch.zeros((3 + groups, rows), dtype=torch.int64, device=device)
        lengths = torch.zeros((2, sequences), dtype=torch.int32, device=device)
        longs[3:] = -1
        self.batch = Batch(
            input_ids=longs[0],
            positions=longs[1],
            cu_query=torch.zeros(sequences + 1, dtype=torch.int32, device=device),
            ctx_lens=lengths[0],
            tree_len=lengths[1],
            tree_mask=longs[2],
            block_tables=torch.zeros((groups, sequences, width), dtype=torch.int32, device=device),
            slot_mapping=longs[3:],
            logit_rows=torch.arange(rows, device=device),
        )

    def fill(self, batch: Batch) -> None:
        """Copies `batch` in. What is left of a batch before it is harmless: no sequence has those rows or reads those tables."""
        own, rows, sequences = self.batch, len(batch.input_ids), len(batch.ctx_lens)
        own.input_ids[:rows].copy_(batch.input_ids)
        own.positions[:rows].copy_(batch.positions)
        own.tree_mask[:rows].copy_(batch.tree_mask)
        own.slot_mapping[:, :rows].copy_(batch.slot_mapping)
        own.slot_mapping[:, rows:].fill_(-1)
        own.ctx_lens[:sequences].copy_(batch.ctx_lens)
        own.tree_len[:sequences].copy_(batch.tree_len)
        own.block_tables[:, :sequences, : batch.block_tables.shape[2]].copy_(batch.block_tables)
        own.cu_query[: sequences + 1].copy_(batch.cu_query)
        own.cu_query[sequences + 1 :].fill_(rows)


@dataclass(frozen=True, slots=True)
class Recorded:
    """One shape's graph: fill `inputs`, call `replay`."""

    inputs: Inputs
    replay: Callable[[], Pass]


class ForwardGraphs:
    """Graphs of a model's pass over a KV cache. tables: (KV groups, blocks of the longest sequence). record: makes a replay of a pass."""

    def __init__(self, model: Model, kv: KVStore, tables: tuple[int, int], record: Callable[[Callable[[], Pass]], Callable[[], Pass]]):
        self._model, self._kv, self._tables, self._record = model, kv, tables, record
        self._recorded: dict[tuple[int, int, tuple[int, ...]], Recorded] = {}

    def __len__(self) -> int:
        return len(self._recorded)

    def run(self, batch: Batch, taps: tuple[int, ...]) -> Forward | None:
        """The pass, or None where no graph holds such a batch. Hidden states and logits are valid until the next pass."""
        rows, sequences = fitting(ROWS, len(batch.input_ids)), fitting(SEQUENCES, len(batch.ctx_lens))
        if rows is None or sequences is None or batch.prompt_rows is not None or batch.first_key is not None:
            return None
        recorded = self._recorded.get((rows, sequences, taps))
        if recorded is None:
            recorded = self._recorded[rows, sequences, taps] = self._make(rows, sequences, taps)
        recorded.inputs.fill(batch)
        hidden, logits, tapped = recorded.replay()
        count = len(batch.input_ids)
        return Forward(
            logits=logits[:count] if len(batch.logit_rows) == count else logits.index_select(0, batch.logit_rows),
            hidden=hidden[:count],
            taps=None if tapped is None else tapped[:count].clone(),  # drafters keep them beyond the step
        )

    def _make(self, rows: int, sequences: int, taps: tuple[int, ...]) -> Recorded:
        logger.debug("recording the target pass of %d rows, %d sequences", rows, sequences)
        inputs = Inputs(rows, sequences, self._tables, self._model.device)

        def forward() -> Pass:
            hidden, tapped = self._model.forward(inputs.batch, self._kv, taps=taps)
            return hidden, self._model.logits(hidden), tapped

        return Recorded(inputs, self._record(forward))


class CudaRecorder:
    """Records passes as CUDA graphs that share one memory pool."""

    def __init__(self, device: torch.device):
        self._device = device
        self._pool: Any = None  # a handle, of a type without a name

    def __call__(self, forward: Callable[[], Pass]) -> Callable[[], Pass]:
        """Runs `forward` twice, to compile kernels and to let libraries allocate, and records the third run."""
        stream = torch.cuda.Stream(self._device)
        stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(stream):
            for _ in range(2):
                forward()
        torch.cuda.current_stream(self._device).wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = forward()
        self._pool = graph.pool()

        def replay() -> Pass:
            graph.replay()
            return outputs

        return replay
