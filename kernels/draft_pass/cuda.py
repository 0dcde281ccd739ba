"""A draft head's pass with all of its first layer behind the attention as one CUDA launch. Few rows, bf16."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from torch import Tensor

from specdec.kernels.cuda_fragments import launches_early
from specdec.kernels.decoder_stack import segment
from specdec.kernels.decoder_stack.cuda import Segments
from specdec.kernels.draft_pass.reference import attended, deeper

if TYPE_CHECKING:
    from specdec.layers.attention import KVStore
    from specdec.models.draft_heads import DraftHead
    from specdec.types import Batch


def draft_pass(features: Tensor, head: DraftHead, batch: Batch, kv: KVStore) -> tuple[Tensor, Tensor]:
    """Shapes in `specdec.ops.draft_pass`."""
    plan = cast("Segments", head.plan)
    mixed, residual = attended(features, head, batch, kv)
    total, _ = segment.run(plan.layers[0], mixed, residual.contiguous(), plan.counters[0], early=launches_early(features.device))
    if head.stack is not None:
        return deeper(total, head, batch, kv)
    hidden = head.norm(total)
    return hidden, hidden if head.config.norm_output else total
