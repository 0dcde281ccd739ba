"""Reading ahead in the small ops: no result changes, and between them the programs that ask, ask once for everything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from specdec.kernels.inputs import Rows, attention_batch
from specdec.kernels.read_ahead import as_bytes, hint
from tests.kernels.device import DEVICE, on

triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")
read_ahead = pytest.importorskip("specdec.kernels.triton_read_ahead")
norm = pytest.importorskip("specdec.kernels.rms_norm.triton")
silu = pytest.importorskip("specdec.kernels.silu_mul.triton")
rope = pytest.importorskip("specdec.kernels.rope.triton")
attention = pytest.importorskip("specdec.kernels.tree_attention.triton")

WEIGHT = torch.arange(100_000 * 16, dtype=torch.int32).to(torch.uint8)


def _norm(ahead: Any) -> tuple[Tensor, ...]:
    x, residual, weight = torch.randn(2, 192), torch.randn(2, 192), torch.randn(192)
    alone = norm.rms_norm(*on(DEVICE, (x, weight)), 1e-5, **ahead)
    return alone, *norm.add_rms_norm(*on(DEVICE, (x, residual, weight)), 1e-5, **ahead)


def _silu(ahead: Any) -> tuple[Tensor, ...]:
    return (silu.silu_mul(torch.randn(3, 2 * 1500).to(DEVICE), **ahead),)


def _rope(ahead: Any) -> tuple[Tensor, ...]:
    caches, angles = torch.zeros(2, 4, 16, 3, 64), torch.randn(2, 32, 32)
    args = on(DEVICE, (torch.randn(5, 15 * 64), torch.arange(5), *angles, *caches, torch.tensor([3, 9, -1, 40, 7])))
    return rope.rope_write_kv(*args, **ahead), args[4], args[5]


def _attention(ahead: Any) -> tuple[Tensor, ...]:
    batch = on(DEVICE, attention_batch([Rows(300), Rows(200)], 4, 2, 64, 16))
    return (attention.tree_attention(*batch.values(), scale=0.125, splits=3, **ahead),)


@pytest.mark.parametrize("op", [_norm, _silu, _rope, _attention])
@pytest.mark.parametrize("pieces", [1, 2])
def test_no_result_changes(op: Callable[[Any], tuple[Tensor, ...]], pieces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter has no instruction to ask with, but it has the programs."""
    if DEVICE == "cpu":
        monkeypatch.setattr(read_ahead, "capability", lambda device: 90)
        monkeypatch.setattr(read_ahead, "_PROGRAMS", 5)
    weight = WEIGHT.to(DEVICE)
    torch.manual_seed(0)
    plain = op({})
    torch.manual_seed(0)
    asking = op({"ahead": (weight[:7936], weight[8192:])[:pieces]})
    assert all(torch.equal(a, b) for a, b in zip(plain, asking, strict=True))


@pytest.mark.parametrize("size", [16, 4096, 4112, 1_000_000 // 16 * 16])
@pytest.mark.parametrize("programs", [1, 7, 132])
def test_everything_is_asked_for_once(size: int, programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    if DEVICE != "cpu":
        pytest.skip("only the interpreter shows what is asked for")
    asked = torch.zeros(size, dtype=torch.int32)
    memory = WEIGHT[:size]

    def note(places: Any, sizes: Any, chunk: Any) -> None:
        for place, n in zip(places.handle.data.reshape(-1), sizes.handle.data.reshape(-1), strict=True):
            start = int(place) - memory.data_ptr()
            assert n <= 0 or (start % 16 == 0 and n % 16 == 0 and start + n <= size)
            asked[start : start + max(int(n), 0)] += 1

    monkeypatch.setattr(read_ahead, "_ask", note)
    for program in range(programs):
        _send[(1,)]((memory, size, memory, 0, 4096), program, programs)
    assert bool((asked == 1).all())


@triton.jit
def _send(ahead, program, programs):
    read_ahead.send_for(ahead, program, programs)


def test_only_few_rows_on_a_card_ask() -> None:
    assert hint(torch.zeros(2, 4), (WEIGHT,)) == {}
    if DEVICE == "cpu":  # the interpreter is no Hopper
        assert read_ahead.asked((WEIGHT,), torch.device("cpu")) == (0, None)


def test_bytes_of_weights() -> None:
    weight = torch.zeros(6, 10, dtype=torch.bfloat16)
    found = as_bytes(weight)
    assert found is not None and found.numel() == 112 and found.data_ptr() == weight.data_ptr()
    assert as_bytes(weight[:, :4]) is None
    assert as_bytes(weight[1:].view(-1)[4:]) is None
