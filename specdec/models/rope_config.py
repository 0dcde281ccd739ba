"""Rotary embedding: what a Hugging Face config says of it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specdec.errors import UnsupportedCheckpoint
from specdec.models.config_values import integer, number

_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary embedding: base and frequency scaling. `kind`: "default", "linear" (divide by factor), "llama3" or "yarn".

    beta_fast, beta_slow: turns within the original positions beyond which YaRN keeps and below which it divides a frequency.
    truncate: whether YaRN rounds the two bounds outwards to whole dimensions. attention_factor: of cos and sin alike.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_positions: int = 8192
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0


def read_rope(config: Mapping[str, Any]) -> RopeConfig:
    """Both spellings: `rope_parameters` (transformers ≥ 5) and `rope_theta` with `rope_scaling`."""
    merged = {"rope_theta": config.get("rope_theta")}
    for key in ("rope_scaling", "rope_parameters"):
        if config.get(key):
            if not isinstance(config[key], Mapping):
                raise UnsupportedCheckpoint(f"config.json: {key} must be an object, got {config[key]!r}")
            merged |= {k: v for k, v in config[key].items() if v is not None}
    theta = number(merged, "rope_theta", 0.0, 1e12, default=10000.0)
    kind = merged.get("rope_type") or merged.get("type") or "default"
    if float(merged.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1.0) != 1.0:
        raise UnsupportedCheckpoint("config.json: partial_rotary_factor other than 1 is not supported")
    if kind == "default":
        return RopeConfig(theta)
    if kind == "linear":
        return RopeConfig(theta, "linear", number(merged, "factor", 0.0, 1e6))
    if kind == "llama3":
        factor, low, high = (number(merged, k, 0.0, 1e6) for k in _LLAMA3_KEYS[:3])
        if low >= high:
            raise UnsupportedCheckpoint(f"config.json: low_freq_factor {low} must be below high_freq_factor {high}")
        return RopeConfig(theta, "llama3", factor, low, high, integer(merged, _LLAMA3_KEYS[3], 1, 1 << 26))
    if kind == "yarn":
        return _yarn(theta, merged)
    raise UnsupportedCheckpoint(f"config.json: rope type {kind!r} is not supported; known: default, linear, llama3, yarn")


def _yarn(theta: float, merged: Mapping[str, Any]) -> RopeConfig:
    for key in ("mscale", "mscale_all_dim"):
        if merged.get(key):
            raise UnsupportedCheckpoint(f"config.json: {key} of yarn is not supported")
    factor = number(merged, "factor", 0.0, 1e6)
    fast, slow = (number(merged, key, 0.0, 1e6, default=default) for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0)))
    if fast <= slow:
        raise UnsupportedCheckpoint(f"config.json: beta_slow {slow} must be below beta_fast {fast}")
    attention = number(merged, "attention_factor", 0.0, 1e6, default=0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0)
    return RopeConfig(
        theta,
        "yarn",
        factor,
        original_max_positions=integer(merged, _LLAMA3_KEYS[3], 1, 1 << 26),
        beta_fast=fast,
        beta_slow=slow,
        truncate=bool(merged.get("truncate", True)),
        attention_factor=attention,
    )


def rope_to_hf(rope: RopeConfig) -> dict[str, Any]:
    config: dict[str, Any] = {"rope_type": rope.kind, "rope_theta": rope.theta}
    if rope.kind != "default":
        config["factor"] = rope.factor
    if rope.kind == "llama3":
        config |= {"low_freq_factor": rope.low_freq_factor, "high_freq_factor": rope.high_freq_factor}
    if rope.kind == "yarn":
        config |= {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "truncate": rope.truncate}
        config["attention_factor"] = rope.attention_factor
    if rope.kind in ("llama3", "yarn"):
        config["original_max_position_embeddings"] = rope.original_max_positions
    return config
