"""The three ways `mass_cut` finds its threshold in Triton: a list in registers, a list in memory, the row itself."""

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


@pytest.mark.parametrize(("list_tile", "room"), [(1024, 1024), (64, 1024), (64, 100)], ids=["registers", "memory", "row"])
@pytest.mark.parametrize("scale", [0.01, 5.0])
def test_every_way_finds_the_same_cut(monkeypatch: pytest.MonkeyPatch, list_tile: int, room: int, scale: float) -> None:
    """A flat law lists all of its 700 tokens, a peaked one few. Rounded scores tie."""
    monkeypatch.setattr(kernel, "_LIST_TILE", list_tile)
    monkeypatch.setattr(kernel, "_MOST_LISTED", room)
    scores = (torch.randn(2, 700, generator=torch.Generator().manual_seed(0)) * scale * 4).round() / 4
    assert _agrees(scores.log_softmax(-1), scores, 0.8371)


def test_a_list_is_not_believed_where_others_rank_higher() -> None:
    """The best-ranked tokens are too unlikely to be listed: the cut lies among them and below."""
    log_p = torch.cat((torch.full((1, 40), -30.0), torch.linspace(-1.0, -9.0, 60)[None]), dim=1)
    rank = torch.cat((torch.linspace(9.0, 5.0, 40), torch.linspace(1.0, 0.0, 60)))[None]
    for p in (1e-12, 0.5, 0.9):
        assert _agrees(log_p, rank, p)
