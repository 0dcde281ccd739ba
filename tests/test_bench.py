"""What the benchmarks record about themselves, and that the start benchmark measures every part."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from bench import offline, schema, start
from tests.harness import checkpoint


def test_records_name_no_paths_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    given = ["/a/b/offline.py", "--gguf", "/c/m.gguf", "--hf-dir=/d/e", "--model=~/m", "--prompts", "3", "--speculation=auto", "org/name"]
    kept = ["offline.py", "--gguf", "m.gguf", "--hf-dir=e", "--model=m", "--prompts", "3", "--speculation=auto", "org/name"]
    monkeypatch.setattr(sys, "argv", given)
    assert schema.environment()["argv"] == kept


def test_the_best_dtype_is_that_of_the_highest_median() -> None:
    speeds = {"off": [99.0], "transformers-float32": [1.0, 2.0, 30.0], "transformers-bfloat16": [3.0, 3.0, 3.0], "llama.cpp-off": [50.0]}
    assert offline.best_dtype(speeds) == "bfloat16"
    assert offline.best_dtype({"off": [1.0], "on": [2.0]}) is None


def test_every_domain_has_prompts() -> None:
    assert "translation" in schema.DOMAINS
    assert all(len(schema.load_prompts(domain, 3)) == 3 for domain in schema.DOMAINS)


def test_start_times_every_part(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The parts make up the total but for what happens outside the child's clock. Nothing is said about how long they take."""
    (tmp_path / "results").mkdir()
    written = tmp_path / "results" / "start.jsonl"
    monkeypatch.setattr(schema, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["start.py", "--model", checkpoint(), "--runs", "1", "--speculation", "off"])
    start.main()
    [record] = [json.loads(line) for line in written.read_text().splitlines()]
    parts = [record[part]["p50"] for part in ("import_s", "load_s", "first_token_s")]
    assert all(part > 0.0 for part in parts) and sum(parts) < record["total_s"]["p50"]
    assert record["bench"] == "start" and record["speculation"] == "off" and "/" not in record["model"]
