"""The house keeps its shape: links, no regular `kernels` package, cheap import, version in one place."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
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


BUILD = "import sys; from setuptools import build_meta; build_meta.build_editable(sys.argv[1])"
START = "import site; site.addsitedir('site'); import specdec; print(specdec.__version__, specdec.__file__)"


@pytest.mark.parametrize("folder", ["beside the clone", "in a folder with an empty specdec", "elsewhere"])
def test_an_editable_install_is_not_hidden_by_a_folder_named_specdec(tmp_path: Path, folder: str) -> None:
    """A notebook in the folder that holds the clone sees ./specdec, which is not the package, before it sees the install."""
    from specdec.version import __version__

    clone = tmp_path / "specdec"
    shutil.copytree(ROOT / "specdec", clone / "specdec", symlinks=True, ignore=shutil.ignore_patterns("__pycache__", "*.so"))
    for name in ("kernels", "server", "csrc"):
        shutil.copytree(ROOT / name, clone / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, clone / name)
    work = tmp_path if folder == "beside the clone" else tmp_path / "work"
    (work / "specdec" if folder.startswith("in a") else work).mkdir(parents=True, exist_ok=True)
    env = {**os.environ, "SPECDEC_CPU": "0"} | {"PYTHONPATH": ""}
    subprocess.run([sys.executable, "-c", BUILD, str(tmp_path)], cwd=clone, env=env, capture_output=True, check=True)
    with zipfile.ZipFile(next(tmp_path.glob("*.whl"))) as wheel:
        wheel.extractall(work / "site")
    # -S: this environment's own packages, an installed specdec among them, are not on the path.
    done = subprocess.run([sys.executable, "-S", "-c", START], cwd=work, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.split() == [__version__, str(clone / "specdec" / "__init__.py")], done.stderr
