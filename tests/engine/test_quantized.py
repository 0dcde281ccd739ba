"""Engines over quantised targets: speculation changes nothing; dummy models start from a config alone; conversion at load."""

from __future__ import annotations

import json
import weakref
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from specdec import LLM, SamplingParams
from specdec.boot import build_engine
from specdec.config import EngineConfig, SpecConfig
from specdec.engine import Engine
from specdec.errors import InvalidRequest
from specdec.layers.linear import RawWeight
from specdec.models.config import ModelConfig
from specdec.models.convert import Fp8OnLoad
from specdec.models.dummy import DummyWeights
from specdec.models.llama import LlamaModel
from specdec.models.load import load_model
from tests.harness import GREEDY, SHAPES, Log, P, R, assert_same, run
from tests.models.tiny_quantized import AWQ, BLOCKS, DYNAMIC, FORMATS, SIZES, compressed, floats, ints, write_quantized
from tests.oracle import run_logits
from tests.tiny import tiny_config, write_tiny

SAMPLED = SamplingParams(temperature=1.1, seed=4, max_tokens=24, ignore_eos=True)
REQUESTS = {"greedy": (R, GREEDY), "sampled": (P, SAMPLED), "alike": (R, replace(SAMPLED, top_p=0.9))}


def start(model: Path, speculation: SpecConfig | str = "off", **options: Any) -> Engine:
    sizes = {"block_size": 4, "device": "cpu", "max_model_len": 128, "max_num_seqs": 8, "kv_cache_bytes": 1 << 24}
    return build_engine(EngineConfig(model=str(model), speculation=SpecConfig.of(speculation), **{**sizes, **options}))


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8 blocks": ("fp8 blocks", {}),
    "fp8 channel": ("ct fp8 dynamic", {}),
    "fp8 channel, W8A8": ("ct fp8 dynamic", {"act_dtype": "fp8"}),
    "fp8 blocks, W8A8": ("fp8 blocks", {"act_dtype": "fp8"}),
    "awq": ("awq", {}),
    "awq, bfloat16": ("awq", {"dtype": "bfloat16", "deterministic": True}),
    "fp8 channel, bfloat16": ("ct fp8 dynamic", {"dtype": "bfloat16", "deterministic": True}),
    "symmetric int4": ("ct int4", {}),
}


@pytest.mark.parametrize("name", MODELS)
def test_speculation_changes_nothing(tmp_path: Path, name: str) -> None:
    form, options = MODELS[name]
    write_quantized(tmp_path / "q", FORMATS[form])
    expected = {key: run(start(tmp_path / "q", **options), {key: request})[key] for key, request in REQUESTS.items()}
    assert len(set(expected["greedy"].outputs[0].token_ids)) > 4, "a constant continuation would prove little"
    for shape in ("ngram-tree", "draft-tree"):
        log = Log()
        found = run(start(tmp_path / "q", SHAPES[shape], **options), REQUESTS, log=log)
        assert log.drafted > 0
        for key in REQUESTS:
            assert_same(found[key], expected[key])


CONFIGS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "fp8 blocks": BLOCKS,
    "fp8 channel": compressed(floats("channel"), DYNAMIC, "float-quantized"),
    "fp8 tensor": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "awq": AWQ,
    "symmetric int4": compressed(ints("channel"), None, "pack-quantized"),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_alone_starts_a_dummy_engine(tmp_path: Path, name: str, dtype: str) -> None:
    """Prompts are token ids, text shows them; numbers are of the size of trained weights and hardly any is zero."""
    config = tiny_config(**SIZES) | ({} if CONFIGS[name] is None else {"quantization_config": CONFIGS[name]})
    (tmp_path / "config.json").write_text(json.dumps(config))
    llm = LLM(str(tmp_path), load_format="dummy", dtype=dtype, speculation="ngram", device="cpu", max_model_len=64)
    output = llm.generate([P], SamplingParams(temperature=1.0, seed=1, max_tokens=6, ignore_eos=True))[0].outputs[0]
    assert output.text == "".join(f" <{token}>" for token in output.token_ids) and len(output.token_ids) == 6
    with pytest.raises(InvalidRequest, match="give the prompt as token ids"):
        llm.generate(["text"])
    model = llm.engine.runner.model
    for linear in (model.layers[0].attention.qkv, model.layers[1].down):
        weight = linear.dequantize()
        assert 0.8 < float(weight.std()) / (0.02 * (768 / weight.shape[1]) ** 0.5) < 1.25 and abs(float(weight.mean())) < 2e-3
        assert float((weight == 0).float().mean()) < 0.13


def test_dummy_weights_follow_their_seed(tmp_path: Path) -> None:
    config = tiny_config(**SIZES) | {"quantization_config": AWQ}
    (tmp_path / "config.json").write_text(json.dumps(config))
    first, again, other = (run_logits(load_model(tmp_path, load_format="dummy", seed=s).model, P) for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)


@pytest.mark.parametrize("act_dtype", ["auto", "fp8"])
def test_conversion_to_fp8_at_load(tmp_path: Path, act_dtype: str) -> None:
    write_tiny(tmp_path)
    plain, fp8 = load_model(tmp_path), load_model(tmp_path, quantization="fp8", act_dtype=act_dtype)
    expected, found = run_logits(plain.model, R), run_logits(fp8.model, R)
    assert 1e-3 < float((found - expected).norm() / expected.norm()) < 0.25
    assert plain.quantization is None and fp8.quantization is not None and ("float8" in fp8.quantization) == (act_dtype == "fp8")
    assert plain.fingerprint != fp8.fingerprint
    assert torch.equal(fp8.model.embedding.dequantize(), plain.model.embedding.dequantize())
    ratio = fp8.model.layers[0].down.method.nbytes / plain.model.layers[0].down.method.nbytes
    assert 0.25 <= ratio < 0.27


def test_a_dummy_may_be_converted_too(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(**SIZES)))
    engine = start(tmp_path, load_format="dummy", quantization="fp8")
    assert run(engine, {"a": (P, GREEDY)})["a"].finished


def test_quantised_copies_of_a_model_have_fingerprints_of_their_own(tmp_path: Path) -> None:
    prints = set()
    for index, name in enumerate(("ct fp8 dynamic", "ct fp8 static", "awq", "ct int4")):
        dense = write_quantized(tmp_path / str(index), FORMATS[name])
        prints |= {load_model(path).fingerprint for path in (tmp_path / str(index), dense)}
    assert len(prints) == 5, "four quantised ones and the values, which share embedding, norm and config"


@pytest.mark.parametrize("name", ["fp8 blocks", "awq"])
def test_a_quantised_checkpoint_can_be_made_dense(tmp_path: Path, name: str) -> None:
    dense = write_quantized(tmp_path / "q", FORMATS[name])
    loaded = load_model(tmp_path / "q", quantization="none")
    assert loaded.quantization is None
    torch.testing.assert_close(run_logits(loaded.model, P), run_logits(load_model(dense).model, P), rtol=0.0, atol=1e-5)


def test_naming_the_format_that_is_there_is_no_error(tmp_path: Path) -> None:
    write_quantized(tmp_path / "q", FORMATS["ct fp8 dynamic"])
    expected = run_logits(load_model(tmp_path / "q").model, P)
    for name in ("compressed-tensors", "fp8"):
        assert torch.equal(run_logits(load_model(tmp_path / "q", quantization=name).model, P), expected)


class Watched(DummyWeights):
    """Remembers how many bytes of float32 matrices that it handed out were alive at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: list[weakref.ref[torch.Tensor]] = []
        self.peak = 0

    def get(self, name: str, shape: tuple[int, ...]) -> RawWeight:
        raw = super().get(name, shape)
        if isinstance(raw, torch.Tensor) and raw.dim() == 2:
            self.alive.append(weakref.ref(raw))
        self.peak = max(self.peak, sum(t.nbytes for ref in self.alive if (t := ref()) is not None))
        return raw


@pytest.mark.parametrize("fp8", [True, False], ids=["fp8", "bfloat16"])
def test_one_linear_layer_at_a_time_is_in_float32(fp8: bool) -> None:
    """A model of which only the small storage fits can be loaded."""
    config = ModelConfig.from_hf(tiny_config(**SIZES, num_hidden_layers=6))
    watched, cpu = Watched(), torch.device("cpu")
    model = LlamaModel(config, Fp8OnLoad(watched, cpu) if fp8 else watched, device=cpu, dtype=torch.bfloat16)
    assert model.layers[0].gate_up.method.name.startswith("fp8" if fp8 else "dense bfloat16")
    rows = max(config.vocab_size, 2 * config.intermediate_size)
    assert watched.peak <= 4 * rows * config.hidden_size, "the embedding's or the widest layer's"
