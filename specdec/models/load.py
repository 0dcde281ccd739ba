"""From a model name to a running model: find the files, read the config, build the layers, open the tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

import torch

from specdec.config import ACT_DTYPES
from specdec.errors import ConfigError, UnsupportedCheckpoint
from specdec.models import gguf, hub
from specdec.models.config import DTYPES, ModelConfig
from specdec.models.convert import Fp8OnLoad, UnpackedWeights
from specdec.models.dummy import DummyWeights, IdTokenizer
from specdec.models.jsonfile import read_json
from specdec.models.llama import LlamaModel
from specdec.models.quantized import QuantizedWeights, declared, inferred
from specdec.models.weights import SafetensorsWeights, Weights
from specdec.quant.declared import METHODS
from specdec.quant.scheme import Fp8Scheme, Quantization
from specdec.tokenizer import Tokenizer

QUANTIZATIONS = ("none", *METHODS)
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run. `name`: as the user wrote it. `fingerprint`: hex digest that tells checkpoints apart, and ways to run one.

    quantization: how its linear layers are stored and multiplied, in words; None = as plain numbers or GGUF blocks.
    """

    name: str
    model: LlamaModel
    config: ModelConfig
    tokenizer: Tokenizer
    fingerprint: str
    quantization: str | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Files of a model on this machine: its config, where the weights are (`path`), where tokenizer files are (`files`).

    quantization: what its config says of it; None also where only the tensors tell.
    """

    path: Path
    files: Path
    config: ModelConfig
    quantization: Quantization | None = None

    def weights(self, device: torch.device = _CPU) -> Weights:
        """Open the tensors; quantised ones are repacked on `device`. Raises UnsupportedCheckpoint on corrupt files."""
        if self.path.is_file():
            return gguf.GgufWeights(self.path, self.files)
        source = SafetensorsWeights(self.path)
        quantization = self.quantization or inferred(source)
        return source if quantization is None else QuantizedWeights(source, quantization, self.config, device)

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
        settings = read_json(path / "config.json")
        config = ModelConfig.from_hf(settings, read_json(generation) if generation.is_file() else None)
        return Checkpoint(path, path, config, declared(settings, path))
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
    act_dtype: str = "auto",
    deterministic: bool = False,
    load_format: str = "auto",
    seed: int = 0,
    progress: bool = True,
) -> LoadedModel:
    """Load a model and its tokenizer onto `device`.

    quantization: None keeps the checkpoint's weight format, "none" makes it dense in `dtype`, "fp8" converts the linear layers of an
    unquantised one to e4m3 with a scale per channel; another name must be the checkpoint's own.
    act_dtype: "auto" multiplies quantised weights by activations in `dtype`, "fp8" has e4m3 weights meet e4m3 activations.
    load_format "dummy" draws random weights (seeded by `seed`) in the config's shapes and storage instead of reading any; without
    tokenizer files prompts are token ids. Raises ModelNotFound, UnsupportedCheckpoint (naming file, tensor or key), ConfigError.
    """
    device = torch.device(device)
    checkpoint = find_checkpoint(source, progress=progress)
    config, dummy = checkpoint.config, load_format == "dummy"
    target_dtype = resolve_dtype(dtype, config, device)
    stored = DummyWeights(seed, quantization=checkpoint.quantization, device=device) if dummy else checkpoint.weights(device)
    own = stored.quantization if isinstance(stored, DummyWeights | QuantizedWeights) else None
    weights, storage = _converted(stored, own, quantization, device)
    act_fp8 = _act_fp8(act_dtype, own, quantization)
    if storage is not None:
        storage += f", activations {'float8_e4m3fn' if act_fp8 else str(target_dtype).removeprefix('torch.')}"
    fingerprint = fingerprint_of(config, stored, storage)
    model = LlamaModel(config, weights, device=device, dtype=target_dtype, deterministic=deterministic, act_fp8=act_fp8)
    bare = dummy and not any((checkpoint.files / name).is_file() for name in _TOKENIZER_FILES)
    tokenizer = IdTokenizer(vocab_size=config.vocab_size, eos_ids=config.eos_ids) if bare else checkpoint.tokenizer()
    if device.type == "cuda":
        torch.cuda.empty_cache()  # whoever sizes the KV cache next asks the card, and what repacking left behind is free
    return LoadedModel(os.fspath(source), model, config, tokenizer, fingerprint, storage)


def _converted(weights: Weights, own: Quantization | None, wanted: str | None, device: torch.device) -> tuple[Weights, str | None]:
    """The weights in the format asked for, and its name. ConfigError for one that they cannot be in."""
    if wanted is not None and wanted not in QUANTIZATIONS:
        raise ConfigError(f"quantization must be None or one of {', '.join(QUANTIZATIONS)}, got {wanted!r}", param="quantization")
    if wanted == "none":
        return UnpackedWeights(weights), None
    if own is None and wanted == "fp8":
        return Fp8OnLoad(weights, device), "fp8 (converted, e4m3 per channel)"
    fp8 = own is not None and all(isinstance(scheme, Fp8Scheme) for scheme in own.schemes)
    if wanted is not None and (own is None or wanted != own.method) and not (wanted == "fp8" and fp8):
        found = f"quantised by {own}" if own is not None else "not quantised"
        raise ConfigError(
            f"quantization {wanted!r} does not fit: {weights.origin} is {found}; leave it out to use what there is", param="quantization"
        )
    return weights, None if own is None else str(own)


def _act_fp8(act_dtype: str, own: Quantization | None, quantization: str | None) -> bool:
    """Whether e4m3 weights meet e4m3 activations. ConfigError where there are no such weights."""
    if act_dtype not in ACT_DTYPES:
        raise ConfigError(f"act_dtype must be one of {', '.join(ACT_DTYPES)}, got {act_dtype!r}", param="act_dtype")
    fp8 = own is not None and any(isinstance(scheme, Fp8Scheme) for scheme in own.schemes)
    if act_dtype == "fp8" and (quantization == "none" or not (fp8 or quantization == "fp8")):
        raise ConfigError("act_dtype 'fp8' needs FP8 weights; take an FP8 checkpoint, or add quantization='fp8'", param="act_dtype")
    return act_dtype == "fp8"


def fingerprint_of(config: ModelConfig, weights: Weights, storage: str | None = None) -> str:
    """Digest of the config, the final norm and a few embedding rows: cheap, and different for any retrained checkpoint.

    storage: `LoadedModel.quantization`, since quantised copies of a model share all of those.
    """
    digest = hashlib.sha256(json.dumps(config.to_hf(), sort_keys=True).encode())
    digest.update((storage or "").encode())
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
