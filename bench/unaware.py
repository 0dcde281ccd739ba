"""A drafter kept from the noise: it ranks candidates by the draft law alone, as EAGLE does, and is verified as it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from specdec.rows import RowInfo
from specdec.sampling import SamplingState
from specdec.types import DraftTree, Scheduled

if TYPE_CHECKING:
    from specdec.spec.proposer import Proposer


class Unaware:
    """Wraps a drafter; everything but what it is told of the noise goes through."""

    def __init__(self, proposer: Proposer):
        self._proposer = proposer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._proposer, name)

    def propose(self, shares: tuple[Scheduled, ...], sampling: SamplingState) -> DraftTree:
        return self._proposer.propose(shares, cast(SamplingState, _Silent(sampling)))


class _Silent:
    """The sampling state with no row's noise: temperature, truncation and penalties stay."""

    def __init__(self, sampling: SamplingState):
        self._sampling = sampling

    def __getattr__(self, name: str) -> Any:
        return getattr(self._sampling, name)

    def noise(self, rows: RowInfo) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        seeds, positions, choices, noisy = self._sampling.noise(rows)
        return seeds, positions, choices, torch.zeros_like(noisy)

    def only_temperature(self, request_slot: int) -> bool:
        return False  # compiled drafts make the noise themselves
