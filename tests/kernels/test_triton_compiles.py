"""What the interpreter does not see: types and shared memory, by compiling for a card (none is needed)."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("compile_triton.py")
ROOT = SCRIPT.parents[2]
pytestmark = pytest.mark.compiles


@pytest.mark.parametrize(
    ("capability", "shared_memory"), [(90, 232448), pytest.param(80, 166912, marks=pytest.mark.slow)], ids=["Hopper", "Ampere"]
)
def test_every_kernel_compiles_and_fits(capability: int, shared_memory: int, tmp_path: Path) -> None:
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"PYTHONPATH": str(ROOT), "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    done = subprocess.run([sys.executable, SCRIPT, str(capability)], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    used = json.loads(done.stdout.splitlines()[-1])
    small = ("_norm", "_silu_mul", "_rope", "_copy", "_noisy_argmax", "_named_draws", "_quantize")
    fused = ("_norm_fp8", "_silu_mul_fp8", "_clamped_swiglu", "_norm_rope")
    drafts = ("_verify", "_build", "_walk", "_compact", "_pad", "_gather", "_weigh", "_sieve", "_find", "_race", "_merge")
    grown = ("_grow", "_layout", "_pairs")
    experts = ("_route", "_sort", "_gate_up", "_down", "_combine")
    assert {name.split()[1] for name in used} == {"_attend", *small, *fused, *drafts, *grown, *experts}
    assert max(used.values()) <= shared_memory, used
