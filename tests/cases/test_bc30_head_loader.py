"""BC-30, loader: one head in three layouts gives the same logits; damaged copies are refused with field and both sizes.

Sources: NVIDIA-NeMo/Automodel#2447; SafeAILab/EAGLE#222; vllm#54526; vllm-project/vllm-ascend#5974.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec.errors import UnsupportedCheckpoint
from specdec.models.head_fingerprint import measure
from specdec.models.head_load import load_head
from specdec.models.load import load_model
from tests.models.test_head_forward import IDS, run
from tests.tiny import write_tiny
from tests.tiny_heads import rotate_basis, tiny_head, write_head

TAPS = (0, 1, 2)  # T0 has two layers


def written(directory: Path, layout: str) -> Path:
    """The case's head: 128 draft ids of 512, for T0 in `directory`/target (written here)."""
    target = load_model(write_tiny(directory / "target"))
    config, tensors = tiny_head("eagle3", target.config, taps=TAPS)
    return write_head(directory / layout, layout, config, tensors, fingerprint=measure(target.model, TAPS))


def test_layouts_give_identical_logits(tmp_path: Path) -> None:
    target = load_model(write_tiny(tmp_path / "target"))
    taps = torch.randn(len(IDS), 3 * 64, generator=torch.Generator().manual_seed(2))
    found = []
    for layout in ("eagle", "speculators", "specforge"):
        head = load_head(written(tmp_path, layout), target)
        assert head.trusted and head.warning is None
        found.append((*run(head, IDS, head.fuse(taps), [7, 33]), head.target_ids))
    assert found[0][0].shape == (len(IDS), 128) and float(found[0][0].std()) > 0.5
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def tensors_with(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        tensors = load_file(path / "model.safetensors")
        change(tensors)
        save_file(tensors, path / "model.safetensors")

    return damage


def repeated(tensors: dict[str, torch.Tensor]) -> None:
    """Draft ids 3 and 4 become the same target id."""
    tensors["d2t"][4] = tensors["d2t"][3] - 1


def tapping_beyond(path: Path) -> None:
    config, tensors = tiny_head("eagle3", load_model(path.parent / "target").config, taps=(0, 1, 9))
    write_head(path, "speculators", config, tensors)


def of_a_smaller_target(path: Path) -> None:
    small = load_model(write_tiny(path.parent / "small", hidden_size=32))
    write_head(path, "speculators", *tiny_head("eagle3", small.config, taps=TAPS))


DAMAGE: dict[str, tuple[Callable[[Path], None], str]] = {
    "a d2t absent": (tensors_with(lambda t: t.pop("d2t")), r"d2t is missing.*draft_vocab_size 128.*vocab_size 512"),
    "b d2t all zero": (tensors_with(lambda t: t["d2t"].zero_()), r"d2t is all zero and t2d disagree.*128.*512"),
    "c not injective": (tensors_with(repeated), r"d2t maps 128 draft ids to only 127 different target ids of 512"),
    "d tap 9 of 2 layers": (tapping_beyond, r"eagle_aux_hidden_state_layer_ids: tap 9 .*target has 2 layers"),
    "e hidden size 32": (of_a_smaller_target, r"hidden_size: the head reads features of size 32, the target's have 64"),
    "f lm_head absent": (tensors_with(lambda t: t.pop("lm_head.weight")), r"lm_head.weight \[128, 64\] is missing.*128.*512"),
}


@pytest.mark.parametrize("damage, message", DAMAGE.values(), ids=DAMAGE.keys())
def test_damaged_copies_are_refused(tmp_path: Path, damage: Callable[[Path], None], message: str) -> None:
    path = written(tmp_path, "speculators")
    damage(path)
    with pytest.raises(UnsupportedCheckpoint, match=message):
        load_head(path, load_model(tmp_path / "target"))


@pytest.mark.parametrize("layout", ["eagle", "speculators", "specforge"])
def test_g_rotated_target_is_flagged(tmp_path: Path, layout: str) -> None:
    path = written(tmp_path, layout)
    rotate_basis(tmp_path / "target")
    head = load_head(path, load_model(tmp_path / "target"))
    assert not head.trusted
    assert head.warning is not None and "another target" in head.warning and "basis" in head.warning
