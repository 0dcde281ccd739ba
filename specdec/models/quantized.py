"""Quantised safetensors checkpoints: which of their tensors make up a matrix, and in which storage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.errors import UnsupportedCheckpoint
from specdec.kernels.fp8_linear.weight import BLOCK, Fp8Weight
from specdec.kernels.int4_linear.weight import Int4Weight
from specdec.layers.linear import RawWeight
from specdec.models.config import ModelConfig
from specdec.models.jsonfile import read_json
from specdec.models.weights import SafetensorsWeights, wrong_shape
from specdec.quant.declared import read_quantization
from specdec.quant.repack import FP8_SCALES, fp8_weight, int4_weight
from specdec.quant.scheme import Fp8Scheme, Int4Scheme, Quantization, Scheme, describe, everywhere

_PARTS = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales"),
    "compressed-tensors": ("weight_packed", "weight_scale"),
}
_OPTIONAL = ("g_idx", "weight_g_idx", "weight_shape", "weight_zero_point")
_ALL_PARTS = ("weight", *FP8_SCALES, "qweight", "qzeros", "scales", "weight_packed", *_OPTIONAL)


def declared(config: Mapping[str, Any], directory: Path) -> Quantization | None:
    """What config.json says, else the separate files of older writers. Raises UnsupportedCheckpoint.

    None = nothing, or what the tensors say by themselves: the MXFP4 experts of GPT-OSS.
    """
    stated = config.get("quantization_config")
    if isinstance(stated, Mapping) and (stated.get("quant_method"), config.get("model_type")) == ("mxfp4", "gpt_oss"):
        return None
    if stated:
        return read_quantization(stated)
    if config.get("compression_config"):
        return read_quantization({"quant_method": "compressed-tensors", **config["compression_config"]})
    for name, method in (("hf_quant_config.json", "modelopt"), ("quant_config.json", "awq")):
        if (directory / name).is_file():
            return read_quantization({"quant_method": method, **read_json(directory / name)})
    return None


def inferred(source: SafetensorsWeights) -> Quantization | None:
    """From the tensors alone, where no config says anything: the first quantised module speaks for all. None = plain numbers."""
    modules: dict[str, dict[str, tuple[int, ...]]] = {}
    for name in sorted(source.names()):
        module, _, last = name.rpartition(".")
        if last in _ALL_PARTS:
            modules.setdefault(module, {})[last] = source.shape_of(name) or ()
    found = next(((method, scheme) for shapes in modules.values() for method, scheme in _guess(shapes)), None)
    if found is None:
        return None
    return everywhere(*found, tuple(m for m, shapes in modules.items() if set(shapes) == {"weight"}), str.__eq__)


def _guess(shapes: Mapping[str, tuple[int, ...]]) -> Iterable[tuple[str, Scheme]]:
    """Method and scheme of one module from the shapes of its tensors; nothing where it is not quantised."""
    scale = next((shapes[name] for name in FP8_SCALES if name in shapes), None)
    if "qweight" in shapes and len(shapes.get("scales", ())) == 2:
        (height, width), (groups, rows) = shapes["qweight"], shapes["scales"]
        awq = width != rows  # AWQ packs along N, GPTQ along K
        group = _group(height if awq else height * 8, groups)
        yield ("awq", Int4Scheme("awq", group)) if awq else ("gptq", Int4Scheme("gptq", group, zero_shift=1))
    elif "weight_packed" in shapes and scale is not None and len(scale) == 2:
        group = _group(shapes["weight_packed"][1] * 8, scale[1])
        yield "compressed-tensors", Int4Scheme("compressed-tensors", group, symmetric="weight_zero_point" not in shapes)
    elif "weight" in shapes and scale is not None:
        rows = shapes["weight"][0]
        per_tensor, per_row = scale in ((), (1,)), scale in ((rows,), (rows, 1))
        yield "fp8", Fp8Scheme("tensor" if per_tensor else "channel" if per_row else "block")


def _group(cols: int, groups: int) -> int:
    """Columns of a group; one that is the whole row is as long as any row."""
    return -1 if groups <= 1 else cols // groups


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a module's rows are: all of `module`, or rows [start, stop) of a fused one, whose parts have these `sizes`."""

    module: str
    start: int
    stop: int
    sizes: tuple[int, ...]


class QuantizedWeights:
    """The tensors of a checkpoint, its quantised matrices as `Fp8Weight` or `Int4Weight`, repacked on `device` one at a time.

    A file may hold q, k and v, or gate and up, fused: `qkv_proj`, `gate_up_proj`. What config and tensors say must agree (the output
    head aside, which writers leave alone whatever they say). Raises UnsupportedCheckpoint naming the tensor.
    """

    def __init__(self, source: SafetensorsWeights, quantization: Quantization, config: ModelConfig, device: torch.device):
        self.origin, self.quantization = source.origin, quantization
        self._source, self._device = source, device
        self._held, self._taken = set(source.names()), set[str]()
        sizes: dict[str, tuple[int, ...]] = {
            "qkv_proj": (config.q_size, config.kv_size, config.kv_size),
            "gate_up_proj": (config.intermediate_size, config.intermediate_size),
        }
        self._fused = {
            f"{part}_proj": (fused, sizes[fused], index)
            for fused, parts in (("qkv_proj", ("q", "k", "v")), ("gate_up_proj", ("gate", "up")))
            for index, part in enumerate(parts)
        }

    def names(self) -> Iterable[str]:
        """Every tensor that is plain or that nobody has asked for yet, less the biases of zeros that some writers add to every layer."""
        return [name for name in self._held - self._taken if not self._is_empty_bias(name)]

    def get(self, name: str, shape: tuple[int, ...]) -> RawWeight:
        module, _, last = name.rpartition(".")
        if last not in ("weight", "bias") or not (module == "lm_head" or module.endswith("_proj")):
            return self._source.get(name, shape)
        place = self._place(module, last, shape[0])
        if last == "bias":
            return self._rows(name, place, shape)
        try:
            return self._matrix(name, place, (shape[0], shape[1]))
        except UnsupportedCheckpoint as err:
            raise err if self.origin in err.message else UnsupportedCheckpoint(f"{self.origin}: {place.module}: {err.message}") from err

    def _place(self, module: str, last: str, rows: int) -> _Place:
        """The module itself where the file has any tensor of it, else its part of the fused one."""
        parent, _, own = module.rpartition(".")
        names = _ALL_PARTS if last == "weight" else (last,)
        if own in self._fused and not any(f"{module}.{name}" in self._held for name in names):
            fused, sizes, index = self._fused[own]
            if any(f"{parent}.{fused}.{name}" in self._held for name in names):
                start = sum(sizes[:index])
                return _Place(f"{parent}.{fused}", start, start + rows, sizes)
        return _Place(module, 0, rows, (rows,))

    def _rows(self, name: str, place: _Place, shape: tuple[int, ...]) -> Tensor:
        """Rows of plain numbers."""
        home = f"{place.module}.{name.rpartition('.')[2]}"
        whole = self._source.get(home, (sum(place.sizes), *shape[1:]))
        if home != name:
            self._taken.add(home)
        assert isinstance(whole, Tensor)  # files hold tensors
        return whole[place.start : place.stop]

    def _matrix(self, name: str, place: _Place, shape: tuple[int, int]) -> RawWeight:
        scheme = self.quantization.scheme_of(place.module)
        present = [part for part in _ALL_PARTS if f"{place.module}.{part}" in self._held]
        plain = present == ["weight"] and self._source.is_plain(f"{place.module}.weight")
        if not present or (plain and (scheme is None or place.module == "lm_head")):
            return self._rows(name, place, shape)
        if scheme is None:
            raise UnsupportedCheckpoint(f"it holds {', '.join(present)}, but its config says that it is not quantised; mend the config")
        if plain:
            raise UnsupportedCheckpoint(f"its weight is plain, but its config says {describe(scheme)}; list it among the modules left out")
        tensors = {part: self._take(f"{place.module}.{part}") for part in present}
        self._check_complete(scheme, place.module, present)
        whole = self._whole(tensors, scheme, place, shape[1])
        return whole if len(place.sizes) == 1 else self._part(whole, place)

    def _take(self, name: str) -> Tensor:
        self._taken.add(name)
        return self._source.tensor(name).to(self._device)

    def _check_complete(self, scheme: Scheme, module: str, present: list[str]) -> None:
        """UnsupportedCheckpoint naming the tensor that the scheme needs and the file has not."""
        if isinstance(scheme, Fp8Scheme):
            needed = ("weight", *([] if FP8_SCALES[1] in present else FP8_SCALES[:1]))
        else:
            zero = scheme.packing == "compressed-tensors" and not scheme.symmetric
            needed = (*_PARTS[scheme.packing], *(["weight_zero_point"] if zero else []))
        for part in needed:
            if part not in present:
                raise UnsupportedCheckpoint(f"{self.origin}: tensor {module}.{part} is missing; the checkpoint is incomplete")

    def _whole(self, tensors: dict[str, Tensor], scheme: Scheme, place: _Place, cols: int) -> Fp8Weight | Int4Weight:
        rows = sum(place.sizes)
        if isinstance(scheme, Int4Scheme):
            return int4_weight(tensors, scheme, (rows, cols))
        scale = tensors.get("weight_scale")
        if scheme.layout == "tensor" and scale is not None and len(place.sizes) > 1 and scale.numel() == len(place.sizes):
            spread = scale.reshape(-1).repeat_interleave(torch.tensor(place.sizes, device=scale.device))
            return fp8_weight(tensors | {"weight_scale": spread}, Fp8Scheme("channel"), (rows, cols))
        if tensors["weight"].shape != (rows, cols):
            raise wrong_shape(self.origin, f"{place.module}.weight", tensors["weight"].shape, (rows, cols))
        return fp8_weight(tensors, scheme, (rows, cols))

    def _part(self, whole: Fp8Weight | Int4Weight, place: _Place) -> Fp8Weight | Int4Weight:
        if isinstance(whole, Fp8Weight) and whole.blocked and place.start % BLOCK:
            raise UnsupportedCheckpoint(f"a part begins at row {place.start}, inside a block of {BLOCK}; use an unfused checkpoint")
        return whole.rows(place.start, place.stop)

    def _is_empty_bias(self, name: str) -> bool:
        module, _, last = name.rpartition(".")
        quantised = any(f"{module}.{part}" in self._taken for part in _ALL_PARTS)
        return last == "bias" and quantised and not bool(self._source.tensor(name).any())
