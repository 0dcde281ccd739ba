"""Who draws what from the noise, and the 64-bit key of a sequence.

The noise itself is defined in `kernels/noise/reference.py` and called through `specdec.ops`. A draw is named by
(seed, id, position, choice, purpose). Purposes keep draws with different jobs independent of each other.

TARGET is keyed by the *absolute position of the token it chooses*: it is the same number in every step that gets there,
whatever was drafted; that is what makes coupled decoding independent of speculation, and what a coupled drafter reads.

The coins of rejection and block verification (`ACCEPT`, `RESIDUAL`, `DRAFT`) must be fresh in every step instead: a step
may look at draws of positions it does not settle (block verification reads every coin of the chain), and using them again
in the next step would condition the second use on the first. Their position word is therefore the number of tokens the
sequence had when the step began, which no two steps of a sequence share.

    TARGET            position = that of the chosen token        id = target token id
    DRAFT + 256 * d   position = tokens at the start of the step id = target token id, for the draws at depth d
    ACCEPT            position = tokens at the start of the step id = node
    RESIDUAL          position = tokens at the start of the step id = target token id
    SYNTH             position = tokens at the start of the step id = depth
    CONTENT           position = any                             id = any; pseudo-random decisions of test drafters
"""

from __future__ import annotations

TARGET = 0
DRAFT = 1
ACCEPT = 2
RESIDUAL = 3
SYNTH = 4
CONTENT = 5


def draft_purpose(depth: int) -> int:
    """Purpose word for drawing the draft tokens at `depth` (1 = children of the root); 0 <= depth < 2**23."""
    return DRAFT + (depth << 8)


def to_key(seed: int) -> int:
    """A user's seed in [-2**63, 2**64) as the int64 (two's complement) that tensors hold; equal modulo 2**64."""
    return ((seed + 2**63) % 2**64) - 2**63
