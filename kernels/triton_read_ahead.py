"""`read_ahead` in Triton: what small ops share that ask for weights with programs beyond those they need.

These programs come last in the grid, about one to a multiprocessor, so that the op's own start first and no multiprocessor makes all the
requests. A thread asks for a chunk with one instruction of Hopper's copy engine, which nobody waits for. On older cards there is none.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import num_threads

from specdec.kernels.read_ahead import PIECES, Ahead
from specdec.kernels.triton_common import INTERPRET, capability

_PROGRAMS = 132  # that ask: one a multiprocessor of a large card
_LINE = tl.constexpr(128)  # bytes: chunks no larger are asked for by the older instruction
CHUNK = 4096  # bytes a thread asks for at a time


def asked(ahead: Ahead, device: torch.device, width: int = 1) -> tuple[int, tuple[Tensor | int, ...] | None]:
    """(rows of `width` programs to add to the grid, the kernel's argument), nothing where there is nothing to ask for or nobody to ask."""
    if not ahead or capability(device) < 90:
        return 0, None
    pieces = (*ahead, *(ahead[0],) * (PIECES - len(ahead)))
    sizes = (*(piece.numel() for piece in ahead), *(0,) * (PIECES - len(ahead)))
    return triton.cdiv(_PROGRAMS, width), (*(part for pair in zip(pieces, sizes, strict=True) for part in pair), CHUNK)


@triton.jit
def send_for(ahead, program, programs):
    """Asks for the part of `program` of `programs`. ahead: the second of what `asked` gives."""
    _send_for(ahead[0], ahead[1], ahead[4], program, programs)
    _send_for(ahead[2], ahead[3], ahead[4], program, programs)


@triton.jit
def send_for_row(ahead, own):
    """The same of a grid of two axes, where programs from `own` on along the second one ask."""
    send_for(ahead, (tl.program_id(1) - own) * tl.num_programs(0) + tl.program_id(0), (tl.num_programs(1) - own) * tl.num_programs(0))


@triton.jit
def _send_for(base, count, chunk, program, programs):
    """Neighbouring chunks go to different programs: what comes first is asked for first."""
    lanes: tl.constexpr = 32 if INTERPRET else num_threads()
    for first in range(program, tl.cdiv(count, chunk), programs * lanes):
        start = (first + tl.arange(0, lanes) * programs) * chunk
        _ask(base + start, tl.minimum(count - start, chunk), chunk)


@triton.jit
def _ask(places, sizes, chunk):
    """For `sizes` bytes at `places`, nothing where that is not positive."""
    some: tl.constexpr = "{ .reg .pred some; setp.gt.s32 some, $2, 0; @some "
    line: tl.constexpr = some + "prefetch.global.L2 [$1]; mov.b32 $0, 0; }"
    bulk: tl.constexpr = some + "cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0; }"
    if not INTERPRET:
        if chunk <= _LINE:
            tl.inline_asm_elementwise(line, "=r,l,r", [places, sizes], dtype=tl.int32, is_pure=False, pack=1)
        else:
            tl.inline_asm_elementwise(bulk, "=r,l,r", [places, sizes], dtype=tl.int32, is_pure=False, pack=1)
