"""The Triton backends by op name. Imported only where Triton can run: with a CUDA device, or in its interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specdec.kernels.accepted_pairs import triton as pairs
from specdec.kernels.clamped_swiglu import triton as clamped
from specdec.kernels.compaction_slots import triton as compaction
from specdec.kernels.coupled_verify import triton as verify
from specdec.kernels.draft_grow import triton as grow
from specdec.kernels.draft_layout import triton as draft_rows
from specdec.kernels.draft_topk import triton as topk
from specdec.kernels.fp8_fp8_linear import triton as fp8_fp8
from specdec.kernels.fp8_linear import triton as fp8
from specdec.kernels.gather_pairs import triton as gather
from specdec.kernels.int4_linear import triton as int4
from specdec.kernels.linear import triton as linear
from specdec.kernels.mass_cut import triton as cut
from specdec.kernels.moe_experts import triton as experts
from specdec.kernels.moe_route import triton as route
from specdec.kernels.move_kv import triton as move
from specdec.kernels.noise import triton as noise
from specdec.kernels.norm_rope import triton as norm_rope
from specdec.kernels.pad_batch import triton as pad
from specdec.kernels.quantize_fp8 import triton as quantize
from specdec.kernels.registry import Backend
from specdec.kernels.rms_norm import triton as norm
from specdec.kernels.rms_norm_fp8 import triton as norm_fp8
from specdec.kernels.rope import triton as rope
from specdec.kernels.silu_mul import triton as silu
from specdec.kernels.silu_mul_fp8 import triton as silu_fp8
from specdec.kernels.tree_attention import triton as attention
from specdec.kernels.tree_attention import triton_fixed as fixed_attention
from specdec.kernels.tree_build import triton as build
from specdec.kernels.tree_layout import triton as layout
from specdec.kernels.tree_walk import triton as walk
from specdec.kernels.triton_common import INTERPRETED

NOT_BY_ITSELF = "interpreted, hence slow: for tests, which name it"


def _backend(
    fn: Callable[..., Any],
    rejects: Callable[..., str | None],
    fixed_order: bool = True,
    name: str = "triton",
    cannot: Callable[..., str | None] | None = None,
) -> Backend:
    """cannot: what the matrix of tests asks of the interpreted kernel, where it has cases that the kernel does not take."""
    if not INTERPRETED:
        return Backend(name, fn, ("cuda",), rejects, fixed_order)

    def interpreted(*args: Any, **kwargs: Any) -> str:
        return (None if cannot is None else cannot(*args, **kwargs)) or NOT_BY_ITSELF

    return Backend(name, fn, ("cuda", "cpu"), interpreted, fixed_order)


BACKENDS: dict[str, Backend] = {
    "rms_norm": _backend(norm.rms_norm, norm.rejects),
    "add_rms_norm": _backend(norm.add_rms_norm, norm.rejects),
    "silu_mul": _backend(silu.silu_mul, silu.rejects),
    "rope_write_kv": _backend(rope.rope_write_kv, rope.rejects),
    "move_kv": _backend(move.move_kv, move.rejects),
    "tree_attention": _backend(attention.tree_attention, attention.rejects, fixed_order=False),
    "tree_attention_fixed": _backend(fixed_attention.tree_attention, fixed_attention.rejects, name="triton_fixed"),
    "gumbel_argmax": _backend(noise.gumbel_argmax, noise.rejects_argmax),
    "gumbel_noise": _backend(noise.gumbel_noise, noise.rejects_ids),
    "moe_route": _backend(route.moe_route, route.rejects),
    "moe_experts": _backend(experts.moe_experts, experts.rejects, fixed_order=False),
    "moe_experts_fixed": _backend(experts.moe_experts_fixed, experts.rejects, name="triton_fixed"),
    "philox_uniform": _backend(noise.philox_uniform, noise.rejects_ids),
    "quantize_fp8": _backend(quantize.quantize_fp8, quantize.rejects),
    "dense_linear": _backend(linear.dense_linear, linear.rejects, fixed_order=False),
    "dense_linear_fixed": _backend(linear.dense_linear_fixed, linear.rejects_fixed, name="triton_fixed"),
    "fp8_linear": _backend(fp8.fp8_linear, fp8.rejects, fixed_order=False),
    "fp8_linear_fixed": _backend(fp8.fp8_linear_fixed, fp8.rejects_fixed, name="triton_fixed"),
    "fp8_fp8_linear": _backend(fp8_fp8.fp8_fp8_linear, fp8_fp8.rejects, fixed_order=False),
    "fp8_fp8_linear_fixed": _backend(fp8_fp8.fp8_fp8_linear_fixed, fp8_fp8.rejects_fixed, name="triton_fixed"),
    "int4_linear": _backend(int4.int4_linear, int4.rejects, fixed_order=False, cannot=int4.rejects),
    "int4_linear_fixed": _backend(int4.int4_linear_fixed, int4.rejects, name="triton_fixed", cannot=int4.rejects),
    "rms_norm_fp8": _backend(norm_fp8.rms_norm_fp8, norm_fp8.rejects),
    "add_rms_norm_fp8": _backend(norm_fp8.add_rms_norm_fp8, norm_fp8.rejects),
    "silu_mul_fp8": _backend(silu_fp8.silu_mul_fp8, silu_fp8.rejects),
    "clamped_swiglu": _backend(clamped.clamped_swiglu, clamped.rejects),
    "norm_rope_write_kv": _backend(norm_rope.norm_rope_write_kv, norm_rope.rejects),
    "mass_cut": _backend(cut.mass_cut, cut.rejects),
    "draft_topk": _backend(topk.draft_topk, topk.rejects),
    "draft_grow": _backend(grow.draft_grow, grow.rejects),
    "draft_layout": _backend(draft_rows.draft_layout, draft_rows.rejects),
    "accepted_pairs": _backend(pairs.accepted_pairs, pairs.rejects),
    "tree_build": _backend(build.tree_build, build.rejects),
    "tree_layout": _backend(layout.tree_layout, layout.rejects),
    "pad_batch": _backend(pad.pad_batch, pad.rejects),
    "compaction_slots": _backend(compaction.compaction_slots, compaction.rejects),
    "gather_pairs": _backend(gather.gather_pairs, gather.rejects),
    "tree_walk": _backend(walk.tree_walk, walk.rejects),
    "coupled_verify": _backend(verify.coupled_verify, verify.rejects),
}
