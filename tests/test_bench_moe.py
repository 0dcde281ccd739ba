"""The benchmark of the experts: what it counts, and that what it times is right. Nothing is said about how long anything takes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from bench import kernels_moe
from bench.kernels_moe import MODELS, PLANS, Shape, bytes_an_expert, error, hit, make_experts, planned, read, record, routings
from specdec import ops
from specdec.kernels.moe_experts.weight import Experts, storage, streamed

CPU = torch.device("cpu")
SMALL = {name: replace(shape, experts=5, per_token=2, hidden=128, inner=64) for name, shape in MODELS.items()}


@pytest.mark.parametrize("model", MODELS)
def test_bytes_of_an_expert(model: str) -> None:
    """Counted from the format: e4m3 with a float32 scale per 128 × 128, or 17 bytes for 32 numbers and bfloat16 biases."""
    shape = SMALL[model]
    numbers = 3 * shape.hidden * shape.inner
    scales = 4 * (1 + 1) if shape.storage == "fp8" else numbers // 32 + 2 * (2 * shape.inner + shape.hidden)
    expected = numbers // (1 if shape.storage == "fp8" else 2) + scales
    assert bytes_an_expert(make_experts(shape, CPU)) == expected


def test_bytes_of_the_real_models() -> None:
    """The figures of reference §8.7: 1.128 and 0.564 GB a layer of gpt-oss-120b, without biases."""
    shape = MODELS["gpt-oss-120b"]
    one = make_experts(replace(shape, experts=1), CPU)
    assert one.nbytes * shape.experts == 128 * 5760 * 90 * 17 + 128 * 2880 * 90 * 17
    assert make_experts(replace(MODELS["a3b-fp8"], experts=1), CPU).nbytes == 3 * 2048 * 768 + 4 * (12 * 16 + 16 * 6)


@pytest.mark.parametrize("model", ["a3b-fp8", "gpt-oss-120b"])
def test_inputs_are_sane_and_the_error_is_one(model: str) -> None:
    """Every expert's output is finite and not zero; the error of the reference itself is 0, that of other experts is not."""
    shape = SMALL[model]
    torch.manual_seed(0)
    experts, x = make_experts(shape, CPU), torch.randn(3, shape.hidden)
    [logits] = routings(shape, 3, 1, CPU)
    assert error(x, logits, shape, experts, ops.moe_experts) == 0.0
    with ops.override("moe_experts", "triton"):
        assert error(x, logits, shape, experts, ops.moe_experts) < 1e-4
    found = kernels_moe.run(x, logits, shape, experts, ops.moe_experts)
    assert found.isfinite().all() and 0.01 < found.std() < 100.0


@pytest.mark.parametrize("plan", PLANS)
def test_plans_are_right(plan: str) -> None:
    shape = SMALL["gpt-oss-120b"]
    torch.manual_seed(0)
    experts, x = streamed(make_experts(shape, CPU)), torch.randn(3, shape.hidden)
    [logits] = routings(shape, 3, 1, CPU)
    with ops.override("moe_experts", "triton"):
        assert error(x, logits, shape, experts, planned(plan)) < 1e-4


def test_hits_are_distinct_experts() -> None:
    shape = Shape(6, 2, 8, 8, "fp8")
    logits = torch.tensor([[9.0, 8, 0, 0, 0, 0], [9.0, 0, 8, 0, 0, 0], [0.0, 9, 8, 0, 0, 0]])
    assert hit(logits, shape.per_token) == 3


def test_reads_stay_inside_the_weight() -> None:
    weight = storage(make_experts(SMALL["a3b-fp8"], CPU).gate_up)[0]
    assert read(weight, 0, 4096) == 4096
    assert read(weight, weight.nbytes - 64, 4096) == 4096  # moved to where it fits
    assert read(weight, 100, 2 * weight.nbytes + 128) == 2 * weight.nbytes + 128  # more than there is: some of it again


def test_records_say_what_was_measured() -> None:
    found = record("a3b-fp8", 4, "usual", [28, 30], 1000, [60e-6, 58e-6, 62e-6], [40e-6, 41e-6, 39e-6])
    assert found["experts_hit"] == 29 and found["bytes"] == 29000
    assert found["us"]["p50"] == pytest.approx(30.0) and found["read_us"]["p50"] == pytest.approx(20.0)
    assert found["ratio"] == pytest.approx(1.5) and not found["met"] and found["GB_per_s"] == pytest.approx(29000 / 30e3)


def test_without_a_card_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["kernels_moe"])
    if not torch.cuda.is_available():
        with pytest.raises(SystemExit, match="needs a CUDA device"):
            kernels_moe.main()


def test_experts_are_of_the_kind_the_model_has() -> None:
    made = make_experts(SMALL["gpt-oss-20b"], CPU)
    assert isinstance(made, Experts) and made.limit == 7.0 and made.gate_up_bias is not None and made.gate_up_bias.shape == (5, 128)
