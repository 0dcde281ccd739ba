"""transformers as the oracle, and a plain KV store to run model code without an engine."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from specdec.models.config import ModelConfig
from specdec.models.llama import LlamaModel
from specdec.types import Batch

BLOCK = 16
# The promise of parity: logits this close, and the same argmax wherever the oracle's best two differ by more than GAP.
LOGIT_TOLERANCE, GAP = 5e-4, 1e-3
PROMPTS = Path(__file__).parent / "data" / "prompts.jsonl"


def prompts() -> list[str]:
    """The 20 prompts of tests/data."""
    return [json.loads(line)["prompt"] for line in PROMPTS.read_text(encoding="utf-8").splitlines()]


class PlainKV:
    """K and V of every layer for one sequence in consecutive blocks; block 0 is left unused."""

    def __init__(self, config: ModelConfig, tokens: int):
        self.config = config
        self.blocks = -(-tokens // BLOCK) + 1
        shape = (self.blocks, BLOCK, config.num_kv_heads, config.head_dim)
        self.layers = [(torch.full(shape, float("nan")), torch.full(shape, float("nan"))) for _ in range(config.num_layers)]

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        return self.layers[index]

    def group_of(self, index: int) -> int:
        return self.config.layer_group[index]

    def batch(self, ids: Sequence[int], start: int = 0) -> Batch:
        """Rows `ids` at positions start… of the one sequence."""
        count, groups = len(ids), len(self.config.kv_groups())
        positions = torch.arange(start, start + count)
        return Batch(
            input_ids=torch.tensor(ids, dtype=torch.int64),
            positions=positions,
            cu_query=torch.tensor([0, count], dtype=torch.int32),
            ctx_lens=torch.tensor([start], dtype=torch.int32),
            tree_len=torch.zeros(1, dtype=torch.int32),
            tree_mask=torch.zeros(count, dtype=torch.int64),
            block_tables=torch.arange(1, self.blocks, dtype=torch.int32).expand(groups, 1, -1).contiguous(),
            slot_mapping=(positions + BLOCK).expand(groups, -1).contiguous(),
            logit_rows=torch.arange(count),
            max_ctx=start,
            causal=True,
        )

    def tree(self, tokens: Sequence[int], parents: Sequence[int], start: int) -> Batch:
        """A draft tree whose root stands at position `start`; node i's K and V go to slot position start + i."""
        words, depth = [1], [0]
        for i, parent in enumerate(parents[1:], start=1):
            words.append(words[parent] | 1 << i)
            depth.append(depth[parent] + 1)
        return replace(
            self.batch(tokens, start),
            positions=start + torch.tensor(depth),
            tree_len=torch.tensor([len(tokens)], dtype=torch.int32),
            tree_mask=torch.tensor(words, dtype=torch.int64),
            causal=False,
        )


@torch.inference_mode()
def run_logits(model: LlamaModel, ids: Sequence[int], chunks: Sequence[int] = ()) -> Tensor:
    """[len(ids), V] logits of all positions, fed in shares of the given sizes (the rest in one)."""
    kv, rows, start = PlainKV(model.config, len(ids)), [], 0
    for size in [*chunks, len(ids) - sum(chunks)]:
        hidden, _ = model.forward(kv.batch(ids[start : start + size], start), kv)
        rows.append(model.logits(hidden))
        start += size
    return torch.cat(rows)


@torch.inference_mode()
def run_greedy(model: LlamaModel, ids: Sequence[int], count: int) -> list[int]:
    """`count` greedy tokens after `ids`, one row a step; end tokens are ordinary tokens here."""
    kv, share, start, output = PlainKV(model.config, len(ids) + count), list(ids), 0, []
    while len(output) < count:
        hidden, _ = model.forward(kv.batch(share, start), kv)
        start += len(share)
        share = [int(model.logits(hidden[-1:]).argmax())]
        output += share
    return output


def assert_parity(found: Tensor, expected: Tensor) -> None:
    """Both [T, V] f32: within LOGIT_TOLERANCE everywhere, same argmax where the oracle's choice is clear."""
    assert found.dtype == torch.float32 and found.shape == expected.shape
    worst = (found - expected).abs().max().item()
    assert worst <= LOGIT_TOLERANCE, f"logits differ by {worst}"
    best = expected.topk(2, dim=-1).values
    clear = best[:, 0] - best[:, 1] > GAP
    assert clear.any()
    assert torch.equal(found.argmax(-1)[clear], expected.argmax(-1)[clear])


def oracle(directory: Path) -> torch.nn.Module:
    """The transformers model of a checkpoint directory, float32, evaluation mode."""
    from transformers import AutoModelForCausalLM

    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
    return model.eval()


@torch.inference_mode()
def oracle_logits(model: torch.nn.Module, ids: Sequence[int]) -> Tensor:
    """[len(ids), V] f32."""
    logits: Tensor = model(torch.tensor([list(ids)])).logits[0]
    return logits.float()
