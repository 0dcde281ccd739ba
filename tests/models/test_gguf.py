"""GGUF files: exact values, un-permuted rows, tokenizer, the cached parse, and every way a file can be broken."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import gguf as gguf_package
import numpy as np
import pytest
import torch

from specdec.errors import ConfigError, UnsupportedCheckpoint
from specdec.models import gguf
from specdec.models.config import RopeConfig
from specdec.models.load import find_checkpoint, load_model
from specdec.quant.ggml import GgmlBlocks
from tests.models.tiny_gguf import write_tiny_gguf
from tests.oracle import assert_parity, oracle, oracle_logits, run_logits

IDS = [(7 * i * i + 13 * i + 5) % 400 for i in range(60)]
QWEN2 = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0", "Q5_1", "F16", "BF16", "F32"])
def test_logits_match_the_dequantised_model(tmp_path: Path, kind: str) -> None:
    directory = write_tiny_gguf(tmp_path / "m.gguf", kind=kind)
    found = run_logits(load_model(tmp_path / "m.gguf").model, IDS)
    assert_parity(found, oracle_logits(oracle(directory), IDS))


@pytest.mark.parametrize("options", [{"tied": False}, {"attention_bias": True}, {"num_key_value_heads": 4}, QWEN2], ids=str)
def test_variants_match(tmp_path: Path, options: dict) -> None:
    directory = write_tiny_gguf(tmp_path / "m.gguf", **options)
    found = run_logits(load_model(tmp_path / "m.gguf").model, IDS)
    assert_parity(found, oracle_logits(oracle(directory), IDS))


def test_packed_kinds_stay_packed(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", kind="Q4_1")
    weights = find_checkpoint(tmp_path / "m.gguf").weights()
    q = weights.get("model.layers.0.self_attn.q_proj.weight", (64, 64))
    assert isinstance(q, GgmlBlocks) and q.kind == "Q4_1"
    assert isinstance(weights.get("model.norm.weight", (64,)), torch.Tensor)


def test_quantization_none_unpacks_to_the_same_values(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m.gguf")
    packed, plain = load_model(tmp_path / "m.gguf"), load_model(tmp_path / "m.gguf", quantization="none")
    assert torch.equal(packed.model.layers[1].attention.qkv.dequantize(), plain.model.layers[1].attention.qkv.dequantize())


def test_config_and_tokenizer_come_from_the_metadata(tmp_path: Path) -> None:
    write_tiny_gguf(tmp_path / "m.gguf")
    loaded = load_model(tmp_path / "m.gguf")
    config = loaded.config
    assert (config.num_layers, config.hidden_size, config.num_kv_heads, config.head_dim, config.vocab_size) == (2, 64, 2, 16, 512)
    assert config.eps == 1e-5 and config.tied and config.eos_ids == (2,) and config.max_positions == 256
    tokenizer = loaded.tokenizer
    assert tokenizer.decode(tokenizer.encode("in the year 1984")) == "in the year 1984"
    assert len(tokenizer.encode(" 10")) == 3, "space and digits are single tokens, although 'Ġ1' or '10' may be merges"
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(("pre", "starts_with_bos"), [("gpt-2", False), ("llama-bpe", True), ("qwen2", False)])
def test_known_pre_tokenizers(tmp_path: Path, pre: str, starts_with_bos: bool) -> None:
    write_tiny_gguf(tmp_path / "m.gguf", pre=pre)
    tokenizer = load_model(tmp_path / "m.gguf").tokenizer
    text = "It's 10 past 1234\n\n  two"
    assert (tokenizer.encode(text)[0] == 1) == starts_with_bos
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_llama3_scaling_is_recognised_from_its_table(tmp_path: Path) -> None:
    from specdec.layers.rotary import inverse_frequencies

    path = tmp_path / "m.gguf"
    plain = inverse_frequencies(RopeConfig(5e5), 64)
    table = (plain / inverse_frequencies(RopeConfig(5e5, "llama3", 32.0, 1.0, 4.0, 8192), 64)).numpy()
    freqs = type("Tensor", (), {"data": table})
    rope = gguf._rope("llama", {"llama.rope.freq_base": 5e5}, freqs, 64)
    assert rope["rope_type"] == "llama3" and rope["factor"] == 32.0
    with pytest.raises(UnsupportedCheckpoint, match=r"rope_freqs\.weight"):
        gguf._rope("llama", {"llama.rope.freq_base": 5e5}, type("Tensor", (), {"data": np.ones(32) * 3}), 64)
    assert not path.exists()


def test_parse_happens_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path)
    first = gguf.parse(path)
    monkeypatch.setattr(gguf_package, "GGUFReader", None)  # a second parse would fail
    assert gguf.parse(path) == first
    load_model(path)


def test_a_changed_file_is_parsed_again(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path)
    first = gguf.parse(path)
    write_tiny_gguf(path, kind="Q8_0")
    assert gguf.parse(path) != first


PARSED = ("index.json", "tokenizer.json", "tokenizer_config.json", "SHA256SUMS")
DAMAGE = {
    "truncated": lambda file: file.write_bytes(file.read_bytes()[:-9]),
    "empty": lambda file: file.write_bytes(b""),
    "garbage": lambda file: file.write_bytes(bytes(range(256)) * 8),
    "nested": lambda file: file.write_bytes(b"[" * 100_000),
    "other JSON": lambda file: file.write_bytes(b'{"config": {}, "tensors": {}}'),
    "missing": lambda file: file.unlink(),
}


@pytest.mark.parametrize("name", PARSED)
@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_cache_heals(tmp_path: Path, name: str, damage: str) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path)
    parsed = gguf.parse(path)
    whole = {file.name: file.read_bytes() for file in parsed.iterdir()}
    expected = load_model(path).tokenizer.encode("in the year 1984")
    DAMAGE[damage](parsed / name)
    assert load_model(path).tokenizer.encode("in the year 1984") == expected
    assert {file.name: file.read_bytes() for file in parsed.iterdir()} == whole


def test_a_damaged_cache_of_a_broken_file_blames_the_file(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path)
    (gguf.parse(path) / "index.json").write_text("{")
    stat = path.stat()
    path.write_bytes(b"GGUF" + bytes(stat.st_size - 4))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # the same key
    with pytest.raises(UnsupportedCheckpoint, match=r"m\.gguf: the GGUF file is truncated or corrupt"):
        load_model(path)


def test_a_damaged_cache_that_cannot_be_mended_is_not_the_files_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path)
    parsed = gguf.parse(path)
    (parsed / "index.json").write_text("{")

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied", str(parsed))

    monkeypatch.setattr(gguf, "write_bytes", refuse)
    with pytest.raises(ConfigError, match="the cache directory, from SPECDEC_HOME, cannot be used"):
        load_model(path)


def test_many_that_mend_at_once_do_not_hinder_each_other(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path)
    parsed = gguf.parse(path)
    with ThreadPoolExecutor(8) as pool:
        for name in PARSED:
            (parsed / name).unlink()
            assert {files.path for files in pool.map(find_checkpoint, [path] * 8)} == {path}
    assert sorted(file.name for file in parsed.iterdir()) == sorted(PARSED)


@pytest.mark.parametrize("keep", [0, 3, 10, 200, 20_000, -70, -1])
def test_truncated_files_are_refused(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path)
    data = path.read_bytes()
    path.write_bytes(data[:keep] if keep >= 0 else data[: len(data) + keep - 64])
    with pytest.raises(
        UnsupportedCheckpoint, match=r"m\.gguf: the (GGUF )?file is truncated.*delete it and pull or copy it again"
    ) as caught:
        load_model(path)
    assert "reshape" not in caught.value.message


def test_another_kind_of_file_is_not_called_truncated(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"PK\x03\x04" * 100)
    with pytest.raises(UnsupportedCheckpoint, match=r"m\.gguf: not a GGUF file"):
        load_model(path)


def test_garbage_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(b"GGUF\x03\x00\x00\x00" + bytes(range(256)) * 40)
    with pytest.raises(UnsupportedCheckpoint, match=r"m\.gguf"):
        load_model(path)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"drop": "blk.1.attn_k.weight"}, r"model\.layers\.1\.self_attn\.k_proj\.weight \[32, 64\] is missing"),
        ({"drop": "token_embd.weight", "meta": {"llama.vocab_size": 512}}, r"embed_tokens\.weight \[512, 64\] is missing"),
        ({"meta": {"llama.feed_forward_length": 96}}, r"gate_proj\.weight has shape \[128, 64\].*\[96, 64\]"),
        ({"meta": {"llama.block_count": 1}}, r"model\.layers\.1\."),
        ({"meta": {"llama.block_count": None}}, r"llama\.block_count"),
        ({"meta": {"llama.attention.head_count": 0}}, "m.gguf"),
        ({"meta": {"llama.attention.head_count": [4, 4]}}, "num_attention_heads"),
        ({"meta": {"llama.expert_count": 8}}, "mixture-of-experts"),
        ({"meta": {"llama.rope.scaling.type": "yarn"}}, "yarn"),
        ({"meta": {"llama.rope.dimension_count": 8, "llama.attention.key_length": 16}}, "partial RoPE"),
        ({"meta": {"tokenizer.ggml.model": "llama"}}, "safetensors form"),
        ({"pre": "mystery"}, "mystery"),
        ({"meta": {"tokenizer.ggml.merges": None}}, "merges"),
        ({"meta": {"tokenizer.ggml.eos_token_id": 9999}}, "eos_token_id"),
        ({"meta": {"tokenizer.ggml.bos_token_id": 9999}}, "bos_token_id"),
    ],
    ids=lambda v: v if isinstance(v, str) else None,
)
def test_broken_contents_are_named(tmp_path: Path, options: dict, named: str) -> None:
    path = tmp_path / "m.gguf"
    write_tiny_gguf(path, **options)
    with pytest.raises(UnsupportedCheckpoint, match=named):
        load_model(path)


def test_unknown_architecture_lists_the_known(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    writer = gguf_package.GGUFWriter(str(path), "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(UnsupportedCheckpoint, match=r"'mamba'.*llama, qwen2"):
        load_model(path)
