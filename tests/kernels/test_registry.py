"""Dispatch: preference, predicates, refusals, overrides."""

from __future__ import annotations

import threading

import pytest
import torch

from specdec import ops
from specdec.errors import ConfigError, KernelUnavailable
from specdec.kernels.registry import Backend, Registry


def _only_f32(x: torch.Tensor) -> str | None:
    return None if x.dtype is torch.float32 else "float32 only"


def _registry() -> Registry:
    table = Registry()
    op = table.op("double")
    op.add(Backend("fast", lambda x: ("fast", x * 2), ("cpu",), _only_f32, fixed_order=False))
    op.add(Backend("broken", lambda x: ("broken", x), ("cpu",), missing="not built"))
    op.add(Backend("plain", lambda x: ("plain", x * 2)))
    return table


def test_the_first_backend_that_accepts_runs() -> None:
    double = _registry().op("double")
    assert double(torch.ones(1))[0] == "fast"
    assert double(torch.ones(1, dtype=torch.float64))[0] == "plain"


def test_override_holds_inside_the_block_and_in_this_thread_only() -> None:
    table = _registry()
    seen: list[str] = []
    with table.override("double", "plain"):
        assert table.op("double")(torch.ones(1))[0] == "plain"
        thread = threading.Thread(target=lambda: seen.append(table.op("double")(torch.ones(1))[0]))
        thread.start()
        thread.join()
    assert seen == ["fast"] and table.op("double")(torch.ones(1))[0] == "fast"


def test_deterministic_picks_a_fixed_order_and_keeps_overrides() -> None:
    table = _registry()
    with table.deterministic("cpu"):
        assert table.op("double")(torch.ones(1))[0] == "plain"
    with table.override("double", "fast"), table.deterministic("cpu"):
        assert table.op("double")(torch.ones(1))[0] == "fast"


def test_refusals_name_the_op_and_the_reason() -> None:
    table = _registry()
    with pytest.raises(ConfigError, match="no op 'triple'"), table.override("triple", "plain"):
        pass
    with pytest.raises(ConfigError, match="has no backend 'quick'"), table.override("double", "quick"):
        pass
    with pytest.raises(KernelUnavailable, match="not built"), table.override("double", "broken"):
        pass
    table.op("square").add(Backend("fast", lambda x: x, ("cpu",), lambda x: "too odd", fixed_order=False))
    with pytest.raises(KernelUnavailable, match=r"square on cpu.*fast: too odd"):
        table.op("square")(torch.ones(1))
    with pytest.raises(KernelUnavailable, match="no backend with a fixed order"), table.deterministic("cpu"):
        pass


def test_a_device_without_backends_is_refused_by_name() -> None:
    with pytest.raises(KernelUnavailable, match="on meta: no backend"):
        ops.silu_mul(torch.ones(1, 2, device="meta"))


def test_explain_lists_every_op_and_why_a_better_backend_is_out() -> None:
    assert _registry().explain("cpu") == {"double": "fast (broken: not built)"}
    assert set(ops.explain("cpu")) == set(ops.TABLE.ops)
    first = ("reference", "matmul", "library", "cuda", "triton", "bisection", "flash", "tree_attention")
    assert all(text.startswith(first) for text in ops.explain("cuda").values())


def test_the_compiled_backend_serves_float32_and_the_reference_the_rest() -> None:
    op = ops.TABLE.ops["rms_norm"]
    x = torch.ones(1, 16)
    expected = "cpu" if ops.compiled() else "reference"
    assert op.select("cpu", (x, x[0], 1e-5), {}).name == expected
    assert op.select("cpu", (x.double(), x[0], 1e-5), {}).name == "reference"
