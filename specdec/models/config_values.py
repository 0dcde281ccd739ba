"""Numbers of a config.json, checked, with errors that name the key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec.errors import UnsupportedCheckpoint


def integer(config: Mapping[str, Any], key: str, low: int, high: int, *, default: int | None = None) -> int:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise UnsupportedCheckpoint(f"config.json: {key} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise UnsupportedCheckpoint(f"config.json: {key} must be an integer in [{low}, {high}], got {value!r}")
    return value


def number(config: Mapping[str, Any], key: str, low: float, high: float, *, default: float | None = None) -> float:
    value = config.get(key)
    value = default if value is None else value
    if value is None:
        raise UnsupportedCheckpoint(f"config.json: {key} is missing")
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low < value <= high:
        raise UnsupportedCheckpoint(f"config.json: {key} must be a number in ({low}, {high}], got {value!r}")
    return float(value)
