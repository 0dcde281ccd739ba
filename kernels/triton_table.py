"""The Triton backends by op name. Imported only where Triton can run: with a CUDA device, or in its interpreter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from specdec.kernels.move_kv import triton as move
from specdec.kernels.noise import triton as noise
from specdec.kernels.registry import Backend
from specdec.kernels.rms_norm import triton as norm
from specdec.kernels.rope import triton as rope
from specdec.kernels.silu_mul import triton as silu
from specdec.kernels.tree_attention import triton as attention
from specdec.kernels.tree_attention import triton_fixed as fixed_attention
from specdec.kernels.triton_common import INTERPRETED


def _backend(fn: Callable[..., Any], rejects: Callable[..., str | None], fixed_order: bool = True, name: str = "triton") -> Backend:
    return (
        Backend(name, fn, ("cuda", "cpu"), _not_by_itself, fixed_order)
        if INTERPRETED
        else Backend(name, fn, ("cuda",), rejects, fixed_order)
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
    "tree_attention_fixed": _backend(fixed_attention.tree_attention, fixed_attention.rejects, name="triton_fixed"),
    "gumbel_argmax": _backend(noise.gumbel_argmax, noise.rejects_argmax),
    "gumbel_noise": _backend(noise.gumbel_noise, noise.rejects_ids),
    "philox_uniform": _backend(noise.philox_uniform, noise.rejects_ids),
}
