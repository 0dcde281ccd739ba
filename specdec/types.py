"""The values that flow through one step. Frozen; every tensor field states shape and dtype.

Letters: B sequences in the step, T rows (tokens) in the batch, R rows whose logits are wanted, N nodes of the widest
tree (root included, ≤ 64), D depth of the deepest path, V target vocabulary, G KV groups, M blocks per table row.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from specdec.sequence import Sequence


@dataclass(frozen=True, slots=True)
class KVGroup:
    """Layers that share one block table. `window` None = full attention, else keys at distance < window are visible."""

    name: str
    num_layers: int
    num_kv_heads: int
    head_dim: int
    window: int | None = None


@dataclass(frozen=True, slots=True)
class SpecBudget:
    """What the policy allows one sequence this step. `drafter` None = plain decoding (a tree of one node).

    floor: a drafter that looks as it drafts stops where no node has that chance; less would not pay for its next pass.
    shared: chosen for the whole batch, to be drafted behind a step in flight, where nobody looks at a draft before it is verified.
    feeds: the drafter runs its own nodes, a beam of them at every depth but the last, and keeps their K and V in slots behind
    the newest token (`specdec.budget`).
    """

    drafter: str | None = None
    nodes: int = 1
    depth: int = 0
    width: int = 1
    feeds: bool = False
    floor: float = 0.0
    shared: bool = False


NO_DRAFT = SpecBudget()
STUCK = 3  # code of `Verdict.finish`
NOTHING_ALLOWED = "nothing_allowed"  # and the stop reason that goes with it


@dataclass(frozen=True, slots=True)
class Scheduled:
    """One sequence's share of a step: `num_new` linear tokens from `seq.num_computed` on.

    `samples` is True when the last of them is the newest token of the sequence: its row is the root of a draft tree and
    yields tokens. Trees are planned for decode rows only (`num_new == 1`); a longer share gets the root alone.
    rerun: rows before `num_computed` (0 or 1) that run again without writing K and V, for the hidden states a draft head needs.
    """

    seq: Sequence
    num_new: int
    samples: bool
    budget: SpecBudget = NO_DRAFT
    rerun: int = 0

    @property
    def prompt_rows(self) -> int:
        """How many of the share's first rows prompt_logprobs asks for: those that predict a prompt token. Before commit."""
        seq = self.seq
        if seq.params.prompt_logprobs is None or seq.choice != 0:
            return 0
        return max(0, min(self.num_new, seq.num_prompt - 1 - seq.num_computed))


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The scheduler's decision. `scheduled` in the order rows are laid out; `preempted` lost their blocks."""

    scheduled: tuple[Scheduled, ...]
    preempted: tuple[Sequence, ...] = ()
    admitted: tuple[Sequence, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows without draft nodes."""
        return sum(s.rerun + s.num_new for s in self.scheduled)

    @property
    def sampling(self) -> tuple[Scheduled, ...]:
        """Shares whose last row yields tokens, in order: the B sequences of trees and verdicts."""
        return tuple(s for s in self.scheduled if s.samples)


class TreeLists(NamedTuple):
    """Fields of a `DraftTree` as lists."""

    tokens: list[list[int]]
    parents: list[list[int]]
    depth: list[list[int]]
    num_nodes: list[int]


@dataclass(frozen=True)
class DraftTree:
    """Draft trees of the B *sampling* sequences of a plan, in plan order.

    Node 0 = root = the newest token. parent < child; siblings distinct; the best path is numbered first. Entries at and beyond
    `num_nodes[b]` are 0 and mean nothing. score: the drafter's estimate that the node is accepted (cumulative along its path), used only
    by the policy. log_q: row i is the law the children of node i were drawn from; None = point masses (deterministic drafts).
    """

    tokens: Tensor  # [B, N] i64
    parents: Tensor  # [B, N] i64, root's parent is -1
    depth: Tensor  # [B, N] i64
    num_nodes: Tensor  # [B] i64
    score: Tensor | None = None  # [B, N] f32
    log_q: Tensor | None = None  # [B, N, V] f32
    drafters: tuple[str | None, ...] = ()  # per sequence, None = root only
    uniform: tuple[int, int] | None = None  # (rows that every tree has in the batch, bound of depths), where the host need not look

    @cached_property
    def host(self) -> TreeLists:
        """Copied to the host once, whoever asks."""
        return TreeLists(self.tokens.tolist(), self.parents.tolist(), self.depth.tolist(), self.num_nodes.tolist())


@dataclass(frozen=True, slots=True)
class Batch:
    """One ragged forward: prefill shares, decode rows and trees side by side, no fork between them.

    A sequence's rows are `cu_query[b]:cu_query[b+1]`. Row positions are absolute. With `tree_len[b] == 0` rows are causal by position;
    otherwise they are nodes of a tree of that many, all of them in the target's passes, one depth in a draft head's: a row sees the
    `ctx_lens[b]` committed keys and the ancestors named by its word in `tree_mask`; node i's key lies at slot position `ctx_lens[b] + i`.
    """

    input_ids: Tensor  # [T] i64
    positions: Tensor  # [T] i64
    cu_query: Tensor  # [B + 1] i32
    ctx_lens: Tensor  # [B] i32, keys in the cache before this query
    tree_len: Tensor  # [B] i32
    tree_mask: Tensor  # [T] i64 ancestor words (0 for causal rows)
    block_tables: Tensor  # [G, B, M] i32
    slot_mapping: Tensor  # [G, T] i64, -1 = no write
    logit_rows: Tensor  # [R] i64, rows of the hidden states whose logits are wanted: all tree nodes, plan order
    prompt_rows: Tensor | None = None  # extra rows for prompt_logprobs, [P] i64
    first_key: Tensor | None = None  # [B] i32, keys before this position are not visible (draft heads); None = all are
    max_ctx: int = 0
    causal: bool = False  # the host knows that no sequence is a tree, and that a sequence's rows follow its context without a gap


@dataclass(frozen=True, slots=True)
class Forward:
    """What the target pass returns."""

    logits: Tensor  # [R, V] f32
    hidden: Tensor  # [T, H] final hidden states (after the last norm)
    taps: Tensor | None = None  # [T, taps * H] tapped hidden states for draft heads
    prompt_logits: Tensor | None = None  # [P, V] f32


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities for one emitted token: its own, its rank (1 = most likely), and the top alternatives."""

    token: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class VerdictLists(NamedTuple):
    """Fields of a `Verdict` as lists."""

    committed: list[list[int]]
    num_committed: list[int]
    path: list[list[int]]
    num_accepted: list[int]
    finish: list[int]


@dataclass(frozen=True)
class Verdict:
    """What verification decided for the B sampling sequences.

    committed[b, :num_committed[b]] are the tokens to append: accepted draft tokens, then correction or bonus, cut at the
    first end token or length limit, or before the first row that allows no token. path[b, :num_accepted[b]] are the accepted
    nodes (root excluded) in order; after a cut only nodes whose token was kept count.
    """

    committed: Tensor  # [B, D + 1] i64
    num_committed: Tensor  # [B] i64, at least 1 unless STUCK
    path: Tensor  # [B, D] i64 node indices
    num_accepted: Tensor  # [B] i64
    finish: Tensor  # [B] i64: 0 running, 1 stop token, 2 length, 3 (STUCK) no token is allowed
    rows: Tensor  # [B, D + 1] i64, row of `Forward.logits` that produced each committed token
    logprobs: tuple[tuple[TokenLogprobs, ...], ...] | None = None
    arriving: Callable[[], list[Any]] | None = None  # `decided` as lists, where a copy of it has been queued; waits for it

    @property
    def decided(self) -> tuple[Tensor, ...]:
        """What the host has to know."""
        return self.committed, self.num_committed, self.path, self.num_accepted, self.finish

    @cached_property
    def host(self) -> VerdictLists:
        """Copied to the host once, whoever asks."""
        return VerdictLists(*(self.arriving() if self.arriving is not None else [field.tolist() for field in self.decided]))


@dataclass(slots=True)
class StepStats:
    """Measured facts of one step, for metrics, policy and traces. Times in seconds.

    alone: nothing but decoding ran. budget: what each sequence was allowed, where that is the same for all. drafter_seconds: in drafters,
    which `draft_seconds` has with all that comes before the pass; 0 where they drafted behind a step in flight. waited: why the step, which
    drafts or comes behind one that does, waited for the verdict before; None = it did not, or no step could have followed that.
    """

    step: int
    num_seqs: int
    num_rows: int
    num_sampling: int
    context: int  # committed keys over the sampling sequences
    draft_seconds: float = 0.0
    forward_seconds: float = 0.0
    verify_seconds: float = 0.0
    step_seconds: float = 0.0
    committed: int = 0
    drafted: dict[str, int] = field(default_factory=dict)  # drafter -> draft tokens
    accepted: dict[str, int] = field(default_factory=dict)
    preempted: int = 0
    skipped: dict[str, int] = field(default_factory=dict)  # reason -> sequences that did not draft
    drafts: dict[str, int] = field(default_factory=dict)  # drafter -> sequences that verified a draft of it
    accepted_position: dict[str, list[int]] = field(default_factory=dict)  # drafter -> [i]: drafts accepted at position i + 1
    drafter_states: dict[str, dict[str, int]] = field(default_factory=dict)  # drafter -> state -> sequences
    alone: bool = True
    budget: SpecBudget | None = None
    drafter_seconds: float = 0.0
    waited: str | None = None
    gain: float | None = None  # tokens per second over what the policy expects of plain decoding; None = unknown


@dataclass(slots=True)
class RequestMetrics:
    """Per-request measurements. Times are seconds on the monotonic clock of the process."""

    arrival: float = 0.0
    first_scheduled: float | None = None
    first_token: float | None = None
    finished: float | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated: int = 0
    steps: int = 0  # target passes that yielded tokens
    drafted: int = 0
    accepted: int = 0
    preemptions: int = 0

    @property
    def queue_wait(self) -> float | None:
        return None if self.first_scheduled is None else self.first_scheduled - self.arrival

    @property
    def ttft(self) -> float | None:
        return None if self.first_token is None else self.first_token - self.arrival

    @property
    def acceptance_length(self) -> float:
        """Committed tokens per target pass, correction or bonus included; 1.0 without speculation."""
        return self.generated / self.steps if self.steps else 0.0

    @property
    def acceptance_rate(self) -> float:
        """Accepted / drafted draft tokens; 0 when nothing was drafted."""
        return self.accepted / self.drafted if self.drafted else 0.0


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request. `finish_reason`: "stop" | "length" | "abort" | None while running.

    `stop_reason`: the stop string or token id that ended it, None for the model's own end token; "nothing_allowed" where the
    request's own rules left no token to go on with (see `SamplingParams`).
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] | None = None


@dataclass(slots=True)
class RequestOutput:
    """State of a request. In a stream, texts and ids are the *new* ones since the last output (deltas)."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    trace: Any = None  # `specdec.trace.Trace` when asked for
