"""All decoder layers and the final norm: the layers' own ops, one after the other. Any device, dtype and weight format."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from specdec.layers.decoder import DecoderStack
    from specdec.types import Batch


def decoder_stack(
    x: Tensor, stack: DecoderStack, batch: Batch, caches: Sequence[tuple[Tensor, Tensor]], groups: Sequence[int], taps: Sequence[int] = ()
) -> tuple[Tensor, Tensor | None]:
    """Shapes and meaning in `specdec.ops.decoder_stack`."""
    views = list(zip(batch.block_tables.unbind(), batch.slot_mapping.unbind(), strict=True))  # made once a step
    tapped: dict[int, Tensor] = {}
    residual = x
    branch: Tensor | None = None  # output of the last block, not yet added to the stream
    for index, layer in enumerate(stack.layers):
        normed, residual = layer.input_norm.before(layer.attention.qkv, residual, branch)
        if index in taps:
            tapped[index] = residual
        mixed = layer.attention(normed, batch, *views[groups[index]], caches[index])
        normed, residual = layer.post_norm.before(layer.reader, residual, mixed)
        branch = layer.mlp(normed)
    assert branch is not None  # a config has at least one layer
    hidden, residual = stack.norm.add(branch, residual)
    tapped[len(stack.layers)] = residual
    return hidden, torch.cat([tapped[j] for j in taps], dim=-1) if taps else None
