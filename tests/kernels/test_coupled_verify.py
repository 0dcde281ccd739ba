"""What `coupled_verify` rests on beside the matrix: how far float32 noise is off, many tiles, windows of rows, and doubts."""

from __future__ import annotations

import pytest
import torch

from specdec.kernels.coupled_verify import reference
from tests.kernels.device import DEVICE, ON_CARDS, on

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from specdec.kernels.coupled_verify import triton as kernel  # noqa: E402
from specdec.kernels.coupled_verify.triton import rough_gumbel  # noqa: E402
from specdec.kernels.noise.triton import near_gumbel  # noqa: E402


@triton.jit
def _gumbel(words, out, TILE: tl.constexpr, ROUGH: tl.constexpr):
    place = tl.program_id(0) * TILE + tl.arange(0, TILE)
    word = tl.load(words + place).to(tl.uint32)
    tl.store(out + place, rough_gumbel(word) if ROUGH else near_gumbel(word))


@pytest.mark.parametrize("rough", [True, False], ids=["rough", "near"])
def test_float32_noise_is_as_near_as_it_says(rough: bool) -> None:
    """Every power of two and its neighbours, both ends, the seam of the series, and a million others."""
    corners = {w + d for w in [0, *(1 << b for b in range(33))] for d in range(-40, 41)}
    words = torch.tensor(sorted(w for w in corners if 0 <= w < 1 << 32))
    words = torch.cat((words, torch.randint(0, 1 << 32, ((1 << 20) - len(words),), generator=torch.Generator().manual_seed(0))))
    out = torch.empty(len(words), device=DEVICE)
    tile = 1 << 20 if DEVICE == "cpu" else 1 << 10
    _gumbel[((1 << 20) // tile,)](words.to(DEVICE), out, TILE=tile, ROUGH=rough)
    u = (words.double() + 0.5) * 2.0**-32
    exact = -torch.log(-torch.log1p(-u))
    error = (out.cpu().double() - exact).abs()
    assert (error.max() < kernel._SLACK.value / 4) if rough else (error / exact.abs().clamp(min=1.0)).max() < 3e-6


def _small_tiles(monkeypatch: pytest.MonkeyPatch, members: int = 1) -> None:
    monkeypatch.setattr(kernel, "_shape", lambda rows, vocab, noise, lse: (64, members))


@pytest.mark.parametrize(
    ("scale", "slack"),
    [*((0.2, None), (3.0, None), (0.2, 1.0), (3.0, 100.0)), *(pytest.param(*case, marks=ON_CARDS) for case in ((3.0, 1.0), (0.2, 100.0)))],
)
def test_many_tiles_of_a_tree_equal_the_full_argmax(monkeypatch: pytest.MonkeyPatch, scale: float, slack: float | None) -> None:
    """A large slack leaves doubts: between the ids of a tile, and of all tiles."""
    _small_tiles(monkeypatch, 4)
    monkeypatch.setattr(kernel, "_EXACT", 32)
    if slack is not None:
        if DEVICE != "cpu":
            pytest.skip("a compiled kernel keeps its constants")
        monkeypatch.setattr(kernel, "_SLACK", tl.constexpr(slack))
    rows, vocab = 7, 700
    logits = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(1)) * scale
    index = torch.arange(rows)
    zeros = torch.zeros(2, dtype=torch.int64)
    args = (logits, (index == 4).long(), index % 3, torch.full((2,), 0.7), zeros + 5, zeros, zeros, zeros == torch.tensor([0, 1]), 0)
    token, _ = kernel.coupled_verify(*on(DEVICE, args))
    assert torch.equal(token.cpu(), reference.coupled_verify(*args)[0])


def test_ties_between_tiles_go_to_the_lowest_id(monkeypatch: pytest.MonkeyPatch) -> None:
    _small_tiles(monkeypatch)
    logits = torch.zeros(1, 300, device=DEVICE)
    logits[0, [250, 140, 70]] = 1.0
    unused = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    token, _ = kernel.coupled_verify(logits, unused, unused, torch.ones(1, device=DEVICE), unused, unused, unused, None, 0)
    assert token.tolist() == [70]
