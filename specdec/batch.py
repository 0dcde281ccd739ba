"""`BatchBuilder`: StepPlan + DraftTree → Batch. Host lists in, device tensors out; one place knows the row layout."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from itertools import pairwise
from typing import TYPE_CHECKING

import numpy as np
import torch

from specdec import ops
from specdec.cache.tables import flat_slots
from specdec.spec.tree import host_words
from specdec.transfer import constant, send, send_all
from specdec.types import Batch

if TYPE_CHECKING:
    from specdec.kernels.tree_layout.reference import TreeLayout
    from specdec.sequence import Sequence
    from specdec.types import DraftTree, Scheduled, StepPlan


NO_CELL = -1  # of a row that writes no K and V


class _Rows:
    """Growing columns of one batch, row by row in plan order."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.positions: list[int] = []
        self.cells: list[int] = []  # the row's place in its sequence's slots: position, ctx + node index in a tree, or NO_CELL
        self.words: list[int] = []
        self.owner: list[int] = []  # request slot of the row
        self.cu = [0]
        self.ctx: list[int] = []
        self.tree_len: list[int] = []
        self.logit_rows: list[int] = []
        self.prompt_rows: list[int] = []

    def close(self, ctx: int, tree_len: int, request_slot: int) -> None:
        self.owner.extend([request_slot] * (len(self.ids) - self.cu[-1]))
        self.cu.append(len(self.ids))
        self.ctx.append(ctx)
        self.tree_len.append(tree_len)


class BatchBuilder:
    """Lays out a step. `tables` [G, max_num_seqs, M] i32 are the scheduler's block tables by request slot, on the host."""

    def __init__(self, tables: torch.Tensor, block_size: int, device: torch.device):
        self._tables = tables.numpy()  # shares memory
        self.block_size = block_size
        self.device = device
        self._sent: tuple[list[int], np.ndarray, torch.Tensor, torch.Tensor] | None = None  # slots, tables; the same on the device

    def build(self, plan: StepPlan, tree: DraftTree) -> Batch:
        """`tree` holds one tree per sampling share of `plan`, in plan order, on the host."""
        rows = _Rows()
        counts = tree.num_nodes.tolist()
        trees = (tree.tokens.tolist(), tree.parents.tolist(), tree.depth.tolist()) if max(counts, default=1) > 1 else None
        b = 0
        for share in plan.scheduled:
            nodes = counts[b] if share.samples else 0
            if nodes > 1:
                assert trees is not None
                self._tree(rows, share, nodes, *(column[b] for column in trees))
            else:
                self._linear(rows, share)
            b += share.samples
        return self._tensors([share.seq.request_slot for share in plan.scheduled], rows)

    def follow(self, seqs: Seq[Sequence], tokens: torch.Tensor, lengths: torch.Tensor) -> Batch:
        """A plain decode row of each sequence, for the token that the step under way gives it: tokens [B] i64; lengths [S] i64, of tokens
        by request slot, that one included; both on the device."""
        slots, tables = self.tables_of(seqs)
        batch, device = len(seqs), self.device
        nothing = constant((0,) * batch, device)
        laid = ops.tree_layout(tokens[:, None], nothing[:, None], constant((1,) * batch, device), lengths, slots, tables, self.block_size)
        return self._laid_out(laid, nothing, tables, causal=True)

    def tables_of(self, seqs: Seq[Sequence]) -> tuple[torch.Tensor, torch.Tensor]:
        """(request slots [B] i64, block tables [G, B, M] i32) of the sequences, on the device, as far as the longest reaches. Not to be
        written to: they are sent again only where they have changed."""
        slots, longest = [seq.request_slot for seq in seqs], max(len(seq.block_tables[0]) for seq in seqs)
        tables = np.ascontiguousarray(self._tables[:, slots, :longest])
        sent = self._sent
        if sent is None or sent[0] != slots or not np.array_equal(sent[1], tables):
            on_device = send_all([np.array(slots), tables], self.device)
            self._sent = sent = slots, tables, on_device[0], on_device[1]
        return sent[2], sent[3]

    def trees(
        self,
        tree: DraftTree,
        num_nodes: torch.Tensor,
        words: torch.Tensor,
        lengths: torch.Tensor,
        slots: torch.Tensor,
        tables: torch.Tensor,
    ) -> Batch:
        """As `build`, on the device, of trees that lie there and have all N nodes, of which num_nodes [B] count: the others write no K and
        V. words [B, N]: of ancestors. lengths [S] i64: tokens by request slot. slots, tables: of `tables_of`, with room for N nodes."""
        laid = ops.tree_layout(tree.tokens, tree.depth, num_nodes, lengths, slots, tables, self.block_size)
        return self._laid_out(laid, words.flatten(), tables, causal=False)

    def _laid_out(self, laid: TreeLayout, words: torch.Tensor, tables: torch.Tensor, *, causal: bool) -> Batch:
        """Of sequences with equally many rows, each a tree or causal; words [T]."""
        rows, batch = len(laid.input_ids), len(laid.ctx_lens)
        each = rows // batch
        return Batch(
            input_ids=laid.input_ids,
            positions=laid.positions,
            cu_query=constant(tuple(range(0, rows + 1, each)), self.device, np.int32),
            ctx_lens=laid.ctx_lens,
            tree_len=constant((0 if causal else each,) * batch, self.device, np.int32),
            tree_mask=words,
            block_tables=tables,
            slot_mapping=laid.slot_mapping,
            logit_rows=constant(tuple(range(rows)), self.device),
            causal=causal,
        )

    @staticmethod
    def _linear(rows: _Rows, share: Scheduled) -> None:
        """A prefill chunk or a plain decode row: causal by position."""
        seq, start = share.seq, share.seq.num_computed
        if share.rerun:
            rows.ids.append(seq.tokens[start - 1])
            rows.positions.append(start - 1)
            rows.cells.append(NO_CELL)
            rows.words.append(0)
        first = len(rows.ids)
        rows.ids.extend(seq.tokens[start : start + share.num_new])
        rows.positions.extend(range(start, start + share.num_new))
        rows.cells.extend(range(start, start + share.num_new))
        rows.words.extend([0] * share.num_new)
        if share.samples:
            rows.logit_rows.append(first + share.num_new - 1)
        rows.prompt_rows.extend(range(first, first + share.prompt_rows))
        rows.close(start - share.rerun, 0, seq.request_slot)

    @staticmethod
    def _tree(rows: _Rows, share: Scheduled, nodes: int, tokens: list[int], parents: list[int], depth: list[int]) -> None:
        """A root with drafts below it: node i at position root + depth[i], its KV in cell root + i."""
        root = share.seq.num_computed
        first = len(rows.ids)
        rows.ids.extend(tokens[:nodes])
        rows.positions.extend(root + d for d in depth[:nodes])
        rows.cells.extend(range(root, root + nodes))
        rows.words.extend(host_words(parents[:nodes]))
        rows.logit_rows.extend(range(first, first + nodes))
        rows.close(root, nodes, share.seq.request_slot)

    def _tensors(self, request_slots: list[int], rows: _Rows) -> Batch:
        """Everything travels as one copy: what a step costs here is the number of small tensors."""
        max_ctx = max(rows.ctx, default=0)
        max_query = max((b - a for a, b in pairwise(rows.cu)), default=1)
        used = -(-(max_ctx + max_query) // self.block_size)
        columns: list[np.ndarray] = [
            np.array([rows.ids, rows.positions, rows.words], dtype=np.int64),
            np.array([rows.ctx, rows.tree_len], dtype=np.int32),
            np.array(rows.cu, dtype=np.int32),
            np.ascontiguousarray(self._tables[:, request_slots, :used]),
            flat_slots(self._tables, rows.owner, rows.cells, self.block_size),
            np.array(rows.logit_rows, dtype=np.int64),
        ]
        if rows.prompt_rows:
            columns.append(np.array(rows.prompt_rows, dtype=np.int64))
        linear, lengths, cu, tables, slots, logit_rows, *prompt_rows = send_all(columns, self.device)
        ids, positions, words = linear.unbind()
        ctx_lens, tree_len = lengths.unbind()
        return Batch(
            input_ids=ids,
            positions=positions,
            cu_query=cu,
            ctx_lens=ctx_lens,
            tree_len=tree_len,
            tree_mask=words,
            block_tables=tables,
            slot_mapping=slots,
            logit_rows=logit_rows,
            prompt_rows=prompt_rows[0] if prompt_rows else None,
            max_ctx=max_ctx,
            causal=not any(rows.tree_len),
        )

    def slots(self, request_slots: list[int], cells: list[int]) -> torch.Tensor:
        """[G, n] i64 flat slots of cells (places counted from the start of a sequence) of the sequences in these request slots."""
        return send(flat_slots(self._tables, request_slots, cells, self.block_size), self.device)
