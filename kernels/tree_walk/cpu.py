"""The walk on the host (`csrc/tree_walk.cpp`): the trees lie there anyway. Importing this needs `specdec._C`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from specdec import _C
from specdec.kernels.tree_walk.reference import forced

if TYPE_CHECKING:
    from specdec.kernels.tree_walk.reference import Walked
    from specdec.rows import RowInfo
    from specdec.sampling import SamplingState


def tree_walk(
    following: Tensor, agrees: Tensor | None, rows: RowInfo, sampling: SamplingState, rates: Tensor | None = None, purpose: int = 0
) -> Walked:
    """Shapes and meaning in `specdec.ops.tree_walk`."""
    if rates is not None:
        agrees = forced(rows, sampling, rates, purpose, _C.philox_uniform)
    tree, state = rows.tree, sampling
    limits = state.length, state.min_total, state.max_total, state.end_ids
    walked: Walked = _C.tree_walk(following, agrees, tree.tokens, tree.parents, tree.depth, tree.num_nodes, rows.request_slots, *limits)
    return walked
