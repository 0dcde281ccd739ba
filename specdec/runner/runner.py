"""`ModelRunner`: one target pass over a batch, and the measurements the policy plans with."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from specdec.config import MAX_NODES
from specdec.runner.graphs import Inputs, Outputs, Passes, Recorder, Widths
from specdec.spec.tree import ancestor_words, chain
from specdec.types import Batch, Forward

if TYPE_CHECKING:
    from specdec.cache.kv import KVCache
    from specdec.models.registry import Model


class ModelRunner:
    """Runs the target. taps: indices of the hidden states that draft heads read (none = no cost).

    recorder: makes recorders of passes, None = every pass is run op by op. blocks: of the longest sequence.
    """

    def __init__(
        self,
        model: Model,
        kv: KVCache,
        device: torch.device,
        *,
        taps: tuple[int, ...] = (),
        recorder: Callable[[], Recorder] | None = None,
        blocks: int = 0,
    ):
        self.model = model
        self.kv = kv
        self.device = device
        self.taps = taps
        self._recorder, self._blocks = recorder, blocks
        self._passes: dict[tuple[int, ...], Passes] = {}  # by taps
        self._backed = 0  # blocks below or at this are in memory of their own

    @torch.inference_mode()
    def forward(self, batch: Batch) -> Forward:
        """Hidden states of all rows, float32 logits of the wanted ones. Both are valid until the next pass."""
        recorded = self._recorded(batch)
        if recorded is not None:
            hidden, taps, logits = recorded
            assert hidden is not None and logits is not None
            taps = None if taps is None else taps.clone()  # drafters keep them beyond the step
            return Forward(logits=_wanted(logits, batch), hidden=hidden, taps=taps)
        hidden, taps = self.model.forward(batch, self.kv, taps=self.taps)
        prompt = None
        if batch.prompt_rows is not None:
            prompt = self.model.logits(hidden.index_select(0, batch.prompt_rows))
        return Forward(logits=self.model.logits(_wanted(hidden, batch)), hidden=hidden, taps=taps, prompt_logits=prompt)

    def _recorded(self, batch: Batch) -> Outputs | None:
        """(hidden, taps, logits) of all rows by a recorded pass, or None where there is none for such a batch."""
        if self._recorder is None or batch.prompt_rows is not None:
            return None
        if self.taps not in self._passes:
            taps, widths = self.taps, Widths((len(self.kv.groups), self._blocks))

            def run(inputs: Inputs) -> Outputs:
                hidden, tapped = self.model.forward(inputs.batch, self.kv, taps=taps)
                return hidden, tapped, self.model.logits(hidden)

            self._passes[taps] = Passes(run, widths, self.device, self._recorder())
        return self._passes[self.taps](batch)

    def replay(self) -> Callable[[], Outputs] | None:
        """The recorded pass that ran last, as it ran; None where there is none. To be timed by itself: it writes the same K and V again."""
        return self._passes[self.taps].last if self.taps in self._passes else None

    def synchronize(self) -> None:
        """Wait for the device, so that a clock read afterwards means something."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def measure(self, rows: int, context: int, *, repeats: int = 3) -> float:
        """Seconds of a target pass with `rows` tree rows over `context` cached keys (best of `repeats`): of one sequence, or of as few as
        can have them."""
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
        """Chains of `rows` nodes in all that write nowhere, for timing. Their context lies in blocks of its own, as a sequence's does:
        distinct as far as the pool reaches, so that attention loads as many bytes as it would in earnest (chains share it)."""
        size, groups, device = self.kv.block_size, len(self.kv.groups), self.device
        chains = -(-rows // MAX_NODES)
        lengths = torch.tensor([(rows + i) // chains for i in range(chains)])
        node = torch.cat([torch.arange(n) for n in lengths.tolist()])
        longest = int(lengths.max())
        words = ancestor_words(chain([0], [[0] * (longest - 1)]))[0][node]
        count = -(-(context + longest) // size)
        tables = torch.stack([1 + torch.arange(count, dtype=torch.int32) % (n - 1) for n in self.kv.num_blocks])
        self._back(int(tables.max()))
        return Batch(
            input_ids=torch.zeros(rows, dtype=torch.long, device=device),
            positions=(context + node).to(device),
            cu_query=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int().to(device),
            ctx_lens=torch.full((chains,), context, dtype=torch.int32, device=device),
            tree_len=(lengths if rows > 1 else 0 * lengths).int().to(device),
            tree_mask=words.to(device) if rows > 1 else torch.zeros(1, dtype=torch.long, device=device),
            block_tables=tables[:, None, :].expand(-1, chains, -1).contiguous().to(device),
            slot_mapping=torch.full((groups, rows), -1, dtype=torch.long, device=device),
            logit_rows=torch.arange(rows, device=device),
            max_ctx=context,
        )

    def _back(self, last: int) -> None:
        """Copy blocks up to `last` onto themselves, once: memory that was never written may be one shared page of zeros."""
        for group, n in enumerate(self.kv.num_blocks):
            self.kv.copy_blocks(group, [(b, b) for b in range(self._backed + 1, min(last, n - 1) + 1)])
        self._backed = max(self._backed, last)


def _wanted(values: Tensor, batch: Batch) -> Tensor:
    """Of values [T, any] the rows whose logits are wanted."""
    return values if len(batch.logit_rows) == len(values) else values.index_select(0, batch.logit_rows)
