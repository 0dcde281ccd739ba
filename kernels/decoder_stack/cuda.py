"""All decoder layers as segments: attention by its own ops, everything between two attentions as one CUDA launch. Few rows, bf16."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor

from specdec.errors import KernelUnavailable
from specdec.kernels.cuda_fragments import launches_early, shared_limit
from specdec.kernels.decoder_stack import segment
from specdec.kernels.decoder_stack.segment import MOST_ROWS, Scaling, Segment, Turn, Weight
from specdec.kernels.fp8_linear.weight import Fp8Weight

if TYPE_CHECKING:
    from specdec.layers.attention import Attention
    from specdec.layers.decoder import DecoderStack, Layer, MoELayer
    from specdec.layers.linear import Linear
    from specdec.layers.norm import RMSNorm
    from specdec.models.draft_heads import DraftHead
    from specdec.types import Batch


MANY_BYTES = 64 << 20  # of a segment's weights: below, its phases take longer than the launches that it saves
GAINS = 8  # rows up to which it does; at 16 the ops are as fast


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """A stack's segments, one a layer, and what the launches of each count with. rows: the most that a launch takes."""

    layers: tuple[Segment, ...]
    counters: tuple[Tensor, ...]
    rows: int


def prepare(stack: DecoderStack) -> tuple[Segments | None, str | None]:
    """(segments, None), or (None, why the stack cannot run in them). The weights are shared, not copied."""
    return prepare_layers(stack.layers, stack.norm)


def prepare_layers(layers: Sequence[Layer | MoELayer], norm: RMSNorm) -> tuple[Segments | None, str | None]:
    """As `prepare`, of layers that follow each other, with `norm` behind the last; where it pays, by what an H200 took (bench/LOG.md)."""
    made, reason = cut(layers, norm)
    reason = reason or loses(made[0])
    return (None, reason) if reason is not None else build(made, GAINS)


def loses(one: Segment) -> str | None:
    """Why the layers' own ops are no slower, or None."""
    if one.out.scale is None:
        return "the ops are as fast for weights that are not FP8"
    small = sum(weight.data.nbytes for weight in one.weights) < MANY_BYTES
    return f"the ops are faster for layers of less than {MANY_BYTES >> 20} MB" if small else None


def cut(stacked: Sequence[Layer | MoELayer], norm: RMSNorm) -> tuple[tuple[Segment, ...], str | None]:
    """(a segment for each of the layers, None), or (nothing, why that cannot be)."""
    reason = refuse(stacked, norm)
    if reason is not None:
        return (), reason
    layers = [cast("Layer", layer) for layer in stacked]
    made = tuple(segment_of(layer, after) for layer, after in zip(layers, [*layers[1:], None], strict=True))
    return made, next((why for one in made if (why := segment.rejects(one.weights)) is not None), None)


def build(made: tuple[Segment, ...], most: int = MOST_ROWS) -> tuple[Segments | None, str | None]:
    """What `decoder_stack` runs, of up to `most` rows, or (None, why the card cannot). nvcc may have to build the library first."""
    device = made[0].out.data.device
    if torch.cuda.get_device_capability(device) < (9, 0):
        return None, "segments need a card of compute capability 9.0 or later"
    rows = min(most_rows(made[0], device), most)
    if not rows:
        return None, "layers are too wide for a multiprocessor's shared memory"
    try:
        segment.function(device)
    except KernelUnavailable as err:
        return None, str(err)
    measured = tuple(one.measured() for one in made)
    if min(one.inner_grown for one in measured) < segment.LEAST_GROWTH:
        return None, "silu(gate) · up could be larger than f16 holds well"
    counters = torch.zeros(len(made), segment.COUNTERS, dtype=torch.int64, device=device)
    return Segments(measured, counters.unbind(), rows), None


def refuse(layers: Sequence[Layer | MoELayer], norm: RMSNorm) -> str | None:
    """Why these layers cannot be cut into segments, or None."""
    if not all(hasattr(layer, "gate_up") for layer in layers):
        return "layers have experts"
    if any(linear.bias is not None for layer in layers for linear in layer.linears):
        return "linear layers have biases"
    if norm.weight.dtype is not torch.bfloat16:
        return "made for bfloat16 activations only"
    return (
        None
        if all(held(linear) is not None for layer in layers for linear in layer.linears)
        else "weights are neither dense nor FP8 by rows"
    )


def held(linear: Linear) -> Tensor | Fp8Weight | None:
    """The weight of a linear layer whose product rounds nothing but its result, None where a segment does not read it."""
    weight, quantizes = getattr(linear.method, "weight", None), getattr(linear.method, "act_fp8", False)
    usable = isinstance(weight, Tensor) or (isinstance(weight, Fp8Weight) and not weight.blocked and not quantizes)
    return weight if usable else None


def segment_of(layer: Layer, after: Layer | None) -> Segment:
    """Of a layer and the projections of the one behind it."""

    def weight(linear: Linear) -> Weight:
        found = held(linear)
        assert found is not None
        return Weight.of(found)

    def scaling(norm: RMSNorm) -> Scaling:
        return Scaling(norm.weight, norm.eps)

    parts = weight(layer.attention.out), weight(layer.gate_up), weight(layer.down), scaling(layer.post_norm)
    return Segment(*parts) if after is None else Segment(*parts, weight(after.attention.qkv), scaling(after.input_norm))


def turn_of(attention: Attention, batch: Batch, slots: Tensor, caches: tuple[Tensor, Tensor]) -> Turn | None:
    """What the segment before an attention does of its work; None where the attention does all of it itself."""
    turn = Turn(attention.rotary.cos, attention.rotary.sin, batch.positions, slots, *caches)
    return turn if attention.head_norms is None and turn.rejects() is None else None


def most_rows(one: Segment, device: torch.device) -> int:
    """The most rows for which shared memory holds the tokens and two units, 0 where not even one."""
    counters, limit = torch.zeros(segment.COUNTERS, dtype=torch.int64, device=device), shared_limit(device)
    widths = one.out.data.shape[1], one.down.data.shape[0]
    for rows in (MOST_ROWS, MOST_ROWS // 2):
        mixed, residual = (torch.empty(rows, width, dtype=torch.bfloat16, device=device) for width in widths)
        if segment.prepare_call(one, mixed, residual, counters, limit=limit)[0].stages >= 2:
            return rows
    return 0


def rejects(x: Tensor, stack: DecoderStack | DraftHead, *_: object, **__: object) -> str | None:
    """Why segments cannot run the call, or None. x [T, any]."""
    plan = stack.plan
    if not isinstance(plan, Segments):
        return stack.why_not or "not prepared"
    return None if x.shape[0] <= plan.rows and x.dtype is torch.bfloat16 else f"{x.shape[0]} rows of {x.dtype}; it takes up to {plan.rows}"


def decoder_stack(
    x: Tensor, stack: DecoderStack, batch: Batch, caches: Sequence[tuple[Tensor, Tensor]], groups: Sequence[int], taps: Sequence[int] = ()
) -> tuple[Tensor, Tensor | None]:
    """Shapes and meaning in `specdec.ops.decoder_stack`."""
    plan, begins_early = cast("Segments", stack.plan), launches_early(x.device)
    views = list(zip(batch.block_tables.unbind(), batch.slot_mapping.unbind(), strict=True))
    tapped: dict[int, Tensor] = {}
    residual, first = x.contiguous(), stack.layers[0]
    mixed = first.attention.mix(first.attention.qkv(first.input_norm(residual)), batch, *views[groups[0]], caches[0])
    for index, (one, counters) in enumerate(zip(plan.layers, plan.counters, strict=True)):
        if index in taps:
            tapped[index] = residual
        after = index + 1
        if after == len(stack.layers):
            residual, _ = segment.run(one, mixed, residual, counters, early=begins_early)
            break
        attention, (table, slots), cache = stack.layers[after].attention, views[groups[after]], caches[after]
        turn = turn_of(attention, batch, slots, cache)
        residual, projected = segment.run(one, mixed, residual, counters, turn, early=begins_early)
        assert projected is not None
        if turn is None:
            mixed = attention.mix(projected, batch, table, slots, cache)
        else:
            mixed = attention.attend(projected.view(len(projected), -1, cache[0].shape[3]), batch, table, cache)
    tapped[len(stack.layers)] = residual
    return stack.norm(residual), torch.cat([tapped[j] for j in taps], dim=-1) if taps else None
