"""Quantised checkpoints of every format compute what their values as plain numbers compute."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specdec import ops
from specdec.errors import UnsupportedCheckpoint
from specdec.models.export import export
from specdec.models.load import find_checkpoint, load_model
from specdec.models.quantized import declared
from specdec.quant.repack import int4_weight
from specdec.quant.scheme import Int4Scheme
from tests.models.tiny_quantized import FORMATS, SNIFFED, write_quantized
from tests.oracle import assert_parity, run_logits

IDS = [(7 * i * i + 13 * i + 5) % 400 for i in range(40)]


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_the_values(tmp_path: Path, name: str) -> None:
    """With the compiled kernels, whose tiles hold some formats as they are."""
    dense = write_quantized(tmp_path / "q", FORMATS[name])
    assert_parity(run_logits(load_model(tmp_path / "q").model, IDS), run_logits(load_model(dense).model, IDS))


@pytest.mark.parametrize("name", FORMATS)
def test_the_ops_of_the_storages_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """As on a GPU: weights stay as they are, and every product goes through `fp8_linear` or `int4_linear`."""
    dense = write_quantized(tmp_path / "q", FORMATS[name])
    expected = run_logits(load_model(dense).model, IDS)
    monkeypatch.setattr(ops, "WHY_NOT", "not built")
    model = load_model(tmp_path / "q").model
    for layer in model.layers:
        for linear in (layer.attention.qkv, layer.attention.out, layer.gate_up, layer.down):
            assert linear.method.name.startswith(FORMATS[name].method) or linear.method.name.startswith("fp8 per tensor")
    assert_parity(run_logits(model, IDS), expected)


@pytest.mark.skipif(ops.WHY_NO_TRITON is not None or torch.cuda.is_available(), reason="the interpreter's: a card has tests of its own")
@pytest.mark.parametrize("name", SNIFFED)
def test_the_kernels_of_a_card_give_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """From the file to logits through the streamed products, interpreted."""
    dense = write_quantized(tmp_path / "q", FORMATS[name])
    expected = run_logits(load_model(dense).model, IDS[:5])
    monkeypatch.setattr(ops, "WHY_NOT", "not built")
    model = load_model(tmp_path / "q").model
    with ops.override("fp8_linear", "triton"), ops.override("int4_linear", "triton"):
        assert_parity(run_logits(model, IDS[:5]), expected)


def test_awq_order() -> None:
    """The published vector: columns 0 to 7 that hold 0 to 7 make the word 0x75316420."""
    word = torch.full((8, 1), 0x75316420, dtype=torch.int32)
    tensors = {"qweight": word, "qzeros": word[:1], "scales": torch.full((1, 8), 0.5)}
    weight = int4_weight(tensors, Int4Scheme("awq", 8), (8, 8))
    assert weight.codes()[:, 3].tolist() == weight.zero[:, 0].tolist() == list(range(8)) and not weight.dequantize().any()


def test_mxfp4_experts_speak_for_themselves(tmp_path: Path) -> None:
    """GPT-OSS's config names a method whose tensors are read as they are; in any other model it is refused."""
    config = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    assert declared(config, tmp_path) is None
    with pytest.raises(UnsupportedCheckpoint, match="'mxfp4'"):
        declared(config | {"model_type": "llama"}, tmp_path)


@pytest.mark.parametrize("name", ["ct fp8 dynamic", "fp8 blocks", "awq"])
def test_export_writes_the_values(tmp_path: Path, name: str) -> None:
    dense = write_quantized(tmp_path / "q", FORMATS[name])
    out = export(find_checkpoint(tmp_path / "q"), tmp_path / "out")
    written, values = (load_file(path / "model.safetensors") for path in (out, dense))
    assert written.keys() == values.keys()
    for key, value in values.items():
        torch.testing.assert_close(written[key], value, rtol=1e-6, atol=0.0)
    assert load_model(out).quantization is None


@pytest.mark.parametrize("name", SNIFFED)
def test_tensors_tell_the_format_where_the_config_does_not(tmp_path: Path, name: str) -> None:
    dense = write_quantized(tmp_path / "q", FORMATS[name], declare=False)
    loaded = load_model(tmp_path / "q")
    assert loaded.quantization is not None
    assert_parity(run_logits(loaded.model, IDS), run_logits(load_model(dense).model, IDS))


@pytest.mark.parametrize("name", ["fp8 blocks", "fp8 static", "awq", "ct int4"])
def test_half_precision_activations(tmp_path: Path, name: str) -> None:
    dense = write_quantized(tmp_path / "q", FORMATS[name])
    expected = run_logits(load_model(dense).model, IDS)
    for dtype, worst in (("float16", 0.02), ("bfloat16", 0.12)):
        found = run_logits(load_model(tmp_path / "q", dtype=dtype).model, IDS)
        assert float((found - expected).norm() / expected.norm()) < worst


@pytest.mark.parametrize("name", ["fp8 blocks", "ct fp8 dynamic", "awq", "ct int4"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_bits_do_not_depend_on_chunks(tmp_path: Path, name: str, dtype: str) -> None:
    write_quantized(tmp_path / "q", FORMATS[name])
    model = load_model(tmp_path / "q", deterministic=True, dtype=dtype).model
    assert torch.equal(run_logits(model, IDS), run_logits(model, IDS, chunks=[1, 1, 1, 20, 3]))
