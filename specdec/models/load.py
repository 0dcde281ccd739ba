"""From a model name to a running model: find the files, read the config, build the layers, open the tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from specdec.errors import ConfigError, UnsupportedCheckpoint
from specdec.models import gguf, hub
from specdec.models.config import DTYPES, ModelConfig
from specdec.models.jsonfile import read_json
from specdec.models.llama import LlamaModel
from specdec.models.weights import DummyWeights, SafetensorsWeights, Weights
from specdec.tokenizer import Tokenizer

QUANTIZATIONS = ("none",)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. `name`: as the user wrote it. `fingerprint`: hex digest that tells checkpoints apart."""

    name: str
    model: LlamaModel
    config: ModelConfig
    tokenizer: Tokenizer
    fingerprint: str


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Files of a model on this machine: its config, where the weights are (`path`), where tokenizer files are (`files`)."""

    path: Path
    files: Path
    config: ModelConfig

    def weights(self) -> Weights:
        """Open the tensors; raises UnsupportedCheckpoint on corrupt files."""
        return gguf.GgufWeights(self.path, self.files) if self.path.is_file() else SafetensorsWeights(self.path)

    def tokenizer(self) -> Tokenizer:
        """Open the tokenizer; raises UnsupportedCheckpoint when it is broken or belongs to another model."""
        try:
            return Tokenizer.from_directory(self.files, vocab_size=self.config.vocab_size, eos_ids=self.config.eos_ids)
        except UnsupportedCheckpoint as err:
            raise err if str(self.path) in err.message else UnsupportedCheckpoint(f"{self.path}: {err.message}") from err


def find_checkpoint(source: str | os.PathLike[str], *, progress: bool = True) -> Checkpoint:
    """Resolve a name (downloading if needed) and read its config. Raises ModelNotFound or UnsupportedCheckpoint."""
    path = hub.resolve(source, progress=progress)
    try:
        if path.is_file():
            files = gguf.parse(path)
            return Checkpoint(path, files, ModelConfig.from_hf(read_json(files / "index.json")["config"]))
        generation = path / "generation_config.json"
        config = ModelConfig.from_hf(read_json(path / "config.json"), read_json(generation) if generation.is_file() else None)
        return Checkpoint(path, path, config)
    except UnsupportedCheckpoint as err:
        raise err if str(path) in err.message else UnsupportedCheckpoint(f"{path}: {err.message}") from err


def resolve_dtype(dtype: str | torch.dtype, config: ModelConfig, device: torch.device) -> torch.dtype:
    """Activation dtype: "auto" is float32 on the CPU, else the checkpoint's, with bfloat16 for float32 checkpoints."""
    if isinstance(dtype, torch.dtype):
        dtype = str(dtype).removeprefix("torch.")
    if dtype == "auto":
        dtype = "float32" if device.type == "cpu" else "bfloat16" if config.dtype == "float32" else config.dtype
    if dtype not in DTYPES:
        raise ConfigError(f"dtype must be one of auto, {', '.join(DTYPES)}, got {dtype!r}", param="dtype")
    result: torch.dtype = getattr(torch, dtype)
    return result


def load_model(
    source: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype = "auto",
    quantization: str | None = None,
    deterministic: bool = False,
    load_format: str = "auto",
    seed: int = 0,
    progress: bool = True,
) -> LoadedModel:
    """Load a model and its tokenizer onto `device`.

    quantization: None keeps the checkpoint's weight format, "none" unpacks GGUF blocks to `dtype`.
    load_format "dummy" draws random weights (seeded by `seed`) of the config's shapes instead of reading any.
    Raises ModelNotFound, UnsupportedCheckpoint (naming file, tensor or key), ConfigError.
    """
    if quantization is not None and quantization not in QUANTIZATIONS:
        raise ConfigError(f"quantization must be None or one of {', '.join(QUANTIZATIONS)}, got {quantization!r}", param="quantization")
    device = torch.device(device)
    checkpoint = find_checkpoint(source, progress=progress)
    config = checkpoint.config
    target_dtype = resolve_dtype(dtype, config, device)
    weights: Weights = DummyWeights(seed) if load_format == "dummy" else checkpoint.weights()
    fingerprint = fingerprint_of(config, weights)
    if quantization == "none":
        weights = UnpackedWeights(weights)
    model = LlamaModel(config, weights, device=device, dtype=target_dtype, deterministic=deterministic)
    return LoadedModel(os.fspath(source), model, config, checkpoint.tokenizer(), fingerprint)


class UnpackedWeights:
    """Weights with every packed tensor dequantised to float32."""

    def __init__(self, packed: Weights):
        self.origin = packed.origin
        self._packed = packed

    def names(self) -> list[str]:
        return list(self._packed.names())

    def get(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        raw = self._packed.get(name, shape)
        return raw if isinstance(raw, torch.Tensor) else raw.dequantize()


def fingerprint_of(config: ModelConfig, weights: Weights) -> str:
    """Digest of the config, the final norm and a few embedding rows: cheap, and different for any retrained checkpoint."""
    digest = hashlib.sha256(json.dumps(config.to_hf(), sort_keys=True).encode())
    if isinstance(weights, DummyWeights):
        digest.update(weights.origin.encode())
        return digest.hexdigest()[:32]
    norm = weights.get("model.norm.weight", (config.hidden_size,))
    embedding = weights.get("model.embed_tokens.weight", (config.vocab_size, config.hidden_size))
    rows = embedding if isinstance(embedding, torch.Tensor) else embedding.data
    for tensor in (norm, rows[:: max(1, config.vocab_size // 64)]):
        if isinstance(tensor, torch.Tensor):
            digest.update(tensor.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:32]
