"""The CUDA C++ kernels compile for cards that need not be there, all but without spills, and their library answers."""

from __future__ import annotations

import ctypes
import os
import re
import subprocess
from pathlib import Path

import pytest
import triton

from specdec.kernels.cuda_fragments import Call
from specdec.kernels.cuda_library import build, find_nvcc

ENTRY = re.compile(r"Compiling entry function '(\w+)'.*?(\d+) bytes stack frame.*?Used (\d+) registers", re.DOTALL)
pytestmark = pytest.mark.compiles


def nvcc() -> Path:
    found = find_nvcc()
    if found is None and not os.environ.get("CI"):  # .ci/run installs one
        pytest.skip("no nvcc here")
    assert found is not None
    return found


def check_descriptors(library: Path) -> None:
    """In even registers. ptxas 13.0 once wrote copies with uniform registers that nothing had set; their descriptor, a pair, then began at
    an odd one."""
    cuobjdump = next(Path(triton.__file__).parent.rglob("cuobjdump"))
    code = subprocess.run([cuobjdump, "-sass", str(library)], capture_output=True, text=True, check=True).stdout
    copies = re.findall(r"LDGSTS\S* .*desc\[UR(\d+)\]", code)
    assert len(copies) > 100
    assert not [register for register in copies if int(register) % 2]


@pytest.mark.parametrize("capability", [90, pytest.param(80, marks=pytest.mark.slow)], ids=["Hopper", "Ampere"])
def test_kernels_compile_without_spills_and_answer(capability: int, tmp_path: Path) -> None:
    report = build(nvcc(), tmp_path / "kernels.so", [capability], "-Xptxas", "-v")
    found = {name: (int(stack), int(registers)) for name, stack, registers in ENTRY.findall(report)}
    kernels = {name: spent for name, spent in found.items() if "fragment_linear" in name}
    assert len(kernels) == 24, report  # two formats, two kinds of numbers, six numbers of token tiles
    for name, (stack, registers) in kernels.items():
        few = not name.endswith(("Li6EEEvNS0_4CallE", "Li8EEEvNS0_4CallE"))  # 48 and 64 tokens: 96 and 128 sums a thread
        assert registers <= 255 and stack <= (0 if few else 320), f"{name} keeps {stack} bytes in local memory"
    segments = {name: spent for name, spent in found.items() if "decoder_segment" in name}
    assert len(segments) == 4, report  # two formats, up to 8 and 16 rows
    assert all(stack == 0 for name, (stack, _) in segments.items() if "Li1E" in name), segments
    assert all(stack <= 32 for stack, _ in segments.values()), segments
    attention = {name: stack for name, (stack, _) in found.items() if "few_attention" in name}
    assert len(attention) == 2 and not any(attention.values()), attention  # two sizes of heads
    library = ctypes.CDLL(str(tmp_path / "kernels.so"))
    library.specdec_error.restype = ctypes.c_char_p
    call = Call(M=1, N=64, K=100)
    assert library.specdec_error(library.specdec_fragment_linear(ctypes.byref(call), 0, 0, 132, 0, None)) == b"invalid argument"
    if capability == 90:
        check_descriptors(tmp_path / "kernels.so")


def test_the_library_appears_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="nvcc failed"):
        build(nvcc(), tmp_path / "kernels.so", [1])
    assert not list(tmp_path.iterdir())
