"""Cases of `draft_pass`: it runs a draft head, so heads are built here and not in `specdec.kernels.cases`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from specdec.kernels.cases import Case, randn
from specdec.models.draft_heads import DraftHead
from specdec.types import Batch
from tests.oracle import PlainKV
from tests.spec.heads import target
from tests.tiny_heads import build_head, tiny_head

FLAGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "normed": {"norm_before_residual": True, "norm_before_fc": True, "norm_output": True},
    "three layers, biases": {"num_layers": 3, "qkv_bias": True, "o_bias": True, "mlp_bias": True, "norm_before_residual": True},
    "windows": {"num_layers": 2, "windows": (7, None), "norm_output": True},
}
CONTEXT = 20


@dataclass(frozen=True)
class Store:
    """KV of one sequence, held by layer so that a call's writes can be compared. pairs: (K, V) per layer."""

    pairs: list[tuple[Tensor, Tensor]]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self.pairs[index]

    def group_of(self, index: int) -> int:
        return 0


def head(flags: dict[str, Any]) -> DraftHead:
    model = target().model
    return build_head(*tiny_head("eagle3", model.config, **flags), model)


def batches(plain: PlainKV) -> dict[str, Batch]:
    """Causal rows behind a context, and one depth of a tree of 9 nodes whose first 6 ran before."""
    first = torch.ones(1, dtype=torch.int32)
    ids = [(5 * i + 3) % 100 for i in range(9)]
    whole = plain.tree(ids, [-1, 0, 0, 0, 1, 1, 4, 4, 5], CONTEXT)
    depth = replace(
        whole,
        input_ids=whole.input_ids[6:],
        positions=whole.positions[6:],
        cu_query=torch.tensor([0, 3], dtype=torch.int32),
        tree_mask=whole.tree_mask[6:],
        slot_mapping=whole.slot_mapping[:, 6:].contiguous(),
    )
    made = {"one": plain.batch(ids[:1], CONTEXT), "chunk": plain.batch(ids, CONTEXT), "depth": depth}
    return {name: replace(batch, first_key=first) for name, batch in made.items()}


def arguments(flags: dict[str, Any], name: str) -> tuple[Any, ...]:
    """Arguments over caches that hold numbers in every slot."""
    made = head(flags)
    plain = PlainKV(made.config, CONTEXT + 16)  # type: ignore[arg-type]  # has what PlainKV reads
    layers = [plain.layer(i) for i in range(made.config.num_layers)]
    pairs = [(randn(*k.shape, seed=2 * i), randn(*v.shape, seed=2 * i + 1)) for i, (k, v) in enumerate(layers)]
    batch = batches(plain)[name]
    return randn(len(batch.input_ids), made.config.hidden_size, seed=5), made, batch, Store(pairs)


def draft_cases() -> Iterator[Case]:
    """Every head over every batch."""
    for flags_name, flags in FLAGS.items():
        for name in ("one", "chunk", "depth"):
            yield Case(f"{flags_name}, {name}", arguments(flags, name), {})
