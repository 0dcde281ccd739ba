"""How the Triton kernels cut a call into programs, from what the host knows without asking the device. Pure functions.

The argument for the tile, on a card that reads R = 4.5 TB/s and does F = 450 TFLOP/s in attention over 132 processors. Per KV head and
key, M packed rows (nodes × query heads of the group) cost 2·hd·w bytes (w bytes a number) and 4·hd·M operations: reading takes longer
up to M = w·F / 2R, that is M = 100 for bfloat16 and 50 for FP8. Hence a tile holds up to 128 packed rows (64 before Hopper), and up to
there the context is read once. With more (64 nodes × group 8 = 512 rows: four tiles) the tiles of one sequence, head and split run side
by side and share the keys through L2: each reads them, four times the bytes out of L2, but in the 5.1 times longer that the products
then take, so that L2 delivers 0.8 R. DRAM still reads once as long as the tiles keep step within the 50 MB of L2.

The argument for the splits: batch 1 with 8 KV heads makes 8 programs, and a processor with two tiles of 32 KiB in flight draws 64 KiB
a latency: reckoning that as a microsecond, a seventieth of R. Hence enough splits to give every processor one program of eight warps
or two of four, in one wave, each split at least two tiles long. It costs its partial result written and read, M·hd·8 bytes, against the
2·hd·w·L/S of its keys: at M = 64, L = 8192, S = 16 and bfloat16 a quarter of them, out of L2.

The argument for who merges: a launch of its own for the merge takes 3.1 to 3.3 µs of a decode step on an H200, whose kernels before it
take 5 to 6. The program that comes last at a tile can merge it at once: a store, an atomic and a load more, each a trip to L2, reckoned
at 1.6 µs. But it merges alone, so only as much as it holds in one go (`MERGED`); with more a launch of many programs is faster. (640 keys,
one sequence, group 4: 9.4 µs for one node, merged by the last program; 15.4 for four, merged by it in two goes; 8.9 for eight, merged by a
launch of its own.)

The argument for short contexts: a tile adds about 0.4 µs to a program's chain of loads and products, so up to some six tiles, of which
those with a mask count two more, one program is done before splits would be merged; from there on splits of two tiles each.

Measured on an H200 before the tiles of whole warp groups: 1.1 to 1.4 times the bound for 32,768 keys, one node or 64; of 8 nodes × group 8,
a program a processor of eight warps that all did the same softmax, 1.75. docs/kernels.md has what is here now.
"""

from __future__ import annotations

from dataclasses import dataclass

MOST_SPLITS = 32  # the merge takes them in one go
MERGED = 8192  # numbers that the last program of a tile merges; more go to a launch of their own
HOPPER_SHARED = 200_000  # bytes; only cards from Hopper on have as much, and products that take their operands from it
FIXED_SPLIT = 1024  # keys a split of the fixed-order kernel: a part of its definition


@dataclass(frozen=True, slots=True)
class Tiling:
    """packed: rows × query heads a program; keys: a tile; splits: programs that share a row tile's keys, at most; merged: numbers that the
    last of them merges at most; least: tiles a split has at least; alone: tiles up to which one program of those takes all."""

    packed: int
    keys: int
    warps: int
    stages: int
    splits: int = 1
    merged: int = MERGED
    least: int = 2
    alone: int = 8


def power_of_two(n: int) -> int:
    """The smallest at or above n."""
    return 1 << max(n - 1, 0).bit_length()


def merged_at_once(cut: Tiling, used: int, splits: int, hd: int) -> int:
    """Pairs of a row and a head that the last program of a tile with `used` of them merges at a time; 0 = a launch of its own merges."""
    each = power_of_two(splits) * power_of_two(hd)
    if splits == 1 or used * each > cut.merged:
        return 0
    return min(power_of_two(used), max(1, 2048 * cut.warps // each))  # 64 numbers a thread


def fast(
    rows: int, sequences: int, group: int, kv_heads: int, hd: int, itemsize: int, stored: int, *, longest: int, shared: int, processors: int
) -> Tiling:
    """itemsize, stored: bytes of a number in the products and in the cache. longest: keys a block table has room for. shared: bytes of
    shared memory a program may have. The rows are taken to be spread evenly over the sequences."""
    width = power_of_two(hd) * itemsize  # bytes of a padded row
    each = max(1, -(-rows // max(sequences, 1)))
    if itemsize == 2 and width <= 256 and shared >= HOPPER_SHARED:
        packed, keys, warps, stages = _warp_groups(each * group, group, stored)
    else:
        packed, keys, warps, stages = _warps(each * group, group, width, itemsize, shared)
    programs = max(sequences, 1) * -(-each // (packed // group)) * kv_heads
    wanted = processors * (8 // warps) // programs
    if each * group > 128 and 2 * programs > processors:
        wanted = 1  # prefill: the products fill the card, and partial results of many rows are no small matter
    return Tiling(packed, keys, warps, stages, max(1, min(wanted, MOST_SPLITS, longest // (2 * keys))))


def _warp_groups(used: int, group: int, stored: int) -> tuple[int, int, int, int]:
    """(packed, keys, warps, stages) where products take operands from shared memory, 64 rows to four warps.

    Fewer than 64 rows are filled up: each warp then owns whole rows, so that the softmax needs no other warp, and the products still take
    less time than the bytes. Two such programs share a processor, each with three tiles of K and V at hand. Half the bytes a key want
    twice the keys a tile; 128 rows want 128 keys, for the sum so far is multiplied once a tile.
    """
    packed = max(64 if used <= 64 else 128, power_of_two(group))
    keys = 128 if packed == 128 or (packed == 64 and stored == 1) else 64
    return packed, keys, 4 if packed == 64 else 8, 3


def _warps(used: int, group: int, width: int, itemsize: int, shared: int) -> tuple[int, int, int, int]:
    """(packed, keys, warps, stages) otherwise. Larger tiles spill registers, before Hopper those of 128 rows too (ptxas)."""
    bulk = 32768 if itemsize == 2 and shared >= HOPPER_SHARED else 16384
    packed = max(16, power_of_two(group), min(power_of_two(used), 128, bulk // width))
    keys, warps = 64 if width <= 256 else 32, 8 if packed * width >= 16384 else 4
    return packed, keys, warps, 2 if width <= 1024 // itemsize else 1


def fixed(group: int, hd: int, itemsize: int, shared: int) -> Tiling:
    """From the model, the dtype and the card alone, so that a row's bits depend on nothing else: each call runs the same instructions.

    64 packed rows feed a warp group's product, so one row of a sequence costs as much arithmetic as 64 / group: still less time than
    the bytes take (M = 64 against 100 above).
    """
    width = power_of_two(hd) * itemsize
    keys = 64 if width <= 256 else 32
    warps = 8 if width > (256 if shared >= HOPPER_SHARED else 128) else 4
    return Tiling(max(64 if width <= 512 else 32, power_of_two(group)), keys, warps, 2 if width <= 1024 // itemsize else 1)
