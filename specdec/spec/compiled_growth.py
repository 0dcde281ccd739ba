"""The EAGLE-3 draft of one sequence in one compiled call on the CPU (`csrc/draft_head.cpp`).

It grows the tree that `eagle3` grows, for requests whose law is shaped by a temperature alone: every depth is a pass of a few
rows whose arithmetic takes less time than the Python around it. Chances are float32 sums in an order of their own, so where
two candidates are as good as equal the trees may differ; what is committed never does.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from specdec import ops, rng
from specdec.budget import beam
from specdec.kernels.draft_grow.reference import BELOW, TIE
from specdec.spec.candidates import FIELD
from specdec.spec.head_drafter import NOISY_CELLS, Scores, depth_cells, rank_cells
from specdec.spec.head_kv import HeadRunner
from specdec.spec.head_progress import Pick
from specdec.types import Scheduled

if TYPE_CHECKING:
    from specdec.models.draft_heads import DraftHead
    from specdec.sampling import SamplingState


def fits(head: DraftHead, share: Scheduled, sampling: SamplingState) -> bool:
    """Whether the compiled call can draft for this request."""
    return ops.draft_plan(head) is not None and share.budget.width <= FIELD and sampling.only_temperature(share.seq.request_slot)


def grow(runner: HeadRunner, share: Scheduled, depth: int, scores: Scores, hopeless: float) -> list[Pick]:
    """The likeliest nodes, by falling score. depth: at least 1. hopeless: a beam whose best node scores less is not run."""
    seq, budget = share.seq, share.budget
    width = min(budget.width, runner.head.config.draft_vocab_size)
    rows = min(beam(budget), width)
    greedy = seq.params.greedy
    shift = 0 if greedy else NOISY_CELLS
    return runner.grow(
        ops.draft_plan(runner.head),
        seq,
        rows * (depth - 1),
        shape=(budget.nodes, depth, width, rows),
        end_ids=list(seq.end_ids),
        hopeless=hopeless,
        law=None if greedy else (seq.params.temperature, runner.head.config.noise_share, rng.to_key(seq.seed), seq.choice, rng.TARGET),
        rates=scores.rates,
        depth_cells=[shift + depth_cells(d) for d in range(1, depth + 1)],
        rank_cells=rank_cells(width),
        buckets=BELOW,
        tie=TIE,
    )
