"""Adds the optional extension `specdec._C` (CPU kernels). Everything else about the package is in pyproject.toml.

Without torch at build time, without a compiler, or with SPECDEC_CPU=0 the package installs without it and runs on the
PyTorch references; start-up says so.
"""

import glob
import os
import platform
import sys

from setuptools import setup

FLAGS = ["-O3", "-g0", "-std=c++20", "-fopenmp", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wno-psabi"]
FLAGS += ["-Wno-maybe-uninitialized", "-Wno-uninitialized"]  # GCC's own AVX-512 headers trip these


def libgomp(torch_lib: str) -> list[str]:
    """Linker arguments for the OpenMP runtime torch loads, so that there is one thread pool in the process."""
    folders = (torch_lib, os.path.join(torch_lib, "..", "..", "torch.libs"))
    shipped = [path for folder in folders for path in sorted(glob.glob(os.path.join(folder, "libgomp*.so*")))]
    return [os.path.realpath(shipped[0])] if shipped else ["-fopenmp"]


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

    class OptionalBuild(BuildExtension):
        """A failing compiler costs speed, not the installation."""

        def run(self) -> None:
            try:
                super().run()
            except Exception as err:  # setuptools, distutils and ninja each raise their own
                print(f"specdec: compiled kernels not built, PyTorch references will be used: {err}", file=sys.stderr)

    here = os.path.dirname(os.path.abspath(__file__))
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
