"""tokenizer.json from GGUF metadata, for byte-level BPE vocabularies whose pre-tokenizer is known for certain."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.errors import UnsupportedCheckpoint

_CONTROL, _USER_DEFINED = 3, 4  # tokenizer.ggml.token_type
_BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
_BYTES_ONLY = {**_BYTE_LEVEL, "use_regex": False}
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split(pattern: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


# tokenizer.ggml.pre -> pre-tokenizer steps. SmolLM splits digits one by one *before* the byte-level regex, so a space
# in front of a digit stays a token of its own.
_PRE: Mapping[str, list[dict[str, Any]]] = {
    "gpt-2": [_BYTE_LEVEL],
    "smollm": [{"type": "Digits", "individual_digits": True}, _BYTE_LEVEL],
    "llama-bpe": [_split(_WORDS % r"\p{N}{1,3}"), _BYTES_ONLY],
    "qwen2": [_split(_WORDS % r"\p{N}"), _BYTES_ONLY],
}


def tokenizer_files(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(tokenizer.json, tokenizer_config.json) as dicts. Raises UnsupportedCheckpoint for what cannot be converted exactly."""
    model, pre = values.get("tokenizer.ggml.model"), values.get("tokenizer.ggml.pre")
    if model != "gpt2" or not isinstance(pre, str) or pre not in _PRE:
        raise UnsupportedCheckpoint(
            f"tokenizer {model!r} with pre-tokenizer {pre!r} cannot be converted exactly; known: gpt2 with {', '.join(_PRE)}. "
            "Use the safetensors form of this model, which carries its tokenizer.json"
        )
    tokens, merges = values.get("tokenizer.ggml.tokens"), values.get("tokenizer.ggml.merges")
    types = values.get("tokenizer.ggml.token_type")
    if not tokens or merges is None or types is None or len(types) != len(tokens):
        raise UnsupportedCheckpoint("tokenizer.ggml.tokens, token_type or merges is missing or of the wrong length")
    bos = values.get("tokenizer.ggml.bos_token_id")
    if bos is not None and not 0 <= bos < len(tokens):
        raise UnsupportedCheckpoint(f"tokenizer.ggml.bos_token_id {bos} is outside the vocabulary of {len(tokens)} tokens")
    add_bos = values.get("tokenizer.ggml.add_bos_token", pre == "llama-bpe")
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_added(i, tokens[i], kind) for i, kind in enumerate(types) if kind in (_CONTROL, _USER_DEFINED)],
        "normalizer": {"type": "NFC"} if pre == "qwen2" else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": _PRE[pre]},
        "post_processor": _post_processor(tokens[bos], bos) if add_bos and bos is not None else None,
        "decoder": _BYTE_LEVEL,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre == "llama-bpe",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": [m.split(" ", 1) for m in merges],
        },
    }
    return tokenizer, _tokenizer_config(values, tokens)


def _added(index: int, content: str, kind: int) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": content, **flags, "special": kind == _CONTROL}


def _post_processor(token: str, index: int) -> dict[str, Any]:
    special, first, second = (
        {"SpecialToken": {"id": token, "type_id": 0}},
        {"Sequence": {"id": "A", "type_id": 0}},
        {"Sequence": {"id": "B", "type_id": 1}},
    )
    return {
        "type": "TemplateProcessing",
        "single": [special, first],
        "pair": [special, first, second],
        "special_tokens": {token: {"id": token, "ids": [index], "tokens": [token]}},
    }


def _tokenizer_config(values: Mapping[str, Any], tokens: list[str]) -> dict[str, Any]:
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for role, key in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown")):
        index = values.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None and 0 <= index < len(tokens):
            config[f"{role}_token"] = tokens[index]
    if template := values.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config
