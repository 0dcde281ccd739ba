"""Files appear whole, with the mode the umask asks for, wherever specdec writes one that others may read."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from specdec.files import replacing, write_bytes, write_tensors
from tests.models.tiny_gguf import write_tiny_gguf

ROOT = Path(__file__).resolve().parents[1]


def test_what_fails_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_bytes(tmp_path / "f", b"old")
    with pytest.raises(KeyboardInterrupt), replacing(tmp_path / "f") as part:
        part.write_bytes(b"half of the n")
        raise KeyboardInterrupt
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("f", b"old")]
    write_bytes(tmp_path / "f", b"new")
    assert [(file.name, file.read_bytes()) for file in tmp_path.iterdir()] == [("f", b"new")]


def test_tensors_come_back(tmp_path: Path) -> None:
    write_tensors(tmp_path / "t.safetensors", {"a": torch.arange(5)}, {"format": "pt"})
    assert torch.equal(load_file(tmp_path / "t.safetensors")["a"], torch.arange(5))
    assert [file.name for file in tmp_path.iterdir()] == ["t.safetensors"]


WRITE = """
import sys
from pathlib import Path
import torch
from specdec.cli_pull import run_pull
from specdec.models.head_export import export_head
from specdec.models.load import find_checkpoint
from specdec.spec.cost import measure_costs
from specdec.train.data import Answer, make_corpus, write_shard
from tests.tiny_heads import tiny_head
home = Path(sys.argv[1])
run_pull(str(home / "m.gguf"), convert=str(home / "out"), progress=False)
export_head(home / "head", *tiny_head("eagle3", find_checkpoint(home / "m.gguf").config))
write_shard(home / "shard.safetensors", make_corpus([Answer([1, 2, 3], 1, 0.0, True, "p", "d")]))
measure_costs(lambda rows, context: float(rows), max_rows=4, max_context=64, cache=home / "costs")
"""


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_the_umask_is_honoured(tmp_path: Path, umask: int) -> None:
    write_tiny_gguf(tmp_path / "m.gguf")
    before = set(tmp_path.rglob("*"))
    env = {**os.environ, "SPECDEC_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", WRITE, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=env, umask=umask, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    modes = {path: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*") if path not in before}
    assert {"parsed", "index.json", "out", "model.safetensors", "head", "shard.safetensors", "costs"} <= {path.name for path in modes}
    assert {path: mode for path, mode in modes.items() if mode != (0o777 if path.is_dir() else 0o666) & ~umask} == {}
