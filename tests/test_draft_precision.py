"""The benchmark of a head's storage: one record a head and storage, on texts and through the engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench import draft_precision, report, schema
from specdec.errors import ConfigError
from specdec.models.head_load import DRAFT_QUANTIZATIONS
from specdec.train.data import Answer, make_corpus, write_shard
from tests.harness import checkpoint
from tests.spec.heads import knowing_head


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "qa.jsonl").write_text(json.dumps({"turns": ["a b c"]}), encoding="utf-8")
    for module in (schema, report):
        monkeypatch.setattr(module, "ROOT", tmp_path)
    monkeypatch.setattr(schema, "commit", lambda: "abc")
    answers = [Answer(list(range(20 + i, 60 + i)), 8, float(i == 2), True, f"{i}", "qa") for i in range(4)]
    (tmp_path / "answers").mkdir()
    write_shard(tmp_path / "answers" / "shard-00000.safetensors", make_corpus(answers))
    return tmp_path


def test_texts_are_greedy_and_the_first_of_their_domain() -> None:
    corpus = make_corpus([Answer([1, 2, 3 + i], 1, float(i == 1), True, str(i), "ab"[i // 3]) for i in range(6)])
    assert draft_precision.first_texts(corpus, ["b", "a"], 2).prompt_ids == ("3", "4", "0", "2")
    with pytest.raises(ConfigError, match="--answers"):
        draft_precision.first_texts(corpus, ["c"], 2)


def test_every_storage_is_measured(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A head that knows the target is right in every storage whose rounding leaves the law's order alone."""
    given = ["--model", checkpoint("last"), "--heads", f"eagle3={knowing_head()}", "--answers", str(work / "answers"), "--domains", "qa"]
    draft_precision.main([*given, "--depths", "3", "--prompts", "1", "--max-tokens", "24", "--shapes", "chain:5"])
    rows = [json.loads(line) for line in (work / "results" / "draft_precision.jsonl").read_text().splitlines()]
    assert [r["precision"] for r in rows] == list(DRAFT_QUANTIZATIONS) and len({r["digest"] for r in rows}) == len(rows)
    size = {r["precision"]: r["bytes"] for r in rows}
    assert size["float32"] == 2 * size["bfloat16"] == 2 * size["float16"] > 3 * size["fp8"] and size["int8"] > 1.5 * size["int4"]
    exact = rows[0]
    assert exact["walked"]["texts"] == 3 and len(exact["walked"]["lengths"]) == 3
    assert draft_precision.served_length(exact["chain:5"]) > 4.0  # it knows the law, and float32 keeps it
    table = capsys.readouterr().out
    assert table.count("| eagle3 | ") == len(rows) and f"| eagle3 | fp8 | {size['fp8'] / 1e6:.1f} |" in table
