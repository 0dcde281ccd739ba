"""What the exporter writes, read the way other engines read it (reference §1.3–1.5)."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from specdec.errors import ConfigError, UnsupportedCheckpoint
from specdec.models.load import LoadedModel, load_model
from tests.tiny import write_tiny
from tests.tiny_heads import tiny_head, write_head

EAGLE31 = {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_tiny(tmp_path_factory.mktemp("target"), seed=1, num_hidden_layers=4))


def written(target: LoadedModel, path: Path, layout: str, kind: str = "eagle3", **flags: Any) -> dict[str, Any]:
    config, tensors = tiny_head(kind, target.config, num_depths=7, taps=(1, 2, 4), **flags)
    write_head(path, layout, config, tensors, verifier="some/target")
    result: dict[str, Any] = json.loads((path / "config.json").read_text())
    return result


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
def test_speculators_layout(target: LoadedModel, tmp_path: Path, kind: str) -> None:
    config = written(target, tmp_path, "speculators", kind, num_layers=2, max_positions=100, **EAGLE31)
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == kind
    method = config["speculators_config"]["proposal_methods"][0]
    assert (method["proposal_type"], method["speculative_tokens"], method["verifier_accept_k"]) == ("greedy", 7, 1)
    assert config["speculators_config"]["verifier"]["name_or_path"] == "some/target"
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["vocab_size"], layer["num_hidden_layers"]) == ("llama", 512, 2)
    assert (layer["rope_theta"], layer["max_position_embeddings"]) == (5000.0, 100)
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4] and config["draft_vocab_size"] == 128
    assert all(config[flag] is True for flag in EAGLE31) and config["fc_norm"] is False
    assert config.get("mask_token_id") == (3 if kind == "peagle" else None)
    tensors = load_file(tmp_path / "model.safetensors")
    assert tensors["layers.0.self_attn.q_proj.weight"].shape == (64, 128) and tensors["layers.1.self_attn.q_proj.weight"].shape == (64, 64)
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert ("mask_hidden" in tensors) == (kind == "peagle")


def test_specforge_layout(target: LoadedModel, tmp_path: Path) -> None:
    """Layer outputs are counted, so taps are one less; a false `norm_output` would switch off the norm before lm_head there."""
    config = written(target, tmp_path, "specforge")
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [0, 1, 3]
    assert "norm_output" not in config and "eagle_aux_hidden_state_layer_ids" not in config
    assert {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"} <= load_file(tmp_path / "model.safetensors").keys()
    assert written(target, tmp_path / "31", "specforge", **EAGLE31)["norm_output"] is True


def test_eagle_layout(target: LoadedModel, tmp_path: Path) -> None:
    config = written(target, tmp_path, "eagle")
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4] and not {"eagle_config", "head_dim", "fc_norm"} & config.keys()
    tensors = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert "midlayer.hidden_norm.weight" in tensors and not any(name.startswith("layers.") for name in tensors)


@pytest.mark.parametrize("layout", ["speculators", "specforge", "eagle"])
def test_an_equal_target_size_is_not_written(target: LoadedModel, tmp_path: Path, layout: str) -> None:
    assert "target_hidden_size" not in written(target, tmp_path / "a", layout)
    narrow = {"hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "own_embedding": True}
    assert written(target, tmp_path / "b", layout, **narrow)["target_hidden_size"] == 64


def test_what_cannot_be_written(target: LoadedModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="windows"):
        written(target, tmp_path, "speculators", num_layers=2, windows=(8, 9))
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        written(target, tmp_path / "file", "speculators")


@pytest.mark.parametrize(
    "flags, message",
    [
        ({"kind": "medusa"}, "kind must be one of eagle3, peagle"),
        ({"num_layers": 2, "windows": (None,)}, "2 layers with 1 windows"),
        ({"num_kv_heads": 3}, "num_kv_heads: 3 does not divide num_heads 4"),
        ({"taps": ()}, "at least one tap"),
        ({"norm_before_fc": True, "fc_norm": True}, "exclude each other"),
        ({"draft_vocab_size": 600}, "draft_vocab_size: 600.*vocab_size 512"),
        ({"kind": "peagle", "mask_token_id": None}, "mask_token_id is missing"),
        ({"mask_token_id": -1}, "mask_token_id: -1"),
    ],
)
def test_configs_that_cannot_be(target: LoadedModel, flags: dict[str, Any], message: str) -> None:
    kind = flags.pop("kind", "eagle3")
    with pytest.raises(UnsupportedCheckpoint, match=message):
        tiny_head(kind, target.config, **flags)
