"""Many answers at once on a GPU: the target alone, a fixed number of lanes, nothing on the host between steps.

The engine serves requests: it looks at every sequence in every step, which costs more than a small target's own pass once
hundreds run. Here a lane holds one sequence at a time; tokens, positions and end conditions stay on the device, and every
CHECK steps the host collects what has ended and fills the free lanes. Tokens are the engine's own: same model code, same ops,
same noise (tests/train holds them equal).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specdec import ops, rng
from specdec.cache.kv import KVCache
from specdec.errors import ConfigError
from specdec.models.registry import Model
from specdec.runner.graphs import CudaRecorder, Outputs
from specdec.types import Batch

BLOCK = 16  # tokens a KV block
CHECK = 16  # steps between two looks at the device
PREFILL_ROWS = 16_384  # prompt tokens of one pass


@dataclass(frozen=True, slots=True)
class Question:
    """A prompt to answer: token ids, temperature (0 = greedy), noise seed."""

    ids: list[int]
    temperature: float
    seed: int


class Lanes:
    """`lanes` sequences of at most `max_len` tokens (prompt and answer), answers of at most `max_tokens`."""

    def __init__(self, model: Model, *, lanes: int, max_len: int, max_tokens: int):
        self.model, self.max_len, self.max_tokens = model, max_len, max_tokens
        config, device = model.config, model.device
        blocks = -(-max_len // BLOCK)
        groups = config.kv_groups()
        self._kv = KVCache(
            groups,
            [lanes * blocks] * len(groups),
            BLOCK,
            dtype=model.dtype,
            device=device,
            layer_group=config.layer_group,
            layer_in_group=config.layer_in_group,
        )
        self._groups, self._stride = len(groups), blocks * BLOCK
        self._table = torch.arange(lanes * blocks, dtype=torch.int32, device=device).view(1, lanes, blocks).repeat(self._groups, 1, 1)
        self._ends = torch.tensor(sorted(config.eos_ids), dtype=torch.int64, device=device)
        self._lane = torch.arange(lanes, device=device)
        self.token, self.position, self.limit, self.seed = (torch.zeros(lanes, dtype=torch.int64, device=device) for _ in range(4))
        self.temperature = torch.ones(lanes, device=device)
        self.noisy, self.active = (torch.zeros(lanes, dtype=torch.bool, device=device) for _ in range(2))
        self.tokens = torch.zeros((lanes, max_len), dtype=torch.int32, device=device)
        self._zero = torch.zeros(lanes, dtype=torch.int64, device=device)
        self._one_each = torch.arange(lanes + 1, dtype=torch.int32, device=device)
        self._replay: Callable[[], Outputs] | None = None

    def fill(self, free: Sequence[int], questions: Sequence[Question]) -> None:
        """Put questions into free lanes: K and V of all prompt tokens but the last, which is the next step's input."""
        device = self.model.device
        start = 0
        while start < len(questions):
            stop, rows = start, 0
            while stop < len(questions) and (rows == 0 or rows + len(questions[stop].ids) <= PREFILL_ROWS):
                rows, stop = rows + len(questions[stop].ids), stop + 1
            self._prefill(free[start:stop], questions[start:stop])
            start = stop
        lane = torch.tensor(free, device=device)
        last = torch.tensor([len(q.ids) - 1 for q in questions], device=device)
        self.token[lane] = torch.tensor([q.ids[-1] for q in questions], device=device)
        self.position[lane] = last
        self.limit[lane] = (last + self.max_tokens).clamp(max=self.max_len - 1)  # position of the last token allowed
        self.seed[lane] = torch.tensor([rng.to_key(q.seed) for q in questions], device=device)
        self.noisy[lane] = torch.tensor([q.temperature > 0 for q in questions], device=device)
        self.temperature[lane] = torch.tensor([q.temperature or 1.0 for q in questions], device=device)
        self.active[lane] = True

    def _prefill(self, lanes: Sequence[int], questions: Sequence[Question]) -> None:
        lengths = [len(q.ids) - 1 for q in questions]
        if not any(lengths):
            return
        device = self.model.device
        ids = torch.tensor([t for q in questions for t in q.ids[:-1]], device=device)
        positions = torch.tensor([p for n in lengths for p in range(n)], device=device)
        lane = torch.tensor(lanes, device=device)
        owner = torch.repeat_interleave(lane, torch.tensor(lengths, device=device))
        zeros = torch.zeros(len(lanes), dtype=torch.int32, device=device)
        cu = torch.tensor([0, *lengths], device=device).cumsum(0).to(torch.int32)
        slots = (owner * self._stride + positions).repeat(self._groups, 1)
        table = self._table[:, lane]
        self.model.forward(Batch(ids, positions, cu, zeros, zeros, torch.zeros_like(ids), table, slots, ids[:0]), self._kv)

    def step(self) -> None:
        """One token for every active lane. On a card it is one CUDA graph: a small target's launches cost more than its work.

        Recording it takes two real steps, to compile and to allocate: lanes are two tokens further after the first.
        """
        if self.token.is_cuda and self._replay is None:
            self._replay = CudaRecorder(self.token.device)(self._advance)
        if self._replay is None:
            self._advance()
        else:
            self._replay()

    def _advance(self) -> Outputs:
        slots = torch.where(self.active, self._lane * self._stride + self.position, -1).repeat(self._groups, 1)
        batch = Batch(
            input_ids=self.token,
            positions=self.position,
            cu_query=self._one_each,
            ctx_lens=self.position.to(torch.int32),
            tree_len=self._one_each[:-1] * 0,
            tree_mask=self._zero,
            block_tables=self._table,
            slot_mapping=slots,
            logit_rows=self._lane,
        )
        hidden, _ = self.model.forward(batch, self._kv)
        scores = self.model.logits(hidden) / self.temperature[:, None]
        chosen = ops.gumbel_argmax(scores, self.seed, self.position + 1, self._zero, self.noisy, rng.TARGET)
        self.position += self.active
        self.token.copy_(torch.where(self.active, chosen, self.token))
        self.tokens.scatter_(1, self.position[:, None], self.token[:, None].to(torch.int32))
        ended = (self.token[:, None] == self._ends).any(1) | (self.position >= self.limit)
        self.active &= ~ended
        return ()


@torch.inference_mode()
def answer(
    model: Model,
    questions: Sequence[Question],
    *,
    lanes: int,
    max_len: int,
    max_tokens: int,
    done: Callable[[int], None] = lambda count: None,
) -> list[list[int]]:
    """Answer tokens of every question, end token included, in their order. done: called with the number of answers just finished."""
    for question in questions:
        if not 1 <= len(question.ids) < max_len:
            raise ConfigError(f"a prompt of {len(question.ids)} tokens does not fit max_len={max_len}", param="max_model_len")
    work = Lanes(model, lanes=min(lanes, max(1, len(questions))), max_len=max_len, max_tokens=max_tokens)
    waiting, running = deque(range(len(questions))), dict[int, int]()  # running: lane -> question
    free = list(range(len(work.active)))
    answers: list[list[int]] = [[] for _ in questions]
    while waiting or running:
        taken = [(free.pop(), waiting.popleft()) for _ in range(min(len(free), len(waiting)))]
        if taken:
            work.fill([lane for lane, _ in taken], [questions[i] for _, i in taken])
            running.update(taken)
        for _ in range(CHECK):
            work.step()
        free += _collect(work, running, questions, answers, done)
    return answers


def _collect(
    work: Lanes, running: dict[int, int], questions: Sequence[Question], answers: list[list[int]], done: Callable[[int], None]
) -> list[int]:
    """Take finished answers out of their lanes; the lanes that are free now."""
    active = work.active.tolist()
    ended = [lane for lane in running if not active[lane]]
    if ended:
        index = torch.tensor(ended, device=work.tokens.device)
        ends = work.position[index].tolist()
        rows: Tensor = work.tokens[index].cpu()
        for lane, end, row in zip(ended, ends, rows, strict=True):
            question = running.pop(lane)
            answers[question] = row[len(questions[question].ids) : end + 1].tolist()
        done(len(ended))
    return ended
