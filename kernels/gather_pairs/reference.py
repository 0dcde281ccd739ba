"""What a draft head reads of a verdict: the tokens committed, and the target's taps along the path that was taken."""

from __future__ import annotations

import torch
from torch import Tensor


def gather_pairs(
    said: Tensor, along: Tensor, committed: Tensor, num_committed: Tensor, path: Tensor, taps: Tensor, roots: Tensor, columns: Tensor | None
) -> None:
    """Shapes and meaning in `specdec.ops.gather_pairs`."""
    room = said.shape[1] - 1 - committed.shape[1]
    found = taps[roots[:, None] + torch.nn.functional.pad(path, (1, 0))]
    found = found if columns is None else found[..., columns]
    tokens = torch.cat((torch.nn.functional.pad(committed, (0, room)), num_committed[:, None]), dim=1)
    for own, values in ((said, tokens), (along[:, : found.shape[1]], found)):
        own[: len(values)].copy_(values)
        own[len(values) :].copy_(values[:1].expand(len(own) - len(values), *values.shape[1:]))
