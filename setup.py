"""Adds the optional extension `specdec._C` (CPU kernels) and, where torch is a CUDA build and nvcc is there, the library of CUDA
kernels. Everything else about the package is in pyproject.toml.

Without torch at build time, without a compiler, or with SPECDEC_CPU=0 the package installs without the extension and runs on the
PyTorch references; start-up says so. SPECDEC_CUDA=0 leaves out the CUDA library (see kernels/cuda_library.py).
"""

import glob
import importlib.util
import os
import platform
import sys
from pathlib import Path

from setuptools import setup

FLAGS = ["-O3", "-g0", "-std=c++20", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wno-psabi"]
FLAGS += ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]  # GCC's own AVX-512 headers trip these


def libgomp(torch_lib: str) -> list[str]:
    """Linker arguments for the OpenMP runtime torch loads, so that there is one thread pool in the process."""
    folders = (torch_lib, os.path.join(torch_lib, "..", "..", "torch.libs"))
    shipped = [path for folder in folders for path in sorted(glob.glob(os.path.join(folder, "libgomp*.so*")))]
    return [os.path.realpath(shipped[0])] if shipped else ["-fopenmp"]


def build_cuda(to: Path) -> None:
    """The library of CUDA kernels into folder `to`, for the cards at hand, or without one for Ampere and Hopper."""
    import torch

    spec = importlib.util.spec_from_file_location("cuda_library", Path(__file__).parent / "specdec" / "kernels" / "cuda_library.py")
    cuda = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(cuda)
    nvcc = cuda.find_nvcc()
    if torch.version.cuda is None or nvcc is None or os.environ.get("SPECDEC_CUDA") == "0":
        return
    cards = {torch.cuda.get_device_capability(i) for i in range(torch.cuda.device_count())}
    cuda.build(nvcc, to / cuda.prebuilt().name, sorted(10 * major + minor for major, minor in cards) or [80, 90])


def extension() -> dict:
    """`ext_modules` and `cmdclass`, or nothing where the extension cannot be built."""
    if os.environ.get("SPECDEC_CPU") == "0" or platform.system() != "Linux":
        return {}
    try:
        import torch
        from torch.utils.cpp_extension import BuildExtension, CppExtension
    except ImportError:
        print("specdec: no torch at build time, installing without compiled kernels", file=sys.stderr)
        return {}

    here = os.path.dirname(os.path.abspath(__file__))

    class OptionalBuild(BuildExtension):
        """A failing compiler costs speed, not the installation. What it made stays, so that a wheel or a second install need not wait."""

        def finalize_options(self) -> None:
            super().finalize_options()
            self.build_temp = os.path.join(here, "build", "objects")  # an editable install would throw its own away

        def run(self) -> None:
            try:
                super().run()
            except Exception as err:  # setuptools, distutils and ninja each raise their own
                print(f"specdec: compiled kernels not built, PyTorch references will be used: {err}", file=sys.stderr)
            try:
                build_cuda(Path(here if self.inplace else self.build_lib) / "specdec")
            except Exception as err:
                print(f"specdec: CUDA kernels not built, Triton's will be used: {err}", file=sys.stderr)

    sources = sorted(glob.glob("specdec/csrc/*.cpp", root_dir=here) + glob.glob("specdec/csrc/cpu/*.cpp", root_dir=here))
    cpu = CppExtension(
        "specdec._C",
        sources,
        depends=sorted(glob.glob("specdec/csrc/**/*.h", root_dir=here, recursive=True)),
        extra_compile_args=FLAGS,
        extra_link_args=libgomp(os.path.join(os.path.dirname(torch.__file__), "lib")),
    )
    return {"ext_modules": [cpu], "cmdclass": {"build_ext": OptionalBuild}}


setup(**extension())
