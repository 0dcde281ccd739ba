"""Precision of a head's weights: on disk, and as asked for at load."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec import ops
from specdec.errors import ConfigError, UnsupportedCheckpoint
from specdec.models.head_export import STORAGES
from specdec.models.head_load import DRAFT_QUANTIZATIONS, load_head
from specdec.models.load import LoadedModel, load_model
from specdec.quant.quantize import pack_q8, quantize, unpack_q8
from tests.models.test_head_load import outputs
from tests.tiny import write_tiny
from tests.tiny_heads import build_head, tiny_head, write_head

# Largest relative error of the outputs of a tiny random head, root of mean square; about twice what was measured.
ERRORS = {"float32": 0.0, "float16": 2e-3, "bfloat16": 2e-2, "fp8": 0.2, "int8": 4e-2, "int4": 0.6}
# Memory of a head's matrices over that of float32; tiny heads are padded to tiles, so a bit above what a large one has.
SHARES = {"float32": 1.0, "float16": 0.5, "bfloat16": 0.5, "fp8": 0.27, "int8": 0.27, "int4": 0.16}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_tiny(tmp_path_factory.mktemp("target"), seed=1, num_hidden_layers=4))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("layout", ["speculators", "eagle"])
def test_storages(target: LoadedModel, tmp_path: Path, storage: str, layout: str) -> None:
    config, tensors = tiny_head("peagle", target.config, num_layers=2, own_embedding=True, norm_before_fc=True)
    head = load_head(write_head(tmp_path, layout, config, tensors, storage=storage), target)
    found = error(outputs(head), outputs(build_head(config, tensors, target.model)))
    assert found <= ERRORS[storage] and (found > 0) == (storage != "float32")


@pytest.mark.parametrize("precision", DRAFT_QUANTIZATIONS)
def test_draft_quantization(target: LoadedModel, tmp_path: Path, precision: str) -> None:
    config, tensors = tiny_head("eagle3", target.config, num_layers=2)
    path = write_head(tmp_path, "speculators", config, tensors)
    head = load_head(path, target, draft_quantization=precision)
    found = error(outputs(head), outputs(load_head(path, target)))
    assert found <= ERRORS[precision] and (found > 0) == (precision != "float32")
    assert (head.epoch == load_head(path, target).epoch) == (precision == "float32")  # draft KV of one is not that of the other


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["compiled", "references"])
@pytest.mark.parametrize("precision", DRAFT_QUANTIZATIONS)
def test_memory_is_that_of_the_storage(target: LoadedModel, tmp_path: Path, precision: str, dtype: torch.dtype) -> None:
    """Also where nothing multiplies it as it is; the same numbers come out either way."""
    config, tensors = tiny_head("peagle", target.config, num_layers=2, own_embedding=True)
    path = write_head(tmp_path, "speculators", config, tensors)
    head, full = (load_head(path, target, draft_quantization=p, dtype=dtype) for p in (precision, "float32"))
    matrices = sum(t.numel() for t in tensors.values() if t.dim() == 2)
    assert full.nbytes == 4 * matrices and head.nbytes <= SHARES[precision] * full.nbytes * 1.01
    compiled = load_head(path, target, draft_quantization=precision)
    assert torch.equal(head.fc.dequantize(), compiled.fc.dequantize()) and torch.equal(
        head.embedding.dequantize(), compiled.embedding.dequantize()
    )


def test_int8_stays_packed(target: LoadedModel, tmp_path: Path) -> None:
    """From an int8 file without loss: the blocks of the file are the blocks in memory, a quarter of the bytes of float32."""
    if not ops.compiled():
        pytest.fail("these tests run with the compiled extension")
    config, tensors = tiny_head("eagle3", target.config)
    stored = load_head(write_head(tmp_path / "int8", "speculators", config, tensors, storage="int8"), target)
    loaded = load_head(write_head(tmp_path / "f32", "speculators", config, tensors), target, draft_quantization="int8")
    assert torch.equal(stored.fc.dequantize(), loaded.fc.dequantize())
    for linear in (stored.fc, stored.lm_head, stored.wide.attention.qkv, stored.wide.down):
        assert linear.method.name == "tiled Q8_0"


@pytest.mark.parametrize("shape", [(64,), (64, 1)])
def test_int8_per_row(target: LoadedModel, tmp_path: Path, shape: tuple[int, ...]) -> None:
    """One scale a row, as other tools write it."""
    config, tensors = tiny_head("eagle3", target.config)
    path = write_head(tmp_path, "speculators", config, tensors)
    weight = tensors["fc.weight"]
    scale = weight.abs().amax(1, keepdim=True) / 127
    quants = (weight / scale).round().to(torch.int8)
    file = path / "model.safetensors"
    save_file(load_file(file) | {"fc.weight": quants, "fc.weight_scale": scale.view(shape)}, file)
    torch.testing.assert_close(load_head(path, target).fc.dequantize(), quants.float() * scale)


def test_wrong_scales_are_named(target: LoadedModel, tmp_path: Path) -> None:
    config, tensors = tiny_head("eagle3", target.config)
    path = write_head(tmp_path, "speculators", config, tensors)
    file = path / "model.safetensors"
    save_file(load_file(file) | {"fc.weight": torch.zeros(64, 192, dtype=torch.int8), "fc.weight_scale": torch.zeros(64, 3)}, file)
    with pytest.raises(UnsupportedCheckpoint, match=r"fc.weight: int8 weight \[64, 192\] needs scales \[64, 6\], got \[64, 3\]"):
        load_head(path, target)


def test_odd_widths_cannot_be_quantised(target: LoadedModel, tmp_path: Path) -> None:
    config, tensors = tiny_head("eagle3", target.config, intermediate_size=40)
    path = write_head(tmp_path, "speculators", config, tensors)
    with pytest.raises(ConfigError, match=r"\[64, 40\].*multiple of 32"):
        load_head(path, target, draft_quantization="int8")


def test_unknown_names(tmp_path: Path, target: LoadedModel) -> None:
    config, tensors = tiny_head("eagle3", target.config)
    for options, field in (({"storage": "fp4"}, "storage"), ({"layout": "gguf"}, "layout")):
        with pytest.raises(ConfigError, match=f"{field} must be one of"):
            write_head(tmp_path, **{"layout": "eagle", **options}, config=config, tensors=tensors)


@pytest.mark.parametrize("kind, levels", [("Q8_0", 254), ("Q4_1", 15)])
def test_blocks_round_to_nearest(kind: str, levels: int) -> None:
    weight = torch.randn(5, 96, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 1.0, 50.0, 0.0, 1.0]).view(-1, 1)
    weight[4] = 3.0
    found = quantize(weight, kind).dequantize().view(5, 3, 32)
    blocks = weight.view(5, 3, 32)
    spread = 2 * blocks.abs().amax(-1) if kind == "Q8_0" else blocks.amax(-1) - blocks.amin(-1)
    # half a step, and the rounding of scale and minimum to 11 bits
    bound = spread / levels / 2 + blocks.abs().amax(-1) * 2**-10
    assert bool(((found - blocks).abs() <= bound.unsqueeze(-1)).all())


def test_q8_round_trip() -> None:
    blocks = quantize(torch.randn(7, 64, generator=torch.Generator().manual_seed(1)), "Q8_0")
    assert torch.equal(pack_q8(*unpack_q8(blocks)).data, blocks.data)
