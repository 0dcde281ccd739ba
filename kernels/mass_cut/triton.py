"""The cut without a sort: a histogram of mass over the ranks, then the tokens of the one bin where the mass reaches p.

Three launches. `_weigh` adds up each bin's mass, in shared memory and from there in the row's table; the program of a row that comes
last finds the bin of the cut. `_sieve` reads the ranks once more: bins above are kept, bins below are not, the tokens of the bin itself
are listed. `_find` looks for the last of them with finer histograms of the list, which is in registers. Bins are 64 an octave of
1 + |rank|, so that scores of any scale spread: at a score of 20 one is 0.25 wide, which is some dozens of tokens of a language model's
law and one or two thousand of a flat one. A list that is too long (of equal scores, say) is not used: `_find` then descends through
the digits of (rank, id) with a histogram of the row for each, exactly, but in one program: some 30 µs a digit for 128k tokens.

Masses are the reference's integers, so who adds first changes nothing. An addition to a bin is two of 32 bits, since shared memory
adds no 64 at once. Bytes a token: 8 read by `_weigh`, 4 read and 1 written by `_sieve`; of operations 53 in `_weigh`, 17 of them
float64 for the exp, and 20 to 35 in `_sieve`. 64 rows of 128k logits are 16 µs of reading and 15 µs of operations at 28.7 T a second,
side by side, then 10 µs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from specdec.kernels.triton_common import INTERPRET, INTERPRETED, ordered

_TILE = 65536 if INTERPRETED else 2048  # compiled, at least as many as a program has threads: none may add a token twice
_SIEVE_TILE = 65536 if INTERPRETED else 256  # few: most tiles then have nothing to list
_LIST_TILE = 4096  # entries of a list, which stay in registers; at least as many as threads too
_ROOM = _LIST_TILE  # of a list
_PROGRAMS = 528  # of `_weigh`: four for each multiprocessor of a large card
_DIGIT = tl.constexpr(11)
_BINS = tl.constexpr(1 << 11)
_ID_BITS = tl.constexpr(22)
_LAST_ID = tl.constexpr((1 << 22) - 1)
_ONE = tl.constexpr(1023 << 52)  # the bits of 1.0


def rejects(log_p: Tensor, rank: Tensor, p: Tensor) -> str | None:
    """Why this kernel cannot run the call, or None."""
    if log_p.shape[1] > _LAST_ID.value + 1:
        return f"rows of {log_p.shape[1]}; it takes up to {_LAST_ID.value + 1}"
    return (
        None
        if log_p.dtype is rank.dtype is torch.float32 and log_p.is_contiguous() and rank.is_contiguous()
        else "rows must be dense float32"
    )


def mass_cut(log_p: Tensor, rank: Tensor, p: Tensor) -> Tensor:
    """Shapes in `specdec.ops.mass_cut`."""
    rows, vocab = log_p.shape
    device = log_p.device
    kept = torch.empty((rows, vocab), dtype=torch.bool, device=device)
    if kept.numel() == 0:
        return kept
    room = min(vocab, _ROOM)
    ids = torch.empty((rows, room), dtype=torch.int32, device=device)
    counted = torch.zeros((rows, _BINS.value + 2), dtype=torch.int64, device=device)  # the table, programs done, tokens listed
    cut = torch.empty((rows, 2), dtype=torch.int64, device=device)  # the bin, what its own mass has to reach
    cells = torch.empty(_BINS.value if INTERPRETED else 0, dtype=torch.int64, device=device)
    tiles = triton.cdiv(vocab, _TILE)
    each = triton.cdiv(rows * tiles, _PROGRAMS)
    _weigh[(rows, triton.cdiv(tiles, each))](log_p, rank, p.contiguous(), cells, counted, cut, vocab, each, TILE=_TILE, num_warps=8)
    _sieve[(rows, triton.cdiv(vocab, _SIEVE_TILE))](rank, ids, counted, cut, kept, vocab, room, TILE=_SIEVE_TILE, num_warps=1)
    _find[(rows,)](log_p, rank, ids, cells, counted, cut, kept, vocab, room, LIST_TILE=_LIST_TILE, TILE=_TILE, num_warps=8)
    return kept


@triton.jit
def _bin(rank):
    """Rises with the rank, equal for equals, f32 -> i32 in [0, _BINS): 64 an octave of 1 + |rank|, the last one open."""
    step = ((1.0 + tl.abs(rank)).to(tl.int32, bitcast=True) >> 17) - (127 << 6)
    step = tl.minimum(step, _BINS // 2 - 1)
    return (step ^ ((rank + 0.0).to(tl.int32, bitcast=True) >> 31)) + _BINS // 2


@triton.jit
def _place(key, token):
    """One number, i64 from 0 up, that falls along the order of the tokens: by falling key, equals by rising id."""
    return ((key.to(tl.int64) + 2147483648) << _ID_BITS) | (token ^ _LAST_ID).to(tl.int64)


@triton.jit
def _masses(log_p):
    """The reference's: i64 in units of 2**-52, none for NaN. exp by a polynomial of degree 11 on half an octave either side of 1 (made for
    the interval, off by 2**-55.8 at most), in fewer operations than a library's that also knows large arguments."""
    x = tl.maximum(tl.where(log_p == log_p, log_p, -40.0), -40.0).to(tl.float64)
    turned = x * 1.4426950408889634 + 6755399441055744.0  # 1.5 * 2**52: rounds to an integer, which the lowest bits then are
    octaves = turned - 6755399441055744.0
    r = x - octaves * 0.6931471805592082  # 40 bits of log 2, exact in any product here
    r = r - octaves * 7.371002565167799e-13
    y = r * 2.51003758422237e-08 + 2.7620075892548164e-07
    y = y * r + 2.7557268480289716e-06
    y = y * r + 2.480152132234228e-05
    y = y * r + 0.00019841269863040559
    y = y * r + 0.0013888888917196736
    y = y * r + 0.008333333333330065
    y = y * r + 0.041666666666624164
    y = y * r + 0.16666666666666669
    y = y * r + 0.5000000000000001
    y = (y * r + 1.0) * r + 1.0
    scaled = (y.to(tl.int64, bitcast=True) + (turned.to(tl.int64, bitcast=True) << 52)).to(tl.float64, bitcast=True)
    return (1.0 + scaled).to(tl.int64, bitcast=True) - _ONE


# Bins in shared memory, which Triton does not index by data: the low words of the sums, 8192 bytes further the high ones.
_ADDRESS = tl.constexpr("{ .shared .align 16 .b8 cells[16384]; mov.u32 $0, cells; }")
_CLEAR = tl.constexpr("st.shared.b32 [$1], 0; st.shared.b32 [$1+8192], 0; mov.b32 $0, 0;")
_READ = tl.constexpr("{ .reg .b32 low, high; ld.shared.b32 low, [$1]; ld.shared.b32 high, [$1+8192]; mov.b64 $0, {low, high}; }")
_ADD = tl.constexpr("""{
.reg .pred more;
.reg .b32 low, high, before;
mov.b64 {low, high}, $2;
atom.shared.add.u32 before, [$1], low;
add.cc.u32 before, before, low;
addc.u32 high, high, 0;
setp.ne.u32 more, high, 0;
@more red.shared.add.u32 [$1+8192], high;
mov.b32 $0, 0;
}""")


@triton.jit
def _open(cells):
    """Where this program's bins are. Once a kernel: every call has bins of its own. Interpreted: `cells`, in plain memory."""
    if INTERPRET:
        return cells
    else:
        return tl.inline_asm_elementwise(_ADDRESS, "=r,r", [tl.program_id(0)], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _clear(bins):
    index = tl.arange(0, _BINS)
    if INTERPRET:
        tl.store(bins + index, tl.zeros([_BINS], tl.int64))
    else:
        tl.debug_barrier()
        tl.inline_asm_elementwise(_CLEAR, "=r,r", [bins + index * 4], dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()


@triton.jit
def _add(bins, index, mass):
    """Adds masses i64 to the bins of index."""
    if INTERPRET:
        tl.atomic_add(bins + index, mass)
    else:  # what is nothing goes to bins far apart: were it -inf, all of it would queue for one
        index = tl.where(mass != 0, index, tl.arange(0, index.shape[0]) & (_BINS - 1))
        tl.inline_asm_elementwise(_ADD, "=r,r,l", [bins + index * 4, mass], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _read(bins):
    index = tl.arange(0, _BINS)
    if INTERPRET:
        return tl.load(bins + index)
    else:
        tl.debug_barrier()
        return tl.inline_asm_elementwise(_READ, "=l,r", [bins + index * 4], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _crossing(masses, target):
    """(the highest bin whose mass, with all above it, reaches the target, -1 if none; what it has to reach by itself)."""
    reached = (tl.cumsum(masses, 0, reverse=True) >= target).to(tl.int32)  # falls with the bin
    found = tl.sum(reached, 0) - 1
    return found, target - tl.sum(tl.where(tl.arange(0, _BINS) > found, masses, 0), 0)


@triton.jit(do_not_specialize=["each"])
def _weigh(log_p, rank, p, cells, counted, cut, vocab, each, TILE: tl.constexpr):
    """Grid (rows, programs), each of which takes `each` tiles."""
    row = tl.program_id(0).to(tl.int64)
    table = counted + row * (_BINS + 2)
    bins = _open(cells)
    _clear(bins)
    start = tl.program_id(1) * each * TILE
    for at in range(start, tl.minimum(start + each * TILE, vocab), TILE):
        column = at + tl.arange(0, TILE)
        real = column < vocab
        law = tl.load(log_p + row * vocab + column, mask=real, other=float("-inf"), eviction_policy="evict_first")
        score = tl.load(rank + row * vocab + column, mask=real, other=0.0)
        _add(bins, _bin(score), _masses(law))
    sums = _read(bins)
    tl.atomic_add(table + tl.arange(0, _BINS), sums, mask=sums != 0, sem="relaxed")
    tl.debug_barrier()  # every thread's sums before the one thread's release
    if tl.atomic_add(table + _BINS, 1, sem="acq_rel") == tl.num_programs(1) - 1:
        target = tl.maximum((1.0 + tl.load(p + row).to(tl.float64)).to(tl.int64, bitcast=True) - _ONE, 1)
        found, rest = _crossing(tl.load(table + tl.arange(0, _BINS), cache_modifier=".cg"), target)
        tl.store(cut + 2 * row, found.to(tl.int64))
        tl.store(cut + 2 * row + 1, rest)


@triton.jit(do_not_specialize=["room"])
def _sieve(rank, ids, counted, cut, kept, vocab, room, TILE: tl.constexpr):
    """Grid (rows, tiles). In the bin of the cut nothing is kept yet."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)
    real = column < vocab
    score = tl.load(rank + row * vocab + column, mask=real, other=0.0, eviction_policy="evict_first")
    own, bound = _bin(score), tl.load(cut + 2 * row).to(tl.int32)
    tl.store(kept + row * vocab + column, own > bound, mask=real)
    chosen = real & (own == bound)
    count = tl.sum(chosen.to(tl.int32), 0)
    if count > 0:
        first = tl.atomic_add(counted + row * (_BINS + 2) + _BINS + 1, count.to(tl.int64), sem="relaxed")
        place = first + tl.cumsum(chosen.to(tl.int32), 0) - 1
        tl.store(ids + row * room + place, column, mask=chosen & (place < room))


@triton.jit
def _select(key, token, mass, bins, target):
    """(key, last id at that key) of the last entry that is wanted. Entries with the largest id are none, and have no mass."""
    low = tl.min(tl.where(token < 2147483647, key, 2147483647), 0).to(tl.int64)
    high = tl.max(key, 0).to(tl.int64)
    while low < high:  # the key lies between the two
        shift = tl.where(high - low >= 1 << 22, 22, tl.where(high - low >= 1 << 11, 11, 0))
        _clear(bins)
        inside = (key >= low) & (key <= high)
        _add(bins, tl.where(inside, (key - low) >> shift, 0).to(tl.int32), tl.where(inside, mass, 0))
        digit, target = _crossing(_read(bins), target)
        low += digit.to(tl.int64) << shift
        high = tl.minimum(high, low + (1 << shift) - 1)
    tied = key == low
    first = tl.min(tl.where(tied, token, 2147483647), 0).to(tl.int64)
    last = tl.max(tl.where(tied, token, 0), 0).to(tl.int64)
    while first < last:  # the lowest id up to which its tokens are wanted
        middle = (first + last) >> 1
        reached = tl.sum(tl.where(tied & (token <= middle), mass, 0), 0) >= target
        first, last = tl.where(reached, first, middle + 1), tl.where(reached, middle, last)
    return low, last


@triton.jit
def _descend(log_p, rank, bins, vocab, bound, target, TILE: tl.constexpr):
    """`_place` of the last token of bin `bound` that is wanted, digit by digit from the top. log_p, rank: of the row."""
    found = tl.full([], 0, tl.int64)
    shift = tl.full([], 32, tl.int64) + _ID_BITS
    while shift > 0:
        _clear(bins)
        narrower = tl.maximum(shift - _DIGIT, 0)
        for at in range(0, vocab, TILE):
            column = at + tl.arange(0, TILE)
            real = column < vocab
            score = tl.load(rank + column, mask=real, other=0.0)
            place = _place(ordered(score), column)
            mine = real & (_bin(score) == bound) & ((place >> shift) == found)
            law = tl.load(log_p + column, mask=mine, other=float("-inf"))
            _add(bins, ((place >> narrower) & ((1 << (shift - narrower)) - 1)).to(tl.int32), _masses(law))
        digit, target = _crossing(_read(bins), target)
        found = (found << (shift - narrower)) | digit
        shift = narrower
    return found


@triton.jit(do_not_specialize=["room"])
def _find(
    log_p, rank, ids, cells, counted, cut, kept, vocab, room, LIST_TILE: tl.constexpr, TILE: tl.constexpr
):  # fmt: skip
    """Grid (rows): keeps what is wanted of the bin of the cut."""
    row = tl.program_id(0).to(tl.int64)
    count = tl.load(counted + row * (_BINS + 2) + _BINS + 1)
    target = tl.load(cut + 2 * row + 1)
    log_p += row * vocab
    rank += row * vocab
    kept += row * vocab
    bins = _open(cells)
    if count > room:
        bound = tl.load(cut + 2 * row).to(tl.int32)
        last = _descend(log_p, rank, bins, vocab, bound, target, TILE)
        for at in range(0, vocab, TILE):
            column = at + tl.arange(0, TILE)
            score = tl.load(rank + column, mask=column < vocab, other=0.0)
            wanted = _place(ordered(score), column) >= last
            tl.store(kept + column, wanted, mask=(column < vocab) & (_bin(score) == bound))
    elif count > 0:
        slot = tl.arange(0, LIST_TILE)
        there = slot < count
        token = tl.load(ids + row * room + slot, mask=there, other=2147483647)
        key = tl.where(there, ordered(tl.load(rank + token, mask=there, other=0.0)), -2147483648)
        mass = _masses(tl.load(log_p + token, mask=there, other=float("-inf")))
        least, last_id = _select(key, token, mass, bins, target)
        tl.store(kept + token, (key > least) | ((key == least) & (token <= last_id)), mask=there)
