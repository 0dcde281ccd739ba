"""The files of a draft head: find them, read them, give their tensors the internal names. Source: reference §1.2–1.5, §4.2."""

from __future__ import annotations

import os
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.errors import ModelNotFound, UnsupportedCheckpoint
from specdec.layers.linear import RawWeight
from specdec.models import hub
from specdec.models.weights import SafetensorsWeights
from specdec.quant.quantize import pack_q8

SIDE_FILE = "specdec.json"  # what no dialect has a key for: fingerprint, provenance, trained depth
SHIPPED = Path(__file__).resolve().parents[1] / "heads"
_SCALE = "_scale"  # appended to the name of an int8 weight
_IGNORED = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
_PATTERNS = ("*.json", "*.safetensors", "*.bin")


def find_head(source: str | os.PathLike[str]) -> Path:
    """Directory of a head: a path, a head shipped with the package ("smollm2-135m-instruct/eagle3"), or a hub id.

    Raises ModelNotFound, or UnsupportedCheckpoint for a directory without config.json.
    """
    text = os.fspath(source)
    for path in (Path(text).expanduser(), SHIPPED / text):
        if text and path.is_dir():
            if not (path / "config.json").is_file():
                raise UnsupportedCheckpoint(f"{path}: no config.json; a draft head is a directory with config.json and its weights")
            return path
    if hub.is_hub_id(text):
        return hub.snapshot(text, _PATTERNS, what="head")
    raise ModelNotFound(f"draft head {text!r}: no such directory; pass a directory or a hub id", param="head")


def shipped_heads(model: str) -> Mapping[str, Path]:
    """Heads that come with the package for a known model, by kind."""
    folder = SHIPPED / model
    return {path.name: path for path in sorted(folder.iterdir()) if (path / "config.json").is_file()} if folder.is_dir() else {}


def read_tensors(directory: Path) -> dict[str, RawWeight]:
    """Every tensor of the head by internal name; int8 weights are joined with their scales.

    Raises UnsupportedCheckpoint naming file and tensor.
    """
    stored = _stored(directory)
    tensors: dict[str, Tensor] = {}
    for name, tensor in stored.items():
        inner = internal_name(name)
        if inner.endswith(_IGNORED):
            continue
        if inner in tensors:
            raise UnsupportedCheckpoint(f"{directory}: tensor {name} is there twice, as {inner} under another name")
        tensors[inner] = tensor
    return _join_scales(tensors, directory)


def internal_name(name: str) -> str:
    """The speculators spelling of a tensor name of any dialect."""
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        return "layers.0." + name.removeprefix("midlayer.")
    return "d2t" if name == "draft_id_to_target_id" else name


def _stored(directory: Path) -> dict[str, Tensor]:
    if any(directory.glob("*.safetensors")):
        source = SafetensorsWeights(directory)
        return {name: source.tensor(name) for name in source.names()}
    files = sorted(directory.glob("pytorch_model*.bin"))
    if not files:
        raise UnsupportedCheckpoint(f"{directory}: no *.safetensors and no pytorch_model.bin")
    tensors: dict[str, Tensor] = {}
    for file in files:
        tensors |= _unpickled(file)
    return tensors


def _unpickled(file: Path) -> dict[str, Tensor]:
    """A torch file that may hold tensors only: nothing of it is executed."""
    try:
        loaded: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, ValueError, EOFError, pickle.UnpicklingError) as err:
        raise UnsupportedCheckpoint(f"{file}: not a readable torch file of tensors: {str(err).splitlines()[0]}") from err
    if not isinstance(loaded, dict) or not all(isinstance(t, Tensor) for t in loaded.values()):
        raise UnsupportedCheckpoint(f"{file}: expected a dictionary of tensors")
    return loaded


def _join_scales(tensors: dict[str, Tensor], directory: Path) -> dict[str, RawWeight]:
    """int8 weights and their fp16 scales, per block of 32 columns (kept packed) or per row (made dense)."""
    joined: dict[str, RawWeight] = {}
    for name, tensor in tensors.items():
        if name.endswith(".weight" + _SCALE):
            if name.removesuffix(_SCALE) not in tensors:
                raise UnsupportedCheckpoint(f"{directory}: tensor {name} has no weight beside it")
        elif tensor.dtype is torch.int8 and tensor.dim() == 2:
            scale = tensors.get(name + _SCALE)
            if scale is None:
                raise UnsupportedCheckpoint(f"{directory}: tensor {name} is int8 and {name}{_SCALE} is missing")
            joined[name] = _int8(tensor, scale, f"{directory}: tensor {name}")
        elif tensor.is_floating_point() and tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise UnsupportedCheckpoint(
                f"{directory}: tensor {name} has dtype {tensor.dtype}; float32, float16, bfloat16 and int8 are supported"
            )
        else:
            joined[name] = tensor
    return joined


def _int8(quants: Tensor, scale: Tensor, origin: str) -> RawWeight:
    if scale.numel() == quants.shape[0]:
        return quants.float() * scale.float().view(-1, 1)
    try:
        return pack_q8(quants, scale)
    except UnsupportedCheckpoint as err:
        raise UnsupportedCheckpoint(f"{origin}: {err.message}") from err
