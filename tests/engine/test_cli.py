"""The command line: what it lists, what it refuses, and what `verify` tells."""

from __future__ import annotations

import argparse
import re

import pytest

from specdec import cli
from tests.harness import checkpoint

TINY = ["--model", checkpoint(), "--device", "cpu", "--max-tokens", "24"]


def test_the_docstring_lists_the_commands() -> None:
    action = next(a for a in cli._parser()._actions if isinstance(a, argparse._SubParsersAction))
    listed = re.match(r"`specdec ([a-z| ]+)`", cli.__doc__ or "")
    assert listed is not None and sorted(listed[1].split(" | ")) == sorted(action.choices)


@pytest.mark.parametrize("flags", [["--prompts", "0"], ["--prompts", "-3"], ["--prompts", "many"], ["--max-tokens", "0"]], ids=" ".join)
def test_counts_must_be_positive(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        cli.main(["verify", *flags])
    assert caught.value.code == 2 and flags[0] in capsys.readouterr().err


@pytest.mark.parametrize("speculation", ["off", "ngram"])
def test_verify_tells_how_much_was_drafted(speculation: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Without a draft the verdict says nothing about speculation, and the output shows it."""
    assert cli.main(["verify", *TINY, "--speculation", speculation, "--prompts", "2", "--deterministic"]) == 0
    out = capsys.readouterr().out
    found = re.search(rf"^{speculation}: (\d+) tokens drafted, (\d+) accepted(; nothing was put to the test)?$", out, re.MULTILINE)
    assert found is not None, out
    assert int(found[1]) >= int(found[2]) and (found[1] == "0") == (found[3] is not None)
    assert speculation != "off" or found[1] == "0"


def test_errors_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["pull", checkpoint(), "--convert", "/proc/specdec"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("specdec: /proc/specdec cannot be written") and err.count("\n") == 1
