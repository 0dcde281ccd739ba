"""The attention benchmark's arithmetic and inputs, as far as no card is needed."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import kernels_attention as bench
from specdec.kernels.tree_attention import matmul, reference, tiling

SCRIPT = Path(bench.__file__)


def test_bytes_and_operations_of_a_cell() -> None:
    cell = bench.Cell(context=8192, batch=1, nodes=1, group=4, kv="bf16")
    assert cell.kv_bytes == 2 * 8193 * 8 * 128 * 2
    assert cell.operations == 2 * 2 * 32 * 128 * 8193
    tree = bench.Cell(context=32768, batch=8, nodes=64, group=8, kv="fp8")
    chunk = bench.Cell(context=8192, batch=1, nodes=512, group=4, kv="bf16")
    assert chunk.operations == 4 * 512 * 4 * 8 * 128 * (8192 + 256), "each row sees itself and the rows before it"
    assert tree.kv_bytes == 2 * 8 * 32832 * 8 * 128 and tree.operations == 4 * 8 * 64 * 64 * 128 * 32832


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
@pytest.mark.parametrize("nodes", [1, 9, 70])
def test_inputs_hold_the_bytes_counted_and_mean_what_the_op_means(kv: str, nodes: int) -> None:
    cell = bench.Cell(context=55, batch=2, nodes=nodes, group=4, kv=kv, block=16)
    caches, rest = bench.inputs(cell, 2, "cpu")
    assert sorted(rest["block_table"].flatten().tolist()) == list(range(caches.shape[2])), "every block is read, once"
    assert 0 <= caches[0].nbytes - cell.kv_bytes < 2 * 2 * 16 * 8 * 128 * caches.itemsize, "but for the ends of the last blocks"
    assert not torch.equal(caches[0].float(), caches[1].float())
    q, *others = rest.values()
    options = {"scale": 128**-0.5, "kv_scales": (0.5, 0.5)}
    a, b = (fn.tree_attention(q.float(), *caches[0], *others, **options) for fn in (reference, matmul))
    torch.testing.assert_close(a, b, rtol=0.0, atol=1e-5)
    through = bench.attend(caches[0], rest, "matmul").float()
    wanted = a if kv == "fp8" else reference.tree_attention(q.float(), *caches[0], *others, scale=128**-0.5)
    torch.testing.assert_close(through, wanted, rtol=0.0, atol=0.02)


def test_copies_reach_past_l2() -> None:
    small = bench.Cell(context=8192, batch=1, nodes=1, group=4, kv="fp8")
    assert small.copies(50 << 20) * small.kv_bytes >= 4 * (50 << 20)
    assert bench.Cell(context=32768, batch=8, nodes=1, group=4, kv="bf16").copies(50 << 20) == 2


def test_the_bound_is_the_larger_of_reading_and_products() -> None:
    cell = bench.Cell(context=8192, batch=1, nodes=64, group=8, kv="bf16")
    products = cell.operations / 450e12
    reading = bench.judged(cell, [3 * products] * 3, [2 * products] * 3)
    computing = bench.judged(cell, [3 * products] * 3, [products / 2] * 3)
    assert (reading["times_bound"], computing["times_bound"]) == (1.5, 3.0)
    assert computing["TFLOP_per_s"] == pytest.approx(150.0, abs=0.1)


def test_all_cells_that_the_issue_asks_for() -> None:
    found = list(bench.cells(bench.arguments().parse_args([])))
    assert len(set(found)) == len(found) == 2 * 2 * 4 * 2 * 2


def test_a_cut_changes_the_launch_and_is_taken_back() -> None:
    def chosen() -> tiling.Tiling:
        return tiling.fast(8, 1, 8, 8, 128, 2, 2, longest=8192, shared=232448, processors=132)

    before = chosen()
    with bench.cut_as("keys=128,splits=3"):
        assert chosen() == replace(before, keys=128, splits=3)
    with bench.cut_as("chosen"):
        assert chosen() == before
    assert chosen() == before


def test_help_needs_no_card() -> None:
    done = subprocess.run([sys.executable, SCRIPT, "--help"], capture_output=True, text=True)
    assert done.returncode == 0 and "--contexts" in done.stdout, done.stderr
    if not torch.cuda.is_available():
        refused = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
        assert refused.returncode == 1 and "needs a CUDA device" in refused.stderr
