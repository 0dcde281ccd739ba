"""The command line of training: what is typed wins, and the record says what was typed."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from specdec.cli import main as cli
from specdec.paths import without_path
from specdec.train.__main__ import SMOKE, _parser, _settings, main
from tests.train.corpus import write_work


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_work(tmp_path_factory.mktemp("train"))


def smoke_run(work: Path, out: Path, *more: str) -> list[str]:
    """Arguments of a smoke run of one step."""
    data = ["--model", str(work / "model"), "--device", "cpu", "--data", str(work / "cycle"), "--out", str(out)]
    return ["eagle3", *data, "--smoke", "--steps", "1", *more]


@pytest.mark.parametrize(
    ("start", "typed"),
    [
        (lambda arguments: cli(["train", *arguments]), ["specdec", "train"]),
        (lambda arguments: main(arguments), ["python", "-m", "specdec.train"]),
    ],
    ids=["specdec train", "python -m"],
)
def test_the_card_names_the_command(work: Path, tmp_path: Path, start: Any, typed: list[str]) -> None:
    """As it can be typed again, but for the folders of this machine."""
    out = tmp_path / "two words"
    assert start(smoke_run(work, out)) == 0
    card = (out / "head" / "README.md").read_text(encoding="utf-8")
    found = re.search(r"Command: `(.*)`\.$", card, re.MULTILINE)
    assert found is not None and shlex.split(found[1]) == [*typed, *map(without_path, smoke_run(work, out))]
    assert str(tmp_path) not in card + (out / "head" / "specdec.json").read_text(encoding="utf-8")


@pytest.mark.parametrize("kind", ["eagle3", "peagle"])
@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ([], SMOKE | {"minutes": None}),
        (["--steps", "7"], SMOKE | {"steps": 7, "minutes": None}),
        (["--minutes", "0.5"], SMOKE | {"steps": None, "minutes": 0.5}),
        (["--depths", "2", "--lr", "0.25", "--storage", "float16", "--taps", "0", "1"], {"depths": 2, "lr": 0.25, "taps": [0, 1]}),
    ],
    ids=" ".join,
)
def test_what_is_typed_beside_smoke_wins(kind: str, typed: list[str], wanted: dict[str, Any]) -> None:
    arguments = [kind, "--data", "d", "--out", "o", *typed]
    smoke, plain = (_settings(_parser("specdec train").parse_args([*arguments, *flag])) for flag in (["--smoke"], []))
    assert {name: smoke[name] for name in wanted} == wanted
    assert {name for name in smoke if smoke[name] != plain[name]} <= {"smoke", *SMOKE}
    assert (plain["decay"], plain["storage"]) == (1.0 if kind == "peagle" else 0.8, "float16" if "--storage" in typed else "bfloat16")


def test_smoke_runs_for_the_steps_or_minutes_that_were_typed(work: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(smoke_run(work, tmp_path / "steps")) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["steps"] == 1
    minutes = [a for a in smoke_run(work, tmp_path / "minutes", "--minutes", "1e-4") if a not in ("--steps", "1")]
    assert main(minutes) == 0
    report = json.loads((tmp_path / "minutes" / "report.json").read_text(encoding="utf-8"))
    assert (report["training"]["steps"], report["training"]["minutes"]) == (None, 1e-4)
    assert main(smoke_run(work, tmp_path / "both", "--minutes", "1")) == 1
    assert "exactly one of steps and minutes" in capsys.readouterr().err
