"""The attention kernels at the sizes of real models compile for Hopper and Ampere, fit, and keep their state in registers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_attention.py")
ROOT = SCRIPT.parents[2]
pytest.importorskip("triton")
pytestmark = pytest.mark.compiles


@pytest.mark.slow
@pytest.mark.parametrize(("capability", "shared_memory", "spilled"), [(90, 232448, 16), (80, 166912, 64)], ids=["Hopper", "Ampere"])
def test_attention_compiles_fits_and_hardly_spills(capability: int, shared_memory: int, spilled: int, tmp_path: Path) -> None:
    """spilled: bytes a thread. On Hopper the fixed order has some (head size 64, FP8), the other two numbers at most (prefill, FP8)."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, SCRIPT, str(capability)], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert {name.split(": ")[1] for name in report} == {"_attend", "_attend_fixed", "_merge", "_merge_few"}
    for name, used in report.items():
        assert used["shared"] <= shared_memory and used["reg"] <= 255, (name, used)
        assert used["stack"] <= (8 if capability == 90 and "fixed" not in name else spilled), (name, used)
