"""Reading ahead: while a small op runs, memory is asked for the weights that the next products will read.

A decode step is products, bound by reading their weights, with small ops between them, bound by latency: the memory idles while one runs,
while the next product fills its pipelines, and whenever a product's last programs finish. Programs that the small op does not need ask for
those weights to come into the second-level cache and leave without waiting; the product then finds its first tiles there. A hint only: no
result depends on it, and a backend may ignore it.
"""

from __future__ import annotations

import torch
from torch import Tensor

PIECES = 2
Ahead = tuple[Tensor, ...]  # to be asked for in this order: at most PIECES tensors of bytes, whose addresses and sizes 16 divides
_FEW = 64  # rows up to which products are bound by their weights


def hint(x: Tensor, ahead: Ahead) -> dict[str, Ahead]:
    """The keyword for the backends of an op on the rows of x, where reading ahead can pay."""
    return {"ahead": ahead} if ahead and x.is_cuda and x.shape[0] <= _FEW else {}


def as_bytes(weight: Tensor) -> Tensor | None:
    """The memory of a weight, from which pieces are cut; None where it does not lie in one piece."""
    if not weight.is_contiguous() or weight.data_ptr() % 16:
        return None
    flat = weight.view(torch.uint8).view(-1)
    return flat[: flat.numel() // 16 * 16]
