"""BC-28: FP8 scales in every layout, fused and not; a missing scale is named; small gates keep their precision.

Sources: vllm#5915, #41022; vllm-omni#5263.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.errors import UnsupportedCheckpoint
from specdec.models.load import load_model
from tests.harness import P
from tests.models.tiny_quantized import edit_config, fp8_channel, fp8_tensor, is_linear
from tests.oracle import run_logits
from tests.tiny import write_tiny

Tensors = dict[str, Tensor]


def _attention(weights: Tensors, layer: int) -> tuple[str, list[Tensor]]:
    prefix = f"model.layers.{layer}.self_attn."
    return prefix, [weights.pop(f"{prefix}{p}_proj.weight") for p in "qkv"]


def separate(weights: Tensors) -> tuple[Tensors, Tensors]:
    """(stored, values): every linear by itself, a scalar each."""
    stored, values = dict(weights), dict(weights)
    for name in filter(is_linear, weights):
        parts, values[name] = fp8_tensor(weights[name])
        stored |= {name: parts["weight"], f"{name}_scale": parts["weight_scale"][0].clone()}
    return stored, values


def fused_one(weights: Tensors) -> tuple[Tensors, Tensors]:
    """q, k and v in one tensor with one scale."""
    stored, values = separate(weights)
    for layer in (0, 1):
        prefix, plain = _attention(dict(weights), layer)
        parts, joined = fp8_tensor(torch.cat(plain))
        _replace(stored, values, prefix, parts["weight"], parts["weight_scale"], joined.split([64, 32, 32]))
    return stored, values


def fused_three(weights: Tensors) -> tuple[Tensors, Tensors]:
    """q, k and v in one tensor with three scales."""
    stored, values = separate(weights)
    for layer in (0, 1):
        prefix, plain = _attention(dict(weights), layer)
        packed = [fp8_tensor(w) for w in plain]
        codes = torch.cat([parts["weight"].view(torch.uint8) for parts, _ in packed]).view(torch.float8_e4m3fn)
        _replace(stored, values, prefix, codes, torch.cat([parts["weight_scale"] for parts, _ in packed]), [v for _, v in packed])
    return stored, values


def _replace(stored: Tensors, values: Tensors, prefix: str, codes: Tensor, scale: Tensor, parts: list[Tensor] | tuple[Tensor, ...]) -> None:
    for name in [n for n in stored if n.startswith(prefix) and n[len(prefix)] in "qkv"]:
        del stored[name]
    stored |= {f"{prefix}qkv_proj.weight": codes, f"{prefix}qkv_proj.weight_scale": scale}
    values |= {f"{prefix}{p}_proj.weight": part.contiguous() for p, part in zip("qkv", parts, strict=True)}


def per_channel(weights: Tensors) -> tuple[Tensors, Tensors]:
    stored, values = dict(weights), dict(weights)
    for name in filter(is_linear, weights):
        parts, values[name] = fp8_channel(weights[name])
        stored |= {name: parts["weight"], f"{name}_scale": parts["weight_scale"]}
    return stored, values


LAYOUTS = {"a": separate, "b": fused_one, "c": fused_three, "d": per_channel}


def written(directory: Path, layout: Callable[[Tensors], tuple[Tensors, Tensors]], change: Callable[[Tensors], None] | None = None) -> Path:
    """T0 in FP8 at `directory`; -> a plain checkpoint of the values it stands for."""
    path, dense = write_tiny(directory), write_tiny(directory.with_name("dense"))
    weights = load_file(path / "model.safetensors")
    stored, values = layout(weights)
    if change is not None:
        change(stored)
    save_file(stored, path / "model.safetensors")
    save_file(values, dense / "model.safetensors")
    strategy = "channel" if layout is per_channel else "tensor"
    weights_args = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, "dynamic": False}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights_args, "input_activations": None}}
    config = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": groups, "ignore": ["lm_head"]}
    edit_config(path, quantization_config=config)
    return dense


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("act_dtype", ["auto", "fp8"])
def test_layouts_give_the_dequantised_model(tmp_path: Path, layout: str, act_dtype: str) -> None:
    dense = written(tmp_path / "fp8", LAYOUTS[layout])
    expected = run_logits(load_model(dense).model, P)
    found = run_logits(load_model(tmp_path / "fp8", act_dtype=act_dtype).model, P)
    error = float((found - expected).norm() / expected.norm())
    rounded = act_dtype == "fp8"  # three bits of every activation of 14 layers, not of the weights alone
    assert found.isfinite().all() and (1e-3 < error < 0.15 if rounded else error < 1e-5)


def without_scale(stored: Tensors) -> None:
    del stored["model.layers.1.self_attn.k_proj.weight_scale"]


def test_a_missing_scale_is_named(tmp_path: Path) -> None:
    written(tmp_path / "fp8", separate, without_scale)
    with pytest.raises(UnsupportedCheckpoint, match=r"tensor model\.layers\.1\.self_attn\.k_proj\.weight_scale is missing"):
        load_model(tmp_path / "fp8")


def test_a_small_gate_beside_a_large_up_keeps_its_precision(tmp_path: Path) -> None:
    """Converted at load, each logical shard by its own scales."""
    path = write_tiny(tmp_path)
    weights = load_file(path / "model.safetensors")
    for name in weights:
        if name.endswith("gate_proj.weight"):
            weights[name] = weights[name.replace("gate", "up")].flip(0) / 100
    save_file(weights, path / "model.safetensors")
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    for dtype in ("float32", "bfloat16"):  # tiles, and the op
        model = load_model(path, quantization="fp8", dtype=dtype).model
        for index, layer in enumerate(model.layers):
            expected = x @ weights[f"model.layers.{index}.mlp.gate_proj.weight"].T
            found = layer.gate_up(x.to(model.dtype))[:, :128].float()
            assert float((found - expected).norm() / expected.norm()) < 0.05 and found.isfinite().all()
