"""Write a checkpoint as a Hugging Face safetensors directory: blocks dequantised, GGUF's q and k rows in half-split order."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError

from specdec.errors import ConfigError, UnsupportedCheckpoint
from specdec.files import write_tensors
from specdec.kernels.mxfp4.weight import Mxfp4Weight
from specdec.layers.linear import RawWeight
from specdec.models.config import ModelConfig
from specdec.models.llama import LlamaModel
from specdec.models.load import Checkpoint
from specdec.models.weights import Weights

EXPORT_DTYPES = ("float32", "bfloat16")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "tokenizer.model")
_SHARD_BYTES = 4 << 30


def export(checkpoint: Checkpoint, directory: Path, *, dtype: str = "float32", shard_bytes: int = _SHARD_BYTES) -> Path:
    """Write config, weights and tokenizer files into `directory`, which must be empty or absent; return it.

    float32 keeps the exact values of quantised blocks, bfloat16 rounds them. Raises ConfigError, UnsupportedCheckpoint.
    """
    if dtype not in EXPORT_DTYPES:
        raise ConfigError(f"dtype must be one of {', '.join(EXPORT_DTYPES)}, got {dtype!r}", param="dtype")
    try:
        if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
            raise ConfigError(f"{directory} exists and is not an empty directory; choose another one for --convert", param="convert")
        directory.mkdir(parents=True, exist_ok=True)
        _write(checkpoint, directory, dtype, shard_bytes)
    except (OSError, SafetensorError) as err:
        raise ConfigError(f"{directory} cannot be written: {err}; choose another directory for --convert", param="convert") from err
    return directory


def _write(checkpoint: Checkpoint, directory: Path, dtype: str, shard_bytes: int) -> None:
    recorder = _Recorder(checkpoint.weights(), directory, getattr(torch, dtype), shard_bytes)
    # The model names the tensors it needs and their shapes; on the meta device building it costs nothing.
    LlamaModel(checkpoint.config, recorder, device=torch.device("meta"), dtype=torch.float32)
    recorder.finish()
    for name in _TOKENIZER_FILES:
        if (checkpoint.files / name).is_file():
            shutil.copyfile(checkpoint.files / name, directory / name)
    _write_json(directory / "config.json", checkpoint.config.to_hf() | {"torch_dtype": dtype})
    _write_json(directory / "generation_config.json", _generation_config(checkpoint.config))


def _generation_config(config: ModelConfig) -> dict[str, object]:
    ends = list(config.eos_ids)
    return {"bos_token_id": config.bos_id, "eos_token_id": ends[0] if len(ends) == 1 else ends, "pad_token_id": ends[0] if ends else None}


class _Recorder:
    """Weights that write what they hand out: dense tensors go to safetensors shards, the caller gets meta tensors."""

    def __init__(self, source: Weights, directory: Path, dtype: torch.dtype, shard_bytes: int):
        self.origin = source.origin
        self._source, self._directory, self._dtype, self._limit = source, directory, dtype, shard_bytes
        self._pending: dict[str, torch.Tensor] = {}
        self._shards: list[list[str]] = []
        self._total = 0

    def names(self) -> Iterable[str]:
        return self._source.names()

    def get(self, name: str, shape: tuple[int, ...]) -> RawWeight:
        raw = self._source.get(name, shape)
        if isinstance(raw, Mxfp4Weight):
            raise UnsupportedCheckpoint(f"{self.origin}: tensor {name}: MXFP4 experts cannot be converted to plain tensors")
        dense = (raw if isinstance(raw, torch.Tensor) else raw.dequantize()).to(self._dtype).contiguous()
        if self._pending and sum(t.nbytes for t in self._pending.values()) + dense.nbytes > self._limit:
            self._flush()
        self._pending[name] = dense
        self._total += dense.nbytes
        return dense.to("meta")

    def _part(self, index: int) -> Path:
        return self._directory / f"part-{index}.safetensors"

    def _flush(self) -> None:
        write_tensors(self._part(len(self._shards)), self._pending, {"format": "pt"})
        self._shards.append(list(self._pending))
        self._pending = {}

    def finish(self) -> None:
        """Write the last shard; name the files as Hugging Face does, with an index when there are several."""
        self._flush()
        count = len(self._shards)
        if count == 1:
            os.replace(self._part(0), self._directory / "model.safetensors")
            return
        weight_map: dict[str, str] = {}
        for index, names in enumerate(self._shards):
            file = f"model-{index + 1:05d}-of-{count:05d}.safetensors"
            os.replace(self._part(index), self._directory / file)
            weight_map |= dict.fromkeys(names, file)
        _write_json(self._directory / "model.safetensors.index.json", {"metadata": {"total_size": self._total}, "weight_map": weight_map})


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
