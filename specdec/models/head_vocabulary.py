"""The draft vocabulary: which target token each draft id stands for. Source: reference §1.0, "d2t facts"."""

from __future__ import annotations

import torch
from torch import Tensor

from specdec.errors import UnsupportedCheckpoint


def target_ids(d2t: Tensor | None, t2d: Tensor | None, draft_size: int, size: int, origin: str) -> Tensor:
    """[draft_size] i64, the target id of each draft id.

    d2t [draft_size]: *offsets*, target id = draft id + d2t; None = identity, for a full vocabulary only. t2d [size] bool:
    the target ids that have a draft id. Raises UnsupportedCheckpoint unless the map is increasing and agrees with t2d.
    """
    reduced = draft_size < size
    if d2t is None:
        if reduced:
            raise UnsupportedCheckpoint(f"{origin}: d2t is missing although draft_vocab_size {draft_size} is below vocab_size {size}")
        return torch.arange(size)
    _check_map(d2t, draft_size, "d2t", "draft_vocab_size", origin)
    ids = torch.arange(draft_size) + d2t.long()
    distinct = ids.unique().numel()
    if distinct != draft_size:
        raise UnsupportedCheckpoint(f"{origin}: d2t maps {draft_size} draft ids to only {distinct} different target ids of {size}")
    if draft_size and not (int(ids.min()) >= 0 and int(ids.max()) < size):
        raise UnsupportedCheckpoint(
            f"{origin}: d2t reaches target id {int(ids.max() if int(ids.max()) >= size else ids.min())}, the vocabulary has {size}; "
            f"d2t holds offsets from the draft id, not target ids"
        )
    if not bool((ids[1:] > ids[:-1]).all()):
        raise UnsupportedCheckpoint(f"{origin}: d2t is not in ascending order of target ids ({draft_size} draft ids of {size})")
    if t2d is not None:
        _check_map(t2d, size, "t2d", "vocab_size", origin)
        _check_agreement(ids, t2d, size, origin)
    elif reduced and not bool(d2t.any()):
        raise UnsupportedCheckpoint(
            f"{origin}: d2t is all zero and no t2d confirms it, although draft_vocab_size {draft_size} is below vocab_size {size}"
        )
    return ids


def _check_map(tensor: Tensor, size: int, name: str, field: str, origin: str) -> None:
    if tuple(tensor.shape) != (size,):
        raise UnsupportedCheckpoint(f"{origin}: tensor {name} has shape {list(tensor.shape)}, {field} asks for [{size}]")
    if tensor.is_floating_point() or tensor.is_complex():
        raise UnsupportedCheckpoint(f"{origin}: tensor {name} has dtype {tensor.dtype}, expected integers or bool")


def _check_agreement(ids: Tensor, t2d: Tensor, size: int, origin: str) -> None:
    kept = t2d.bool().nonzero().flatten()
    if torch.equal(kept, ids):
        return
    offset_zero = torch.equal(ids, torch.arange(len(ids)))
    what = "d2t is all zero" if offset_zero else "d2t"
    common = int(torch.isin(ids, kept).sum())
    raise UnsupportedCheckpoint(
        f"{origin}: {what} and t2d disagree: d2t keeps {len(ids)} target ids, t2d {kept.numel()}, of {size}; {common} are in both"
    )
