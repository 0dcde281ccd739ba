"""No tiling of the lists spills registers or wants more shared memory than the card has, on Hopper and on Ampere (none is needed)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from specdec.kernels.tilings import CANDIDATES

SCRIPT = Path(__file__).with_name("compile_gemm.py")
ROOT = SCRIPT.parents[2]
SHARED = {90: 232448, 80: 166912}
pytestmark = pytest.mark.compiles


@pytest.mark.parametrize(
    ("capability", "which"),
    [(90, "usual"), *(pytest.param(card, which, marks=pytest.mark.slow) for card, which in ((80, "usual"), (90, "all"), (80, "all")))],
)
def test_tilings_compile_without_spills(capability: int, which: str, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, SCRIPT, str(capability), which], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert {name.split(":")[0] for name in found} == set(CANDIDATES)
    wrong = {name: used for name, used in found.items() if used["stack"] or used["shared"] > SHARED[capability]}
    assert not wrong
