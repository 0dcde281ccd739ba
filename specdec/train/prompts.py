"""Prompts to train on: JSON lines of {id, domain, turns}, plain or gzip. Only prompts; the target writes the answers."""

from __future__ import annotations

import gzip
import json
import os
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Prompt:
    """One conversation to be answered. `turns`: the user's messages, in order."""

    id: str
    domain: str
    turns: tuple[str, ...]


def read_prompts(sources: Iterable[str | os.PathLike[str]]) -> list[Prompt]:
    """Prompts of files and directories (every *.jsonl and *.jsonl.gz in them, by name). Repeated ids keep their first row.

    Raises ConfigError naming file and line of a row that is not a prompt, or the source that holds none.
    """
    found: dict[str, Prompt] = {}
    for source in sources:
        before = len(found)
        for file in _files(Path(source)):
            for number, line in enumerate(_lines(file), 1):
                if line.strip():
                    prompt = _parse(line, f"{file}:{number}")
                    found.setdefault(prompt.id, prompt)
        if len(found) == before:
            raise ConfigError(f"{source}: no new prompts in it (expected *.jsonl or *.jsonl.gz with id, domain and turns)", param="prompts")
    return list(found.values())


def held_out(prompt_id: str, fraction: float) -> bool:
    """Whether a prompt belongs to the validation split: by a hash of its id, so all turns and temperatures fall together."""
    return zlib.crc32(prompt_id.encode()) % 10_000 < round(fraction * 10_000)


def _files(path: Path) -> Sequence[Path]:
    if path.is_dir():
        return sorted([*path.glob("*.jsonl"), *path.glob("*.jsonl.gz")])
    if not path.is_file():
        raise ConfigError(f"{path}: no such file or directory", param="prompts")
    return [path]


def _lines(file: Path) -> list[str]:
    try:
        data = file.read_bytes()
        return (gzip.decompress(data) if file.suffix == ".gz" else data).decode("utf-8").split("\n")  # texts may hold other line separators
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as err:
        raise ConfigError(f"{file}: not readable as (gzip) UTF-8 text: {err}", param="prompts") from err


def _parse(line: str, where: str) -> Prompt:
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError as err:
        raise ConfigError(f"{where}: not JSON: {err}", param="prompts") from err
    turns = row.get("turns") if isinstance(row, dict) else None
    if not isinstance(turns, list) or not turns or not all(isinstance(t, str) and t for t in turns) or "id" not in row:
        raise ConfigError(f"{where}: a prompt needs an id and turns, a non-empty list of texts", param="prompts")
    return Prompt(str(row["id"]), str(row.get("domain", "")), tuple(turns))
