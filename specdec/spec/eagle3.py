"""The EAGLE-3 drafter: a dynamic tree grown depth by depth (`growth`) from a head that feeds its own state back.

At every depth the head runs a beam of nodes of all sequences in one pass. On the CPU the draft of one sequence is one compiled
call (`compiled_growth`). Source: reference §2 and §3.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from torch import Tensor

from specdec.spec import compiled_growth
from specdec.spec.beam import Beam, BeamRows, beam_rows
from specdec.spec.growth import HOPELESS, Growth, beam_widths
from specdec.spec.head_drafter import HeadDrafter, HostDraft, numbered
from specdec.spec.head_kv import HeadRunner
from specdec.spec.proposer import register
from specdec.spec.recorded_growth import RecordedDrafts
from specdec.transfer import send_all
from specdec.types import Scheduled

if TYPE_CHECKING:
    from specdec.sampling import SamplingState
    from specdec.sequence import Sequence
    from specdec.spec.proposer import DrafterContext


class Eagle3(HeadDrafter):
    """See the module, and `HeadDrafter` for what it needs."""

    name = "eagle3"
    feeds = True

    def __init__(self, context: DrafterContext):
        super().__init__(context)
        patient = context.config.policy == "fixed"  # exactly the depth asked for
        self.looks = self.noise_coupled and not patient and self._device.type == "cpu"  # elsewhere to look is to wait
        self._recorded = RecordedDrafts(self, self._runner, context.recorder) if context.recorder is not None else None

    def _draft(
        self, shares: list[Scheduled], depths: list[int], sampling: SamplingState
    ) -> tuple[list[HostDraft], Mapping[tuple[int, int], Tensor]]:
        if not self._replays(shares, depths, sampling):
            return [self._compiled(shares[0], depths[0])], {}
        if self._recorded is not None and self._recorded.fit(shares, depths, sampling):
            return self._recorded.drafts(shares, depths[0], sampling), {}
        beams = beam_widths(shares, self)
        stepper = _Recurrence(self._runner, [s.seq for s in shares], beams, depths)
        return Growth(self, stepper, shares, depths, sampling, beams=beams, looks=self.looks).drafts()

    def _replays(self, shares: list[Scheduled], depths: list[int], sampling: SamplingState) -> bool:
        return not (len(shares) == 1 and self.noise_coupled and compiled_growth.fits(self.head, shares[0], sampling))

    def _compiled(self, share: Scheduled, depth: int) -> HostDraft:
        """The draft of one sequence in one compiled call."""
        picks = compiled_growth.grow(self._runner, share, depth, self.scores, max(HOPELESS, share.budget.floor) if self.looks else 0.0)
        return numbered(share.seq.tokens[-1], picks)


class _Recurrence:
    """Steps of a head that reads its own state: `feedback` [B * rows, Hd] of the pass before is the feature of the next."""

    def __init__(self, runner: HeadRunner, seqs: list[Sequence], beams: list[int], depths: list[int]):
        self._runner, self._seqs, self._beams, self._depths = runner, seqs, beams, depths
        self._live = len(seqs)
        self._beam: Beam | None = None  # made when there is a second depth
        self._feedback: Tensor

    def begin(self) -> Tensor:
        hidden, self._feedback = self._runner.extend(self._seqs)
        return self._runner.head.logits(hidden)

    def keep(self, index: Tensor) -> None:
        self._feedback = self._feedback.view(self._live, -1, self._feedback.shape[1])[index].flatten(0, 1)
        self._live = len(index)
        self._running().keep(index)

    def advance(self, tokens: Tensor, parents: Tensor) -> Tensor:
        hidden, self._feedback = self._running().advance(self._feedback, tokens, parents)
        return self._runner.head.logits(hidden)

    def _running(self) -> Beam:
        if self._beam is None:
            rows = send_all(beam_rows(self._runner.rows, self._seqs, self._beams, self._depths), self._runner.head.device)
            self._beam = Beam(self._runner.feed, BeamRows(*rows))
        return self._beam


register("eagle3")(Eagle3)
