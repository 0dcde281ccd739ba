"""The ops the models call, and the one table that decides which kernel runs them.

Every op has a PyTorch reference and may have faster backends (`specdec/kernels/<op>/`). Preference: cpu > reference on the
CPU, triton > reference on CUDA. `explain()` prints the choice, `override()` and `deterministic()` narrow it for a
block of code. Letters: T rows, H hidden, I intermediate, hd head size, nh / nkv query / KV heads, NB blocks of bs slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from specdec.kernels import cuda_fragments
from specdec.kernels.accepted_pairs.reference import AcceptedPairs
from specdec.kernels.decoder_stack import cuda as segments
from specdec.kernels.draft_grow.reference import NextBeam
from specdec.kernels.draft_layout.reference import DraftLayout, Laws
from specdec.kernels.fp8_linear.fragments import Fp8Fragments, pack, rejects_weight
from specdec.kernels.fp8_linear.weight import Fp8Weight
from specdec.kernels.int4_linear.fragments import Int4Fragments
from specdec.kernels.int4_linear.planes import Int4Planes, pack_planes, rejects_group
from specdec.kernels.int4_linear.weight import Int4Weight
from specdec.kernels.kv_fp8 import UNSCALED, Scales, scaled
from specdec.kernels.linear.tiles import TiledWeight
from specdec.kernels.moe_experts.weight import Experts, storage, streamed
from specdec.kernels.table import COMPILED, HEAD_SIZES, TABLE, WHY_NO_CUDA, WHY_NO_PRODUCTS, WHY_NO_TRITON, WHY_NOT
from specdec.kernels.tilings import MEASURED, file_name
from specdec.kernels.tree_build.reference import BuiltTree
from specdec.kernels.tree_layout.reference import TreeLayout
from specdec.kernels.tree_walk.reference import Walked

if TYPE_CHECKING:
    from specdec.layers.attention import KVStore
    from specdec.layers.decoder import DecoderStack
    from specdec.models.draft_heads import DraftHead
    from specdec.rows import RowInfo
    from specdec.sampling import SamplingState
    from specdec.types import Batch

_RMS_NORM = TABLE.ops["rms_norm"]
_ADD_RMS_NORM = TABLE.ops["add_rms_norm"]
_SILU_MUL = TABLE.ops["silu_mul"]
_ROPE_WRITE_KV = TABLE.ops["rope_write_kv"]
_MOVE_KV = TABLE.ops["move_kv"]
_GUMBEL_ARGMAX = TABLE.ops["gumbel_argmax"]
_GUMBEL_NOISE = TABLE.ops["gumbel_noise"]
_PHILOX_UNIFORM = TABLE.ops["philox_uniform"]
_MASS_CUT = TABLE.ops["mass_cut"]
_TILED_LINEAR = TABLE.ops["tiled_linear"]
_TILED_EMBEDDING = TABLE.ops["tiled_embedding"]
_TREE_WALK = TABLE.ops["tree_walk"]
_TREE_ATTENTION = TABLE.ops["tree_attention"]
_PREFILL_ATTENTION = TABLE.ops["prefill_attention"]
_DECODER_STACK = TABLE.ops["decoder_stack"]
_DRAFT_PASS = TABLE.ops["draft_pass"]
_COUPLED_VERIFY = TABLE.ops["coupled_verify"]
_RMS_NORM_FP8 = TABLE.ops["rms_norm_fp8"]
_ADD_RMS_NORM_FP8 = TABLE.ops["add_rms_norm_fp8"]
_SILU_MUL_FP8 = TABLE.ops["silu_mul_fp8"]
_CLAMPED_SWIGLU = TABLE.ops["clamped_swiglu"]
_NORM_ROPE_WRITE_KV = TABLE.ops["norm_rope_write_kv"]
_DRAFT_TOPK = TABLE.ops["draft_topk"]
_DRAFT_GROW = TABLE.ops["draft_grow"]
_DRAFT_LAYOUT = TABLE.ops["draft_layout"]
_ACCEPTED_PAIRS = TABLE.ops["accepted_pairs"]
_TREE_BUILD = TABLE.ops["tree_build"]
_TREE_LAYOUT = TABLE.ops["tree_layout"]
_COMPACTION_SLOTS = TABLE.ops["compaction_slots"]
_GATHER_PAIRS = TABLE.ops["gather_pairs"]
_PAD_BATCH = TABLE.ops["pad_batch"]
_DENSE_LINEAR = TABLE.ops["dense_linear"]
_FP8_LINEAR = TABLE.ops["fp8_linear"]
_FP8_FP8_LINEAR = TABLE.ops["fp8_fp8_linear"]
_INT4_LINEAR = TABLE.ops["int4_linear"]
_QUANTIZE_FP8 = TABLE.ops["quantize_fp8"]
_MOE_ROUTE = TABLE.ops["moe_route"]
_MOE_EXPERTS = TABLE.ops["moe_experts"]


def explain(device: str = "cpu") -> dict[str, str]:
    """Backend used per op on `device`, with the reason where a better one is not usable, and what the table of tilings knows of it."""
    table = TABLE.explain(device)
    if not device.startswith("cuda"):
        return table
    return {op: "; ".join(filter(None, (text, MEASURED.explain(op)))) for op, text in table.items()}


def fixed_dense(device: str) -> str:
    """The backend of `dense_linear` whose bits do not depend on M, for weights on `device`."""
    return "triton_fixed" if device == "cuda" and WHY_NO_TRITON is None else "rowwise"


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
    return WHY_NOT is None


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


def prefill_attention(
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
    """`tree_attention` where the host knows that there are no trees: tree_len and tree_mask are 0, the rows of sequence b are at positions
    ctx_lens[b], ctx_lens[b] + 1, …"""
    rows = cu_query, ctx_lens, tree_len, tree_mask, positions
    options = {"scale": scale, "window": window, "sinks": sinks, "first": first, **scaled(k_cache, kv_scales)}
    return _PREFILL_ATTENTION(q, k_cache, v_cache, block_table, *rows, **options)


def move_kv(k_caches: list[Tensor], v_caches: list[Tensor], src: Tensor, dst: Tensor) -> None:
    """Per layer, slot dst[i] gets what slot src[i] held before the call. src, dst [n] i64 flat slots, dst distinct."""
    if k_caches:
        _MOVE_KV(k_caches, v_caches, src, dst)


def prepare_stack(stack: DecoderStack) -> tuple[Any, str | None]:
    """(what the compiled `decoder_stack` runs, None), or (None, why it cannot run this stack). Once, at load."""
    if stack.norm.weight.is_cuda:
        return (None, WHY_NO_CUDA) if WHY_NO_CUDA is not None else segments.prepare(stack)
    return (None, WHY_NOT) if WHY_NOT is not None else COMPILED["prepare_stack"](stack, HEAD_SIZES)


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
    if head.device.type == "cuda":
        return (None, WHY_NO_CUDA) if WHY_NO_CUDA is not None else segments.prepare_layers([head.wide], head.norm)
    return (None, WHY_NOT) if WHY_NOT is not None else COMPILED["prepare_draft"](head, HEAD_SIZES)


def draft_plan(head: DraftHead) -> Any:
    """What `prepare_draft` made of the head, if the compiled `draft_pass` of the CPU is what runs now; else None."""
    if head.device.type != "cpu":
        return None
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
    usable = WHY_NO_PRODUCTS is None and weight.data.is_cuda and dtype in cuda_fragments.NUMBERS
    return pack(weight) if usable and rejects_weight(weight) is None else weight


def fp8_linear(x: Tensor, weight: Fp8Weight | Fp8Fragments) -> Tensor:
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


def int4_linear(x: Tensor, weight: Int4Weight | Int4Planes | Int4Fragments) -> Tensor:
    """x [M,K] f32, f16 or bf16, 4-bit weight N × K -> [M,N] of x's dtype, float32 sums."""
    return _INT4_LINEAR(x, weight)


def prepare_int4(weight: Int4Weight) -> Int4Weight | Int4Planes:
    """The weight as the kernels of its device read it fastest. Once, at load; what comes back replaces what went in."""
    return pack_planes(weight) if weight.data.is_cuda and rejects_group(weight.group, weight.shape[1]) is None else weight


def prepare_experts(experts: Experts) -> Experts:
    """The same experts as the kernels of their device read them fastest. Once, at load; what comes back replaces what went in."""
    return streamed(experts) if storage(experts.gate_up)[0].is_cuda else experts


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


def tree_walk(
    following: Tensor, agrees: Tensor | None, rows: RowInfo, sampling: SamplingState, rates: Tensor | None = None, purpose: int = 0
) -> Walked:
    """The path taken in each of the B trees behind the R rows, cut at the first end token or at the length limit.

    following [R] i64: the token emitted if the path ends at that row's node. agrees [R] bool: which nodes may be on a path, True for
    roots, for at most one child of any node; None = those that draft what follows their parent. rates [K] f64 force it instead: a node
    agrees if it is the first child of its parent and its coin is below the rate at its depth, the last one beyond; coins are
    `philox_uniform` of (length, id depth, purpose). A token that is both the last allowed and an end token finishes as stopped. Returns
    the tensors of `specdec.types.Verdict` in its order: committed [B,D+1], num_committed [B], path [B,D], num_accepted [B], finish [B],
    rows [B,D+1], all i64, D = deepest node.
    """
    walked: Walked = _TREE_WALK(following, agrees, rows, sampling, rates, purpose)
    return walked


def coupled_verify(
    logits: Tensor,
    slots: Tensor,
    depths: Tensor,
    temperature: Tensor,
    seeds: Tensor,
    lengths: Tensor,
    choices: Tensor,
    noisy: Tensor | None,
    purpose: int,
    *,
    lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """(token [R] i64, log-sum-exp of each row's logits [R] f32 or None): to the bit `gumbel_argmax` of logits / temperature.

    logits [R,V] f32, slots, depths [R] i64: request slot and depth of each row's node. By request slot: temperature [S] f32 (1 where it
    has been applied, and for greedy requests), seeds, lengths (tokens so far), choices [S] i64, noisy [S] bool, None = nobody samples
    (keys are not read). A row's token is the one at position length + depth. Rows with the same key may share the making of their noise.
    """
    return _COUPLED_VERIFY(logits, slots, depths, temperature, seeds, lengths, choices, noisy, purpose, lse=lse)


def tree_build(tokens: Tensor, parents: Tensor, scores: Tensor, roots: Tensor, nodes: Tensor, width: int, deepest: int) -> BuiltTree:
    """Draft trees of the likeliest candidates of a pool: the best path numbered first, parents before children.

    tokens, parents [B,C] i64, scores [B,C] f32 of the candidates: parents are places in the pool, below the child's own, -1 = the root;
    a score of 0 = cannot be right. roots [B] i64 tokens, nodes [B] i64 budgets, root included, at most `width` = N <= 64; no candidate
    is deeper than `deepest` = D. Returns `BuiltTree`: tokens, parents, depth [B,N], num_nodes [B], score, words [B,N], paths [B,N,D],
    places [B,N].
    """
    built: BuiltTree = _TREE_BUILD(tokens, parents, scores, roots, nodes, width, deepest)
    return built


def tree_layout(
    tokens: Tensor, depth: Tensor, num_nodes: Tensor, lengths: Tensor, slots: Tensor, tables: Tensor, block_size: int
) -> TreeLayout:
    """Rows of B trees of N nodes each, node i of a sequence of n tokens at position n - 1 + depth and in the cell n - 1 + i.

    tokens (-1 becomes 0), depth [B,N], num_nodes [B] i64: nodes at and beyond it write nothing; lengths [S] i64 by request slot, slots [B]
    i64, tables [G,B,M] i32. Returns `TreeLayout`: input_ids, positions [B·N], slot_mapping [G,B·N] i64, ctx_lens [B] i32.
    """
    laid: TreeLayout = _TREE_LAYOUT(tokens, depth, num_nodes, lengths, slots, tables, block_size)
    return laid


def compaction_slots(
    path: Tensor, num_accepted: Tensor, num_committed: Tensor, lengths: Tensor, slots: Tensor, tables: Tensor, block_size: int
) -> tuple[Tensor, Tensor]:
    """(source, target) [G,B·D] i64 flat slots that bring the K and V of accepted nodes from cells root + node to root + depth.

    path [B,D], num_accepted, num_committed [B] i64 of a verdict that lengths [S] i64 (by request slot) have already; slots [B] i64, tables
    [G,B,M] i32. What was not accepted stays where it is: source and target are root + depth.
    """
    moves: tuple[Tensor, Tensor] = _COMPACTION_SLOTS(path, num_accepted, num_committed, lengths, slots, tables, block_size)
    return moves


def gather_pairs(
    said: Tensor, along: Tensor, committed: Tensor, num_committed: Tensor, path: Tensor, taps: Tensor, roots: Tensor, columns: Tensor | None
) -> None:
    """The pairs of a verdict over b sequences into the inputs of a recording of B, filled up with copies of the first.

    said [B,most+1] i64 gets committed [b,D+1], zeros, and num_committed [b] in its last column; along [B,most,C] gets, of taps [T,any],
    the columns [C] i64 (None = all) of the rows roots [b] and roots + path [b,D]; what lies behind stays. D + 1 <= most.
    """
    _GATHER_PAIRS(said, along, committed, num_committed, path, taps, roots, columns)


def pad_batch(own: tuple[Tensor, ...], given: tuple[Tensor, ...]) -> None:
    """The fields of a batch of T rows of B sequences into those of a recorded pass of as many or more.

    Both: input_ids, positions, tree_mask [T] i64, slot_mapping [G,T] i64, ctx_lens, tree_len [B], cu_query [B+1], block_tables [G,B,M] i32
    and, for a draft head, first_key [B] i32. Rows beyond write nothing and belong to nobody; what else was there stays.
    """
    _PAD_BATCH(own, given)


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
    kv_scales: Scales = UNSCALED,
) -> Tensor:
    """`rope_write_kv` of a projection whose q heads are first normed by q_weight [hd] and k heads by k_weight [hd]. Returns q [T,nh,hd]."""
    rotation = positions, cos, sin, k_cache, v_cache, slots
    return _NORM_ROPE_WRITE_KV(qkv, q_weight, k_weight, eps, *rotation, **scaled(k_cache, kv_scales))


def draft_topk(
    hidden: Tensor,
    weight: Tensor | Fp8Weight,
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
    """A draft head's output layer and the best `width` of the race logits / temperature + share · noise, in one op.

    hidden [R,H], weight [Vd,H] of its dtype, or e4m3 with a scale a row or for all, temperature [R] f32, target_ids [Vd] i64 (None = the
    draft has the target's vocabulary), seeds, positions, choices [R] i64, noisy [R] bool (None = no row); or temperature and these of B
    sequences [B], which have R / B rows each, side by side. Returns (target ids [R,width] i64, best first, their shares of
    the race's softmax [R,width] f32, log-sum-exp [R] f32 of logits / temperature).
    """
    keys = seeds, positions, choices, noisy
    best: tuple[Tensor, Tensor, Tensor] = _DRAFT_TOPK(hidden, weight, temperature, target_ids, *keys, purpose, share, width)
    return best


def draft_grow(
    tokens: Tensor,
    chances: Tensor,
    above: Tensor,
    parents: Tensor,
    words: Tensor,
    noisy: Tensor,
    ends: Tensor,
    rates: Tensor,
    pool: tuple[Tensor, Tensor, Tensor, Tensor],
    start: int,
    cells: tuple[int, int],
    beam: int,
    bit: int,
) -> NextBeam:
    """The candidates of one depth of a beam search into the pool, and the `beam` = n likeliest of them, which run next.

    tokens [B,C] i64, chances [B,C] f32 of the candidates, C = R * width, the best first of each of R rows; of these rows' nodes the scores
    above [B,R] f32, places in the pool parents [B,R] i64 (-1 = the root), ancestor words [B,R] i64. noisy [B] bool, ends [B,E] i64: tokens
    that have no children. rates f32 by cell; cells: the depth's first one, and how many more where noisy. Writes columns from `start` of
    pool: tokens, parents i64, scores f32, cells i64, each [at least B, any]. The i-th of the beam gets the bit `bit` + i; n <= C.
    """
    state = above, parents, words, noisy, ends, rates
    grown: NextBeam = _DRAFT_GROW(tokens, chances, *state, pool, start, cells, beam, bit)
    return grown


def draft_layout(columns: Tensor, laws: Laws, depth: int, passes: int, width: int, block_size: int) -> DraftLayout:
    """Where the rows of drafts of B sequences lie. columns [B,3+M] i64: request slot, newest token, first visible key, block table; laws:
    of `SamplingState`, by request slot; depth: of the trees; passes: P over `width` nodes each, behind the newest token."""
    layout: DraftLayout = _DRAFT_LAYOUT(columns, laws, depth, passes, width, block_size)
    return layout


def accepted_pairs(said: Tensor, newest: Tensor, tables: Tensor, masks: int, mask_token: int, block_size: int) -> AcceptedPairs:
    """The rows that run a verdict's tokens through a draft head. said [B,D+2] i64: the tokens committed and, last, how many (>= 1); newest
    [B] i64: position of the last one; tables [B,M] i32; masks: rows behind the last pair, with the token mask_token."""
    pairs: AcceptedPairs = _ACCEPTED_PAIRS(said, newest, tables, masks, mask_token, block_size)
    return pairs
