"""The noise: published Philox vectors, our counter layout, exactness of uniforms and of the Gumbel transform."""

from __future__ import annotations

import math

import pytest
import torch

from specdec import rng
from specdec.kernels.noise import reference as noise

# Random123's known answers for philox4x32-10: counter, key, output.
KAT = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def _ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int64)


def _python_word(seed: int, token: int, position: int, choice: int, purpose: int) -> int:
    """The same word with Python integers, written from the paper's description."""
    c = [token // 4, position, choice, purpose]
    k = [seed % 2**32, (seed >> 32) % 2**32]
    for _ in range(10):
        p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [(p1 >> 32) ^ c[1] ^ k[0], p1 % 2**32, (p0 >> 32) ^ c[3] ^ k[1], p0 % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c[token % 4]


@pytest.mark.parametrize(("counter", "key", "expected"), KAT)
def test_philox_known_answers(counter: tuple[int, ...], key: tuple[int, ...], expected: tuple[int, ...]) -> None:
    out = noise.philox4x32(tuple(_ints(c) for c in counter), tuple(_ints(k) for k in key))
    assert tuple(int(w) for w in out) == expected


def test_counter_layout_reproduces_the_published_pi_vector() -> None:
    """seed = key words (low, high), id // 4 = counter word 0, then position, choice, purpose; id % 4 picks the word."""
    seed = rng.to_key(0x299F31D0A4093822)
    ids = _ints(*(4 * 0x243F6A88 + i for i in range(4)))[None]
    words = noise.philox_words(_ints(seed), _ints(0x85A308D3), _ints(0x13198A2E), ids, 0x03707344)
    assert tuple(words[0].tolist()) == KAT[2][2]


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 123456789012345])
def test_words_match_big_integer_arithmetic(seed: int) -> None:
    ids = _ints(0, 1, 2, 3, 4, 7, 49151, 200000)[None]
    for position, choice, purpose in ((0, 0, 0), (131071, 3, rng.ACCEPT), (2**31, 127, rng.draft_purpose(63))):
        got = noise.philox_words(_ints(seed), _ints(position), _ints(choice), ids, purpose)[0].tolist()
        assert got == [_python_word(seed % 2**64, i, position, choice, purpose) for i in ids[0].tolist()]


def test_uniform_is_exact_and_open() -> None:
    """The transform is exact in float64; the float32 that is handed out is never 0 and never 1."""
    for word, u in ((0, 2.0**-33), (2**32 - 1, 1 - 2.0**-33), (2**31, 0.5 + 2.0**-33)):
        assert noise._uniform(_ints(word)).item() == u
    keys = torch.zeros(1, dtype=torch.int64)
    ids = torch.arange(50_000)[None]
    drawn = noise.philox_uniform(keys, keys, keys, ids, rng.ACCEPT)
    assert drawn.dtype is torch.float32 and drawn.min() > 0 and drawn.max() < 1
    exact = (noise.philox_words(keys, keys, keys, ids, rng.ACCEPT).double() + 0.5) / 2**32
    assert ((drawn - exact).abs() <= exact * 2.0**-24).all()


def test_gumbel_is_finite_at_both_ends_and_correctly_rounded() -> None:
    words = _ints(0, 1, 2**16, 2**31, 2**32 - 2, 2**32 - 1)
    expected = [-math.log(-math.log1p(-(w + 0.5) / 2**32)) for w in words.tolist()]
    assert torch.equal(noise._gumbel(words), torch.tensor(expected, dtype=torch.float64).float())
    assert -3.2 < expected[-1] < expected[0] < 22.9


@pytest.mark.parametrize("vocab", [1, 3, 4, 5, 497])
def test_argmax_adds_exactly_the_noise_of_each_id(vocab: int) -> None:
    gen = torch.Generator().manual_seed(vocab)
    scores = torch.randn(5, vocab, generator=gen)
    seeds, positions, choices = torch.arange(5) * 7 - 3, torch.arange(5) + 11, torch.arange(5) % 2
    noisy = torch.tensor([True, False, True, True, False])
    ids = torch.arange(vocab).expand(5, vocab)
    g = noise.gumbel_noise(seeds, positions, choices, ids, rng.TARGET)
    expected = torch.where(noisy[:, None], scores + g, scores).argmax(-1)
    assert torch.equal(noise.gumbel_argmax(scores, seeds, positions, choices, noisy, rng.TARGET), expected)


def test_argmax_breaks_ties_by_lowest_id_and_never_picks_a_masked_one() -> None:
    zero, greedy, noisy = _ints(0), torch.tensor([False]), torch.tensor([True])
    assert noise.gumbel_argmax(torch.tensor([[1.0, 2.0, 2.0, 0.0]]), zero, zero, zero, greedy, 0).item() == 1
    scores = torch.full((1, 40), -math.inf)
    scores[0, 17] = -1e30
    assert noise.gumbel_argmax(scores, zero, zero, zero, noisy, 0).item() == 17


def test_argmax_rows_do_not_depend_on_their_batch() -> None:
    gen = torch.Generator().manual_seed(1)
    scores = torch.randn(6, 301, generator=gen)
    keys = torch.arange(6)
    noisy = torch.ones(6, dtype=torch.bool)
    whole = noise.gumbel_argmax(scores, keys, keys, keys, noisy, 0)
    for r in range(6):
        one = slice(r, r + 1)
        assert noise.gumbel_argmax(scores[one], keys[one], keys[one], keys[one], noisy[one], 0).item() == whole[r].item()
    assert noise.gumbel_argmax(scores[:0], keys[:0], keys[:0], keys[:0], noisy[:0], 0).shape == (0,)


def test_gumbel_argmax_samples_the_softmax() -> None:
    """Chi-square over 20,000 positions, 7 degrees of freedom: a true sampler exceeds 29.9 once in 10,000 seeds; the seed is fixed."""
    p = torch.tensor([0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005], dtype=torch.float64)
    n = 20_000
    zeros = torch.zeros(n, dtype=torch.int64)
    noisy = torch.ones(n, dtype=torch.bool)
    drawn = noise.gumbel_argmax(p.log().float().expand(n, 8), zeros + 42, torch.arange(n), zeros, noisy, rng.TARGET)
    counts = torch.bincount(drawn, minlength=8).double()
    assert ((counts - n * p) ** 2 / (n * p)).sum().item() < 29.9


def test_purposes_choices_and_seeds_give_different_noise() -> None:
    ids = torch.arange(64)[None]
    names = [(0, 0, rng.TARGET), (0, 0, rng.DRAFT), (0, 0, rng.ACCEPT), (0, 0, rng.RESIDUAL), (0, 0, rng.SYNTH)]
    names += [(0, 1, rng.TARGET), (1, 0, rng.TARGET), (0, 0, rng.draft_purpose(2))]
    rows = [noise.gumbel_noise(_ints(seed), _ints(5), _ints(choice), ids, purpose) for seed, choice, purpose in names]
    for i, a in enumerate(rows):
        for b in rows[i + 1 :]:
            assert (a == b).float().mean() < 0.1


def test_seed_wraps_to_two_complement() -> None:
    assert rng.to_key(2**64 - 1) == -1 == rng.to_key(-1)
    assert rng.to_key(2**63) == -(2**63) == rng.to_key(-(2**63))
    assert rng.to_key(12) == 12
