"""One random head in every dialect gives the same numbers; what does not fit is refused with the field and both sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from specdec.errors import ConfigError, ModelNotFound, UnsupportedCheckpoint
from specdec.models.config import RopeConfig
from specdec.models.draft_heads import DraftHead
from specdec.models.head_config import NOISE_SHARE
from specdec.models.head_dialect import MASK_TOKEN_KEYS, dialect_of
from specdec.models.head_load import load_head
from specdec.models.load import LoadedModel, load_model
from tests.models.test_head_forward import IDS, run
from tests.tiny import write_tiny
from tests.tiny_heads import build_head, tiny_head, write_head

LAYOUTS = ("speculators", "specforge", "eagle")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    return load_model(write_tiny(tmp_path_factory.mktemp("target"), seed=1, num_hidden_layers=4))


def outputs(head: DraftHead) -> Tensor:
    """Logits and feedback on fixed taps, and the mask feature: everything a drafter sees of the head."""
    taps = torch.randn(len(IDS), head.config.tap_size, generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        logits, feedback = run(head, IDS, head.fuse(taps), [len(IDS)])
    mask = head.mask_feature if head.mask_feature is not None else torch.zeros(0)
    return torch.cat((logits.flatten(), feedback.flatten(), mask))


def edit_config(path: Path, **changes: Any) -> None:
    """Set keys of config.json; None removes one."""
    file = path / "config.json"
    config = json.loads(file.read_text()) | changes
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit_tensors(path: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file({name: t.contiguous() for name, t in tensors.items()}, path / "model.safetensors")


HEADS: dict[str, dict[str, Any]] = {
    "plain": {},
    "eagle31": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "fc_norm": {"fc_norm": True, "norm_output": True},
    "deep": {"num_layers": 3, "windows": (9, None, 9), "max_positions": 100},
    "qwen": {"qk_norm": True, "qkv_bias": True, "head_dim": 32},
    "biases": {"qkv_bias": True, "o_bias": True, "mlp_bias": True},
    "narrow": {"own_embedding": True, "hidden_size": 32, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 96},
    "full vocabulary": {"draft_vocab_size": 512, "own_lm_head": False},
    "llama3": {"rope": RopeConfig(1e4, "llama3", 8.0, 1.0, 4.0, 64)},
    "two taps": {"taps": (1, 4)},
}


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
@pytest.mark.parametrize("flags", HEADS.values(), ids=HEADS.keys())
def test_every_layout_is_the_same_head(target: LoadedModel, tmp_path: Path, kind: str, flags: dict[str, Any]) -> None:
    config, tensors = tiny_head(kind, target.config, num_depths=6, **flags)
    expected = outputs(build_head(config, tensors, target.model))
    for layout in LAYOUTS:
        head = load_head(write_head(tmp_path / layout, layout, config, tensors, provenance={"by": "test"}), target)
        assert torch.equal(outputs(head), expected), layout
        assert (head.config.taps, head.config.kind, head.config.num_depths) == (config.taps, kind, 6)
        assert head.config.max_positions == config.max_positions and head.config.windows == config.windows
        assert head.config.provenance == {"by": "test"} and (head.config.dialect == "speculators") == (layout == "speculators")
        assert head.trusted and head.warning is None


@pytest.mark.parametrize("key", MASK_TOKEN_KEYS)
def test_mask_token_spellings(target: LoadedModel, tmp_path: Path, key: str) -> None:
    config, tensors = tiny_head("peagle", target.config, num_layers=2)
    path = write_head(tmp_path / "head", "specforge", config, tensors)
    outer, _, inner = key.rpartition(".")
    edit_config(path, mask_token_id=None)
    edit_config(path, **{outer: {inner: 7}} if outer else {key: 7})
    assert load_head(path, target).config.mask_token_id == 7


def test_amazon_peagle(target: LoadedModel, tmp_path: Path) -> None:
    """`midlayer` for the wide layer, then `layers.1…`; zero map over the full vocabulary; own embeddings; flat config."""
    config, tensors = tiny_head("peagle", target.config, num_layers=4, draft_vocab_size=512, own_embedding=True)
    path = write_head(tmp_path / "head", "eagle", config, tensors)
    stored = torch.load(path / "pytorch_model.bin", weights_only=True)
    stored |= {"d2t": torch.zeros(512, dtype=torch.int64), "t2d": torch.ones(512, dtype=torch.bool)}
    (path / "pytorch_model.bin").unlink()
    save_file(stored, path / "model.safetensors")
    assert {"midlayer.hidden_norm.weight", "layers.1.input_layernorm.weight", "layers.3.mlp.up_proj.weight"} <= stored.keys()
    edit_config(path, mask_token_id=None, ptd_token_id=3)
    assert torch.equal(outputs(load_head(path, target)), outputs(build_head(config, tensors, target.model)))


def test_vllm_spellings(target: LoadedModel, tmp_path: Path) -> None:
    config, tensors = tiny_head("eagle3", target.config, norm_output=True, norm_before_residual=True)
    path = write_head(tmp_path / "head", "eagle", config, tensors)
    renamed = {("" if n.startswith("lm_head") else "model.") + n.replace("d2t", "draft_id_to_target_id"): t for n, t in tensors.items()}
    del renamed["model.t2d"]
    (path / "pytorch_model.bin").unlink()
    save_file(renamed, path / "model.safetensors")
    edit_config(path, architectures=["Eagle3LlamaForCausalLM"], feedback_post_norm=None)
    head = load_head(path, target)
    assert head.config.dialect == "vllm" and head.config.norm_output
    assert torch.equal(outputs(head), outputs(build_head(config, tensors, target.model)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_copy_of_the_embedding_is_shared(target: LoadedModel, tmp_path: Path, dtype: torch.dtype) -> None:
    config, tensors = tiny_head("eagle3", target.config, own_embedding=True)
    copied = tensors | {"embed_tokens.weight": target.model.embedding.dequantize().to(dtype)}
    path = write_head(tmp_path / "copy", "speculators", config, copied, storage=str(dtype).removeprefix("torch."))
    assert load_head(path, target).embedding is target.model.embedding
    other = load_head(write_head(tmp_path / "own", "speculators", config, tensors), target)
    assert other.config.own_embedding and other.embedding is not target.model.embedding


def test_norm_output_depends_on_the_writer(target: LoadedModel, tmp_path: Path) -> None:
    """SpecForge means the norm before lm_head, speculators the state fed back."""
    config, tensors = tiny_head("eagle3", target.config)
    flat = write_head(tmp_path / "flat", "specforge", config, tensors)
    edit_config(flat, norm_output=True, feedback_post_norm=None)
    assert not load_head(flat, target).config.norm_output
    nested = write_head(tmp_path / "nested", "speculators", config, tensors)
    edit_config(nested, norm_output=True)
    assert load_head(nested, target).config.norm_output
    edit_config(flat, norm_output=False)
    with pytest.raises(UnsupportedCheckpoint, match="norm_output"):
        load_head(flat, target)


def test_absent_keys(target: LoadedModel, tmp_path: Path) -> None:
    """norm_before_residual: True in a speculators file, False in a flat one; flags follow the tensors; taps have defaults."""
    config, tensors = tiny_head("eagle3", target.config, norm_before_fc=True, taps=(2, 2, 1))
    for layout, expected in (("speculators", True), ("specforge", False)):
        path = write_head(tmp_path / layout, layout, config, tensors)
        edit_config(path, norm_before_residual=None, norm_before_fc=None, eagle_config=None, eagle_aux_hidden_state_layer_ids=None)
        found = load_head(path, target).config
        assert found.norm_before_residual is expected and found.norm_before_fc and found.taps == (2, 2, 1)


def test_dialects() -> None:
    assert dialect_of({"speculators_model_type": "eagle3", "architectures": ["Eagle3DraftModel"]}) == "speculators"
    assert dialect_of({"architectures": ["LlamaForCausalLMEagle3"], "eagle_config": {}}) == "specforge"
    assert dialect_of({"architectures": ["LlamaForCausalLMEagle3"]}) == "eagle"
    assert dialect_of({"architectures": ["Eagle3LlamaForCausalLM"], "head_dim": 64}) == "vllm"


def drop(name: str) -> Callable[[Path], None]:
    return lambda path: edit_tensors(path, lambda t: t.__delitem__(name))


def put(name: str, tensor: Tensor) -> Callable[[Path], None]:
    return lambda path: edit_tensors(path, lambda t: t.update({name: tensor}))


def config_with(**changes: Any) -> Callable[[Path], None]:
    return lambda path: edit_config(path, **changes)


def layer_with(**changes: Any) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        layer = json.loads((path / "config.json").read_text())["transformer_layer_config"]
        edit_config(path, transformer_layer_config=layer | changes)

    return damage


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "d2t absent": (drop("d2t"), r"d2t is missing.*128.*512"),
    "d2t zero, no t2d": (lambda p: (put("d2t", torch.zeros(128, dtype=torch.long))(p), drop("t2d")(p))[0], r"d2t is all zero.*128.*512"),
    "d2t a table": (lambda p: edit_tensors(p, lambda t: t.update(d2t=t["d2t"] + torch.arange(128))), r"d2t.*offsets"),
    "d2t short": (put("d2t", torch.zeros(100, dtype=torch.long)), r"d2t has shape \[100\].*\[128\]"),
    "d2t float": (put("d2t", torch.zeros(128)), r"d2t has dtype"),
    "t2d short": (put("t2d", torch.ones(100, dtype=torch.bool)), r"t2d has shape \[100\].*\[512\]"),
    "tap out of range": (config_with(eagle_aux_hidden_state_layer_ids=[0, 2, 9]), r"eagle_aux_hidden_state_layer_ids: tap 9.*4 layers"),
    "taps not numbers": (config_with(eagle_aux_hidden_state_layer_ids="2"), r"eagle_aux_hidden_state_layer_ids must be a list"),
    "too few taps": (config_with(eagle_aux_hidden_state_layer_ids=[0, 2]), r"fc.weight has shape \[64, 192\].*\[64, 128\]"),
    "other vocabulary": (layer_with(vocab_size=600), r"vocab_size.*600.*512"),
    "draft vocabulary": (config_with(draft_vocab_size=100), r"lm_head.weight has shape \[128, 64\].*\[100, 64\]"),
    "target hidden size": (config_with(target_hidden_size=32), r"target_hidden_size.*32.*64"),
    "lm_head absent": (drop("lm_head.weight"), r"lm_head.weight \[128, 64\] is missing.*draft_vocab_size 128.*512"),
    "tensor absent": (drop("layers.0.hidden_norm.weight"), r"layers.0.hidden_norm.weight \[64\] is missing"),
    "tensor unknown": (put("fc.bias", torch.zeros(64)), r"1 tensors do not belong.*fc.bias"),
    "tensor twice": (put("midlayer.mlp.up_proj.weight", torch.zeros(4)), r"there twice"),
    "layer too many": (layer_with(num_hidden_layers=2), r"layers.1.*is missing"),
    "intermediate": (layer_with(intermediate_size=64), r"layers.0.mlp.*\[128, 64\].*\[64, 64\]"),
    "heads": (layer_with(num_key_value_heads=3), r"num_key_value_heads: 3 does not divide num_attention_heads 4"),
    "rope": (layer_with(rope_scaling={"rope_type": "longrope", "factor": 2.0}), r"transformer_layer_config: rope type 'longrope'"),
    "no layer config": (config_with(transformer_layer_config=3), r"transformer_layer_config must be an object"),
    "eagle_config not an object": (config_with(eagle_config=[1]), r"eagle_config must be an object"),
    "fingerprint not an object": (
        lambda p: (p / "specdec.json").write_text('{"fingerprint": 3}') and None,
        r"fingerprint must be an object",
    ),
    "other algorithm": (config_with(speculators_model_type="dflash"), r"speculators_model_type: 'dflash'"),
    "both norms": (config_with(fc_norm=True, norm_before_fc=True), r"norm_before_fc and fc_norm exclude each other"),
    "logit scale": (config_with(logit_scale=0.5), r"logit_scale: 0.5"),
    "last hidden only": (config_with(eagle_config={"use_aux_hidden_state": False}), r"use_aux_hidden_state"),
    "draft vocabulary type": (config_with(draft_vocab_size="x"), r"draft_vocab_size must be a positive integer"),
    "peagle without mask": (config_with(speculators_model_type="peagle"), r"mask token id.*pard_token"),
    "peagle without mask_hidden": (config_with(speculators_model_type="peagle", mask_token_id=3), r"mask_hidden \[1, 1, 192\] is missing"),
    "mask out of range": (config_with(speculators_model_type="peagle", mask_token_id=512), r"mask_token_id: 512.*512"),
    "dtype": (put("fc.weight", torch.zeros(64, 192, dtype=torch.float64)), r"fc.weight has dtype torch.float64"),
    "int8 without scale": (put("fc.weight", torch.zeros(64, 192, dtype=torch.int8)), r"fc.weight is int8 and fc.weight_scale is missing"),
    "scale without weight": (put("fc2.weight_scale", torch.zeros(64)), r"fc2.weight_scale has no weight"),
    "config not json": (lambda p: (p / "config.json").write_text("{") and None, r"config.json: not valid JSON"),
    "weights truncated": (lambda p: (p / "model.safetensors").write_bytes(b"\0" * 20) and None, r"model.safetensors: not a readable"),
    "no weights": (lambda p: (p / "model.safetensors").unlink(), r"no \*.safetensors and no pytorch_model.bin"),
}


@pytest.mark.parametrize("damage, message", DAMAGE.values(), ids=DAMAGE.keys())
def test_damage_is_named(target: LoadedModel, tmp_path: Path, damage: Callable[[Path], Any], message: str) -> None:
    config, tensors = tiny_head("eagle3", target.config)
    path = write_head(tmp_path / "head", "speculators", config, tensors)
    damage(path)
    with pytest.raises(UnsupportedCheckpoint, match=message) as caught:
        load_head(path, target)
    assert str(path) in caught.value.message


def test_bin_files_execute_nothing(target: LoadedModel, tmp_path: Path) -> None:
    config, tensors = tiny_head("eagle3", target.config)
    path = write_head(tmp_path / "head", "eagle", config, tensors)
    torch.save({"fc.weight": print}, path / "pytorch_model.bin")
    with pytest.raises(UnsupportedCheckpoint, match=r"pytorch_model.bin: not a readable torch file"):
        load_head(path, target)


def test_not_found(target: LoadedModel, tmp_path: Path) -> None:
    for name in ("no/such/path", str(tmp_path / "nothing"), ""):
        with pytest.raises(ModelNotFound, match="head") as caught:
            load_head(name, target)
        assert caught.value.param == "head"
    with pytest.raises(UnsupportedCheckpoint, match=r"no config\.json"):
        load_head(tmp_path, target)
    with pytest.raises(ConfigError, match="draft_quantization must be None or one of float32, bfloat16, float16, fp8, int8, int4"):
        load_head(tmp_path, target, draft_quantization="fp4")


def test_share_of_the_noise(target: LoadedModel, tmp_path: Path) -> None:
    """Measured for the head, or that of heads in general; it is no part of what the draft KV depends on."""
    config, tensors = tiny_head("eagle3", target.config, noise_share=0.5)
    path = write_head(tmp_path / "own", "speculators", config, tensors)
    own, side = load_head(path, target), path / "specdec.json"
    side.write_text(json.dumps({key: v for key, v in json.loads(side.read_text()).items() if key != "noise_share"}))
    general = load_head(path, target)
    assert (own.config.noise_share, general.config.noise_share) == (0.5, NOISE_SHARE) and own.epoch == general.epoch
    for bad in (0, 1.5, "half", True):
        side.write_text(json.dumps({"noise_share": bad}))
        with pytest.raises(UnsupportedCheckpoint, match=r"noise_share must be a number in \(0, 1\]"):
            load_head(path, target)
    with pytest.raises(UnsupportedCheckpoint, match="noise_share"):
        tiny_head("eagle3", target.config, noise_share=0.0)
