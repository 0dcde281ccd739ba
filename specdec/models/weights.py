"""`Weights`: tensors of a checkpoint by Hugging Face name, checked for presence and shape as the model asks for them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch

from specdec.errors import UnsupportedCheckpoint
from specdec.kernels.mxfp4.weight import NAN, Mxfp4Weight, repack
from specdec.layers.linear import RawWeight
from specdec.models.jsonfile import read_json

BLOCKS, SCALES = "_blocks", "_scales"  # what the two tensors of an MXFP4 weight end in
# Old checkpoints carry RoPE tables as buffers; they follow from the config.
_IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")
UNREAD: Mapping[str, str] = {
    **dict.fromkeys(("input_scale", "output_scale"), "activations are not quantised, or each row by its own largest magnitude"),
    **dict.fromkeys(("k_scale", "v_scale", "q_scale", "kv_scale", "prob_scale"), "they scale FP8 attention and an FP8 KV cache"),
}
"""Last names of tensors beside quantised ones that a model may leave alone, and why nothing of it is lost."""


class Weights(Protocol):
    """Where a model takes its tensors from. `origin` names it in errors."""

    origin: str

    def names(self) -> Iterable[str]:
        """Every tensor name the source holds."""
        ...

    def get(self, name: str, shape: tuple[int, ...]) -> RawWeight:
        """The tensor, on whatever device; UnsupportedCheckpoint naming the tensor when it is absent or has another shape."""
        ...


def missing(origin: str, name: str, shape: tuple[int, ...]) -> UnsupportedCheckpoint:
    return UnsupportedCheckpoint(f"{origin}: tensor {name} {list(shape)} is missing; the checkpoint is incomplete")


def wrong_shape(origin: str, name: str, found: Iterable[int], shape: tuple[int, ...]) -> UnsupportedCheckpoint:
    return UnsupportedCheckpoint(f"{origin}: tensor {name} has shape {list(found)}, config.json asks for {list(shape)}")


def check_all_used(weights: Weights, used: set[str], *, tied: bool) -> None:
    """Refuse a checkpoint with tensors the model did not take: running without them would be another model."""
    extra = {n for n in weights.names() if n not in used and not n.endswith(_IGNORED_SUFFIXES) and n.rpartition(".")[2] not in UNREAD}
    if tied:
        extra.discard("lm_head.weight")  # a copy of the embedding in some exports
    if extra:
        some = ", ".join(sorted(extra)[:4]) + (", …" if len(extra) > 4 else "")
        raise UnsupportedCheckpoint(f"{weights.origin}: {len(extra)} tensors do not belong to this architecture: {some}")


class SafetensorsWeights:
    """One or several safetensors files of a directory, memory-mapped. Raises UnsupportedCheckpoint naming the bad file."""

    def __init__(self, directory: Path):
        self.origin = str(directory)
        self._where: dict[str, Any] = {}
        for file, names in self._files(directory).items():
            handle = _open(file)
            held = set(handle.keys())
            for name in held if names is None else names:
                if name not in held:
                    raise UnsupportedCheckpoint(f"{file}: tensor {name} is listed in the index and not in the file")
                self._where[name] = handle

    @staticmethod
    def _files(directory: Path) -> Mapping[Path, list[str] | None]:
        index = directory / "model.safetensors.index.json"
        if not index.is_file():
            files = sorted(directory.glob("*.safetensors"))
            if not files:
                raise UnsupportedCheckpoint(f"{directory}: no *.safetensors file (other weight formats: convert to safetensors first)")
            single = [f for f in files if f.name == "model.safetensors"] or files
            return {file: None for file in single}
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise UnsupportedCheckpoint(f"{index}: weight_map is missing")
        by_file: dict[Path, list[str]] = {}
        for name, file in weight_map.items():
            by_file.setdefault(directory / Path(str(file)).name, []).append(name)
        return by_file

    def names(self) -> Iterable[str]:
        """Scales of MXFP4 blocks are part of the tensor that is called after the blocks."""
        return [n for n in self._where if not (n.endswith(SCALES) and n.removesuffix(SCALES) + BLOCKS in self._where)]

    def _mxfp4(self, name: str, shape: tuple[int, ...]) -> Mxfp4Weight:
        """The weight of logical shape [.., N, K] whose nibbles are in `name` [.., N, K/32, 16], with the scales that belong to it."""
        scales, blocks = name.removesuffix(BLOCKS) + SCALES, (*shape[:-1], shape[-1] // 32)
        parts = []
        for part, wanted in ((name, (*blocks, 16)), (scales, blocks)):
            if part not in self._where:
                raise missing(self.origin, part, wanted)
            tensor = self.tensor(part)
            if tuple(tensor.shape) != wanted or shape[-1] % 32:
                raise wrong_shape(self.origin, part, tensor.shape, wanted)
            if tensor.dtype is not torch.uint8:
                raise UnsupportedCheckpoint(f"{self.origin}: tensor {part} has dtype {tensor.dtype}; MXFP4 is stored as uint8")
            parts.append(tensor)
        if bool((parts[1] == NAN).any()):
            raise UnsupportedCheckpoint(f"{self.origin}: tensor {scales} has scales that are NaN (255); the file is damaged")
        return Mxfp4Weight(repack(parts[0]), parts[1])

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """The shape of a tensor, from the file's header; None where there is none of this name."""
        return tuple(self._where[name].get_slice(name).get_shape()) if name in self._where else None

    def is_plain(self, name: str) -> bool:
        """Whether a tensor the source holds is of plain numbers, from the file's header."""
        return self._where[name].get_slice(name).get_dtype() in ("F32", "F16", "BF16")

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor the source holds, whatever its shape and dtype."""
        tensor: torch.Tensor = self._where[name].get_tensor(name)
        return tensor

    def get(self, name: str, shape: tuple[int, ...]) -> RawWeight:
        found = self.shape_of(name)
        if found is None:
            raise missing(self.origin, name, shape)
        if name.endswith(BLOCKS):
            return self._mxfp4(name, shape)
        if found != shape:
            raise wrong_shape(self.origin, name, found, shape)
        tensor = self.tensor(name)
        if tensor.dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise UnsupportedCheckpoint(
                f"{self.origin}: tensor {name} has dtype {tensor.dtype}; float32, float16 and bfloat16 are supported"
            )
        return tensor


class DictWeights:
    """Tensors (or packed blocks) already in memory, of any dtype."""

    def __init__(self, tensors: Mapping[str, RawWeight], origin: str):
        self.origin = origin
        self._tensors = tensors

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def items(self) -> Iterable[tuple[str, RawWeight]]:
        return self._tensors.items()

    def get(self, name: str, shape: tuple[int, ...]) -> RawWeight:
        if name not in self._tensors:
            raise missing(self.origin, name, shape)
        tensor = self._tensors[name]
        if tuple(tensor.shape) != shape:
            raise wrong_shape(self.origin, name, tensor.shape, shape)
        return tensor


def _open(file: Path) -> Any:
    from safetensors import SafetensorError, safe_open

    try:
        return safe_open(file, framework="pt")
    except FileNotFoundError:
        raise UnsupportedCheckpoint(f"{file}: this shard of the checkpoint is missing") from None
    except (SafetensorError, OSError) as err:
        raise UnsupportedCheckpoint(f"{file}: not a readable safetensors file (corrupt or truncated): {err}") from err
