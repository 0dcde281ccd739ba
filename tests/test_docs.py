"""What the documents say can be done is done here, and what they list is there."""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import shlex
from pathlib import Path

import pytest

from specdec import cli, ops
from specdec.config import METHODS
from specdec.server import args as server_args
from specdec.train import __main__ as train

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


@pytest.mark.model
def test_the_notebook_example_prints_what_the_readme_shows() -> None:
    [code], [shown] = blocks("python"), blocks("text")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(compile(code, "README.md", "exec"), {})
    assert printed.getvalue() == shown


def commands() -> list[list[str]]:
    """Every `specdec …` line of a console block, as words."""
    lines = "".join(blocks("console")).replace("\\\n", " ").splitlines()
    return [shlex.split(line[2:], comments=True)[1:] for line in lines if line.startswith("$ specdec ")]


def test_there_are_commands_to_check() -> None:
    assert len(commands()) >= 3


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_the_commands_are_accepted(words: list[str]) -> None:
    parsers = {"train": train._parser("specdec train"), "serve": server_args.parser()}
    parser = parsers.get(words[0])
    if parser is None:
        cli._parser().parse_args(words)
    else:
        parser.parse_args(words[1:])


def test_every_flag_in_the_text_exists() -> None:
    known = {flag for parser in (cli._parser(), train._parser("train"), server_args.parser()) for flag in flags(parser)}
    known |= {"--help", "--no-deps"}
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", README))
    assert named and named <= known, named - known


def flags(parser: argparse.ArgumentParser) -> set[str]:
    found = {flag for action in parser._actions for flag in action.option_strings}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            found.update(*(flags(child) for child in action.choices.values()))
    return found


def test_the_table_of_drafters_lists_every_method() -> None:
    table = README[README.index("| `speculation=` |") :].split("\n\n")[0]
    assert set(re.findall(r'`"([a-z0-9_]+)"`', table)) == set(METHODS)


def test_the_makefile_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"(?:^\$ |`)make ([a-z-]+)", README, re.MULTILINE))
    assert {"serve", "test"} <= named <= targets


def test_every_case_is_listed_and_every_listed_file_is_there() -> None:
    listed = (ROOT / "tests" / "cases" / "README.md").read_text(encoding="utf-8")
    done, between, waiting = re.split(r"^(What the remaining.*)$", listed, flags=re.MULTILINE)
    assert {path.name for path in (ROOT / "tests" / "cases").glob("test_*.py")} == set(re.findall(r"test_\w+\.py", done))
    rows = re.findall(r"^\| BC-(\d+) \|.*$", done, re.MULTILINE)
    assert rows and {f"test_bc{row}" for row in rows} == set(re.findall(r"test_bc\d+", done))
    both = set(rows) & set(re.findall(r"BC-(\d+)", waiting))
    assert both == set(re.findall(r"BC-(\d+)", between)), "a case with tests waits for nothing, unless a half of it is said to"


def test_every_kernel_has_its_place_in_the_kernels_page() -> None:
    """Each op and each folder of one is named, and what the page names as a command's module is there."""
    page = (ROOT / "docs" / "kernels.md").read_text(encoding="utf-8")
    folders = {path.parent.name for path in (ROOT / "kernels").glob("*/*.py")}
    assert not {name for name in folders if f"`{name}`" not in page and f"kernels/{name}`" not in page}
    assert not {op for op in ops.TABLE.ops if f"`{op}`" not in page}
    for module in re.findall(r"python -m (bench[.\w]*)", page):
        assert (ROOT / f"{module.replace('.', '/')}.py").exists(), module
