"""The plain read kernel: how long the same bytes take when nothing is done with them."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

_WORDS = 4096  # int32 words a step of a program: 16 KB
_PROGRAMS = 132 * 8


def programs(count: int) -> int:
    """Programs that read `count` words."""
    return max(1, min(_PROGRAMS, triton.cdiv(count, _WORDS)))


def read(words: Tensor, out: Tensor) -> None:
    """words int32 [W], out int32 [programs(W)]: the exclusive or of all of out is that of all words."""
    _read[(programs(words.numel()),)](out, words, words.numel(), programs(words.numel()), WORDS=_WORDS, num_warps=8, num_stages=4)


@triton.jit
def _read(out, words, count, stride, WORDS: tl.constexpr):
    """The exclusive or of what this program reads: cheap, and not to be left out by a compiler."""
    seen = tl.zeros([WORDS], tl.int32)
    for step in range(tl.program_id(0), tl.cdiv(count, WORDS), stride):
        place = step * WORDS + tl.arange(0, WORDS)
        seen = seen ^ tl.load(words + place, mask=place < count, other=0, eviction_policy="evict_first")
    tl.store(out + tl.program_id(0), tl.xor_sum(seen, 0))
