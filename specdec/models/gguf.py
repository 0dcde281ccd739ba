"""GGUF checkpoints: parse once, then map the weight blocks straight from the file.

Parsing the metadata takes seconds (the vocabulary is a list of strings), so its result is kept in the cache: `index.json`
(config and, per tensor, kind, shape and place in the file), `tokenizer.json`, `tokenizer_config.json`, and `SHA256SUMS` of
these. The key is the file's path, size and modification time; what does not match its sums is parsed again. Blocks stay
packed; nothing is copied or dequantised before the model takes it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specdec.errors import UnsupportedCheckpoint
from specdec.files import write_bytes
from specdec.layers.linear import RawWeight
from specdec.models.config import RopeConfig
from specdec.models.gguf_tokenizer import tokenizer_files
from specdec.models.hub import cache_access
from specdec.models.jsonfile import read_json
from specdec.models.weights import missing, wrong_shape
from specdec.quant.ggml import GgmlBlocks

_VERSION = 1  # of the cached form
_PARSED = ("index.json", "tokenizer.json", "tokenizer_config.json")
_SUMS = "SHA256SUMS"
PACKED = ("Q4_0", "Q4_1", "Q8_0")
_DENSE = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_ARCHITECTURES = {"llama": ("LlamaForCausalLM", "llama"), "qwen2": ("Qwen2ForCausalLM", "qwen2")}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# Factor pairs under which Llama 3.1 (8) and 3.2 (32) models were published; GGUF keeps only the resulting table.
_LLAMA3_FACTORS = (8.0, 32.0)


def parse(path: Path) -> Path:
    """Directory with the parsed form of a GGUF file, from the cache or made now. Raises UnsupportedCheckpoint or ConfigError."""
    try:
        stat = path.stat()
    except OSError as err:
        raise UnsupportedCheckpoint(f"{path}: {err.strerror}") from err
    key = hashlib.sha256(f"{_VERSION}/{path.resolve()}/{stat.st_size}/{stat.st_mtime_ns}".encode()).hexdigest()[:24]
    with cache_access() as cache:
        target = cache / "parsed" / key
        if not _intact(target):
            _write(_read(path), target)
    return target


def _intact(parsed: Path) -> bool:
    """Whether every file is there and is what was written: a full disk, a power cut or an editor may have been at it since."""
    try:
        return (parsed / _SUMS).read_bytes() == _sums({name: (parsed / name).read_bytes() for name in _PARSED})
    except OSError:
        return False


def _sums(files: Mapping[str, bytes]) -> bytes:
    """In the form of the command sha256sum."""
    return "".join(f"{hashlib.sha256(content).hexdigest()}  {name}\n" for name, content in files.items()).encode()


def _write(contents: Mapping[str, Any], parsed: Path) -> None:
    """Write or mend the directory. The sums go last; processes that do this at once write the same bytes."""
    files = {name: json.dumps(contents[name], ensure_ascii=False).encode() for name in _PARSED}
    parsed.mkdir(parents=True, exist_ok=True)
    for name, content in (files | {_SUMS: _sums(files)}).items():
        write_bytes(parsed / name, content)


def _read(path: Path) -> dict[str, Any]:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(path)
        values = {name: field.contents() for name, field in reader.fields.items()}
    except OSError as err:
        raise UnsupportedCheckpoint(f"{path}: cannot be read: {err.strerror or err}") from err
    except Exception as err:  # the parser indexes into the file and fails in many ways on bad bytes
        raise UnsupportedCheckpoint(_unreadable(path)) from err
    arch = values.get("general.architecture")
    if arch not in _ARCHITECTURES:
        raise UnsupportedCheckpoint(f"{path}: architecture {arch!r} is not supported in GGUF; supported: {', '.join(_ARCHITECTURES)}")
    try:
        config = hf_config(arch, values, {t.name: t for t in reader.tensors})
        tensors = {_hf_name(t.name): _place(t, arch, config) for t in reader.tensors if t.name != "rope_freqs.weight"}
        tokenizer, tokenizer_config = tokenizer_files(values)
    except UnsupportedCheckpoint as err:
        raise UnsupportedCheckpoint(f"{path}: {err.message}") from err
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as err:
        raise UnsupportedCheckpoint(f"{path}: malformed GGUF metadata: {err!r}") from err
    return {"index.json": {"config": config, "tensors": tensors}, "tokenizer.json": tokenizer, "tokenizer_config.json": tokenizer_config}


def _unreadable(path: Path) -> str:
    """What the user can see and do; the parser's own words are about arrays, and stay in the chained error."""
    with path.open("rb") as file:
        start = file.read(4)
    size = path.stat().st_size
    if start != b"GGUF"[: len(start)]:
        return f"{path}: not a GGUF file (it starts with {start!r}); pass a .gguf file or a directory with config.json"
    return f"{path}: the GGUF file is truncated or corrupt ({size:,} bytes are there); delete it and pull or copy it again"


def hf_config(arch: str, values: dict[str, Any], tensors: dict[str, Any]) -> dict[str, Any]:
    """The Hugging Face config of GGUF metadata. `tensors` by GGUF name, for what only they tell (tying, biases, RoPE)."""

    def need(key: str) -> Any:
        if f"{arch}.{key}" not in values:
            raise UnsupportedCheckpoint(f"metadata key {arch}.{key} is missing")
        return values[f"{arch}.{key}"]

    if values.get(f"{arch}.expert_count"):
        raise UnsupportedCheckpoint("mixture-of-experts GGUF files are not supported")
    heads = need("attention.head_count")
    head_dim = values.get(f"{arch}.attention.key_length") or values.get(f"{arch}.rope.dimension_count") or need("embedding_length") // heads
    ends = [values.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    architecture, model_type = _ARCHITECTURES[arch]
    embedding = tensors.get("token_embd.weight")
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "hidden_size": need("embedding_length"),
        "intermediate_size": need("feed_forward_length"),
        "num_hidden_layers": need("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": values.get(f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "vocab_size": int(embedding.shape[1]) if embedding is not None else need("vocab_size"),
        "max_position_embeddings": need("context_length"),
        "rms_norm_eps": float(np.float32(need("attention.layer_norm_rms_epsilon")).astype(str)),  # 1e-05, not 9.99e-06
        "rope_parameters": _rope(arch, values, tensors.get("rope_freqs.weight"), head_dim),
        "tie_word_embeddings": "output.weight" not in tensors,
        "attention_bias": arch == "llama" and "blk.0.attn_q.bias" in tensors,
        "mlp_bias": arch == "llama" and "blk.0.ffn_up.bias" in tensors,
        "eos_token_id": [i for i in dict.fromkeys(ends) if i is not None],
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
        "torch_dtype": "float32",
    }


def _rope(arch: str, values: dict[str, Any], freqs: Any, head_dim: int) -> dict[str, Any]:
    theta = float(values.get(f"{arch}.rope.freq_base", 10000.0))
    if values.get(f"{arch}.rope.dimension_count", head_dim) != head_dim:
        raise UnsupportedCheckpoint(f"{arch}.rope.dimension_count differs from the head size {head_dim}: partial RoPE is not supported")
    scaling = values.get(f"{arch}.rope.scaling.type", "none")
    if scaling == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": float(values.get(f"{arch}.rope.scaling.factor", 1.0))}
    if scaling != "none":
        raise UnsupportedCheckpoint(f"{arch}.rope.scaling.type {scaling!r} is not supported; known: none, linear")
    if freqs is None:
        return {"rope_type": "default", "rope_theta": theta}
    from specdec.layers.rotary import inverse_frequencies

    plain = inverse_frequencies(RopeConfig(theta), head_dim)
    for factor in _LLAMA3_FACTORS:
        rope = RopeConfig(theta, "llama3", factor, 1.0, 4.0, 8192)
        table = torch.from_numpy(np.array(freqs.data, dtype=np.float32))
        if table.shape == plain.shape and torch.allclose(plain / inverse_frequencies(rope, head_dim), table, rtol=1e-3):
            scales = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
            return {"rope_type": "llama3", "rope_theta": theta, "factor": factor, **scales}
    raise UnsupportedCheckpoint("rope_freqs.weight is not the table of a published Llama 3 scaling (factor 8 or 32)")


def _hf_name(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _TOP and kind == "weight":
        return f"{_TOP[stem]}.weight"
    parts = stem.split(".")
    if len(parts) == 3 and parts[0] == "blk" and parts[1].isdigit() and parts[2] in _LAYER and kind in ("weight", "bias"):
        return f"model.layers.{parts[1]}.{_LAYER[parts[2]]}.{kind}"
    raise UnsupportedCheckpoint(f"tensor {name} does not belong to this architecture")


def _place(tensor: Any, arch: str, config: dict[str, Any]) -> dict[str, Any]:
    """Index entry of one tensor. `unpermute`: number of heads whose rows are stored interleaved (llama q and k), else 0."""
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    shape = [int(n) for n in reversed(tensor.shape.tolist())]  # GGUF lists the innermost dimension first
    return {
        "kind": tensor.tensor_type.name,
        "shape": shape,
        "offset": int(tensor.data_offset),
        "bytes": int(tensor.n_bytes),
        "unpermute": heads.get(tensor.name.split(".")[-2], 0) if arch == "llama" else 0,
    }


class GgufWeights:
    """Tensors of a parsed GGUF file, memory-mapped: packed kinds as GgmlBlocks, dense ones as they are, others dequantised."""

    def __init__(self, path: Path, parsed: Path):
        self.origin = str(path)
        index = read_json(parsed / "index.json")
        self.config: dict[str, Any] = index["config"]
        self._tensors: dict[str, Any] = index["tensors"]
        self._file = np.memmap(path, mode="c")  # copy-on-write: torch wants a writable buffer

    def names(self) -> Iterable[str]:
        return self._tensors.keys()

    def get(self, name: str, shape: tuple[int, ...]) -> RawWeight:
        if name not in self._tensors:
            raise missing(self.origin, name, shape)
        entry = self._tensors[name]
        if tuple(entry["shape"]) != shape:
            raise wrong_shape(self.origin, name, entry["shape"], shape)
        raw = self._file[entry["offset"] : entry["offset"] + entry["bytes"]]
        if raw.size != entry["bytes"]:
            raise UnsupportedCheckpoint(f"{self.origin}: the file is truncated inside tensor {name}; delete it and pull or copy it again")
        kind = entry["kind"]
        if kind in PACKED:
            rows = _unpermute(torch.from_numpy(raw).view(shape[0], -1), entry["unpermute"])
            return GgmlBlocks(rows, kind, (shape[0], shape[1]))
        dense = torch.from_numpy(raw).view(_DENSE[kind]).view(shape) if kind in _DENSE else self._dequantize(raw, name, kind, shape)
        return _unpermute(dense, entry["unpermute"])

    def _dequantize(self, raw: np.ndarray, name: str, kind: str, shape: tuple[int, ...]) -> torch.Tensor:
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        try:
            values = dequantize(raw.reshape(*shape[:-1], -1), GGMLQuantizationType[kind])
        except (NotImplementedError, KeyError, ValueError) as err:
            raise UnsupportedCheckpoint(f"{self.origin}: tensor {name} has kind {kind}, which cannot be read: {err}") from err
        return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(shape)


def _unpermute(rows: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of q or k from interleaved RoPE order [heads, hd/2, 2] to half-split order [heads, 2, hd/2]; 0 heads = as is."""
    if heads == 0:
        return rows
    order = torch.arange(rows.shape[0]).view(heads, -1, 2).transpose(1, 2).reshape(-1)
    return rows[order]
