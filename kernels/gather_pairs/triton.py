"""One launch: a program copies a piece of one node's taps to its place; the first of a sequence writes its tokens too."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_common import INTERPRETED

_TILE = 16384 if INTERPRETED else 1024


def rejects(said: Tensor, along: Tensor, committed: Tensor, num_committed: Tensor, path: Tensor, taps: Tensor, *_: object) -> str | None:
    """Why this kernel cannot run the call, or None."""
    return None if said.is_contiguous() and along.is_contiguous() and taps.stride(1) == 1 else "outputs and taps must be dense"


def gather_pairs(
    said: Tensor, along: Tensor, committed: Tensor, num_committed: Tensor, path: Tensor, taps: Tensor, roots: Tensor, columns: Tensor | None
) -> None:
    """Shapes and meaning in `specdec.ops.gather_pairs`."""
    (size, most, width), (batch, run) = along.shape, committed.shape
    _gather[(size, run, triton.cdiv(width, _TILE))](
        said, along, committed.contiguous(), num_committed, path.contiguous(), taps, roots, roots if columns is None else columns,
        batch, run, most, width, taps.stride(0), CHOSEN=columns is not None, SAID=triton.next_power_of_2(most + 1), TILE=_TILE,
    )  # fmt: skip


@triton.jit(
    do_not_specialize=["batch", "run", "most"],
    do_not_specialize_on_alignment=["committed", "num_committed", "path", "roots"],
)
def _gather(
    said, along, committed, num_committed, path, taps, roots, columns, batch, run, most, width, taps_row,
    CHOSEN: tl.constexpr, SAID: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Grid (sequences and copies of the first, nodes of a path, tiles of columns). run = D + 1."""
    sequence, step, tile = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    source = tl.where(sequence < batch, sequence, 0)
    row = tl.load(roots + source)
    if step > 0:
        row += tl.load(path + source * (run - 1) + step - 1)
    column = tile * TILE + tl.arange(0, TILE)
    inside = column < width
    place = tl.load(columns + column, mask=inside, other=0) if CHOSEN else column
    value = tl.load(taps + row * taps_row + place, mask=inside, other=0.0)
    tl.store(along + (sequence * most + step) * width + column, value, mask=inside)
    if (step == 0) & (tile == 0):
        lane = tl.arange(0, SAID)
        token = tl.load(committed + source * run + lane, mask=lane < run, other=0)
        token = tl.where(lane == most, tl.load(num_committed + source), token)
        tl.store(said + sequence * (most + 1) + lane, token, mask=lane <= most)
