"""All fields of a batch in one launch: the first program has what there is per sequence, some the rows, the others pieces of tables."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.pad_batch.reference import Fields
from specdec.kernels.triton_common import INTERPRETED

_ROWS = 256
_PIECE = 16384 if INTERPRETED else 1024  # entries of a table


def rejects(own: Fields, given: Fields) -> str | None:
    """Why this kernel cannot run the call, or None."""
    return None if all(t.is_contiguous() for t in own) else "inputs must be dense"


def pad_batch(own: Fields, given: Fields) -> None:
    """Shapes and meaning in `specdec.ops.pad_batch`."""
    fields = [t.contiguous() for t in given]
    (groups, rows), (_, sequences, width) = fields[3].shape, fields[7].shape
    own_rows, (_, own_sequences, own_width) = len(own[0]), own[7].shape
    tiles, pieces = triton.cdiv(own_rows, _ROWS), triton.cdiv(width, _PIECE)
    first: tuple[Tensor, Tensor] = (own[8], fields[8]) if len(own) > 8 else (own[4], fields[4])
    _pad[(1 + tiles + groups * sequences * pieces,)](
        *own[:8], first[0], *fields[:8], first[1], rows, sequences, width, own_rows, own_sequences, own_width, groups, tiles, pieces,
        FIRST=len(own) > 8, ROWS=_ROWS, SEQUENCES=triton.next_power_of_2(own_sequences + 1), PIECE=_PIECE, num_warps=4,
    )  # fmt: skip


_SIZES = ["rows", "sequences", "width", "own_rows", "own_sequences", "own_width", "groups", "tiles", "pieces"]
_GIVEN = ["ids", "positions", "words", "slots", "contexts", "trees", "ends", "tables", "first"]  # wherever a copy put them


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=[*_GIVEN, *(f"own_{name}" for name in _GIVEN)])
def _pad(
    own_ids, own_positions, own_words, own_slots, own_contexts, own_trees, own_ends, own_tables, own_first,
    ids, positions, words, slots, contexts, trees, ends, tables, first,
    rows, sequences, width, own_rows, own_sequences, own_width, groups, tiles, pieces,
    FIRST: tl.constexpr, ROWS: tl.constexpr, SEQUENCES: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Grid (1 + tiles of rows + groups · sequences · pieces of a table's row)."""
    program = tl.program_id(0)
    if program == 0:
        place = tl.arange(0, SEQUENCES)
        there = place < sequences
        tl.store(own_contexts + place, tl.load(contexts + place, mask=there, other=0), mask=there)
        tl.store(own_trees + place, tl.load(trees + place, mask=there, other=0), mask=there)
        if FIRST:
            tl.store(own_first + place, tl.load(first + place, mask=there, other=0), mask=there)
        end = tl.load(ends + place, mask=place <= sequences, other=0)
        tl.store(own_ends + place, tl.where(place <= sequences, end, rows), mask=place <= own_sequences)
    elif program <= tiles:
        row = (program - 1) * ROWS + tl.arange(0, ROWS)
        there = row < rows
        tl.store(own_ids + row, tl.load(ids + row, mask=there, other=0), mask=there)
        tl.store(own_positions + row, tl.load(positions + row, mask=there, other=0), mask=there)
        tl.store(own_words + row, tl.load(words + row, mask=there, other=0), mask=there)
        for group in range(groups):
            tl.store(own_slots + group * own_rows + row, tl.load(slots + group * rows + row, mask=there, other=-1), mask=row < own_rows)
    else:
        piece = program - 1 - tiles
        line = piece // pieces  # of a group and a sequence
        column = piece % pieces * PIECE + tl.arange(0, PIECE)
        own_line = (line // sequences * own_sequences + line % sequences).to(tl.int64)
        block = tl.load(tables + line.to(tl.int64) * width + column, mask=column < width, other=0)
        tl.store(own_tables + own_line * own_width + column, block, mask=column < width)
