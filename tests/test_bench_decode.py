"""The decode benchmark's own arithmetic, on a tiny model and the CPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from bench import decode
from bench.decode import MODELS, config_of, decoding, directory, measure
from bench.dummy_head import dummy_head
from bench.profile.step import Span, busy, by_time
from specdec.boot import load_target
from specdec.config import EngineConfig
from specdec.models.load import find_checkpoint
from tests.harness import checkpoint


@pytest.mark.parametrize("accept", [[], [1.0, 1.0]])
def test_a_step_of_every_sequence(accept: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.decode.PROMPT", 40)
    monkeypatch.setattr("bench.decode.OUTPUT", 60)
    config = config_of(checkpoint(), 3, accept, True, device="cpu").with_(load_format="auto", max_model_len=128)
    record = measure(decoding(config, load_target(config)), 4)
    assert record["batch"] == 3
    assert record["tokens_a_step"] == 3 * (1 + len(accept))
    assert 0 < record["ms_p20"] <= record["ms"] <= record["ms_p80"]


@pytest.mark.parametrize(
    ("method", "deterministic", "policy"),
    [(None, True, "fixed"), ("eagle3", False, "fixed"), ("peagle", False, "fixed"), ("eagle3", False, "auto")],
)
def test_a_record_for_every_batch(method: str | None, deterministic: bool, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def tiny(model: str, batch: int, accept: list[float], **how: Any) -> EngineConfig:
        config = config_of(checkpoint(), batch, accept, device="cpu", **how)
        return config.with_(load_format="auto", max_model_len=128)

    for name, value in {"PROMPT": 40, "OUTPUT": 60, "LEARNT": 80, "LEARNING": 12, "config_of": tiny, "floor": lambda target: 1.0}.items():
        monkeypatch.setattr(decode, name, value)
    found = list(decode.records("any", [1, 2], [1.0, 0.5], 4, method, eager=True, wait=False, deterministic=deterministic, policy=policy))
    assert all(r["policy"] == policy for r in found)
    if policy == "fixed":
        assert all(r["drafted"] == [[(3, 2), 4]] for r in found if method is not None)
    assert all(r["deterministic"] == deterministic and r["prefill_ms"] > 0 for r in found)
    assert [r["batch"] for r in found] == [1, 2]
    assert all(r["pass_ms"] is None for r in found)  # nothing is recorded here


def test_the_configs_are_whole() -> None:
    assert MODELS == ("llama-3.1-8b", "llama-3.1-8b-fp8", "llama-3.3-70b-fp8", "smollm2-135m")
    for model in MODELS:
        found = find_checkpoint(directory(model))
        assert found.config.vocab_size == (49152 if model == "smollm2-135m" else 128256)
        assert (found.quantization is not None) == model.endswith("fp8")


def test_busy_time_counts_overlaps_once() -> None:
    spans = [Span("a", 10.0, 20.0), Span("b", 15.0, 25.0), Span("a", 40.0, 45.0), Span("c", 41.0, 42.0)]
    assert busy(spans) == (20.0, 35.0)
    assert by_time(spans)[0] == ("a", 2, 15.0)


@pytest.mark.parametrize("promise", [0.4, 0.85])
def test_a_dummy_head_promises_what_it_is_told(promise: float, tmp_path: Path) -> None:
    target = load_target(config_of(checkpoint(), 1, [], True, device="cpu").with_(load_format="auto"))
    head = load_file(Path(dummy_head(target, "eagle3", tmp_path, promise)) / "model.safetensors")
    weight = head["lm_head.weight"].float()
    states = torch.nn.functional.rms_norm(torch.randn(512, weight.shape[1]), weight.shape[1:])
    assert abs(torch.softmax(states @ weight.T, dim=-1).amax(dim=-1).mean().item() - promise) < 0.05
