"""Checkpoints with experts: every way of storing them gives the same model, and a damaged one is named."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.cli_pull import run_pull
from specdec.errors import ConfigError, UnsupportedCheckpoint
from specdec.kernels.fp8_linear.cases import random_fp8
from specdec.kernels.fp8_linear.weight import Fp8Weight
from specdec.kernels.int4_linear.cases import random_int4
from specdec.kernels.int4_linear.weight import Int4Weight
from specdec.kernels.moe_experts.weight import dense_expert
from specdec.kernels.mxfp4.weight import Mxfp4Weight
from specdec.layers.decoder import MoELayer
from specdec.models.load import load_model
from specdec.quant.experts import stack_experts
from specdec.train.capture import DenseTarget
from tests.models.tiny_quantized import BLOCKS, FORMATS, write_quantized
from tests.oracle import run_logits
from tests.tiny import GPT_OSS, QWEN3_MOE, tiny_config, write_tiny

IDS = [(7 * i * i + 13 * i + 5) % 400 for i in range(40)]
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)  # e2m1 by code
CPU, F32 = torch.device("cpu"), torch.float32


def rewrite(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def quantise(weight: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """[E,K,N] as a checkpoint holds it -> (blocks u8 [E,N,K/32,16], scales u8 [E,N,K/32], the same numbers as floats [E,K,N]).

    Random codes of about the weight's size; written from the format's definition, one number at a time.
    """
    experts, columns, rows = weight.shape
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (experts, rows, columns), generator=g)
    scales = torch.randint(120, 124, (experts, rows, columns // 32), generator=g)
    blocks = torch.zeros(experts, rows, columns // 32, 16, dtype=torch.uint8)
    values = torch.zeros(experts, rows, columns)
    for c in range(columns):
        shift = 4 * (c % 2)  # even columns in the low nibble
        blocks[:, :, c // 32, c % 32 // 2] |= (codes[:, :, c] << shift).to(torch.uint8)
        values[:, :, c] = torch.tensor(NUMBERS)[codes[:, :, c]] * 2.0 ** (scales[:, :, c // 32].double() - 127).float()
    return blocks, scales.to(torch.uint8), values.transpose(1, 2).contiguous()


def write_mxfp4(directory: Path, *, packed: bool) -> Path:
    """A GPT-OSS checkpoint whose experts are MXFP4 numbers, stored as such (`packed`) or as floats."""
    write_tiny(directory, seed=3, **GPT_OSS)
    if packed:
        config = json.loads((directory / "config.json").read_text())
        config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}
        (directory / "config.json").write_text(json.dumps(config))

    def change(tensors: dict[str, Tensor]) -> None:
        for seed, name in enumerate(sorted(n for n in tensors if n.endswith(("experts.gate_up_proj", "experts.down_proj")))):
            blocks, scales, values = quantise(tensors.pop(name), seed)
            tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales} if packed else {name: values}

    return rewrite(directory, change)


def test_mxfp4_equals_the_same_numbers_as_floats(tmp_path: Path) -> None:
    packed = load_model(write_mxfp4(tmp_path / "packed", packed=True)).model
    floats = load_model(write_mxfp4(tmp_path / "floats", packed=False)).model
    found = run_logits(packed, IDS)
    assert found.std() > 0.5
    assert torch.equal(found, run_logits(floats, IDS))
    unpacked = load_model(tmp_path / "packed", quantization="none").model
    assert torch.equal(found, run_logits(unpacked, IDS))
    layers = [model.layers[0] for model in (packed, unpacked)]
    assert all(isinstance(layer, MoELayer) for layer in layers)
    stored = [layer.moe.experts.gate_up for layer in layers if isinstance(layer, MoELayer)]
    assert isinstance(stored[0], Mxfp4Weight) and isinstance(stored[1], Tensor)


def stack(tensors: dict[str, Tensor]) -> None:
    """The experts of every layer in two tensors."""
    for layer in (0, 2):
        prefix = f"model.layers.{layer}.mlp.experts"
        single = [[tensors.pop(f"{prefix}.{e}.{n}_proj.weight") for e in range(6)] for n in ("gate", "up", "down")]
        gate, up, down = (torch.stack(weights) for weights in single)
        tensors |= {f"{prefix}.gate_up_proj": torch.cat((gate, up), 1), f"{prefix}.down_proj": down}


def test_stacked_experts_equal_single_ones(tmp_path: Path) -> None:
    single = load_model(write_tiny(tmp_path / "single", seed=3, **QWEN3_MOE)).model
    stacked = load_model(rewrite(write_tiny(tmp_path / "stacked", seed=3, **QWEN3_MOE), stack)).model
    assert torch.equal(run_logits(single, IDS), run_logits(stacked, IDS))


def test_narrow_experts_stay_narrow_on_the_cpu(tmp_path: Path) -> None:
    """bfloat16 experts take bfloat16's memory, and the logits are those of the same numbers in float32."""

    def narrow(tensors: dict[str, Tensor]) -> None:
        tensors |= {n: t.bfloat16() for n, t in tensors.items() if "experts" in n}

    def widen(tensors: dict[str, Tensor]) -> None:
        narrow(tensors)
        tensors |= {n: t.float() for n, t in tensors.items()}

    models = [load_model(rewrite(write_tiny(tmp_path / f.__name__, seed=3, **QWEN3_MOE), f)).model for f in (narrow, widen)]
    layers = [model.layers[0] for model in models]
    sizes = [layer.moe.experts.nbytes for layer in layers if isinstance(layer, MoELayer)]
    assert 2 * sizes[0] == sizes[1] and torch.equal(*(run_logits(model, IDS) for model in models))


def drop_expert(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.0.mlp.experts.4.up_proj.weight"]


def seventh_expert(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.0.mlp.experts.6.up_proj.weight"] = torch.zeros(48, 64)


def experts_of_the_dense_layer(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.gate.weight"] = torch.zeros(6, 64)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (drop_expert, r"experts\.4\.up_proj\.weight \[48, 64\] is missing"),
        (seventh_expert, r"1 tensors do not belong.*experts\.6\.up_proj"),
        (experts_of_the_dense_layer, r"do not belong.*layers\.1\.mlp\.gate"),
    ],
)
def test_damaged_qwen3_moe_is_named(tmp_path: Path, change: Callable, named: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=named):
        load_model(rewrite(write_tiny(tmp_path, **QWEN3_MOE), change))


def drop_scales(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.experts.down_proj_scales"]


def drop_blocks(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.1.mlp.experts.down_proj_blocks"]


def cut_scales(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.experts.down_proj_scales"] = torch.zeros(5, 64, 2, dtype=torch.uint8)


def wide_blocks(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.experts.down_proj_blocks"] = torch.zeros(5, 64, 3, 16)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (drop_scales, r"down_proj_scales \[5, 64, 3\] is missing"),
        (drop_blocks, r"down_proj_blocks \[5, 64, 96\] is missing"),
        (cut_scales, r"down_proj_scales has shape \[5, 64, 2\]"),
        (wide_blocks, r"down_proj_blocks has dtype torch.float32; MXFP4 is stored as uint8"),
    ],
)
def test_damaged_mxfp4_is_named(tmp_path: Path, change: Callable, named: str) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=named):
        load_model(rewrite(write_mxfp4(tmp_path, packed=True), change))


@pytest.mark.parametrize("kind", [QWEN3_MOE, GPT_OSS], ids=["qwen3_moe", "gpt_oss"])
def test_converted_checkpoint_is_the_same_model(tmp_path: Path, kind: dict) -> None:
    directory = write_tiny(tmp_path / "a", seed=3, **kind)
    run_pull(str(directory), convert=str(tmp_path / "b"))
    assert torch.equal(*(run_logits(load_model(d).model, IDS) for d in (directory, tmp_path / "b")))


def test_mxfp4_is_not_converted(tmp_path: Path) -> None:
    directory = write_mxfp4(tmp_path / "a", packed=True)
    with pytest.raises(UnsupportedCheckpoint, match="MXFP4 experts cannot be converted"):
        run_pull(str(directory), convert=str(tmp_path / "b"))


def test_training_refuses_experts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="experts"):
        DenseTarget(load_model(write_tiny(tmp_path, **GPT_OSS)).model, (0, 1, 2))


@pytest.mark.parametrize("layout", ["tensor", "channel", "block"])
def test_fp8_experts_are_stacked_exactly(layout: str) -> None:
    single = [[random_fp8(128, 96, layout, seed=2 * e + i) for i in range(2)] for e in range(3)]
    stacked = stack_experts(single, CPU, F32)
    assert isinstance(stacked, Fp8Weight) and stacked.data.shape == (3, 256, 96)
    for e, shards in enumerate(single):
        assert torch.equal(dense_expert(stacked, e), torch.cat([shard.dequantize() for shard in shards]))


def test_fp8_blocks_that_do_not_line_up_become_dense() -> None:
    single = [[random_fp8(100, 96, "block", seed=2 * e + i) for i in range(2)] for e in range(2)]
    stacked = stack_experts(single, CPU, F32)
    assert isinstance(stacked, Tensor)
    assert all(torch.equal(stacked[e], torch.cat([shard.dequantize() for shard in single[e]])) for e in range(2))


@pytest.mark.parametrize("groups", [(32, 32), (32, 64)])
def test_int4_experts_are_stacked_exactly(groups: tuple[int, int]) -> None:
    single = [[random_int4(40, 64, g, symmetric=False, seed=2 * e + i) for i, g in enumerate(groups)] for e in range(3)]
    stacked = stack_experts(single, CPU, F32)
    assert isinstance(stacked, Tensor) == (groups[0] != groups[1])
    for e, shards in enumerate(single):
        assert torch.equal(dense_expert(stacked, e), torch.cat([shard.dequantize() for shard in shards]))


@pytest.mark.parametrize(
    ("name", "storage"),
    [("fp8 blocks", Fp8Weight), ("ct fp8 dynamic", Fp8Weight), ("fp8 static", Fp8Weight), ("awq", Int4Weight), ("ct int4", Int4Weight)],
)
def test_quantised_experts_equal_the_values_they_stand_for(tmp_path: Path, name: str, storage: type) -> None:
    """Every expert quantised for itself, as published checkpoints are; stacked, they stay in their storage."""
    dense = write_quantized(tmp_path / "m", FORMATS[name], **QWEN3_MOE | {"moe_intermediate_size": 128})
    found, expected = load_model(tmp_path / "m").model, load_model(dense).model
    layer = found.layers[0]
    assert isinstance(layer, MoELayer) and isinstance(layer.moe.experts.gate_up, storage) and isinstance(layer.moe.experts.down, storage)
    torch.testing.assert_close(run_logits(found, IDS), run_logits(expected, IDS), atol=5e-4, rtol=0.0)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", [QWEN3_MOE, GPT_OSS], ids=["qwen3_moe", "gpt_oss"])
def test_a_config_alone_gives_a_dummy(tmp_path: Path, kind: dict, packed: bool) -> None:
    """Random experts in the storage that the config names, of a size at which activations stay finite."""
    method = {"quant_method": "mxfp4"} if kind is GPT_OSS else BLOCKS
    config = tiny_config(**kind) | ({"quantization_config": method} if packed else {})
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load_model(tmp_path, load_format="dummy").model
    layer = model.layers[0]
    assert isinstance(layer, MoELayer)
    assert type(layer.moe.experts.down) is ((Mxfp4Weight if kind is GPT_OSS else Fp8Weight) if packed else Tensor)
    logits = run_logits(model, IDS)
    assert logits.isfinite().all() and 1e-3 < logits.std() < 10.0


def test_experts_are_converted_to_fp8_at_load(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path, seed=3, **QWEN3_MOE)
    converted, plain = (load_model(directory, quantization=q).model for q in ("fp8", None))
    layer = converted.layers[0]
    assert isinstance(layer, MoELayer) and isinstance(layer.moe.experts.gate_up, Fp8Weight)
    difference = (run_logits(converted, IDS) - run_logits(plain, IDS)).abs()
    assert 0.0 < difference.mean() < 0.5
