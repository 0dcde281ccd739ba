"""`ModelRunner`: one target pass over a batch, and the measurements the policy plans with."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch

from specdec.spec.tree import ancestor_words, chain
from specdec.types import Batch, Forward

if TYPE_CHECKING:
    from specdec.cache.kv import KVCache
    from specdec.models.registry import Model


class ModelRunner:
    """Runs the target. `taps`: indices of the hidden states that draft heads read (none = no cost)."""

    def __init__(self, model: Model, kv: KVCache, device: torch.device, *, taps: tuple[int, ...] = ()):
        self.model = model
        self.kv = kv
        self.device = device
        self.taps = taps

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Forward:
        """Hidden states of all rows, float32 logits of the wanted ones."""
        hidden, taps = self.model.forward(batch, self.kv, taps=self.taps)
        wanted = batch.logit_rows
        rows = hidden if wanted.numel() == hidden.shape[0] else hidden.index_select(0, wanted)
        prompt = None
        if batch.prompt_rows is not None:
            prompt = self.model.logits(hidden.index_select(0, batch.prompt_rows))
        return Forward(logits=self.model.logits(rows), hidden=hidden, taps=taps, prompt_logits=prompt)

    def synchronize(self) -> None:
        """Wait for the device, so that a clock read afterwards means something."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def measure(self, rows: int, context: int, *, repeats: int = 3) -> float:
        """Seconds of a target pass with `rows` tree rows over `context` cached keys (best of `repeats`, one sequence)."""
        batch = self._probe(rows, context)
        best = float("inf")
        for _ in range(repeats):
            self.synchronize()
            start = time.perf_counter()
            self.forward(batch)
            self.synchronize()
            best = min(best, time.perf_counter() - start)
        return best

    def _probe(self, rows: int, context: int) -> Batch:
        """A chain of `rows` nodes that writes nowhere and reads the null block, for timing."""
        size, groups = self.kv.block_size, len(self.kv.groups)
        device = self.device
        node = torch.arange(rows)
        words = ancestor_words(chain([0], [[0] * (rows - 1)]))[0]
        blocks = -(-(context + rows) // size)
        return Batch(
            input_ids=torch.zeros(rows, dtype=torch.long, device=device),
            positions=(context + node).to(device),
            cu_query=torch.tensor([0, rows], dtype=torch.int32, device=device),
            ctx_lens=torch.tensor([context], dtype=torch.int32, device=device),
            tree_len=torch.tensor([rows if rows > 1 else 0], dtype=torch.int32, device=device),
            tree_mask=words.to(device) if rows > 1 else torch.zeros(1, dtype=torch.long, device=device),
            block_tables=torch.zeros(groups, 1, blocks, dtype=torch.int32, device=device),
            slot_mapping=torch.full((groups, rows), -1, dtype=torch.long, device=device),
            logit_rows=node.to(device),
            max_query=rows,
            max_ctx=context,
        )
