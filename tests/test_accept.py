"""The acceptance benchmark: what it counts, on which contexts, what it skips, and what the report makes of its records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench import accept, report, report_accept, schema
from bench.cells import Cell, Drafter, Shape, Tally, recorded
from specdec.config import SamplingParams
from specdec.errors import ConfigError
from specdec.trace import TracedStep
from tests.harness import checkpoint
from tests.spec.heads import knowing_head, random_head

MACHINE = {"commit": "abc", "cpu": "c", "gpu": None, "threads": 1}


def cell(**changes: Any) -> Cell:
    fields = {"model": "m", "drafter": "eagle3", "digest": "d", "nodes": 4, "depth": 3, "width": 1, "mode": "coupled", "temperature": 0.0}
    return Cell(**(fields | {"domain": "qa", "texts": "free", "count": 2, "max_tokens": 24, "seeds": 1} | changes))


def step(position: int, taken: int, drafted: int = 3) -> TracedStep:
    nodes, path = list(range(drafted + 1)), list(range(1, taken + 1))
    return TracedStep(0, 0, position, "eagle3", nodes, [n - 1 for n in nodes], path, [7] * (taken + 1), 0.5, 0.25, 0.125)


def data(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "data").mkdir()
    rows = [{"turns": [text]} for text in ("a b c", "what is it, and why, and where is the other one now")]
    (folder / "data" / "qa.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    for module in (schema, report):
        monkeypatch.setattr(module, "ROOT", folder)
    monkeypatch.setattr(schema, "commit", lambda: "abc")


def lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "results" / "accept.jsonl").read_text().splitlines()]


def test_shapes_are_read_or_refused() -> None:
    assert [Shape.of(t) for t in ("chain:1", "tree:5", "tree:32:6:8")] == [Shape(2, 1, 1), Shape(5, 4, 4), Shape(32, 6, 8)]
    for text in ("chain:0", "chain:64", "tree:1", "tree:8:2", "tree:8:0:2", "ring:3", "chain:x", "chain"):
        with pytest.raises(ConfigError, match="shape"):
            Shape.of(text)


def test_passes_are_counted_without_the_prompt_and_the_limit() -> None:
    """The pass over the prompt is no step; 20 tokens leave no room for three drafts and a bonus after position 16."""
    tally = Tally()
    tally.run([step(4, 0, 0), step(5, 3), step(9, 1), step(11, 0), step(12, 0, 0), step(16, 2)], depth=3, limit=20)
    found = tally.summary()
    assert (found["steps"], tally.drafts, tally.drafted, tally.accepted, tally.committed) == (4, 3, 9, 4, [4, 2, 1, 1])
    assert found["acceptance_length"] == 2.0 and found["positions"] == [2 / 3, 1 / 3, 1 / 3] and found["drafting"] == 0.75
    assert found["draft_seconds"]["p50"] == 0.5 and found["verify_seconds"]["p50"] == 0.125


def test_what_is_recorded_for_this_tree_head_and_machine_is_known() -> None:
    row = json.loads(json.dumps(MACHINE | vars_of(cell()) | {"steps": 3}))
    assert cell().key(MACHINE) in recorded([row])
    for other in (cell(digest="e"), cell(temperature=1.0), cell(texts="forced"), cell(nodes=5)):
        assert other.key(MACHINE) not in recorded([row])
    assert cell().key(MACHINE | {"commit": "def"}) not in recorded([row])
    assert not recorded([row | {"commit": "abc+"}]) and not recorded([{"commit": "abc", "bench": "accept"}])


def vars_of(one: Cell) -> dict[str, Any]:
    return {name: getattr(one, name) for name in Cell.__dataclass_fields__}


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data(tmp_path, monkeypatch)
    given = ["--model", checkpoint(), "--drafters", "ngram", f"draft_model={checkpoint()}", "--shapes", "chain:2", "--domains", "qa"]
    given += ["--prompts", "2", "--max-tokens", "24"]
    accept.main(given)
    first = lines(tmp_path)
    assert [r["drafter"] for r in first] == ["ngram", "draft_model"] and "/" not in first[1]["source"] and first[1]["digest"]
    assert first[1]["acceptance_length"] > 2.0  # the target drafts for itself
    accept.main([*given, "--temperatures", "0", "1"])
    again = lines(tmp_path)
    assert again[:2] == first and [(r["drafter"], r["temperature"]) for r in again[2:]] == [("ngram", 1.0), ("draft_model", 1.0)]
    assert len({r["commit"] for r in again}) == 1


def test_a_head_that_is_always_right_fills_every_draft(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It knows the law: with the noise it names every token; without, only the likeliest, which is drawn now and then."""
    data(tmp_path, monkeypatch)
    bench = accept.Bench(checkpoint("last"))
    drafter = bench.identified(Drafter("eagle3", knowing_head()))
    free = {"drafter": "eagle3", "digest": drafter.digest, "temperature": 1.0, "max_tokens": 60, "seeds": 3}
    coupled, quiet = (bench.measure(drafter, cell(mode=mode, **free)) for mode in ("coupled", "deterministic"))
    assert drafter.digest and coupled.steps and coupled.accepted == coupled.drafted and coupled.accepted > 2 * coupled.steps
    assert quiet.accepted / quiet.drafted < 0.9


def test_contexts_start_a_step_at_their_last_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes of the target's own greedy texts; drafts of every seed and temperature start from the same root."""
    data(tmp_path, monkeypatch)
    bench = accept.Bench(checkpoint())
    texts = [(30, list(range(5, 150))), (70, list(range(5, 215)))]
    monkeypatch.setattr(bench, "texts", lambda domain, prompts, max_tokens: texts)
    contexts = bench.contexts("qa", 3, 0)
    assert [len(c) for c in contexts] == [65, 129, 129] and all(c in ([*t[: len(c)]] for _, t in texts) for c in contexts)
    with pytest.raises(ConfigError, match="raise --max-tokens"):
        bench.contexts("qa", 9, 0)
    drafter = Drafter("eagle3", random_head())
    trees: dict[str, list[list[int]]] = {}
    for mode in ("coupled", "deterministic"):
        for seed in range(4):
            engine = bench.engine(drafter.spec(Shape(20, 3, 6)), mode, accept.CHUNK)
            params = SamplingParams(temperature=1.0, seed=seed, max_tokens=5)
            found, _ = next(accept.steps(engine, contexts[0], params))
            assert found.position == 64 and found.tokens[0] == contexts[0][-1] and len(found.tokens) > 1
            trees.setdefault(mode, []).append(found.tokens)
    assert all(tree == trees["deterministic"][0] for tree in trees["deterministic"])  # whatever the seed
    assert len({tuple(tree) for tree in trees["coupled"]}) > 1


def test_the_report_has_every_shape_and_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data(tmp_path, monkeypatch)
    base = MACHINE | {"time": "2026-12-02T00:00:00", "source": "h", "policy": "fixed", "steps": 4}
    base |= {name: {"p50": ms / 1e3} for name, ms in (("draft_seconds", 2), ("forward_seconds", 5), ("verify_seconds", 1))}
    for domain, more in (("qa", 0.0), ("rag", 1.0)):
        for k in (1, 2, 3):
            own = cell(domain=domain, nodes=k + 1, depth=k)
            schema.append("accept", base | vars_of(own) | {"acceptance_length": 1.0 + more + k / 10, "positions": [0.5] * k})
        for mode, length in (("coupled", 3.0), ("rejection", 2.0)):
            own = cell(domain=domain, mode=mode, texts="forced", temperature=1.0, nodes=32, width=4)
            schema.append("accept", base | vars_of(own) | {"acceptance_length": length + more, "positions": [0.5]})
    readme = tmp_path / "README.md"
    readme.write_text("a\n<!-- table:accept -->\nold\n<!-- /table:accept -->\nz\n", encoding="utf-8")
    report.main(readme, [])
    text = readme.read_text(encoding="utf-8")
    assert "| eagle3 | chain 2 | 1.70 | 0.50 0.50 | 2.0 | 6.0 |" in text and "| 3.50 | 2.50 |" in text
    assert "old" not in text and text.endswith("z\n")
    titles = [title for title, _ in report_accept.panels(schema.records("accept"))]
    assert (tmp_path / "results" / "accept.svg").read_text().count("<polyline") == len(titles) == 4
    report.main(readme, ["--without-times"])
    text = readme.read_text(encoding="utf-8")
    assert "| eagle3 | chain 2 | 1.70 | 0.50 0.50 |\n" in text and "ms" not in text
    assert (tmp_path / "results" / "accept.svg").read_text().count("<polyline") == 2
