"""Tiny checkpoints in every quantised format, packed here from the formats' definitions, and what their weights are as numbers.

Nothing of the loader is used: packing is NumPy over the definition, quantisation is round to nearest.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.tiny import write_tiny

SIZES = {"hidden_size": 192, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 48}
"""Two blocks of 128 a side, the second a part; q ends inside a block; groups of 64 divide all widths."""

Packed = tuple[dict[str, Tensor], Tensor]  # tensors by last name, the values they stand for [N,K]


# -- FP8 ------------------------------------------------------------------------------------------------------------------


def _e4m3(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8_tensor(weight: Tensor) -> Packed:
    scale = weight.abs().amax() / 448
    codes = _e4m3(weight, scale)
    return {"weight": codes, "weight_scale": scale.view(1)}, codes.float() * scale


def fp8_scalar(weight: Tensor) -> Packed:
    """A scale without dimensions and a static scale of activations."""
    tensors, values = fp8_tensor(weight)
    return tensors | {"weight_scale": tensors["weight_scale"][0].clone(), "input_scale": torch.tensor(0.02)}, values


def fp8_channel(weight: Tensor) -> Packed:
    scale = weight.abs().amax(1, keepdim=True) / 448
    codes = _e4m3(weight, scale)
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale


def fp8_channel_bf16(weight: Tensor) -> Packed:
    """llm-compressor keeps scales in the model's dtype."""
    scale = (weight.abs().amax(1, keepdim=True) / 448).bfloat16()
    codes = _e4m3(weight, scale.float())
    return {"weight": codes, "weight_scale": scale}, codes.float() * scale.float()


def fp8_block(weight: Tensor, name: str = "weight_scale_inv") -> Packed:
    rows, cols = weight.shape
    scale, values, codes = torch.empty(-(-rows // 128), -(-cols // 128)), torch.empty_like(weight), torch.empty_like(weight)
    for i in range(scale.shape[0]):
        for j in range(scale.shape[1]):
            place = slice(i * 128, (i + 1) * 128), slice(j * 128, (j + 1) * 128)
            scale[i, j] = weight[place].abs().amax() / 448
            codes[place] = _e4m3(weight[place], scale[i, j]).float()
            values[place] = codes[place] * scale[i, j]
    return {"weight": codes.to(torch.float8_e4m3fn), name: scale}, values


# -- 4 bits ---------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Groups:
    """A weight in 4 bits: codes and zeros 0 to 15, each int64 [N, ...]; scale f16 [N, groups]."""

    codes: np.ndarray
    zeros: np.ndarray
    scale: Tensor
    values: Tensor


def grouped(weight: Tensor, group: int, *, symmetric: bool) -> Groups:
    rows, cols = weight.shape
    parts = weight.view(rows, cols // group, group)
    low, high = parts.amin(-1).clamp(max=0), parts.amax(-1).clamp(min=0)
    scale = (torch.maximum(-low, high) / 7.5 if symmetric else (high - low) / 14).half()
    zeros = torch.full_like(low, 8) if symmetric else (-low / scale.float()).round().clamp(1, 15)
    codes = (parts / scale.float()[..., None] + zeros[..., None]).round().clamp(0, 15)
    values = ((codes - zeros[..., None]) * scale.float()[..., None]).view(rows, cols)
    return Groups(codes.view(rows, cols).long().numpy(), zeros.long().numpy(), scale, values)


def words(columns: list[np.ndarray]) -> Tensor:
    """Eight arrays of nibbles, the first in the lowest bits -> int32."""
    total = sum(column.astype(np.uint64) << np.uint64(4 * i) for i, column in enumerate(columns))
    return torch.from_numpy(np.asarray(total).astype(np.uint32).view(np.int32).copy())


def awq(weight: Tensor, group: int = 64) -> Packed:
    """Transposed, eight outputs a word, in the order 0 2 4 6 1 3 5 7."""
    g = grouped(weight, group, symmetric=False)

    def pack(array: np.ndarray) -> Tensor:
        return words([array.T[:, c::8] for c in (0, 2, 4, 6, 1, 3, 5, 7)])

    return {"qweight": pack(g.codes), "qzeros": pack(g.zeros), "scales": g.scale.T.contiguous()}, g.values


def gptq(weight: Tensor, group: int = 64, *, symmetric: bool = True, less: int = 1, index: str | None = "plain") -> Packed:
    """Transposed, eight inputs a word; zero points eight outputs a word, less one in the first version."""
    g = grouped(weight, group, symmetric=symmetric)
    zeros = g.zeros.T - less
    tensors = {
        "qweight": words([g.codes.T[i::8] for i in range(8)]),
        "qzeros": words([zeros[:, i::8] for i in range(8)]),
        "scales": g.scale.T.contiguous(),
        "bias": torch.zeros(weight.shape[0], dtype=torch.float16),  # AutoGPTQ writes one for every layer
    }
    if index is not None:
        order = torch.arange(weight.shape[1], dtype=torch.int32) // group
        tensors["g_idx"] = order if index == "plain" else order.flip(0)
    return tensors, g.values


def pack_quantized(weight: Tensor, group: int = 64, *, symmetric: bool = True, zeros: str = "packed") -> Packed:
    """Eight inputs a word; zero points eight rows a word (or int8 less eight), both stored plus 8."""
    g = grouped(weight, group, symmetric=symmetric)
    tensors = {
        "weight_packed": words([g.codes[:, i::8] for i in range(8)]),
        "weight_scale": g.scale,
        "weight_shape": torch.tensor(weight.shape),
    }
    if not symmetric:
        padded = np.concatenate((g.zeros, np.zeros((-len(g.zeros) % 8, g.zeros.shape[1]), dtype=np.int64)))
        packed = words([padded[i::8] for i in range(8)])
        tensors["weight_zero_point"] = packed if zeros == "packed" else torch.from_numpy(g.zeros - 8).to(torch.int8)
    return tensors, g.values


# -- formats --------------------------------------------------------------------------------------------------------------


def compressed(weights: dict[str, Any], inputs: dict[str, Any] | None, container: str, **more: Any) -> dict[str, Any]:
    """A compressed-tensors config of one group."""
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": container, "config_groups": {"group_0": group}, "ignore": ["lm_head"], **more}


def floats(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False, **more}


def ints(strategy: str, **more: Any) -> dict[str, Any]:
    return {"num_bits": 4, "type": "int", "symmetric": True, "strategy": strategy, "group_size": None, **more}


DYNAMIC = floats("token", dynamic=True)


@dataclass(frozen=True)
class Format:
    """config: of config.json's quantization_config; files: other JSON files; name: what the engine calls it; method: of its linears."""

    pack: Callable[[Tensor], Packed]
    config: dict[str, Any] | None
    method: str
    files: dict[str, Any] = field(default_factory=dict)


BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm", "modules_to_not_convert": None}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": False, "sym": True, "lm_head": False}
FORMATS: dict[str, Format] = {
    "fp8 blocks": Format(fp8_block, BLOCKS | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"]}, "fp8 per 128x128 block"),
    "fp8 static": Format(
        fp8_scalar, {"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": ["lm_head"]}, "fp8 per channel"
    ),
    "fp8 per tensor, inverse name": Format(
        lambda w: ({k.replace("scale", "scale_inv"): v for k, v in fp8_tensor(w)[0].items()}, fp8_tensor(w)[1]),
        {"quant_method": "fp8", "activation_scheme": "dynamic"},
        "fp8 per channel",
    ),
    "fbgemm": Format(
        fp8_channel,
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
        "fp8 per channel",
    ),
    "ct fp8 static": Format(fp8_tensor, compressed(floats("tensor"), floats("tensor"), "float-quantized"), "fp8 per channel"),
    "ct fp8 dynamic": Format(fp8_channel_bf16, compressed(floats("channel"), DYNAMIC, "float-quantized"), "fp8 per channel"),
    "ct fp8 blocks": Format(
        lambda w: fp8_block(w, "weight_scale"),
        compressed(floats("block", block_structure=[128, 128]), floats("group", group_size=128, dynamic=True), "float-quantized"),
        "fp8 per 128x128 block",
    ),
    "old compression_config": Format(
        fp8_channel, None, "fp8 per channel", {"compression_config": compressed(floats("channel"), DYNAMIC, "float-quantized")}
    ),
    "modelopt": Format(
        fp8_scalar,
        None,
        "fp8 per channel",
        {"hf_quant_config.json": {"producer": {}, "quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head*", "vision*"]}}},
    ),
    "awq": Format(awq, AWQ, "int4 group 64"),
    "awq, groups of 32": Format(lambda w: awq(w, 32), AWQ | {"group_size": 32}, "int4 group 32"),
    "old awq": Format(
        awq, None, "int4 group 64", {"quant_config.json": {"zero_point": True, "q_group_size": 64, "w_bit": 4, "version": "GEMM"}}
    ),
    "gptq": Format(gptq, GPTQ, "int4 group 64"),
    "gptq, asymmetric": Format(lambda w: gptq(w, symmetric=False, index=None), GPTQ | {"sym": False}, "int4 group 64"),
    "gptq v2": Format(lambda w: gptq(w, symmetric=False, less=0), GPTQ | {"sym": False, "checkpoint_format": "gptq_v2"}, "int4 group 64"),
    "ct int4": Format(pack_quantized, compressed(ints("group", group_size=64), None, "pack-quantized"), "int4 group 64"),
    "ct int4, asymmetric": Format(
        lambda w: pack_quantized(w, symmetric=False),
        compressed(ints("group", group_size=64, symmetric=False), None, "pack-quantized"),
        "int4 group 64",
    ),
    "ct int4, int8 zeros": Format(
        lambda w: pack_quantized(w, symmetric=False, zeros="int8"),
        compressed(ints("group", group_size=64, symmetric=False), None, "pack-quantized"),
        "int4 group 64",
    ),
    "ct int4 per channel": Format(
        lambda w: pack_quantized(w, w.shape[1]), compressed(ints("channel"), None, "pack-quantized"), "int4 group "
    ),
}
SNIFFED = ("fp8 blocks", "fp8 static", "ct fp8 dynamic", "awq", "gptq", "ct int4", "ct int4, asymmetric", "ct int4 per channel")
"""Formats whose tensors say all there is to know, where no config does."""


def is_linear(name: str) -> bool:
    return name.endswith("_proj.weight")


def write_quantized(directory: Path, form: Format, *, declare: bool = True, **overrides: Any) -> Path:
    """A tiny checkpoint in this format at `directory`, and beside it, at "<directory>-dense", the values it stands for. -> the latter."""
    path = write_tiny(directory, seed=3, **{**SIZES, **overrides})
    dense = write_tiny(directory.with_name(directory.name + "-dense"), seed=3, **{**SIZES, **overrides})
    stored, values = {}, {}
    for name, tensor in load_file(path / "model.safetensors").items():
        if is_linear(name):
            parts, values[name] = form.pack(tensor)
            stored |= {f"{name.removesuffix('weight')}{last}": part.contiguous() for last, part in parts.items()}
        else:
            stored[name] = values[name] = tensor
    save_file(stored, path / "model.safetensors")
    save_file(values, dense / "model.safetensors")
    if declare:
        edit_config(path, quantization_config=form.config)
        for name, content in form.files.items():
            if name.endswith(".json"):
                (path / name).write_text(json.dumps(content))
            else:
                edit_config(path, **{name: content})
    return dense


def edit_config(directory: Path, **changes: Any) -> None:
    """Set keys of config.json; None removes one."""
    file = directory / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit_tensors(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    """Change the tensors of a checkpoint."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")
