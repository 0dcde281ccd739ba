"""A draft head's pass in one compiled call (`csrc/draft_head.h`): the bits of the single compiled ops.

`prepare` hands a head's weights to the extension once; the result goes with the head. Importing this needs `specdec._C`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from specdec import _C
from specdec.kernels.decoder_stack import cpu as stack
from specdec.kernels.linear.tiles import KINDS, TiledWeight

if TYPE_CHECKING:
    from specdec.layers.attention import KVStore
    from specdec.layers.decoder import Layer
    from specdec.models.draft_heads import DraftHead
    from specdec.types import Batch


def prepare(head: DraftHead, head_sizes: Sequence[int]) -> tuple[_C.DraftHead | None, str | None]:
    """(plan, None), or (None, why this head cannot run in one compiled call). The weights are shared, not copied."""
    layers = _layers(head)
    reason = stack.refuse(layers, head.norm, head_sizes) or _refuse(head)
    if reason is not None:
        return None, reason
    attention, config = layers[0].attention, head.config
    (embedding,) = _embedding(head)
    plan = _C.DraftHead(
        layers=[stack.layer_weights(layer) for layer in layers],
        norm=head.norm.weight,
        cos=attention.rotary.cos,
        sin=attention.rotary.sin,
        feature_norm=head.feature_norm.weight,
        tap_norms=[norm.weight for norm in ([head.input_norm] if head.input_norm is not None else head.tap_norms)],
        fc=stack.linear_weights(head.fc),
        lm_head=stack.linear_weights(head.lm_head),
        embedding=(embedding.data, KINDS.index(embedding.kind), embedding.rows),
        eps=head.norm.eps,
        scale=attention.scale,
        normed_stream=config.norm_before_residual,
        norm_output=config.norm_output,
    )
    return plan, None


def draft_pass(features: Tensor, head: DraftHead, batch: Batch, kv: KVStore) -> tuple[Tensor, Tensor]:
    """Shapes and meaning in `specdec.ops.draft_pass`."""
    layers = range(head.config.num_layers)
    hidden, feedback = head.plan.run(
        batch.input_ids,
        features,
        batch.positions,
        batch.cu_query,
        batch.ctx_lens,
        batch.tree_len,
        batch.tree_mask,
        batch.block_tables,
        batch.slot_mapping,
        [kv.layer(i) for i in layers],
        [kv.group_of(i) for i in layers],
        batch.first_key,
    )
    return hidden, feedback


def _layers(head: DraftHead) -> list[Layer]:
    return [head.wide, *(cast("Sequence[Layer]", head.stack.layers) if head.stack is not None else ())]


def _embedding(head: DraftHead) -> list[TiledWeight]:
    return getattr(head.embedding.method, "parts", [])


def _refuse(head: DraftHead) -> str | None:
    """Why what a head has besides its layers cannot be compiled in, or None."""
    if not (stack.tiles(head.fc) and stack.tiles(head.lm_head)) or len(_embedding(head)) != 1:
        return "weights are not tiled"
    if head.dtype is not torch.float32 or head.embedding.embedding_dim != head.config.hidden_size:
        return "compiled for float32, and tokens and features of one size"
    norms = [head.feature_norm, *head.tap_norms, *([head.input_norm] if head.input_norm is not None else [])]
    return "norms differ in eps" if {norm.eps for norm in norms} != {head.norm.eps} else None
