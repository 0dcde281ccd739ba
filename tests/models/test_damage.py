"""Damaged checkpoints: whatever byte is wrong, loading either works or raises a typed error. Seeded, so always the same bytes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from specdec.errors import UnsupportedCheckpoint
from specdec.models.load import load_model
from tests.models.tiny_gguf import write_tiny_gguf
from tests.models.tiny_quantized import FORMATS, write_quantized
from tests.tiny import write_tiny

ROUNDS = 40


def refusals(model: Path, file: Path, end: int, seed: int) -> int:
    """How many of ROUNDS single-byte changes in the first `end` bytes of `file` are refused; any other error fails the test."""
    whole, rng, refused = file.read_bytes(), random.Random(seed), 0
    for _ in range(ROUNDS):
        damaged = bytearray(whole)
        damaged[rng.randrange(end)] ^= 1 << rng.randrange(8)
        file.write_bytes(damaged)
        try:
            load_model(model)
        except UnsupportedCheckpoint:
            refused += 1
    file.write_bytes(whole)
    return refused


def test_gguf_metadata(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "home"))
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path)
    assert refusals(path, path, path.read_bytes().find(b"token_embd.weight") + 1500, seed=0) > ROUNDS // 10


@pytest.mark.parametrize("form", ["fp8 blocks", "awq", "ct int4, asymmetric"])
@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_quantised(tmp_path: Path, form: str, name: str) -> None:
    write_quantized(tmp_path / "q", FORMATS[form])
    file = tmp_path / "q" / name
    data = file.read_bytes()
    end = int.from_bytes(data[:8], "little") + 8 if name.endswith(".safetensors") else len(data)
    assert refusals(tmp_path / "q", file, end, seed=2) > ROUNDS // 10


@pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json"])
def test_directory(tmp_path: Path, name: str) -> None:
    file = write_tiny(tmp_path) / name
    data = file.read_bytes()
    end = int.from_bytes(data[:8], "little") + 8 if name.endswith(".safetensors") else len(data)
    assert refusals(tmp_path, file, end, seed=1) > ROUNDS // 10
