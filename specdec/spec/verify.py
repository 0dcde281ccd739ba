"""Verification: which drafts the target accepts, and the token that follows them. A phase of its own after the forward.

Coupled (default). Every row r gets the target's own token x_r = argmax of its scores plus the noise of that token's
position. Walk from the root: while a child of the node drafts x, descend; emit x of the last node.

  *Exact for any candidates.* x_r is a function of the row's history, the request and (seed, position). The rows on the walk have
  exactly the histories that decoding one token at a time would have had, so by induction over depth the emitted tokens are the
  ones it would have emitted; the drafts decided only which rows were there. Nothing is assumed about how they were found: they
  may even have read the same noise. That x ~ softmax(scores) is the Gumbel-max identity.

  *The walk without walking.* A draft node agrees if its token is its parent's x. Siblings are distinct, so at most one child
  of a node agrees, and the nodes whose whole path agrees form one path: the walk's. log2(depth) rounds of pointer doubling
  find them for all trees at once, with no host synchronisation.

Rejection and block verification are in `rejection.py`. Synthetic forces acceptance at given rates, for benchmarks of the
machinery only: its text is not the target's.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from specdec import ops, rng
from specdec.config import VERIFY_MODES
from specdec.errors import ConfigError
from specdec.logprobs import token_logprobs
from specdec.rows import RowInfo
from specdec.sampling import SamplingState
from specdec.spec import rejection
from specdec.types import DraftTree, Scheduled, Verdict

RUNNING, STOPPED, LENGTH = 0, 1, 2  # codes of Verdict.finish


class Verifier:
    """Turns target logits into a Verdict; holds nothing but its mode.

    mode: "coupled" | "rejection" | "block" | "synthetic" (see `SpecConfig.verify`). synthetic_acceptance: unconditional rate per
    position, for "synthetic". noise_coupled: names of drafters whose drafts read the target's noise; they are refused
    under "rejection" and "block", whose proofs need drafts independent of their coins (ConfigError).
    """

    def __init__(self, mode: str = "coupled", *, synthetic_acceptance: Seq[float] = (), noise_coupled: Seq[str] = ()):
        if mode not in VERIFY_MODES:
            raise ConfigError(f"verify {mode!r} is unknown; choose one of {', '.join(VERIFY_MODES)}", param="verify")
        if mode in ("rejection", "block") and noise_coupled:
            raise ConfigError(
                f"verify={mode!r} needs drafts drawn independently, but {', '.join(noise_coupled)} drafts with the target's noise; "
                "use verify='coupled'",
                param="verify",
            )
        if mode == "synthetic" and not synthetic_acceptance:
            raise ConfigError("verify='synthetic' needs synthetic_acceptance", param="synthetic_acceptance")
        self.mode = mode
        self.rates = tuple(synthetic_acceptance)

    def verify(
        self,
        tree: DraftTree,
        logits: Tensor,
        shares: Seq[Scheduled],
        sampling: SamplingState,
        token_mask: Tensor | None = None,
    ) -> Verdict:
        """Verdict over the B trees of `shares`. logits [R, V] f32, one row per node; token_mask [R, V] bool, True = allowed."""
        rows = RowInfo(tree, [share.seq.request_slot for share in shares], logits.device)
        scores = sampling.process(logits, rows, token_mask)
        if self.mode in ("coupled", "synthetic"):
            chosen = choose(scores, rows, sampling)
            agrees = self._forced(rows, sampling) if self.mode == "synthetic" else agreement(chosen, rows)
            taken = taken_rows(agrees, rows)
            final = chosen[taken.last]
        else:
            walk = rejection.block if self.mode == "block" else rejection.rejection
            accepted, final = walk(scores, rows, sampling)
            taken = taken_rows(accepted, rows)
        verdict = settle(taken, final, rows, sampling)
        logprobs = token_logprobs(logits, scores, verdict, [share.seq.params for share in shares])
        return verdict if logprobs is None else replace(verdict, logprobs=logprobs)

    def _forced(self, rows: RowInfo, sampling: SamplingState) -> Tensor:
        """[R] bool: first children (the best path) accepted at the configured rates, given that their parent is."""
        conditional = [b / a if a > 0 else 0.0 for a, b in zip((1.0, *self.rates), self.rates, strict=False)]
        table = torch.tensor([1.0, *conditional, 0.0], dtype=torch.float64, device=rows.device)
        rate = table[rows.depth.clamp(max=len(table) - 1)]
        slot = rows.slot
        coins = ops.philox_uniform(sampling.seed[slot], sampling.length[slot], sampling.choice[slot], rows.depth[:, None], rng.SYNTH)
        first = torch.full_like(rows.node, rows.num_rows).scatter_reduce(0, rows.parent, torch.where(rows.node > 0, rows.node, 64), "amin")
        return (rows.node == 0) | ((first[rows.parent] == rows.node) & (coins[:, 0] < rate))


def choose(scores: Tensor, rows: RowInfo, sampling: SamplingState) -> Tensor:
    """[R] i64: the target's own token after every node, ties to the lowest id. scores [R, V] f32."""
    return ops.gumbel_argmax(scores, *sampling.noise(rows), rng.TARGET)


def agreement(chosen: Tensor, rows: RowInfo) -> Tensor:
    """[R] bool: the node drafts the token that the target chooses after its parent; True for roots. chosen [R] i64."""
    if rows.root_only:
        return torch.ones(rows.num_rows, dtype=torch.bool, device=rows.device)
    return (rows.node == 0) | (chosen[rows.parent] == rows.token)


@dataclass(frozen=True, slots=True)
class Taken:
    """The accepted path of each tree. D = deepest node."""

    rows: Tensor  # [B, D + 1] i64, row of the path's node at each depth (the root first), 0 beyond the path
    count: Tensor  # [B] i64, accepted draft nodes
    last: Tensor  # [B] i64, row of the path's last node


def taken_rows(agrees: Tensor, rows: RowInfo) -> Taken:
    """Nodes whose whole path agrees, by depth. agrees [R] bool, True for roots, for at most one child of any node."""
    if rows.root_only:
        roots = torch.arange(rows.num_rows, device=rows.device)
        return Taken(roots[:, None], torch.zeros_like(roots), roots)
    jump, deepest = rows.parent, rows.max_depth
    for _ in range(deepest.bit_length()):
        agrees = agrees & agrees[jump]
        jump = jump[jump]
    table = torch.zeros((len(rows.counts), deepest + 2), dtype=torch.int64, device=rows.device)
    column = torch.where(agrees, rows.depth, deepest + 1)  # the last column collects what is not on the path
    table[rows.seq, column] = torch.arange(rows.num_rows, device=rows.device)
    reached = torch.zeros(len(rows.counts), dtype=torch.int64, device=rows.device).index_add_(0, rows.seq, agrees.long())
    count = reached - 1
    return Taken(table[:, :-1], count, table.gather(1, count[:, None])[:, 0])


def settle(taken: Taken, final: Tensor, rows: RowInfo, sampling: SamplingState) -> Verdict:
    """Accepted tokens and the final one ([B] i64), cut at the first end token or at the length limit.

    A token that is both the last allowed and an end token finishes as stopped.
    """
    column = torch.arange(taken.rows.shape[1], device=rows.device)
    count, slots = taken.count[:, None], rows.slots
    committed = torch.where(column == count, final[:, None], 0)
    if not rows.root_only:
        drafted = torch.nn.functional.pad(rows.token[taken.rows[:, 1:]], (0, 1))
        committed = torch.where(column < count, drafted, committed)
    position = sampling.length[slots][:, None] + column
    ends = (committed[:, :, None] == sampling.end_ids[slots][:, None, :]).any(dim=-1)
    ends &= position >= sampling.min_total[slots][:, None]
    full = position + 1 >= sampling.max_total[slots][:, None]
    none = len(column)
    first = torch.where((ends | full) & (column <= count), column, none).amin(dim=1)
    stopped = ends.gather(1, first.clamp(max=none - 1)[:, None])[:, 0]
    num_committed = torch.minimum(first, taken.count) + 1
    num_accepted = torch.minimum(taken.count, num_committed)
    inside = column[: none - 1] < num_accepted[:, None]
    return Verdict(
        committed=torch.where(column < num_committed[:, None], committed, 0),
        num_committed=num_committed,
        path=torch.where(inside, rows.node[taken.rows[:, 1:]], 0),
        num_accepted=num_accepted,
        finish=torch.where(first == none, RUNNING, torch.where(stopped, STOPPED, LENGTH)),
        rows=taken.rows,
    )
