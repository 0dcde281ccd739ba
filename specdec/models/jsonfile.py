"""Reading the JSON files of a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from specdec.errors import UnsupportedCheckpoint


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a checkpoint's file; UnsupportedCheckpoint naming the file when it is not one."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnsupportedCheckpoint(f"{file}: missing") from None
    except (OSError, ValueError, RecursionError) as err:  # the last: brackets nested too deep
        raise UnsupportedCheckpoint(f"{file}: not valid JSON: {err}") from err
    if not isinstance(value, dict):
        raise UnsupportedCheckpoint(f"{file}: expected a JSON object, found {type(value).__name__}")
    return value
