"""The noise in every backend: published Philox vectors, exact words, the pruned argmax against the full one."""

from __future__ import annotations

import pytest
import torch

from specdec import ops
from specdec.kernels.noise import reference
from specdec.kernels.registry import Backend
from tests.kernels.device import at_home
from tests.kernels.matrix import implementations, label, use

UNIFORM = implementations("philox_uniform")
ARGMAX = implementations("gumbel_argmax")

# Random123, kat_vectors, philox4x32 10: counter, key, result
KNOWN = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    ((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0), (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)),
)


def _signed(value: int) -> torch.Tensor:
    return torch.tensor([value - (1 << 64) if value >= 1 << 63 else value])


@pytest.mark.parametrize("entry", UNIFORM, ids=label)
@pytest.mark.parametrize("known", KNOWN, ids=["zeros", "ones", "pi"])
def test_published_vectors_through_our_counter_layout(entry: tuple[str, Backend, str | None], known: tuple) -> None:
    counter, key, words = known
    _, backend, variant = entry
    ids = torch.tensor([[4 * counter[0] + lane for lane in range(4)]])
    seed = _signed(key[0] | key[1] << 32)
    with use(variant):
        got = at_home(backend, seed, torch.tensor([counter[1]]), torch.tensor([counter[2]]), ids, counter[3])
    expected = torch.tensor([words], dtype=torch.float64).add(0.5).mul(2.0**-32).float().clamp(max=1 - 2.0**-24)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("entry", ARGMAX, ids=label)
@pytest.mark.parametrize("scale", [0.0, 0.3, 2.0, 20.0])
def test_argmax_equals_scores_plus_noise(entry: tuple[str, Backend, str | None], scale: float) -> None:
    """64 rows of the model's vocabulary: what is skipped never wins."""
    _, backend, variant = entry
    rows, vocab = 24, 49152
    g = torch.Generator().manual_seed(int(scale * 10))
    scores = torch.randn(rows, vocab, generator=g) * scale
    seeds = torch.randint(-(2**62), 2**62, (rows,), generator=g)
    index = torch.arange(rows)
    with use(variant):
        got = at_home(backend, scores, seeds, index, index % 2, torch.ones(rows, dtype=torch.bool), 0)
    ids = torch.arange(vocab).expand(rows, -1)
    noisy = scores + reference.gumbel_noise(seeds, index, index % 2, ids, 0)
    assert torch.equal(got, noisy.argmax(1))


@pytest.mark.parametrize("entry", ARGMAX, ids=label)
def test_ties_go_to_the_lowest_id(entry: tuple[str, Backend, str | None]) -> None:
    _, backend, variant = entry
    scores = torch.zeros(3, 200)
    scores[0, [150, 63, 64]] = 1.0
    scores[1, 199] = 1.0
    zero = torch.zeros(3, dtype=torch.int64)
    with use(variant):
        got = at_home(backend, scores, zero, zero, zero, torch.zeros(3, dtype=torch.bool), 0)
    assert got.tolist() == [63, 199, 0]


def test_noise_is_bounded_as_the_pruning_assumes() -> None:
    """The largest noise belongs to word 0; the compiled argmax skips what cannot gain 22.88."""
    u = (torch.tensor([0.0, 2.0**32 - 1], dtype=torch.float64) + 0.5) * 2.0**-32
    largest, smallest = (-torch.log(-torch.log1p(-u))).tolist()
    assert 22.87 < largest < 22.88 and -3.2 < smallest < -3.1


def test_choices_positions_seeds_and_purposes_separate_the_noise() -> None:
    ids = torch.arange(64)[None]
    one, two = torch.tensor([1]), torch.tensor([2])
    base = ops.gumbel_noise(one, one, one, ids, 0)
    for other in (
        ops.gumbel_noise(two, one, one, ids, 0),
        ops.gumbel_noise(one, two, one, ids, 0),
        ops.gumbel_noise(one, one, two, ids, 0),
        ops.gumbel_noise(one, one, one, ids, 1),
        ops.gumbel_noise(one << 32, one, one, ids, 0),
    ):
        assert not (other == base).any()
    assert torch.equal(base, ops.gumbel_noise(one, one, one, ids, 0))
