"""The table of ops: which backends each has, in order of preference, and why one cannot be used in this process or for a call.

`specdec.ops` has the functions that models call. Source of the compiled backends: `csrc`; of Triton's: `triton_table`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec.kernels.accepted_pairs import reference as pairs_reference
from specdec.kernels.clamped_swiglu import reference as clamped_reference
from specdec.kernels.compaction_slots import reference as compaction_reference
from specdec.kernels.coupled_verify import reference as verify_reference
from specdec.kernels.cuda_library import missing, missing_products
from specdec.kernels.decoder_stack import cuda as stack_cuda
from specdec.kernels.decoder_stack import reference as stack_reference
from specdec.kernels.draft_grow import reference as grow_reference
from specdec.kernels.draft_layout import reference as draft_rows_reference
from specdec.kernels.draft_pass import cuda as draft_cuda
from specdec.kernels.draft_pass import reference as draft_reference
from specdec.kernels.draft_topk import reference as topk_reference
from specdec.kernels.fp8_fp8_linear import cuda as fp8_fp8_cuda
from specdec.kernels.fp8_fp8_linear import library as fp8_fp8_library
from specdec.kernels.fp8_fp8_linear import reference as fp8_fp8_reference
from specdec.kernels.fp8_linear import cuda as fp8_cuda
from specdec.kernels.fp8_linear import reference as fp8_reference
from specdec.kernels.fp8_linear import widened as fp8_widened
from specdec.kernels.gather_pairs import reference as gather_reference
from specdec.kernels.int4_linear import cuda as int4_cuda
from specdec.kernels.int4_linear import reference as int4_reference
from specdec.kernels.linear import reference as linear_reference
from specdec.kernels.mass_cut import bisection as cut_bisection
from specdec.kernels.mass_cut import reference as cut_reference
from specdec.kernels.moe_experts import reference as experts_reference
from specdec.kernels.moe_route import reference as route_reference
from specdec.kernels.move_kv import reference as move_reference
from specdec.kernels.noise import reference as noise_reference
from specdec.kernels.norm_rope import reference as norm_rope_reference
from specdec.kernels.pad_batch import reference as pad_reference
from specdec.kernels.prefill_attention import flash
from specdec.kernels.quantize_fp8 import reference as quantize_reference
from specdec.kernels.registry import Backend, Op, Registry
from specdec.kernels.rms_norm import reference as norm_reference
from specdec.kernels.rms_norm_fp8 import reference as norm_fp8_reference
from specdec.kernels.rope import reference as rope_reference
from specdec.kernels.silu_mul import reference as silu_reference
from specdec.kernels.silu_mul_fp8 import reference as silu_fp8_reference
from specdec.kernels.tree_attention import cuda as attention_cuda
from specdec.kernels.tree_attention import matmul as attention_matmul
from specdec.kernels.tree_attention import reference as attention_reference
from specdec.kernels.tree_build import reference as build_reference
from specdec.kernels.tree_layout import reference as layout_reference
from specdec.kernels.tree_walk import reference as walk_reference

if TYPE_CHECKING:
    from specdec.layers.attention import KVStore
    from specdec.layers.decoder import DecoderStack
    from specdec.models.draft_heads import DraftHead
    from specdec.types import Batch

TABLE = Registry()

_NEEDS_F32 = "compiled for float32 only"
_TRITON_OPS = (
    *("rms_norm", "add_rms_norm", "silu_mul", "rope_write_kv", "move_kv", "tree_attention"),
    *("gumbel_argmax", "gumbel_noise", "philox_uniform", "tree_walk", "mass_cut"),
)
_BRIDGED = ("linear", "decoder_stack", "draft_pass", "tree_walk")
HEAD_SIZES = (16, 32, 48, 64, 80, 96, 128, 256)


def _load_extension() -> tuple[dict[str, Callable[..., Any]], str | None]:
    """Compiled functions by op name and None, or nothing and the reason why they cannot be used."""
    try:
        module = import_module("specdec._C")
    except ImportError as err:
        return {}, f"extension specdec._C not usable ({err}); install a C++ compiler and reinstall"
    linear, stack, draft, walk = (import_module(f"specdec.kernels.{op}.cpu") for op in _BRIDGED)
    bridges = {"tiled_linear": linear.tiled_linear, "tiled_embedding": linear.tiled_embedding, "tree_walk": walk.tree_walk}
    bridges |= {"decoder_stack": stack.decoder_stack, "prepare_stack": stack.prepare}
    bridges |= {"draft_pass": draft.draft_pass, "prepare_draft": draft.prepare}
    return {**vars(module), **bridges}, None


def _load_triton() -> tuple[dict[str, Backend], str | None]:
    """Triton backends by op name and None, or nothing and the reason why they cannot be used."""
    if not torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1":
        return {}, "no CUDA device"
    try:
        return import_module("specdec.kernels.triton_table").BACKENDS, None
    except ImportError as err:
        return {}, f"Triton not usable ({err}); install triton"


COMPILED, WHY_NOT = _load_extension()
_TRITON, WHY_NO_TRITON = _load_triton()
WHY_NO_CUDA, WHY_NO_PRODUCTS = (missing(), missing_products()) if torch.cuda.is_available() else ("no CUDA device",) * 2


def _first_not_f32(x: Tensor, *_: Any, **__: Any) -> str | None:
    return None if x.dtype is torch.float32 else _NEEDS_F32


def _attention_rejects(q: Tensor, k_cache: Tensor, *_: Any, **__: Any) -> str | None:
    if q.dtype is not torch.float32 or k_cache.dtype is not torch.float32:
        return _NEEDS_F32
    return None if q.shape[2] in HEAD_SIZES else f"compiled for head sizes {HEAD_SIZES} only"


def _rope_rejects(qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, *_: Any, **__: Any) -> str | None:
    if qkv.dtype is not torch.float32 or k_cache.dtype is not torch.float32:
        return _NEEDS_F32
    return None if k_cache.shape[3] % 2 == 0 else "head size must be even"


def _norm_rope_rejects(qkv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, *rest: Tensor, **_: Any) -> str | None:
    return _rope_rejects(qkv, *rest)


def _stack_rejects(x: Tensor, stack: DecoderStack, batch: Batch, caches: Sequence[tuple[Tensor, Tensor]], *_: Any, **__: Any) -> str | None:
    if stack.plan is None:
        return stack.why_not
    return None if x.dtype is torch.float32 and caches[0][0].dtype is torch.float32 else _NEEDS_F32


def _draft_rejects(features: Tensor, head: DraftHead, batch: Batch, kv: KVStore) -> str | None:
    if head.plan is None:
        return head.why_not
    return None if features.dtype is torch.float32 and kv.layer(0)[0].dtype is torch.float32 else _NEEDS_F32


def _register(
    name: str,
    reference: Callable[..., Any],
    rejects: Callable[..., str | None] | None = _first_not_f32,
    *extra: Backend,
    covers: Any = (),
    before: Sequence[Backend] = (),
) -> Op:
    """Op `name`: the compiled CPU backend (extension function of the same name), `before`, Triton, `extra`, the reference."""
    op = TABLE.op(name)
    op.add(Backend("cpu", COMPILED.get(name, reference), ("cpu",), rejects, missing=WHY_NOT, covers=covers))
    for backend in before:
        op.add(backend)
    if name in _TRITON_OPS:
        op.add(_TRITON.get(name, Backend("triton", reference, ("cuda",), missing=WHY_NO_TRITON)))
    for backend in extra:
        op.add(backend)
    op.add(Backend("reference", reference))
    return op


def _beside_triton(name: str, reference: Callable[..., Any], *cpu: Backend) -> Op:
    """Op `name` for the GPU: Triton, the reference; and `cpu`, where nothing else does its work there."""
    op = TABLE.op(name)
    for backend in cpu:
        op.add(backend)
    op.add(_TRITON.get(name, Backend("triton", reference, ("cuda",), missing=WHY_NO_TRITON)))
    op.add(Backend("reference", reference))
    return op


_register("rms_norm", norm_reference.rms_norm)
_register("add_rms_norm", norm_reference.add_rms_norm)
_register("silu_mul", silu_reference.silu_mul)
_register("rope_write_kv", rope_reference.rope_write_kv, _rope_rejects)
_register("move_kv", move_reference.move_kv, None)
_register("gumbel_argmax", noise_reference.gumbel_argmax)
_register("gumbel_noise", noise_reference.gumbel_noise, None)
_register("philox_uniform", noise_reference.philox_uniform, None)
_register("mass_cut", cut_reference.mass_cut, _first_not_f32, Backend("bisection", cut_bisection.mass_cut))
_register("tiled_linear", linear_reference.tiled_linear)
_register("tiled_embedding", linear_reference.tiled_embedding, None)
_register("tree_walk", walk_reference.tree_walk, None)
_FIXED = _TRITON.get("tree_attention_fixed", Backend("triton_fixed", attention_reference.tree_attention, ("cuda",), missing=WHY_NO_TRITON))
_MATMUL = Backend("matmul", attention_matmul.tree_attention, fixed_order=False)
_FEW = Backend("cuda", attention_cuda.tree_attention, ("cuda",), attention_cuda.rejects, fixed_order=False, missing=WHY_NO_CUDA)
_ATTENTION = _register("tree_attention", attention_reference.tree_attention, _attention_rejects, _FIXED, _MATMUL, before=[_FEW])


def _flash_backend(package: flash.Package | None, missing: str | None) -> Backend:
    """The flash-attn package. It steps back where an override asks for a kernel of tree attention."""
    if package is None:
        return Backend("flash", _ATTENTION, ("cuda",), missing=missing)
    return Backend("flash", package.prefill_attention, ("cuda",), package.rejects, fixed_order=False, covers=("tree_attention",))


TABLE.op("prefill_attention").add(_flash_backend(*(flash.load() if torch.cuda.is_available() else (None, "no CUDA device"))))
TABLE.op("prefill_attention").add(Backend("tree_attention", _ATTENTION))  # in a fixed order where that is asked for

_STACK_PARTS = ("rms_norm", "add_rms_norm", "tiled_linear", "rope_write_kv", "tree_attention", "prefill_attention", "silu_mul")
_SEGMENT_PARTS = ("rms_norm", "add_rms_norm", "silu_mul", "rope_write_kv", "fp8_linear", "dense_linear")
_SEGMENTS = Backend("cuda", stack_cuda.decoder_stack, ("cuda",), stack_cuda.rejects, False, WHY_NO_CUDA, _SEGMENT_PARTS)
_register("decoder_stack", stack_reference.decoder_stack, _stack_rejects, _SEGMENTS, covers=_STACK_PARTS)
_DRAFT_PARTS = (*_STACK_PARTS, "tiled_embedding", "decoder_stack", "draft_pass")
_DRAFT_SEGMENT = Backend("cuda", draft_cuda.draft_pass, ("cuda",), stack_cuda.rejects, False, WHY_NO_CUDA, _SEGMENT_PARTS)
_register("draft_pass", draft_reference.draft_pass, _draft_rejects, _DRAFT_SEGMENT, covers=_DRAFT_PARTS)

_VERIFY = partial(verify_reference.coupled_verify, argmax=COMPILED.get("gumbel_argmax", noise_reference.gumbel_argmax))
_VERIFY_CPU = Backend("cpu", _VERIFY, ("cpu",), _first_not_f32, missing=WHY_NOT)
_beside_triton("coupled_verify", verify_reference.coupled_verify, _VERIFY_CPU)


def _quantized(name: str, reference: Callable[..., Any], wide: str, argument: str) -> None:
    """Op `name` is op `wide`, quantised; where that is compiled for the CPU, so that both have the same bits."""
    made = partial(reference, **{argument: COMPILED[wide]}) if wide in COMPILED else reference
    _beside_triton(name, reference, Backend("cpu", made, ("cpu",), _first_not_f32, missing=WHY_NOT))


_quantized("rms_norm_fp8", norm_fp8_reference.rms_norm_fp8, "rms_norm", "norm")
_quantized("add_rms_norm_fp8", norm_fp8_reference.add_rms_norm_fp8, "add_rms_norm", "norm")
_quantized("silu_mul_fp8", silu_fp8_reference.silu_mul_fp8, "silu_mul", "product")
_beside_triton("clamped_swiglu", clamped_reference.clamped_swiglu)
_NORM_ROPE = partial(
    norm_rope_reference.norm_rope_write_kv,
    norm=COMPILED.get("rms_norm", norm_reference.rms_norm),
    write=COMPILED.get("rope_write_kv", rope_reference.rope_write_kv),
)
_NORM_ROPE_CPU = Backend("cpu", _NORM_ROPE, ("cpu",), _norm_rope_rejects, missing=WHY_NOT)
_beside_triton("norm_rope_write_kv", norm_rope_reference.norm_rope_write_kv, _NORM_ROPE_CPU)
_beside_triton("draft_topk", topk_reference.draft_topk)
_beside_triton("draft_grow", grow_reference.draft_grow)
_beside_triton("draft_layout", draft_rows_reference.draft_layout)
_beside_triton("accepted_pairs", pairs_reference.accepted_pairs)
_beside_triton("tree_build", build_reference.tree_build)
_beside_triton("tree_layout", layout_reference.tree_layout)
_beside_triton("pad_batch", pad_reference.pad_batch)
_beside_triton("compaction_slots", compaction_reference.compaction_slots)
_beside_triton("gather_pairs", gather_reference.gather_pairs)


def _register_product(name: str, reference: Callable[..., Any], *others: Backend, cuda: Backend | None = None) -> Op:
    """Op `name`, no compiled CPU backend: `cuda`, Triton tiled for M, `others`, Triton with one tiling for every M, the reference."""
    op = TABLE.op(name)
    if cuda is not None:
        op.add(cuda)
    for key, backend in ((name, "triton"), (f"{name}_fixed", "triton_fixed")):
        op.add(_TRITON.get(key, Backend(backend, reference, ("cuda",), missing=WHY_NO_TRITON)))
        for other in others if key == name else ():
            op.add(other)
    op.add(Backend("rowwise" if name == "dense_linear" else "reference", reference))
    return op


_FP8_FRAGMENTS = Backend("cuda", fp8_cuda.fp8_linear, ("cuda",), fp8_cuda.rejects, missing=WHY_NO_PRODUCTS)
_INT4_FRAGMENTS = Backend("cuda", int4_cuda.int4_linear, ("cuda",), int4_cuda.rejects, missing=WHY_NO_PRODUCTS)
_LIBRARY = Backend("library", linear_reference.dense_linear, fixed_order=False)
_WIDENED = Backend("widened", fp8_widened.fp8_linear, ("cuda",), fp8_widened.rejects, fixed_order=False)
_SCALED_MM = Backend("scaled_mm", fp8_fp8_library.fp8_fp8_linear, ("cuda",), fp8_fp8_library.rejects, fixed_order=False)
_register_product("dense_linear", linear_reference.rowwise_linear, _LIBRARY)
_register_product("fp8_linear", fp8_reference.fp8_linear, _WIDENED, cuda=_FP8_FRAGMENTS)
_E4M3_CUDA = Backend("cuda", fp8_fp8_cuda.fp8_fp8_linear, ("cuda",), fp8_fp8_cuda.rejects, fixed_order=False, missing=WHY_NO_CUDA)
_register_product("fp8_fp8_linear", fp8_fp8_reference.fp8_fp8_linear, _SCALED_MM, cuda=_E4M3_CUDA)
_register_product("int4_linear", int4_reference.int4_linear, cuda=_INT4_FRAGMENTS)
_beside_triton("quantize_fp8", quantize_reference.quantize_fp8)
_beside_triton("moe_route", route_reference.moe_route)
_register_product("moe_experts", experts_reference.moe_experts)
