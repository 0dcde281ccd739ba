"""How the Triton attention kernels are cut: reads of the context, splits, and what the fixed order may not depend on."""

from __future__ import annotations

import itertools

import pytest

from specdec.kernels.tree_attention import tiling
from specdec.kernels.tree_attention.tiling import Tiling

HOPPER = {"shared": 232448, "processors": 132}


def cut(nodes: int, sequences: int, group: int, *, kv_heads: int = 8, hd: int = 128, itemsize: int = 2, longest: int = 32768) -> Tiling:
    return tiling.fast(nodes * sequences, sequences, group, kv_heads, hd, itemsize, itemsize, longest=longest, **HOPPER)


@pytest.mark.parametrize("hd", [64, 128])
def test_the_context_is_read_once_up_to_128_packed_rows(hd: int) -> None:
    for nodes, group in itertools.product(range(1, 65), (1, 2, 3, 4, 8, 16)):
        tiles = -(-nodes // (cut(nodes, 1, group, hd=hd).packed // group))
        assert tiles == 1 or nodes * group > 96, (nodes, group)  # a tile of 128 holds 126 rows of group 3
        assert tiles <= -(-nodes * group // 120)


@pytest.mark.parametrize("sequences", [1, 2, 3, 8, 64, 500])
def test_splits_fill_the_card_in_one_wave(sequences: int) -> None:
    for nodes, group in itertools.product((1, 8, 64), (4, 8)):
        t = cut(nodes, sequences, group)
        programs = sequences * -(-nodes // (t.packed // group)) * 8
        room = 132 * (8 // t.warps)
        assert t.splits == 1 or programs * t.splits <= room
        assert 2 * programs * t.splits > min(room, 2 * programs * tiling.MOST_SPLITS) or 2 * programs > 132


def test_short_tables_and_prefill_are_not_split() -> None:
    assert cut(1, 1, 4, longest=128).splits == 1
    assert cut(1, 1, 4, longest=1024).splits == 8
    assert cut(512, 1, 4).splits == 1
    assert cut(100, 1, 4, kv_heads=1).splits > 1, "few rows and heads: even prefill leaves processors idle"


def test_the_last_program_merges_what_it_holds_in_one_go() -> None:
    for splits, group, hd in ((16, 4, 128), (8, 8, 128), (6, 4, 128), (16, 3, 64)):
        at_once = tiling.merged_at_once(cut(1, 1, group, hd=hd), group, splits, hd)
        assert at_once >= group and at_once * splits * hd <= 8192
    assert not tiling.merged_at_once(cut(4, 1, 4), 16, 8, 128), "twice that takes longer than a launch"
    assert not tiling.merged_at_once(cut(64, 1, 8), 128, 8, 128), "a launch of many programs"
    assert not tiling.merged_at_once(cut(1, 1, 4), 4, 1, 128), "nothing to merge"


def test_hopper_fills_warp_groups_of_64_rows() -> None:
    for nodes, group in itertools.product((1, 2, 5, 8, 16, 64), (1, 3, 4, 8)):
        t = cut(nodes, 1, group)
        few = nodes * group <= 64
        assert (t.packed, t.warps, t.keys) == ((64, 4, 64) if few else (128, 8, 128))
        shared = 256 * (t.packed + 2 * t.keys * t.stages)  # of Q, and of the tiles of K and V
        assert shared + 1024 <= 233472 // (2 if few else 1), "two programs a processor"


def test_no_rows_or_sequences() -> None:
    assert tiling.fast(0, 0, 4, 8, 128, 2, 2, longest=16, **HOPPER).splits == 1
    assert tiling.fast(5, 0, 4, 8, 128, 2, 1, longest=0, **HOPPER).splits == 1


def test_fixed_tiles_divide_the_fixed_splits_and_keep_trees_in_two() -> None:
    for group, hd, itemsize in itertools.product((1, 3, 4, 8, 64), (16, 64, 128, 256), (2, 4)):
        t = tiling.fixed(group, hd, itemsize, 166912)
        assert tiling.FIXED_SPLIT % t.keys == 0 and t.packed >= group and t.splits == 1
