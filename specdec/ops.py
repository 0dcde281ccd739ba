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
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec.kernels.clamped_swiglu import reference as clamped_reference
from specdec.kernels.coupled_verify import reference as verify_reference
from specdec.kernels.decoder_stack import reference as stack_reference
from specdec.kernels.draft_pass import reference as draft_reference
from specdec.kernels.draft_topk import reference as topk_reference
from specdec.kernels.fp8_fp8_linear import library as fp8_fp8_library
from specdec.kernels.fp8_fp8_linear import reference as fp8_fp8_reference
from specdec.kernels.fp8_linear import reference as fp8_reference
from specdec.kernels.fp8_linear import widened as fp8_widened
from specdec.kernels.fp8_linear.weight import Fp8Weight
from specdec.kernels.int4_linear import reference as int4_reference
from specdec.kernels.int4_linear.planes import Int4Planes, pack_planes, rejects_group
from specdec.kernels.int4_linear.weight import Int4Weight
from specdec.kernels.kv_fp8 import UNSCALED, Scales, scaled
from specdec.kernels.linear import reference as linear_reference
from specdec.kernels.linear.tiles import TiledWeight
from specdec.kernels.mass_cut import bisection as cut_bisection
from specdec.kernels.mass_cut import reference as cut_reference
from specdec.kernels.moe_experts import reference as experts_reference
from specdec.kernels.moe_experts.weight import Experts
from specdec.kernels.moe_route import reference as route_reference
from specdec.kernels.move_kv import reference as move_reference
from specdec.kernels.noise import reference as noise_reference
from specdec.kernels.norm_rope import reference as norm_rope_reference
from specdec.kernels.quantize_fp8 import reference as quantize_reference
from specdec.kernels.registry import Backend, Op, Registry
from specdec.kernels.rms_norm import reference as norm_reference
from specdec.kernels.rms_norm_fp8 import reference as norm_fp8_reference
from specdec.kernels.rope import reference as rope_reference
from specdec.kernels.silu_mul import reference as silu_reference
from specdec.kernels.silu_mul_fp8 import reference as silu_fp8_reference
from specdec.kernels.tilings import MEASURED, file_name
from specdec.kernels.tree_attention import matmul as attention_matmul
from specdec.kernels.tree_attention import reference as attention_reference
from specdec.kernels.tree_build import reference as build_reference
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
    *("gumbel_argmax", "gumbel_noise", "philox_uniform", "tree_walk", "mass_cut"),
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


def _rope_rejects(qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, *_: Any, **__: Any) -> str | None:
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


def _beside_triton(name: str, reference: Callable[..., Any]) -> Op:
    """Op `name` for the GPU: Triton, the reference. On the CPU something else does its work, or nothing needs it."""
    op = TABLE.op(name)
    op.add(_TRITON.get(name, Backend("triton", reference, ("cuda",), missing=_WHY_NO_TRITON)))
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
_FIXED = _TRITON.get("tree_attention_fixed", Backend("triton_fixed", attention_reference.tree_attention, ("cuda",), missing=_WHY_NO_TRITON))
_MATMUL = Backend("matmul", attention_matmul.tree_attention, fixed_order=False)
_TREE_ATTENTION = _register("tree_attention", attention_reference.tree_attention, _attention_rejects, _FIXED, _MATMUL)

_STACK_PARTS = ("rms_norm", "add_rms_norm", "tiled_linear", "rope_write_kv", "tree_attention", "silu_mul")
_DECODER_STACK = _register("decoder_stack", stack_reference.decoder_stack, _stack_rejects, covers=_STACK_PARTS)
_DRAFT_PARTS = (*_STACK_PARTS, "tiled_embedding", "decoder_stack", "draft_pass")
_DRAFT_PASS = _register("draft_pass", draft_reference.draft_pass, _draft_rejects, covers=_DRAFT_PARTS)

_COUPLED_VERIFY = _beside_triton("coupled_verify", verify_reference.coupled_verify)
_RMS_NORM_FP8 = _beside_triton("rms_norm_fp8", norm_fp8_reference.rms_norm_fp8)
_ADD_RMS_NORM_FP8 = _beside_triton("add_rms_norm_fp8", norm_fp8_reference.add_rms_norm_fp8)
_SILU_MUL_FP8 = _beside_triton("silu_mul_fp8", silu_fp8_reference.silu_mul_fp8)
_CLAMPED_SWIGLU = _beside_triton("clamped_swiglu", clamped_reference.clamped_swiglu)
_NORM_ROPE_WRITE_KV = _beside_triton("norm_rope_write_kv", norm_rope_reference.norm_rope_write_kv)
_DRAFT_TOPK = _beside_triton("draft_topk", topk_reference.draft_topk)
_TREE_BUILD = _beside_triton("tree_build", build_reference.tree_build)


def _register_product(name: str, reference: Callable[..., Any], *others: Backend) -> Op:
    """Op `name`, no compiled CPU backend: Triton tiled for M, `others`, Triton with one tiling for every M, the reference."""
    op = TABLE.op(name)
    for key, backend in ((name, "triton"), (f"{name}_fixed", "triton_fixed")):
        op.add(_TRITON.get(key, Backend(backend, reference, ("cuda",), missing=_WHY_NO_TRITON)))
        for other in others if key == name else ():
            op.add(other)
    op.add(Backend("rowwise" if name == "dense_linear" else "reference", reference))
    return op


_LIBRARY = Backend("library", linear_reference.dense_linear, fixed_order=False)
_WIDENED = Backend("widened", fp8_widened.fp8_linear, ("cuda",), fp8_widened.rejects, fixed_order=False)
_SCALED_MM = Backend("scaled_mm", fp8_fp8_library.fp8_fp8_linear, ("cuda",), fp8_fp8_library.rejects, fixed_order=False)
_DENSE_LINEAR = _register_product("dense_linear", linear_reference.rowwise_linear, _LIBRARY)
_FP8_LINEAR = _register_product("fp8_linear", fp8_reference.fp8_linear, _WIDENED)
_FP8_FP8_LINEAR = _register_product("fp8_fp8_linear", fp8_fp8_reference.fp8_fp8_linear, _SCALED_MM)
_INT4_LINEAR = _register_product("int4_linear", int4_reference.int4_linear)
_QUANTIZE_FP8 = _beside_triton("quantize_fp8", quantize_reference.quantize_fp8)
_MOE_ROUTE = _beside_triton("moe_route", route_reference.moe_route)
_MOE_EXPERTS = _register_product("moe_experts", experts_reference.moe_experts)


def explain(device: str = "cpu") -> dict[str, str]:
    """Backend used per op on `device`, with the reason where a better one is not usable, and what the table of tilings knows of it."""
    table = TABLE.explain(device)
    if not device.startswith("cuda"):
        return table
    return {op: "; ".join(filter(None, (text, MEASURED.explain(op)))) for op, text in table.items()}


def fixed_dense(device: str) -> str:
    """The backend of `dense_linear` whose bits do not depend on M, for weights on `device`."""
    return "triton_fixed" if device == "cuda" and _WHY_NO_TRITON is None else "rowwise"


def load_tilings(folder: Path, card: str) -> bool:
    """Puts the measured tilings of `card` in force for this process: from `folder` (`python -m bench.tune` writes), else the package's.

    False where neither has a good table; the rules for what nobody measured hold then. Before a capture, not during one.
    """
    for place in (folder, Path(__file__).parent / "tilings"):
        try:
            MEASURED.load(place / file_name(card))
            return True
        except (OSError, ValueError):
            continue
    return False


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


def rope_write_kv(
    qkv: Tensor, positions: Tensor, cos: Tensor, sin: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, kv_scales: Scales = UNSCALED
) -> Tensor:
    """Half-split RoPE on q and k, k and v into the cache. Returns q [T,nh,hd].

    qkv [T,(nh+2*nkv)*hd], positions [T] i64 < P, cos and sin [P,hd/2] f32, caches [NB,bs,nkv,hd], slots [T] i64 flat
    (block * bs + offset), -1 = no write; other slots distinct. kv_scales: of FP8 caches (`kernels/kv_fp8.py`).
    """
    return _ROPE_WRITE_KV(qkv, positions, cos, sin, k_cache, v_cache, slots, **scaled(k_cache, kv_scales))


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
    kv_scales: Scales = UNSCALED,
) -> Tensor:
    """Paged attention for causal and tree rows (`specdec.types.Batch`). Returns [T, nh*hd]; rows past cu_query[B] are 0.

    q [T,nh,hd], caches [NB,bs,nkv,hd], block_table [B,M] i32, cu_query [B+1] i32, ctx_lens and tree_len [B] i32,
    tree_mask [T] i64, positions [T] i64, sinks [nh], first [B] i32. A key at logical position p is visible iff p >= first (at
    most the row's own position) and positions - p < window. The rows of a tree are any of its tree_len nodes. kv_scales: of
    FP8 caches (`kernels/kv_fp8.py`).
    """
    rows = cu_query, ctx_lens, tree_len, tree_mask, positions
    options = {"scale": scale, "window": window, "sinks": sinks, "first": first, **scaled(k_cache, kv_scales)}
    return _TREE_ATTENTION(q, k_cache, v_cache, block_table, *rows, **options)


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


def fp8_linear(x: Tensor, weight: Fp8Weight) -> Tensor:
    """x [M,K] f32, f16 or bf16, e4m3 weight N × K -> [M,N] of x's dtype, float32 sums. Activations are not quantised."""
    return _FP8_LINEAR(x, weight)


def quantize_fp8(x: Tensor, group: int | None = None) -> tuple[Tensor, Tensor]:
    """x [M,K] f32, f16 or bf16 -> (float8_e4m3fn [M,K], scale f32 [M]), each row by its own largest magnitude; zero rows get scale 0.

    With `group`, which divides K, each `group` columns of a row by theirs: scale [M, K/group].
    """
    quantized: tuple[Tensor, Tensor] = _QUANTIZE_FP8(x) if group is None else _QUANTIZE_FP8(x, group)
    return quantized


def fp8_fp8_linear(q: Tensor, scale: Tensor, weight: Fp8Weight, dtype: torch.dtype) -> Tensor:
    """q [M,K] e4m3, scale f32 a row [M] or a row and 128 columns [M,K/128], e4m3 weight N × K -> [M,N] of `dtype`, float32 sums."""
    return _FP8_FP8_LINEAR(q, scale, weight, dtype)


def int4_linear(x: Tensor, weight: Int4Weight | Int4Planes) -> Tensor:
    """x [M,K] f32, f16 or bf16, 4-bit weight N × K -> [M,N] of x's dtype, float32 sums."""
    return _INT4_LINEAR(x, weight)


def prepare_int4(weight: Int4Weight) -> Int4Weight | Int4Planes:
    """The weight as the kernels of its device read it fastest. Once, at load; what comes back replaces what went in."""
    return pack_planes(weight) if weight.data.is_cuda and rejects_group(weight.group, weight.shape[1]) is None else weight


def moe_route(logits: Tensor, k: int, renormalise: bool) -> tuple[Tensor, Tensor]:
    """logits [T,E] -> (ids [T,k] i32 of the best experts, best first, ties by lowest id; weights [T,k] f32).

    Softmax in float32 over the k chosen (`renormalise`) or over all E; a NaN logit counts as -inf.
    """
    routed: tuple[Tensor, Tensor] = _MOE_ROUTE(logits, k, renormalise)
    return routed


def moe_experts(x: Tensor, ids: Tensor, weights: Tensor, experts: Experts) -> Tensor:
    """Sum over a row's choices of weight · expert(row). x [T,H], ids [T,k] i32, distinct in a row, -1 = none (padded rows),
    weights [T,k] f32 -> [T,H] of x's dtype; float32 sums, the experts' activation rounded to x's dtype."""
    return _MOE_EXPERTS(x, ids, weights, experts)


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


def coupled_verify(
    logits: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    positions: Tensor,
    choices: Tensor,
    noisy: Tensor | None,
    purpose: int,
    *,
    lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(token [R] i64, log-sum-exp of each row's logits [R] f32 or None): to the bit `gumbel_argmax` of logits / temperature.

    logits [R,V] f32, temperature [R] f32 (1 where it has been applied, and for greedy rows), seeds, positions, choices [R] i64, noisy
    [R] bool, None = no row (keys are not read). Rows with the same three keys may share the making of their noise.
    """
    return _COUPLED_VERIFY(logits, temperature, seeds, positions, choices, noisy, purpose, lse=lse)


def tree_build(
    tokens: Tensor, parents: Tensor, scores: Tensor, roots: Tensor, nodes: Tensor, width: int, deepest: int
) -> build_reference.BuiltTree:
    """Draft trees of the likeliest candidates of a pool: the best path numbered first, parents before children.

    tokens, parents [B,C] i64, scores [B,C] f32 of the candidates: parents are places in the pool, below the child's own, -1 = the root;
    a score of 0 = cannot be right. roots [B] i64 tokens, nodes [B] i64 budgets, root included, at most `width` = N <= 64; no candidate
    is deeper than `deepest` = D. Returns `BuiltTree`: tokens, parents, depth [B,N], num_nodes [B], score, words [B,N], paths [B,N,D],
    places [B,N].
    """
    built: build_reference.BuiltTree = _TREE_BUILD(tokens, parents, scores, roots, nodes, width, deepest)
    return built


def rms_norm_fp8(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x [T,H], weight [H] -> `quantize_fp8` of `rms_norm`: (e4m3 [T,H], scale f32 [T])."""
    quantized: tuple[Tensor, Tensor] = _RMS_NORM_FP8(x, weight, eps)
    return quantized


def add_rms_norm_fp8(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """x, residual [T,H], weight [H] -> (e4m3 [T,H], scale f32 [T]) of the norm of the sum, and the sum [T,H]. Inputs are not changed."""
    quantized: tuple[Tensor, Tensor, Tensor] = _ADD_RMS_NORM_FP8(x, residual, weight, eps)
    return quantized


def silu_mul_fp8(gate_up: Tensor) -> tuple[Tensor, Tensor]:
    """gate_up [T,2I], gate first -> `quantize_fp8` of `silu_mul`: (e4m3 [T,I], scale f32 [T])."""
    quantized: tuple[Tensor, Tensor] = _SILU_MUL_FP8(gate_up)
    return quantized


def clamped_swiglu(gate_up: Tensor, alpha: float = 1.702, limit: float = 7.0) -> Tensor:
    """gate_up [T,2I] with columns gate, up, gate, up, … -> (up + 1) * gate * sigmoid(alpha * gate) [T,I], gate <= limit, |up| <= limit."""
    return _CLAMPED_SWIGLU(gate_up, alpha, limit)


def norm_rope_write_kv(
    qkv: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    positions: Tensor,
    cos: Tensor,
    sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
) -> Tensor:
    """`rope_write_kv` of a projection whose q heads are first normed by q_weight [hd] and k heads by k_weight [hd]. Returns q [T,nh,hd]."""
    return _NORM_ROPE_WRITE_KV(qkv, q_weight, k_weight, eps, positions, cos, sin, k_cache, v_cache, slots)


def draft_topk(
    hidden: Tensor,
    weight: Tensor,
    temperature: Tensor,
    target_ids: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    choices: Tensor,
    noisy: Tensor | None,
    purpose: int,
    share: float,
    width: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """A draft head's output layer and the best `width` of the race logits / temperature + share · noise, never storing the logits.

    hidden [R,H], weight [Vd,H] of its dtype, temperature [R] f32, target_ids [Vd] i64 (None = the draft has the target's vocabulary),
    seeds, positions, choices [R] i64, noisy [R] bool (None = no row). Returns (target ids [R,width] i64, best first, their shares of
    the race's softmax [R,width] f32, log-sum-exp [R] f32 of logits / temperature).
    """
    keys = seeds, positions, choices, noisy
    best: tuple[Tensor, Tensor, Tensor] = _DRAFT_TOPK(hidden, weight, temperature, target_ids, *keys, purpose, share, width)
    return best
