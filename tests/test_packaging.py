"""The house keeps its shape: links, no regular `kernels` package, cheap import, version in one place."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.mark.parametrize("name", ["kernels", "server", "csrc"])
def test_links_are_relative_and_whole(name: str) -> None:
    link = ROOT / "specdec" / name
    assert link.is_symlink() and os.readlink(link) == f"../{name}"
    assert link.is_dir()


def test_kernels_is_a_namespace_package() -> None:
    """A regular package `kernels` in the working directory would shadow the one transformers looks for."""
    assert not list((ROOT / "kernels").glob("__init__.py"))


def python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_transformers_imports_from_the_repo_root() -> None:
    assert python("from transformers import LlamaForCausalLM; print(LlamaForCausalLM.__name__)") == "LlamaForCausalLM"


def test_importing_specdec_is_lazy() -> None:
    assert (
        python("import sys, specdec; specdec.__version__; print(sorted({'torch', 'transformers', 'fastapi'} & set(sys.modules)))") == "[]"
    )


def test_the_library_does_not_import_transformers() -> None:
    assert python("import sys; from specdec import LLM, SamplingParams, SpecConfig; print('transformers' in sys.modules)") == "False"


def test_public_names() -> None:
    import specdec

    for name in specdec.__all__:
        assert getattr(specdec, name) is not None
    with pytest.raises(AttributeError, match="nonsense"):
        _ = specdec.nonsense


def test_version_has_one_home() -> None:
    from specdec.version import __version__

    text = (ROOT / "pyproject.toml").read_text()
    assert "specdec.version.__version__" in text and __version__ not in text
