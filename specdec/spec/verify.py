"""Verification: which drafts the target accepts, and the token that follows them. A phase of its own after the forward.

Coupled (default). Every row r gets the target's own token x_r = argmax of its scores plus the noise of that token's
position. Walk from the root: while a child of the node drafts x, descend; emit x of the last node.

  *Exact for any candidates.* x_r is a function of the row's history, the request and (seed, position). The rows on the walk have
  exactly the histories that decoding one token at a time would have had, so by induction over depth the emitted tokens are the
  ones it would have emitted; the drafts decided only which rows were there. Nothing is assumed about how they were found: they
  may even have read the same noise. That x ~ softmax(scores) is the Gumbel-max identity.

The walk itself, and where an end token or a limit cuts it, is `ops.tree_walk`. A row in which the request's own rules allow no
token ends the output: the run is cut before it (`cut`), as it would have been without drafts.

Rejection and block verification are in `rejection.py`. Synthetic forces acceptance at given rates, for benchmarks of the
machinery only: its text is not the target's.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from specdec import ops, rng
from specdec.config import VERIFY_MODES
from specdec.errors import ConfigError
from specdec.logprobs import token_logprobs
from specdec.rows import RowInfo
from specdec.sampling import SamplingState
from specdec.spec import rejection
from specdec.transfer import send
from specdec.types import STUCK, DraftTree, Scheduled, Verdict


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
        self._rates: Tensor | None = None  # see `_conditional`

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
        rates = self._conditional(logits.device) if self.mode == "synthetic" else None
        if self.mode in ("coupled", "synthetic") and token_mask is None and self._only_temperature(shares, sampling):
            keys = sampling.seed, sampling.length, sampling.choice, sampling.noisy if sampling.samples(rows.request_slots) else None
            following, _ = ops.coupled_verify(logits, rows.slot, rows.depth, sampling.temperature, *keys, rng.TARGET)
            return Verdict(*ops.tree_walk(following, None, rows, sampling, rates, rng.SYNTH))
        scores = sampling.process(logits, rows, token_mask)
        stuck = sampling.stuck(scores, rows, token_mask)
        if stuck is not None:  # whatever law such a row gets, nothing of it is emitted
            scores = scores.masked_fill(stuck[:, None], 0.0)
        if self.mode in ("coupled", "synthetic"):
            following, agrees = choose(scores, rows, sampling), None
        else:
            walk = rejection.block if self.mode == "block" else rejection.rejection
            agrees, final = walk(scores, rows, sampling)
            following = final[rows.seq]
        verdict = Verdict(*ops.tree_walk(following, agrees, rows, sampling, rates, rng.SYNTH))
        verdict = verdict if stuck is None else cut(verdict, stuck)
        logprobs = token_logprobs(logits, scores, verdict, [share.seq.params for share in shares])
        return verdict if logprobs is None else replace(verdict, logprobs=logprobs)

    @staticmethod
    def _only_temperature(shares: Seq[Scheduled], sampling: SamplingState) -> bool:
        """Whether temperatures alone, 0 included, shape the laws, and nobody asks how likely tokens were."""
        silent = all(share.seq.params.logprobs is None for share in shares)
        return silent and all(sampling.only_temperature(share.seq.request_slot) for share in shares)

    def _conditional(self, device: torch.device) -> Tensor:
        """[K] f64: by depth the rate at which a first child is accepted, given that its parent is; 0 beyond. The same tensor every time."""
        if self._rates is None or self._rates.device != device:
            conditional = [b / a if a > 0 else 0.0 for a, b in zip((1.0, *self.rates), self.rates, strict=False)]
            self._rates = send(np.array([1.0, *conditional, 0.0]), device)
        return self._rates


def cut(verdict: Verdict, stuck: Tensor) -> Verdict:
    """The verdict, ended before the first token of its run that a stuck row produced. stuck [R] bool.

    Right in every mode: up to there no such row was read, and what is cut off is everything that one had a part in.
    """
    column = torch.arange(verdict.rows.shape[1], device=stuck.device)
    lost = stuck[verdict.rows] & (column < verdict.num_committed[:, None])
    first = torch.where(lost, column, len(column)).amin(dim=1)
    return replace(
        verdict,
        num_committed=torch.minimum(verdict.num_committed, first),
        num_accepted=torch.minimum(verdict.num_accepted, first),
        finish=torch.where(lost.any(dim=1), STUCK, verdict.finish),
    )


def choose(scores: Tensor, rows: RowInfo, sampling: SamplingState) -> Tensor:
    """[R] i64: the target's own token after every node, ties to the lowest id. scores [R, V] f32."""
    if not sampling.samples(rows.request_slots):  # nobody's noise is read, so nobody's key is looked up
        unused, silent = (torch.zeros(rows.num_rows, dtype=kind, device=rows.device) for kind in (torch.int64, torch.bool))
        return ops.gumbel_argmax(scores, unused, unused, unused, silent, rng.TARGET)
    return ops.gumbel_argmax(scores, *sampling.noise(rows), rng.TARGET)
