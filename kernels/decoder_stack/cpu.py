"""All decoder layers in one compiled call (`csrc/cpu/stack.h`): the bits of the single compiled ops, one parallel region.

`prepare` hands a stack's weights to the extension once; the result goes with the stack. Importing this needs `specdec._C`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from specdec import _C
from specdec.kernels.linear.tiles import KINDS, TiledWeight

if TYPE_CHECKING:
    from specdec.layers.decoder import DecoderStack, Layer, MoELayer
    from specdec.layers.linear import Linear
    from specdec.layers.norm import RMSNorm
    from specdec.types import Batch


def prepare(stack: DecoderStack, head_sizes: Sequence[int]) -> tuple[_C.DecoderStack | None, str | None]:
    """(plan, None), or (None, why this stack cannot run in one compiled call). The weights are shared, not copied."""
    reason = refuse(stack.layers, stack.norm, head_sizes)
    if reason is not None:
        return None, reason
    attention = stack.layers[0].attention
    layers = [layer_weights(cast("Layer", layer)) for layer in stack.layers]
    rotary = attention.rotary
    return _C.DecoderStack(layers, stack.norm.weight, rotary.cos, rotary.sin, eps=stack.norm.eps, scale=attention.scale), None


def decoder_stack(
    x: Tensor, stack: DecoderStack, batch: Batch, caches: Sequence[tuple[Tensor, Tensor]], groups: Sequence[int], taps: Sequence[int] = ()
) -> tuple[Tensor, Tensor | None]:
    """Shapes and meaning in `specdec.ops.decoder_stack`."""
    hidden, tapped = stack.plan.run(
        x,
        batch.positions,
        batch.cu_query,
        batch.ctx_lens,
        batch.tree_len,
        batch.tree_mask,
        batch.block_tables,
        batch.slot_mapping,
        caches,
        groups,
        taps,
        batch.first_key,
    )
    return hidden, tapped if taps else None


def refuse(layers: Sequence[Layer | MoELayer], norm: RMSNorm, head_sizes: Sequence[int]) -> str | None:
    """Why these layers and their final norm cannot be compiled in, or None."""
    if not all(hasattr(layer, "gate_up") for layer in layers):
        return "layers have experts"
    if not all(tiles(linear) for layer in layers for linear in layer.linears):
        return "weights are not tiled"
    if layers[0].attention.rotary.cos.shape[1] * 2 not in head_sizes:
        return f"compiled for head sizes {tuple(head_sizes)} only"
    if any(layer.attention.head_norms for layer in layers):
        return "queries and keys are normalised"
    if any(layer.attention.sinks is not None for layer in layers):
        return "attention has sinks"
    rotation = {(id(layer.attention.rotary), layer.attention.scale) for layer in layers}
    eps = {norm.eps for layer in layers for norm in (layer.input_norm, layer.post_norm)} | {norm.eps}
    return "layers differ in rotary tables, attention scale or eps" if len(rotation) > 1 or len(eps) > 1 else None


def layer_weights(layer: Layer) -> tuple[Any, ...]:
    """A layer as the extension takes it."""
    qkv, out, gate_up, down = (linear_weights(linear) for linear in layer.linears)
    return layer.input_norm.weight, qkv, out, layer.post_norm.weight, gate_up, down, layer.attention.window


def linear_weights(linear: Linear) -> tuple[list[tuple[Tensor, int, int]], int, Tensor | None]:
    """A tiled linear layer as the extension takes it."""
    parts = [(w.data, KINDS.index(w.kind), w.rows) for w in tiles(linear) or []]
    return parts, linear.in_features, linear.bias


def tiles(linear: Linear) -> list[TiledWeight] | None:
    """The tiled weights of a linear layer, None where it has none."""
    return getattr(linear.method, "parts", None)
