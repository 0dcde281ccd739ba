"""`RowInfo`: what each row of target logits is — whose, which node, after which path."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from specdec.transfer import constant, send, send_all
from specdec.types import DraftTree


class RowInfo:
    """The R rows of B trees, in plan order, node order within a tree. Tensors are made on first use, on `device`.

    request_slots: of the B sequences, on the host. A row's *position* is that of the token it produces: a node of depth d in
    a sequence of n tokens (the root is number n - 1) produces token n + d.
    """

    def __init__(self, tree: DraftTree, request_slots: list[int], device: torch.device):
        self.tree = tree
        self.request_slots = request_slots
        self.device = device
        self.root_only = tree.tokens.shape[1] == 1
        self.uniform = None if tree.uniform is None else tree.uniform[0]
        alike = 1 if self.root_only else self.uniform
        self.counts: list[int] = tree.num_nodes.tolist() if alike is None else [alike] * len(request_slots)
        self.num_rows = sum(self.counts)

    @cached_property
    def slots(self) -> Tensor:
        """[B] i64 request slots."""
        return constant(tuple(self.request_slots), self.device)

    @cached_property
    def starts(self) -> Tensor:
        """[B] i64, the row of each root."""
        if self.root_only:
            return self.seq
        if self.uniform is not None:
            return constant(tuple(range(0, self.num_rows, self.uniform)), self.device)
        counts = np.array(self.counts, dtype=np.int64)
        return send(counts.cumsum() - counts, self.device)

    @cached_property
    def seq(self) -> Tensor:
        """[R] i64, index into the B sequences."""
        if self.root_only:
            return constant(tuple(range(len(self.counts))), self.device)
        if self.uniform is not None:
            return constant(tuple(row // self.uniform for row in range(self.num_rows)), self.device)
        return send(np.arange(len(self.counts)).repeat(self.counts), self.device)

    @cached_property
    def node(self) -> Tensor:
        """[R] i64."""
        if self.root_only:
            return constant((0,) * self.num_rows, self.device)
        if self.uniform is not None:
            return constant(tuple(row % self.uniform for row in range(self.num_rows)), self.device)
        return torch.arange(self.num_rows, device=self.device) - self.starts[self.seq]

    @cached_property
    def drafted(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(tokens, parents, depth [B, N] i64, num_nodes [B] i64) of the tree, on `device`."""
        tree = self.tree
        fields = (tree.tokens, tree.parents, tree.depth, tree.num_nodes)
        if tree.tokens.device == self.device:
            return fields
        tokens, parents, depth, num_nodes = send_all([field.numpy() for field in fields], self.device)
        return tokens, parents, depth, num_nodes

    def _flat(self, values: Tensor) -> Tensor:
        return values[self.seq, self.node] if self.uniform is None else values.flatten()

    @cached_property
    def token(self) -> Tensor:
        """[R] i64, the node's own token."""
        return self._flat(self.drafted[0])

    @cached_property
    def depth(self) -> Tensor:
        """[R] i64."""
        return self.node if self.root_only else self._flat(self.drafted[2])

    @cached_property
    def max_depth(self) -> int:
        """Of all nodes; read on the host, where builders leave the tree, unless it is known."""
        if self.tree.uniform is not None:
            return self.tree.uniform[1]
        return 0 if self.root_only else int(self.tree.depth.max())

    @cached_property
    def parent(self) -> Tensor:
        """[R] i64, row of the parent; a root's is itself."""
        return self.starts[self.seq] + self._flat(self.drafted[1]).clamp(min=0)

    @cached_property
    def slot(self) -> Tensor:
        """[R] i64, request slot."""
        if self.root_only:
            return self.slots
        if self.uniform is not None:
            return constant(tuple(slot for slot in self.request_slots for _ in range(self.uniform)), self.device)
        return self.slots[self.seq]

    @cached_property
    def path_tokens(self) -> Tensor:
        """[R, max_depth] i64: draft tokens from depth 1 down to the node itself, -1 beyond its depth."""
        columns = torch.full((self.num_rows, self.max_depth + 1), -1, dtype=torch.int64, device=self.device)
        current = torch.arange(self.num_rows, device=self.device)
        for up in range(self.max_depth):
            # what lies above the root lands in column 0, which is dropped
            columns.scatter_(1, (self.depth - up).clamp(min=0)[:, None], self.token[current][:, None])
            current = self.parent[current]
        return columns[:, 1:]

    def of(self, request_slots: Collection[int]) -> slice | Tensor | None:
        """Index of the rows whose sequence is in `request_slots`: None if there is none, a full slice if all are."""
        hit = [slot in request_slots for slot in self.request_slots]
        if not any(hit):
            return None
        if all(hit):
            return slice(None)
        rows: list[int] = []
        first = 0
        for inside, count in zip(hit, self.counts, strict=True):
            rows.extend(range(first, first + count) if inside else ())
            first += count
        return send(np.array(rows, dtype=np.int64), self.device)
