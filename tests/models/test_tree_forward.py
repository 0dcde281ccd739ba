"""A tree is verified in one pass: each node's logits are those of its own path decoded as plain text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from specdec.models.load import load_model
from tests.oracle import PlainKV, run_logits
from tests.tiny import GPT_OSS, QWEN3_MOE, write_tiny

CONTEXT = [(7 * i * i + 13 * i + 5) % 400 for i in range(70)]  # beyond one attention tile and the window
TOKENS = [11, 200, 201, 40, 41, 300, 42, 43]
PARENTS = [-1, 0, 0, 1, 1, 2, 3, 5]


def path_to(node: int) -> list[int]:
    return ([] if node == 0 else path_to(PARENTS[node])) + [TOKENS[node]]


VARIANTS = {
    "gqa": {},
    "two_groups": {"two_groups": True},
    "mqa": {"tied": True, "num_key_value_heads": 1},
    "qwen3_moe": QWEN3_MOE,
    "gpt_oss": GPT_OSS,
}


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
@pytest.mark.parametrize("deterministic", [False, True])
def test_nodes_equal_their_paths(tmp_path: Path, options: dict, deterministic: bool) -> None:
    model = load_model(write_tiny(tmp_path, seed=4, **options), deterministic=deterministic).model
    kv = PlainKV(model.config, len(CONTEXT) + len(TOKENS))
    with torch.inference_mode():
        model.forward(kv.batch(CONTEXT), kv)
        hidden, _ = model.forward(kv.tree(TOKENS, PARENTS, len(CONTEXT)), kv)
        found = model.logits(hidden)
    for node in range(len(TOKENS)):
        expected = run_logits(model, CONTEXT + path_to(node), chunks=[1] * 3)[-1]
        if deterministic:
            assert torch.equal(found[node], expected), f"node {node}"
        else:
            torch.testing.assert_close(found[node], expected, atol=1e-4, rtol=1e-4)
