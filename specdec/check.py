"""Checks of arguments. Each raises `error` naming the parameter, what it must be, and what was given."""

from __future__ import annotations

import math
from typing import Any

from specdec.errors import InvalidRequest, SpecdecError


def shown(value: Any) -> str:
    """A value as it may stand in a message: its beginning, or what it is where Python will not spell it out."""
    try:
        return f"{value!r:.80}"
    except ValueError:  # more digits than sys.get_int_max_str_digits()
        return "one of thousands of digits"


def require(ok: bool, message: str, param: str, error: type[SpecdecError] = InvalidRequest) -> None:
    if not ok:
        raise error(message, param=param)


def number(value: Any, name: str, low: float, high: float, error: type[SpecdecError] = InvalidRequest, *, low_open: bool = False) -> None:
    ok = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < math.inf
    ok = ok and (value > low if low_open else value >= low) and value <= high
    require(ok, f"{name} must be a number in {'(' if low_open else '['}{low}, {high}], got {shown(value)}", name, error)


def integer(value: Any, name: str, low: int, high: int, error: type[SpecdecError] = InvalidRequest) -> None:
    ok = isinstance(value, int) and not isinstance(value, bool) and low <= value <= high
    require(ok, f"{name} must be an integer in [{low}, {high}], got {shown(value)}", name, error)


def ids(values: Any, name: str) -> None:
    require(values is None or isinstance(values, (list, tuple, set, frozenset, range)), f"{name} must be a list of token ids", name)
    for token in values or ():
        integer(token, name, 0, 2**31 - 1)


def words(values: Any, name: str) -> None:
    ok = values is None or (isinstance(values, (list, tuple, set, frozenset)) and all(isinstance(w, str) and w for w in values))
    require(ok, f"{name} must be a list of non-empty strings", name)
