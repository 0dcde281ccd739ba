"""Counter-based Gumbel noise: Philox4x32-10, shared by sampling and drafting.

Key = the 64-bit seed (low word first). Counter = (token id // 4, absolute position, choice index, purpose); the token's
word is id % 4. u = (word + 0.5) / 2³², E = -log1p(-u), g = -log E, computed in float64 and rounded once to float32, so
any backend with logs good to 1e-12 gives the same float32 but for one case in about ten million.
Philox: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

from __future__ import annotations

import torch
from torch import Tensor

_MASK = 0xFFFFFFFF
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_BELOW_ONE = 1.0 - 2.0**-24


def philox4x32(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ten rounds. All words i64 tensors holding values in [0, 2³²), broadcast against each other."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * _M0, c2 * _M1  # wraps like unsigned 64-bit; the shifts below mask off the sign
        c0, c1, c2, c3 = ((p1 >> 32) & _MASK) ^ c1 ^ k0, p1 & _MASK, ((p0 >> 32) & _MASK) ^ c3 ^ k1, p0 & _MASK
        k0, k1 = (k0 + _W0) & _MASK, (k1 + _W1) & _MASK
    return c0, c1, c2, c3


def philox_words(seeds: Tensor, positions: Tensor, choices: Tensor, ids: Tensor, purpose: int) -> Tensor:
    """seeds, positions, choices [R] i64, ids [R,W] i64 -> the uint32 word of every id, as i64 [R,W]."""
    row = [t.unsqueeze(1) & _MASK for t in (positions, choices, seeds, seeds >> 32)]
    words = philox4x32((ids >> 2, row[0], row[1], torch.full_like(ids, purpose)), (row[2], row[3]))
    lane = ids & 3
    return torch.where(lane < 2, torch.where(lane == 0, words[0], words[1]), torch.where(lane == 2, words[2], words[3]))


def philox_uniform(seeds: Tensor, positions: Tensor, choices: Tensor, ids: Tensor, purpose: int) -> Tensor:
    """Uniform numbers in (0, 1), [R,W] f32; never 1.0 after rounding."""
    words = philox_words(seeds, positions, choices, ids, purpose)
    return ((words.double() + 0.5) * 2.0**-32).float().clamp(max=_BELOW_ONE)


def gumbel_noise(seeds: Tensor, positions: Tensor, choices: Tensor, ids: Tensor, purpose: int) -> Tensor:
    """Standard Gumbel noise of the given target ids, [R,W] f32, within [-3.2, 22.9]."""
    u = (philox_words(seeds, positions, choices, ids, purpose).double() + 0.5) * 2.0**-32
    return (-torch.log(-torch.log1p(-u))).float()


def gumbel_argmax(scores: Tensor, seeds: Tensor, positions: Tensor, choices: Tensor, noisy: Tensor, purpose: int) -> Tensor:
    """scores [R,V] f32 (divided by temperature; masked = -inf), seeds, positions, choices [R] i64, noisy [R] bool -> [R] i64.

    argmax of score + noise (noise only where `noisy`), ties to the lowest id. NaN scores count as -inf.
    """
    rows, vocab = scores.shape
    ids = torch.arange(vocab, device=scores.device).expand(rows, vocab)
    noise = gumbel_noise(seeds, positions, choices, ids, purpose)
    total = torch.nan_to_num(scores + torch.where(noisy.unsqueeze(1), noise, 0.0), nan=-torch.inf, posinf=torch.inf, neginf=-torch.inf)
    best = total.amax(dim=1, keepdim=True)
    return torch.where(total == best, ids, vocab).amin(dim=1)  # amin, since argmax leaves ties open
