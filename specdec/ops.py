"""The ops the models call, and the one table that decides which kernel runs them.

Every op has a PyTorch reference and may have faster backends (`specdec/kernels/<op>/`). Preference: cpu > reference on the
CPU, triton > reference on CUDA. `explain()` prints the choice, `override()` and `deterministic()` narrow it for a
block of code. Letters: T rows, H hidden, I intermediate, hd head size, nh / nkv query / KV heads, NB blocks of bs slots.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec.kernels import cuda_fragments
from specdec.kernels.cuda_library import missing as missing_cuda
from specdec.kernels.decoder_stack import reference as stack_reference
from specdec.kernels.draft_pass import reference as draft_reference
from specdec.kernels.fp8_fp8_linear import reference as fp8_fp8_reference
from specdec.kernels.fp8_linear import cuda as fp8_cuda
from specdec.kernels.fp8_linear import reference as fp8_reference
from specdec.kernels.fp8_linear.fragments import Fp8Fragments, pack, rejects_weight
from specdec.kernels.fp8_linear.weight import Fp8Weight
from specdec.kernels.int4_linear import cuda as int4_cuda
from specdec.kernels.int4_linear import reference as int4_reference
from specdec.kernels.int4_linear.fragments import Int4Fragments
from specdec.kernels.int4_linear.weight import Int4Weight
from specdec.kernels.linear import reference as linear_reference
from specdec.kernels.linear.tiles import TiledWeight
from specdec.kernels.mass_cut import bisection as cut_bisection
from specdec.kernels.mass_cut import reference as cut_reference
from specdec.kernels.move_kv import reference as move_reference
from specdec.kernels.noise import reference as noise_reference
from specdec.kernels.quantize_fp8 import reference as quantize_reference
from specdec.kernels.registry import Backend, Op, Registry
from specdec.kernels.rms_norm import reference as norm_reference
from specdec.kernels.rope import reference as rope_reference
from specdec.kernels.silu_mul import reference as silu_reference
from specdec.kernels.tree_attention import matmul as attention_matmul
from specdec.kernels.tree_attention import reference as attention_reference
from specdec.kernels.tree_walk import reference as walk_reference

if TYPE_CHECKING:
    from specdec.layers.attention import KVStore
    from specdec.layers.decoder import DecoderStack
    from specdec.models.draft_heads import DraftHead
    from specdec.rows import RowInfo
    from specdec.sampling import SamplingState
    from specdec.types import Batch

TABLE = Registry()

_NEEDS_F32 = "compiled for float32 only"
_TRITON_OPS = (
    *("rms_norm", "add_rms_norm", "silu_mul", "rope_write_kv", "move_kv", "tree_attention"),
    *("gumbel_argmax", "gumbel_noise", "philox_uniform"),
)
_BRIDGED = ("linear", "decoder_stack", "draft_pass", "tree_walk")
_HEAD_SIZES = (16, 32, 48, 64, 80, 96, 128, 256)


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


_COMPILED, _WHY_NOT = _load_extension()
_TRITON, _WHY_NO_TRITON = _load_triton()


def _first_not_f32(x: Tensor, *_: Any, **__: Any) -> str | None:
    return None if x.dtype is torch.float32 else _NEEDS_F32


def _attention_rejects(q: Tensor, k_cache: Tensor, *_: Any, **__: Any) -> str | None:
    if q.dtype is not torch.float32 or k_cache.dtype is not torch.float32:
        return _NEEDS_F32
    return None if q.shape[2] in _HEAD_SIZES else f"compiled for head sizes {_HEAD_SIZES} only"


def _rope_rejects(qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, *_: Any) -> str | None:
    if qkv.dtype is not torch.float32 or k_cache.dtype is not torch.float32:
        return _NEEDS_F32
    return None if k_cache.shape[3] % 2 == 0 else "head size must be even"


def _stack_rejects(x: Tensor, stack: DecoderStack, batch: Batch, caches: Sequence[tuple[Tensor, Tensor]], *_: Any, **__: Any) -> str | None:
    if stack.plan is None:
        return stack.why_not
    return None if x.dtype is torch.float32 and caches[0][0].dtype is torch.float32 else _NEEDS_F32


def _draft_rejects(features: Tensor, head: DraftHead, batch: Batch, kv: KVStore) -> str | None:
    if head.plan is None:
        return head.why_not
    return None if features.dtype is torch.float32 and kv.layer(0)[0].dtype is torch.float32 else _NEEDS_F32


def _register(
    name: str, reference: Callable[..., Any], rejects: Callable[..., str | None] | None = _first_not_f32, *extra: Backend, covers: Any = ()
) -> Op:
    """Op `name`: the compiled CPU backend (extension function of the same name), Triton, `extra`, the reference."""
    op = TABLE.op(name)
    op.add(Backend("cpu", _COMPILED.get(name, reference), ("cpu",), rejects, missing=_WHY_NOT, covers=covers))
    if name in _TRITON_OPS:
        op.add(_TRITON.get(name, Backend("triton", reference, ("cuda",), missing=_WHY_NO_TRITON)))
    for backend in extra:
        op.add(backend)
    op.add(Backend("reference", reference))
    return op


_RMS_NORM = _register("rms_norm", norm_reference.rms_norm)
_ADD_RMS_NORM = _register("add_rms_norm", norm_reference.add_rms_norm)
_SILU_MUL = _register("silu_mul", silu_reference.silu_mul)
_ROPE_WRITE_KV = _register("rope_write_kv", rope_reference.rope_write_kv, _rope_rejects)
_MOVE_KV = _register("move_kv", move_reference.move_kv, None)
_GUMBEL_ARGMAX = _register("gumbel_argmax", noise_reference.gumbel_argmax)
_GUMBEL_NOISE = _register("gumbel_noise", noise_reference.gumbel_noise, None)
_PHILOX_UNIFORM = _register("philox_uniform", noise_reference.philox_uniform, None)
_MASS_CUT = _register("mass_cut", cut_reference.mass_cut, _first_not_f32, Backend("bisection", cut_bisection.mass_cut))
_TILED_LINEAR = _register("tiled_linear", linear_reference.tiled_linear)
_TILED_EMBEDDING = _register("tiled_embedding", linear_reference.tiled_embedding, None)
_TREE_WALK = _register("tree_walk", walk_reference.tree_walk, None)
_MATMUL = Backend("matmul", attention_matmul.tree_attention, fixed_order=False)
_TREE_ATTENTION = _register("tree_attention", attention_reference.tree_attention, _attention_rejects, _MATMUL)

_STACK_PARTS = ("rms_norm", "add_rms_norm", "tiled_linear", "rope_write_kv", "tree_attention", "silu_mul")
_DECODER_STACK = _register("decoder_stack", stack_reference.decoder_stack, _stack_rejects, covers=_STACK_PARTS)
_DRAFT_PARTS = (*_STACK_PARTS, "tiled_embedding", "decoder_stack", "draft_pass")
_DRAFT_PASS = _register("draft_pass", draft_reference.draft_pass, _draft_rejects, covers=_DRAFT_PARTS)

_DENSE_LINEAR = TABLE.op("dense_linear")
_DENSE_LINEAR.add(Backend("library", linear_reference.dense_linear, fixed_order=False))
_DENSE_LINEAR.add(Backend("rowwise", linear_reference.rowwise_linear))

_FP8_LINEAR = TABLE.op("fp8_linear")
_WHY_NO_CUDA = missing_cuda() if torch.cuda.is_available() else "no CUDA device"
_FP8_LINEAR.add(Backend("cuda", fp8_cuda.fp8_linear, ("cuda",), fp8_cuda.rejects, missing=_WHY_NO_CUDA))
_FP8_LINEAR.add(Backend("reference", fp8_reference.fp8_linear))
_QUANTIZE_FP8 = TABLE.op("quantize_fp8")
_QUANTIZE_FP8.add(Backend("reference", quantize_reference.quantize_fp8))
_FP8_FP8_LINEAR = TABLE.op("fp8_fp8_linear")
_FP8_FP8_LINEAR.add(Backend("reference", fp8_fp8_reference.fp8_fp8_linear))
_INT4_LINEAR = TABLE.op("int4_linear")
_INT4_LINEAR.add(Backend("cuda", int4_cuda.int4_linear, ("cuda",), int4_cuda.rejects, missing=_WHY_NO_CUDA))
_INT4_LINEAR.add(Backend("reference", int4_reference.int4_linear))


def explain(device: str = "cpu") -> dict[str, str]:
    """Backend used per op on `device`, with the reason where a better one is not usable."""
    return TABLE.explain(device)


def override(op: str, backend: str) -> AbstractContextManager[None]:
    """`with override("rms_norm", "reference"): …` for this thread or task only. ConfigError on unknown names."""
    return TABLE.override(op, backend)


def deterministic(device: str) -> AbstractContextManager[None]:
    """Within the block, only backends whose bits do not depend on batch, tree or thread count. KernelUnavailable if there is none."""
    return TABLE.deterministic(device)


def compiled() -> bool:
    """Whether the compiled CPU kernels are usable in this process."""
    return _WHY_NOT is None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [T,H], weight [H] -> [T,H]."""
    return _RMS_NORM(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual [T,H], weight [H] -> (norm of the sum, the sum), both [T,H]. Inputs are not changed."""
    return _ADD_RMS_NORM(x, residual, weight, eps)


def silu_mul(gate_up: Tensor) -> Tensor:
    """gate_up [T,2I], gate first -> silu(gate) * up [T,I]."""
    return _SILU_MUL(gate_up)


def rope_write_kv(qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> Tensor:
    """Half-split RoPE on q and k, k and v into the cache. Returns q [T,nh,hd].

    qkv [T,(nh+2*nkv)*hd], positions [T] i64 < P, cos and sin [P,hd/2] f32, caches [NB,bs,nkv,hd], slots [T] i64 flat
    (block * bs + offset), -1 = no write; other slots distinct.
    """
    return _ROPE_WRITE_KV(qkv, positions, cos, sin, k_cache, v_cache, slots)


def tree_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_query: Tensor,
    ctx_lens: Tensor,
    tree_len: Tensor,
    tree_mask: Tensor,
    positions: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sinks: Tensor | None = None,
    first: Tensor | None = None,
) -> Tensor:
    """Paged attention for causal and tree rows (`specdec.types.Batch`). Returns [T, nh*hd]; rows past cu_query[B] are 0.

    q [T,nh,hd], caches [NB,bs,nkv,hd], block_table [B,M] i32, cu_query [B+1] i32, ctx_lens and tree_len [B] i32,
    tree_mask [T] i64, positions [T] i64, sinks [nh], first [B] i32. A key at logical position p is visible iff p >= first (at
    most the row's own position) and positions - p < window. The rows of a tree are any of its tree_len nodes.
    """
    rows = cu_query, ctx_lens, tree_len, tree_mask, positions
    return _TREE_ATTENTION(q, k_cache, v_cache, block_table, *rows, scale=scale, window=window, sinks=sinks, first=first)


def move_kv(k_caches: list[Tensor], v_caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Per layer, slot dst[i] gets what slot src[i] held before the call. src, dst [n] i64 flat slots, dst distinct."""
    if k_caches:
        _MOVE_KV(k_caches, v_caches, src, dst)


def prepare_stack(stack: DecoderStack) -> tuple[Any, str | None]:
    """(what the compiled `decoder_stack` runs, None), or (None, why it cannot run this stack). Once, at load."""
    return (None, _WHY_NOT) if _WHY_NOT is not None else _COMPILED["prepare_stack"](stack, _HEAD_SIZES)


def decoder_stack(
    x: Tensor, stack: DecoderStack, batch: Batch, caches: Sequence[tuple[Tensor, Tensor]], groups: Sequence[int], taps: Sequence[int] = ()
) -> tuple[Tensor, Tensor | None]:
    """All decoder layers and the final norm, x [T,H] -> (hidden [T,H], tapped [T,len(taps)*H] or None).

    caches: (K, V) per layer, each [NB,bs,nkv,hd], written; groups: KV group per layer, an index into the batch's tables.
    Tap j is the residual stream on entry to layer j (j = number of layers: before the final norm), in the order given.
    """
    return _DECODER_STACK(x, stack, batch, caches, groups, taps)


def prepare_draft(head: DraftHead) -> tuple[Any, str | None]:
    """`prepare_stack` for the compiled `draft_pass`."""
    return (None, _WHY_NOT) if _WHY_NOT is not None else _COMPILED["prepare_draft"](head, _HEAD_SIZES)


def draft_plan(head: DraftHead) -> Any:
    """What `prepare_draft` made of the head, if the compiled `draft_pass` is what runs now; else None."""
    choice = _DRAFT_PASS.choice.get()
    return head.plan if not choice or _DRAFT_PASS.backends[0].bypasses(choice) is None else None


def draft_pass(features: Tensor, head: DraftHead, batch: Batch, kv: KVStore) -> tuple[Tensor, Tensor]:
    """A draft head's network: (hidden for its lm_head, feedback), each [T,H]; writes K and V. Rows as in `DraftHead.forward`."""
    return _DRAFT_PASS(features, head, batch, kv)


def dense_linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [M,K], weight [N,K], same dtype -> [M,N]."""
    return _DENSE_LINEAR(x, weight)


def prepare_fp8(weight: Fp8Weight, dtype: torch.dtype) -> Fp8Weight | Fp8Fragments:
    """The weight as `fp8_linear` reads it fastest on its device, for activations in `dtype`. Once, at load: the result replaces it."""
    usable = _WHY_NO_CUDA is None and weight.data.is_cuda and dtype in cuda_fragments.NUMBERS
    return pack(weight) if usable and rejects_weight(weight) is None else weight


def fp8_linear(x: Tensor, weight: Fp8Weight | Fp8Fragments) -> Tensor:
    """x [M,K] f32, f16 or bf16, e4m3 weight N × K -> [M,N] of x's dtype, float32 sums. Activations are not quantised."""
    return _FP8_LINEAR(x, weight)


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [M,K] f32, f16 or bf16 -> (float8_e4m3fn [M,K], scale f32 [M]), each row by its own largest magnitude; zero rows get scale 0."""
    quantized: tuple[Tensor, Tensor] = _QUANTIZE_FP8(x)
    return quantized


def fp8_fp8_linear(q: Tensor, scale: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """q [M,K] e4m3 with a scale a row [M] f32, e4m3 weight N × K -> [M,N] of `dtype`, float32 sums."""
    return _FP8_FP8_LINEAR(q, scale, weight, dtype)


def int4_linear(x: Tensor, weight: Int4Weight | Int4Fragments) -> Tensor:
    """x [M,K] f32, f16 or bf16, 4-bit weight N × K -> [M,N] of x's dtype, float32 sums."""
    return _INT4_LINEAR(x, weight)


def tiled_linear(x: Tensor, weight: TiledWeight) -> Tensor:
    """x [M,K] f32 -> [M,rows] f32, fixed order."""
    return _TILED_LINEAR(x, weight)


def tiled_embedding(ids: Tensor, weight: TiledWeight) -> Tensor:
    """ids [T] i64 -> dequantised rows [T,cols] f32."""
    return _TILED_EMBEDDING(ids, weight)


def philox_uniform(seeds: Tensor, positions: Tensor, choices: Tensor, ids: Tensor, purpose: int) -> Tensor:
    """Uniforms in (0,1). seeds, positions, choices [R] i64, ids [R,W] i64 -> [R,W] f32."""
    return _PHILOX_UNIFORM(seeds, positions, choices, ids, purpose)


def gumbel_noise(seeds: Tensor, positions: Tensor, choices: Tensor, ids: Tensor, purpose: int) -> Tensor:
    """Gumbel noise of target ids. seeds, positions, choices [R] i64, ids [R,W] i64 -> [R,W] f32."""
    return _GUMBEL_NOISE(seeds, positions, choices, ids, purpose)


def gumbel_argmax(scores: Tensor, seeds: Tensor, positions: Tensor, choices: Tensor, noisy: Tensor, purpose: int) -> Tensor:
    """argmax of score + noise per row, ties to the lowest id. scores [R,V] f32, noisy [R] bool, others [R] i64 -> [R] i64."""
    return _GUMBEL_ARGMAX(scores, seeds, positions, choices, noisy, purpose)


def mass_cut(log_p: Tensor, rank: Tensor, p: Tensor) -> Tensor:
    """The fewest best-ranked tokens whose mass reaches p, equals by rising id. log_p, rank [R,V] f32, p [R] f32 -> kept [R,V] bool."""
    return _MASS_CUT(log_p, rank, p)


def tree_walk(following: Tensor, agrees: Tensor | None, rows: RowInfo, sampling: SamplingState) -> walk_reference.Walked:
    """The path taken in each of the B trees behind the R rows, cut at the first end token or at the length limit.

    following [R] i64: the token emitted if the path ends at that row's node. agrees [R] bool: which nodes may be on a path, True for
    roots, for at most one child of any node; None = those that draft what follows their parent. A token that is
    both the last allowed and an end token finishes as stopped. Returns the tensors of `specdec.types.Verdict` in its order:
    committed [B,D+1], num_committed [B], path [B,D], num_accepted [B], finish [B], rows [B,D+1], all i64, D = deepest node.
    """
    walked: walk_reference.Walked = _TREE_WALK(following, agrees, rows, sampling)
    return walked
