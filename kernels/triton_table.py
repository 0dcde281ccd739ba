"""The Triton backends by op name. Imported only where Triton can run: with a CUDA device, or in its interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specdec.kernels.clamped_swiglu import triton as clamped
from specdec.kernels.coupled_verify import triton as verify
from specdec.kernels.draft_topk import triton as topk
from specdec.kernels.mass_cut import triton as cut
from specdec.kernels.move_kv import triton as move
from specdec.kernels.noise import triton as noise
from specdec.kernels.norm_rope import triton as norm_rope
from specdec.kernels.registry import Backend
from specdec.kernels.rms_norm import triton as norm
from specdec.kernels.rms_norm_fp8 import triton as norm_fp8
from specdec.kernels.rope import triton as rope
from specdec.kernels.silu_mul import triton as silu
from specdec.kernels.silu_mul_fp8 import triton as silu_fp8
from specdec.kernels.tree_attention import triton as attention
from specdec.kernels.tree_build import triton as build
from specdec.kernels.tree_walk import triton as walk
from specdec.kernels.triton_common import INTERPRETED


def _backend(fn: Callable[..., Any], rejects: Callable[..., str | None], fixed_order: bool = True) -> Backend:
    return (
        Backend("triton", fn, ("cuda", "cpu"), _not_by_itself, fixed_order)
        if INTERPRETED
        else Backend("triton", fn, ("cuda",), rejects, fixed_order)
    )


def _not_by_itself(*_: Any, **__: Any) -> str:
    return "interpreted, hence slow: for tests, which name it"


BACKENDS: dict[str, Backend] = {
    "rms_norm": _backend(norm.rms_norm, norm.rejects),
    "add_rms_norm": _backend(norm.add_rms_norm, norm.rejects),
    "silu_mul": _backend(silu.silu_mul, silu.rejects),
    "rope_write_kv": _backend(rope.rope_write_kv, rope.rejects),
    "move_kv": _backend(move.move_kv, move.rejects),
    "tree_attention": _backend(attention.tree_attention, attention.rejects, fixed_order=False),
    "gumbel_argmax": _backend(noise.gumbel_argmax, noise.rejects_argmax),
    "gumbel_noise": _backend(noise.gumbel_noise, noise.rejects_ids),
    "philox_uniform": _backend(noise.philox_uniform, noise.rejects_ids),
    "rms_norm_fp8": _backend(norm_fp8.rms_norm_fp8, norm_fp8.rejects),
    "add_rms_norm_fp8": _backend(norm_fp8.add_rms_norm_fp8, norm_fp8.rejects),
    "silu_mul_fp8": _backend(silu_fp8.silu_mul_fp8, silu_fp8.rejects),
    "clamped_swiglu": _backend(clamped.clamped_swiglu, clamped.rejects),
    "norm_rope_write_kv": _backend(norm_rope.norm_rope_write_kv, norm_rope.rejects),
    "mass_cut": _backend(cut.mass_cut, cut.rejects),
    "draft_topk": _backend(topk.draft_topk, topk.rejects),
    "tree_build": _backend(build.tree_build, build.rejects),
    "tree_walk": _backend(walk.tree_walk, walk.rejects),
    "coupled_verify": _backend(verify.coupled_verify, verify.rejects),
}
