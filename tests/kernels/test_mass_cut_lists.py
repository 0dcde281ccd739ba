"""The two ways `mass_cut` finds its last token in Triton: a list of the bin's tokens in registers, digits of the whole row."""

from __future__ import annotations

import pytest
import torch

from specdec.kernels.mass_cut import reference
from tests.kernels.device import DEVICE, on

pytest.importorskip("triton")
from specdec.kernels.mass_cut import triton as kernel


def _agrees(log_p: torch.Tensor, rank: torch.Tensor, p: float) -> bool:
    wanted = torch.full((len(log_p),), p)
    got = kernel.mass_cut(*on(DEVICE, (log_p, rank, wanted)))
    return torch.equal(got.cpu(), reference.mass_cut(log_p, rank, wanted))


@pytest.mark.parametrize("room", [1024, 8], ids=["registers", "row"])
@pytest.mark.parametrize("scale", [0.0, 0.01, 5.0])
def test_both_ways_find_the_same_cut(monkeypatch: pytest.MonkeyPatch, room: int, scale: float) -> None:
    """Rounded scores tie; at scale 0 all do, and ids alone say where the cut is."""
    monkeypatch.setattr(kernel, "_ROOM", room)
    scores = (torch.randn(2, 700, generator=torch.Generator().manual_seed(0)) * scale * 4).round() / 4
    for p in (0.0, 0.1313, 0.8371, 1.0):
        assert _agrees(scores.log_softmax(-1), scores, p)


def test_scores_of_any_scale_and_sign_are_in_order_of_their_bins() -> None:
    scores = torch.randn(3, 700, generator=torch.Generator().manual_seed(1)) * 8
    scores = scores.sign() * scores.abs().exp()  # up to e**24
    scores[1, ::3] = -torch.inf
    scores[2] *= 1e-30
    flat = torch.randn(3, 700, generator=torch.Generator().manual_seed(2)).log_softmax(-1)
    for p in (0.2131, 0.7717, 0.9991):
        assert _agrees(torch.where(scores.isinf(), -torch.inf, flat), scores, p)


def test_tokens_of_hardly_any_mass_may_rank_highest() -> None:
    """The cut lies among them and below."""
    log_p = torch.cat((torch.full((1, 40), -30.0), torch.linspace(-1.0, -9.0, 60)[None]), dim=1)
    rank = torch.cat((torch.linspace(9.0, 5.0, 40), torch.linspace(1.0, 0.0, 60)))[None]
    for p in (1e-12, 0.5, 0.9):
        assert _agrees(log_p, rank, p)
