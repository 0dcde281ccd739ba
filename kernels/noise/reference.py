"""The noise, defined once: Philox4x32-10, uniforms, Gumbel noise and the noisy argmax, in plain torch.

Every other backend must agree with this file: random words exactly, numbers within the op's tolerance. A word is named by
(seed, token id, position, choice, purpose) and by nothing else, so it can be computed anywhere, in any order, by anybody: the
target and a drafter that want the noise of (position, id) get the same number.

    key      = the 64-bit seed (low word, high word), given as int64 in two's complement
    counter  = (id // 4, position, choice, purpose); the word is number id % 4 of the four outputs
    u        = (word + 0.5) / 2**32           in (0, 1)
    exponential E = -log1p(-u)                 Gumbel g = -log(E), in [-3.14, 22.88]

Noise is evaluated in float64 and rounded once to float32, so any backend with logs good to 1e-12 gives the same float32 but for
one case in about ten million. Words are unsigned 32-bit values held in int64, whose products wrap modulo 2**64, which is what
Philox needs. Philox: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_BELOW_ONE = 1.0 - 2.0**-24  # the largest float32 below 1
_CHUNK = 1 << 21  # elements a pass may hold: bounds the temporaries of wide batches


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds. All words are int64 tensors in [0, 2**32) that broadcast together; so are the four results."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # 32 x 32 -> 64 bits; the shift is arithmetic, the mask drops the copies of the sign bit
        p0, p1 = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def _blocks(seeds: Tensor, positions: Tensor, choices: Tensor, block: Tensor, purpose: int) -> Tensor:
    """The four words of counters `block` [R or 1, W]: [R, W, 4] i64."""
    row = [t.unsqueeze(1) & _MASK for t in (positions, choices, seeds, seeds >> 32)]
    words = philox4x32((block, row[0], row[1], torch.full_like(block, purpose)), (row[2], row[3]))
    return torch.stack(torch.broadcast_tensors(*words), dim=-1)


def philox_words(seeds: Tensor, positions: Tensor, choices: Tensor, ids: Tensor, purpose: int) -> Tensor:
    """The 32-bit words of the named draws. seeds, positions, choices [R] i64; ids [R, W] i64 >= 0 -> [R, W] i64."""
    return _blocks(seeds, positions, choices, ids >> 2, purpose).gather(-1, (ids & 3).unsqueeze(-1)).squeeze(-1)


def _uniform(words: Tensor) -> Tensor:
    """float64, because neither word + 0.5 nor 1 - 2**-33 exists in float32."""
    return (words.double() + 0.5) * 2.0**-32


def _gumbel(words: Tensor) -> Tensor:
    return (-torch.log(-torch.log1p(-_uniform(words)))).float()


def philox_uniform(seeds: Tensor, positions: Tensor, choices: Tensor, ids: Tensor, purpose: int) -> Tensor:
    """u rounded to float32, never 0 and never 1. seeds, positions, choices [R] i64; ids [R, W] i64 -> [R, W] f32."""
    return _uniform(philox_words(seeds, positions, choices, ids, purpose)).float().clamp(max=_BELOW_ONE)


def gumbel_noise(seeds: Tensor, positions: Tensor, choices: Tensor, ids: Tensor, purpose: int) -> Tensor:
    """g of the named draws. seeds, positions, choices [R] i64; ids [R, W] i64 -> [R, W] f32."""
    return _gumbel(philox_words(seeds, positions, choices, ids, purpose))


def gumbel_argmax(scores: Tensor, seeds: Tensor, positions: Tensor, choices: Tensor, noisy: Tensor, purpose: int) -> Tensor:
    """argmax over v of scores[r, v] + g(r, v) where noisy[r], of scores[r, v] alone elsewhere; ties to the lowest id.

    scores [R, V] f32, already divided by the temperature, -inf = impossible, NaN counts as -inf; seeds, positions, choices
    [R] i64; noisy [R] bool -> [R] i64. The sum is one float32 addition. A row depends on nothing but its own entries.
    """
    rows, vocab = scores.shape
    step = max(1, _CHUNK // max(1, vocab))
    block = torch.arange(-(-vocab // 4), device=scores.device).unsqueeze(0)
    result = torch.empty(rows, dtype=torch.int64, device=scores.device)
    for lo in range(0, rows, step):
        own = slice(lo, lo + step)
        total = scores[own].nan_to_num(nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
        if bool(noisy[own].any()):  # a look from the host: noise costs far more
            words = _blocks(seeds[own], positions[own], choices[own], block, purpose).flatten(1)[:, :vocab]
            total = torch.where(noisy[own].unsqueeze(1), total + _gumbel(words), total)
        result[own] = total.argmax(dim=-1)  # the first of equals
    return result
