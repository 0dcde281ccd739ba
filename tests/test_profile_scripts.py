"""The profiling scripts as written: what they start, with tools in their place that only say how they were called."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
from importlib import import_module
from pathlib import Path

import pytest

from bench import decode, kernels, kernels_attention, kernels_moe, kernels_small
from specdec import ops

PROFILE = Path(decode.__file__).parent / "profile"
PARSERS = {"kernels": kernels.parser, "kernels_attention": kernels_attention.arguments}
LISTS = {"kernels_small": kernels_small, "kernels_moe": kernels_moe}
NOT_TIMED = {  # on a GPU: made of other ops, of the CPU's tiles, or parts of coupled_verify and tests'
    *("decoder_stack", "draft_pass", "tiled_linear", "tiled_embedding"),
    *("gumbel_argmax", "gumbel_noise", "philox_uniform"),
}


def run(tmp_path: Path, tool: str, script: str, *args: str) -> subprocess.CompletedProcess[str]:
    """The script with a `tool` first in the path that prints its arguments."""
    (tmp_path / tool).write_text('#!/bin/sh\nfor a in "$@"; do printf "%s\\n" "$a"; done\n')
    (tmp_path / tool).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    return subprocess.run(["sh", str(PROFILE / script), *args], capture_output=True, text=True, env=environment, check=False)


def started(words: list[str]) -> tuple[str, list[str]]:
    """(module of bench, its arguments) of `… python -m bench.MODULE …`."""
    at = words.index("-m")
    return words[at + 1].removeprefix("bench."), words[at + 2 :]


@pytest.mark.parametrize("op", sorted(set(ops.TABLE.ops) - NOT_TIMED))
def test_ncu_runs_the_benchmark_of_every_op(tmp_path: Path, op: str) -> None:
    done = run(tmp_path, "ncu", "ncu.sh", op)
    assert done.returncode == 0, done.stderr
    words = done.stdout.splitlines()
    module, args = started(words)
    assert (PROFILE.parent / f"{module}.py").exists() and "--dry" in args
    if module in PARSERS:
        PARSERS[module]().parse_args(args)
    else:
        text = (PROFILE.parent / f"{module}.py").read_text()
        assert all(f'"{arg}"' in text for arg in args if arg.startswith("--"))
    pattern = re.compile(words[words.index("--kernel-name") + 1].removeprefix("regex:"))
    folder = import_module("specdec.kernels.table").__file__
    sources = "\n".join(p.read_text() for p in Path(folder).parent.rglob("*.py"))
    assert any(pattern.search(name) for name in re.findall(r"@triton\.jit[^@]*?\ndef (\w+)", sources)), pattern


@pytest.mark.parametrize("op", sorted(NOT_TIMED))
def test_ncu_refuses_what_it_cannot_show(tmp_path: Path, op: str) -> None:
    done = run(tmp_path, "ncu", "ncu.sh", op)
    assert done.returncode == 1 and op in done.stderr


def test_ncu_passes_a_kernel_and_arguments_on(tmp_path: Path) -> None:
    words = run(tmp_path, "ncu", "ncu.sh", "fp8_linear", "_str.*", *shlex.split("--model llama-70b --rows 16")).stdout.splitlines()
    assert "regex:_str.*" in words and words[-4:] == ["--model", "llama-70b", "--rows", "16"]


def test_nsys_profiles_decoding_and_sums_kernels_up(tmp_path: Path) -> None:
    words = run(tmp_path, "nsys", "nsys.sh", "out", "--model", "llama-3.1-8b", "--batch", "1").stdout.splitlines()
    module, args = started(words[: words.index("stats")])
    assert module == "decode" and args == ["--steps", "24", "--model", "llama-3.1-8b", "--batch", "1"]
    assert words[words.index("--output") + 1] == "out" and words[-1] == "out.nsys-rep"
