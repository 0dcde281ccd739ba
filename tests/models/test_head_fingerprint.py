"""The fingerprint survives precision and flags other weights, even those that compute the same function in another basis."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.models.head_fingerprint import config_digest, correlation, measure, mismatch
from specdec.models.load import LoadedModel, load_model
from specdec.quant.quantize import quantize
from tests.oracle import run_logits
from tests.tiny import write_tiny
from tests.tiny_heads import rotate_basis

TAPS = (0, 2, 4)


def rewritten(path: Path, change: Callable[[str, Tensor], Tensor]) -> None:
    file = path / "model.safetensors"
    save_file({name: change(name, t).contiguous() for name, t in load_file(file).items()}, file)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Like a trained model, its layers change the residual stream by less than its size."""
    return write_tiny(tmp_path / "model", seed=3, scale=0.7, num_hidden_layers=4)


@pytest.fixture
def target(checkpoint: Path) -> LoadedModel:
    return load_model(checkpoint)


def test_same_weights(target: LoadedModel) -> None:
    stored = json.loads(json.dumps(measure(target.model, TAPS)))
    assert mismatch(stored, target.model) is None
    assert all(correlation(stored, measure(target.model, TAPS), tap) == pytest.approx(1.0) for tap in TAPS)


def test_precision_is_tolerated(checkpoint: Path, target: LoadedModel) -> None:
    stored = measure(target.model, TAPS)
    assert mismatch(stored, load_model(checkpoint, dtype="bfloat16").model) is None
    rewritten(checkpoint, lambda _, t: quantize(t, "Q4_1").dequantize() if t.dim() == 2 else t)
    noisy = load_model(checkpoint).model
    assert mismatch(stored, noisy) is None
    assert correlation(stored, measure(noisy, TAPS), 4) < 0.9999  # it did change something


@pytest.mark.parametrize("seed", [4, 5])
def test_other_weights_are_flagged(tmp_path: Path, target: LoadedModel, seed: int) -> None:
    other = load_model(write_tiny(tmp_path / "other", seed=seed, scale=0.7, num_hidden_layers=4))
    reason = mismatch(measure(target.model, TAPS), other.model)
    assert reason is not None and "correlation" in reason


def test_rotated_basis_is_flagged(checkpoint: Path, target: LoadedModel) -> None:
    """The rotated target writes the same text; only its hidden states are elsewhere."""
    before = run_logits(target.model, list(range(3, 40)))
    stored = measure(target.model, TAPS)
    rotate_basis(checkpoint)
    rotated = load_model(checkpoint).model
    torch.testing.assert_close(run_logits(rotated, list(range(3, 40))), before, atol=1e-3, rtol=1e-3)
    reason = mismatch(stored, rotated)
    assert reason is not None and "basis" in reason


def test_scaled_states_are_flagged(checkpoint: Path, target: LoadedModel) -> None:
    """Correlation alone would not see it."""
    stored = measure(target.model, TAPS)
    rewritten(checkpoint, lambda name, t: 2 * t if "embed_tokens" in name or "o_proj" in name or "down_proj" in name else t)
    reason = mismatch(stored, load_model(checkpoint).model)
    assert reason is not None and "standard deviation" in reason


def test_config_counts(tmp_path: Path, target: LoadedModel) -> None:
    other = load_model(write_tiny(tmp_path / "other", seed=3, scale=0.7, num_hidden_layers=4, rope_theta=20000.0))
    assert config_digest(other.config) != config_digest(target.config)
    reason = mismatch(measure(target.model, TAPS), other.model)
    assert reason is not None and "config hash" in reason
    same = load_model(write_tiny(tmp_path / "same", seed=3, num_hidden_layers=4, max_position_embeddings=64, rms_norm_eps=9.99999974e-06))
    assert config_digest(same.config) == config_digest(target.config)


def test_short_targets_have_one(tmp_path: Path) -> None:
    short = load_model(write_tiny(tmp_path / "short", max_position_embeddings=16)).model
    assert mismatch(measure(short, (0, 1)), short) is None


@pytest.mark.parametrize("damage", [{"version": 99}, {"taps": {}}, {"taps": {"9": {}}}, {"taps": {"x": 1}}, {"taps": {"2": {"mean": 0.0}}}])
def test_unreadable_is_a_mismatch(target: LoadedModel, damage: dict) -> None:
    reason = mismatch({**measure(target.model, TAPS), **damage}, target.model)
    assert reason is not None and "cannot be compared" in reason
