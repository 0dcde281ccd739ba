"""Loading safetensors directories: complete ones, broken ones, sharded, dummy, exported."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.cli_pull import run_pull
from specdec.errors import ConfigError, ModelNotFound, UnsupportedCheckpoint
from specdec.models.export import export
from specdec.models.load import find_checkpoint, load_model, resolve_dtype
from tests.models.tiny_gguf import write_tiny_gguf
from tests.oracle import assert_parity, oracle, oracle_logits, run_logits
from tests.tiny import write_tiny

IDS = [(7 * i * i + 13 * i + 5) % 400 for i in range(40)]


def rewrite(directory: Path, change: object) -> None:
    """Apply `change(tensors)` to the weights of a checkpoint."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)  # type: ignore[operator]
    save_file(tensors, directory / "model.safetensors")


def shard(directory: Path) -> dict[str, str]:
    """Split the weights into two files with an index; returns the weight map."""
    tensors = load_file(directory / "model.safetensors")
    (directory / "model.safetensors").unlink()
    names = sorted(tensors)
    weight_map = {n: f"model-0000{1 + (i % 2)}-of-00002.safetensors" for i, n in enumerate(names)}
    for file in set(weight_map.values()):
        save_file({n: tensors[n] for n in names if weight_map[n] == file}, directory / file)
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return weight_map


def test_sharded_equals_whole(tmp_path: Path) -> None:
    whole = run_logits(load_model(write_tiny(tmp_path / "a")).model, IDS)
    directory = write_tiny(tmp_path / "b")
    shard(directory)
    assert torch.equal(whole, run_logits(load_model(directory).model, IDS))


def test_missing_shard_is_named(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path)
    shard(directory)
    (directory / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(UnsupportedCheckpoint, match="model-00002-of-00002"):
        load_model(directory)


def test_index_may_not_promise_what_the_file_lacks(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path)
    weight_map = shard(directory)
    weight_map["model.norm.weight"] = next(f for f in weight_map.values() if f != weight_map["model.norm.weight"])
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(UnsupportedCheckpoint, match=r"model\.norm\.weight is listed in the index"):
        load_model(directory)


def test_json_that_is_nested_too_deep_is_named(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path)
    (directory / "config.json").write_text("[" * 100_000)
    with pytest.raises(UnsupportedCheckpoint, match=r"config\.json: not valid JSON"):
        load_model(directory)


def drop_norm(tensors: dict) -> None:
    del tensors["model.norm.weight"]


def cut_v(tensors: dict) -> None:
    tensors["model.layers.1.self_attn.v_proj.weight"] = torch.zeros(16, 64)


def add_q_norm(tensors: dict) -> None:
    tensors["model.layers.0.self_attn.q_norm.weight"] = torch.zeros(16)


def as_int8(tensors: dict) -> None:
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(128, 64, dtype=torch.int8)


def drop_head(tensors: dict) -> None:
    del tensors["lm_head.weight"]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (drop_norm, r"model\.norm\.weight \[64\] is missing"),
        (cut_v, r"v_proj\.weight has shape \[16, 64\], config\.json asks for \[32, 64\]"),
        (add_q_norm, r"do not belong to this architecture: model\.layers\.0\.self_attn\.q_norm\.weight"),
        (as_int8, "int8"),
        (drop_head, r"lm_head\.weight \[512, 64\] is missing"),
    ],
)
def test_wrong_tensors_are_named(tmp_path: Path, change: object, named: str) -> None:
    directory = write_tiny(tmp_path)
    rewrite(directory, change)
    with pytest.raises(UnsupportedCheckpoint, match=named):
        load_model(directory)


def test_old_rope_buffers_and_a_copy_of_tied_embeddings_are_harmless(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path, tied=True)
    expected = run_logits(load_model(directory).model, IDS)

    def add(tensors: dict) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    rewrite(directory, add)
    assert torch.equal(expected, run_logits(load_model(directory).model, IDS))


@pytest.mark.parametrize("keep", [0, 4, 100, -200])
def test_truncated_safetensors_are_refused(tmp_path: Path, keep: int) -> None:
    directory = write_tiny(tmp_path)
    file = directory / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(UnsupportedCheckpoint, match=r"model\.safetensors"):
        load_model(directory)


@pytest.mark.parametrize("text", ["", "{", "[]", "\ud800".encode("utf-16", "surrogatepass").decode("latin-1")])
def test_broken_json_is_named(tmp_path: Path, text: str) -> None:
    directory = write_tiny(tmp_path)
    (directory / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(UnsupportedCheckpoint, match=r"config\.json"):
        load_model(directory)


def test_directories_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedCheckpoint, match=r"no config\.json"):
        load_model(tmp_path)
    (write_tiny(tmp_path) / "model.safetensors").unlink()
    with pytest.raises(UnsupportedCheckpoint, match="safetensors"):
        load_model(tmp_path)


def test_unknown_names_list_the_known(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFound, match="smollm2-135m-instruct") as caught:
        load_model(tmp_path / "nothing" / "here" / "at-all")
    assert caught.value.param == "model"


def test_tokenizer_of_another_model_is_refused(tmp_path: Path) -> None:
    directory, other = write_tiny(tmp_path / "a", vocab_size=300), write_tiny(tmp_path / "b")
    (directory / "tokenizer.json").write_text((other / "tokenizer.json").read_text())
    with pytest.raises(UnsupportedCheckpoint, match=r"512 tokens but the model's vocab_size is 300"):
        load_model(directory)


def test_dummy_needs_no_weights_and_follows_its_seed(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path)
    (directory / "model.safetensors").unlink()
    first, again, other = (run_logits(load_model(directory, load_format="dummy", seed=s).model, IDS) for s in (1, 1, 2))
    assert torch.equal(first, again) and not torch.equal(first, other)
    assert first.isfinite().all()


def test_fingerprints_tell_checkpoints_apart(tmp_path: Path) -> None:
    a, b, c = write_tiny(tmp_path / "a"), write_tiny(tmp_path / "b", seed=1), write_tiny(tmp_path / "c", rope_theta=5e4)
    prints = [load_model(d).fingerprint for d in (a, a, b, c)]
    assert prints[0] == prints[1] and len(set(prints)) == 3


def test_dtypes(tmp_path: Path) -> None:
    directory = write_tiny(tmp_path)
    config = find_checkpoint(directory).config
    assert resolve_dtype("auto", config, torch.device("cpu")) is torch.float32
    assert resolve_dtype("auto", config, torch.device("cuda")) is torch.bfloat16
    with pytest.raises(ConfigError, match="dtype"):
        load_model(directory, dtype="int4")
    with pytest.raises(ConfigError, match="quantization"):
        load_model(directory, quantization="q3")
    exact = run_logits(load_model(directory).model, IDS)
    expected = oracle_logits(oracle(directory), IDS)
    assert_parity(exact, expected)
    model = load_model(directory, dtype="bfloat16").model
    assert model.dtype is torch.bfloat16 and model.logits(torch.zeros(1, 64, dtype=torch.bfloat16)).dtype is torch.float32


@pytest.mark.parametrize("shard_bytes", [1 << 30, 40_000])
def test_export_is_read_back_by_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, shard_bytes: int) -> None:
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "home"))
    write_tiny_gguf(tmp_path / "m.gguf")
    out = export(find_checkpoint(tmp_path / "m.gguf"), tmp_path / "out", shard_bytes=shard_bytes)
    several = len(list(out.glob("*.safetensors"))) > 1
    assert several == (shard_bytes < 1 << 30) == (out / "model.safetensors.index.json").is_file()
    loaded = load_model(out)
    assert_parity(run_logits(load_model(tmp_path / "m.gguf").model, IDS), oracle_logits(oracle(out), IDS))
    assert_parity(run_logits(loaded.model, IDS), oracle_logits(oracle(out), IDS))
    assert loaded.tokenizer.encode("a 12") == load_model(tmp_path / "m.gguf").tokenizer.encode("a 12")


def test_pull_converts_and_does_not_overwrite(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "home"))
    write_tiny_gguf(tmp_path / "m.gguf")
    assert run_pull(str(tmp_path / "m.gguf")) == tmp_path / "m.gguf"
    out = run_pull(str(tmp_path / "m.gguf"), convert=str(tmp_path / "out"), dtype="bfloat16")
    assert load_file(out / "model.safetensors")["model.norm.weight"].dtype is torch.bfloat16
    with pytest.raises(ConfigError, match="not an empty directory"):
        run_pull(str(tmp_path / "m.gguf"), convert=str(tmp_path / "out"))
    with pytest.raises(ConfigError, match="dtype"):
        run_pull(str(tmp_path / "m.gguf"), convert=str(tmp_path / "other"), dtype="int8")
    (tmp_path / "file").write_text("in the way")
    for place in ("/proc/specdec", str(tmp_path / "file" / "below")):
        with pytest.raises(ConfigError, match="cannot be written") as caught:
            run_pull(str(tmp_path / "m.gguf"), convert=place)
        assert caught.value.param == "convert" and place in caught.value.message
