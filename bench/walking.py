"""Draft heads in the form whose passes run over whole texts: for measurements that walk recorded answers."""

from __future__ import annotations

from pathlib import Path

from specdec.models.head_load import load_head
from specdec.models.load import LoadedModel
from specdec.train.capture import DenseTarget
from specdec.train.model import TrainableHead
from specdec.train.recipe import copy_tensors


def trainable(loaded: LoadedModel, directory: str, target: DenseTarget, precision: str | None = None) -> TrainableHead:
    """An exported head, its matrices rounded to the storage `precision` (None = the file's), on `target`, made of `loaded`."""
    exported = load_head(directory, loaded)
    head = TrainableHead(exported.config, target.embedding, exported.target_ids)
    copy_tensors(head, Path(directory), precision)
    return head
