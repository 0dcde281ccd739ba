"""Where a head's files are looked for, and what their tensors are called."""

from __future__ import annotations

from pathlib import Path

import pytest

from specdec.models import head_files, hub
from specdec.models.head_files import find_head, internal_name, shipped_heads


def head_at(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    return path


def test_shipped_heads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_files, "SHIPPED", tmp_path)
    assert shipped_heads("model") == {}
    eagle3, peagle = head_at(tmp_path / "model" / "eagle3"), head_at(tmp_path / "model" / "peagle")
    (tmp_path / "model" / "notes").mkdir()
    assert shipped_heads("model") == {"eagle3": eagle3, "peagle": peagle}
    assert find_head("model/peagle") == peagle


def test_hub_ids_fetch_both_weight_formats(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, tuple[str, ...], str]] = []

    def snapshot(repo: str, patterns: tuple[str, ...], *, what: str) -> Path:
        asked.append((repo, patterns, what))
        return tmp_path

    monkeypatch.setattr(hub, "snapshot", snapshot)
    assert find_head("owner/some-EAGLE3.head") == tmp_path
    assert asked == [("owner/some-EAGLE3.head", ("*.json", "*.safetensors", "*.bin"), "head")]


def test_local_paths_come_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    head_at(tmp_path / "owner" / "name")
    assert find_head("owner/name") == Path("owner/name")


@pytest.mark.parametrize(
    "outer, inner",
    [
        ("midlayer.self_attn.q_proj.weight", "layers.0.self_attn.q_proj.weight"),
        ("model.layers.0.hidden_norm.weight", "layers.0.hidden_norm.weight"),
        ("model.midlayer.mlp.up_proj.weight", "layers.0.mlp.up_proj.weight"),
        ("layers.1.mlp.up_proj.weight", "layers.1.mlp.up_proj.weight"),
        ("model.draft_id_to_target_id", "d2t"),
        ("model.fc.weight", "fc.weight"),
        ("lm_head.weight", "lm_head.weight"),
    ],
)
def test_internal_names(outer: str, inner: str) -> None:
    assert internal_name(outer) == inner
