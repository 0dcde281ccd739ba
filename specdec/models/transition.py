"""What the draft before says of the next one: a small correction of P-EAGLE's hidden states.

All mask rows of P-EAGLE run at once, so the law of a row knows nothing of the drafts before it, and the tree of their product
holds combinations that no text has. With the token e of the draft before at hand, its state becomes h + C · silu(A · norm(e) + B · h):
three small products a node, instead of a pass of the head. The target's law given the true token before is what it is trained
on, the head itself staying as it is. Our extension of reference §4.5, mitigation (a).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch.nn.functional as F
from torch import Tensor

from specdec.models.head_config import TRANSITION

if TYPE_CHECKING:
    from specdec.layers.embedding import Embedding
    from specdec.models.builder import Builder
    from specdec.models.head_config import HeadConfig


class Transition:
    """Tensors `transition.*`: token_norm [Hd], token_proj and hidden_proj [r, Hd], out_proj [Hd, r]."""

    def __init__(self, build: Builder, config: HeadConfig, embedding: Embedding):
        size, hidden = config.transition, config.hidden_size
        self._embedding = embedding
        self._norm = build.norm(f"{TRANSITION}.token_norm")
        self._token = build.linear([f"{TRANSITION}.token_proj"], [size], hidden)
        self._hidden = build.linear([f"{TRANSITION}.hidden_proj"], [size], hidden)
        self._out = build.linear([f"{TRANSITION}.out_proj"], [hidden], size)

    def __call__(self, hidden: Tensor, ids: Tensor) -> Tensor:
        """[R, Hd], target ids [R] -> [R, Hd]."""
        token = self._norm(self._embedding(ids).to(hidden.dtype))
        return hidden + self._out(F.silu(self._token(token) + self._hidden(hidden)))

    @property
    def nbytes(self) -> int:
        """Memory of the matrices."""
        return sum(linear.method.nbytes for linear in (self._token, self._hidden, self._out))
