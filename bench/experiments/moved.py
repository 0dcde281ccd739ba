"""Targets that moved on: the same architecture with noisy weights, or after some steps of fine-tuning."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from specdec.errors import ConfigError
from specdec.layers.linear import RawWeight
from specdec.llm import LLM
from specdec.models.export import export
from specdec.models.llama import LlamaModel
from specdec.models.load import LoadedModel, find_checkpoint
from specdec.models.weights import Weights
from specdec.train.data import Answer, Corpus, make_corpus
from specdec.train.generate import GenerateConfig, Talk, converse
from specdec.train.prompts import Prompt

IGNORED = -100  # label that the loss of transformers leaves out


class Noisy:
    """Weights in float32, every matrix plus Gaussian noise of `size` times its own root mean square; vectors as they are."""

    def __init__(self, weights: Weights, size: float, seed: int = 0):
        self.origin = f"{weights.origin} with noise of {size:g}"
        self._weights, self._size, self._seed = weights, size, seed

    def names(self) -> list[str]:
        return list(self._weights.names())

    def get(self, name: str, shape: tuple[int, ...]) -> RawWeight:
        raw = self._weights.get(name, shape)
        weight = raw.float() if isinstance(raw, Tensor) else raw.dequantize()
        if weight.dim() != 2 or self._size == 0.0:
            return weight
        key = int.from_bytes(hashlib.sha256(f"{self._seed}/{name}".encode()).digest()[:7], "little")
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(key))
        return weight + noise * (self._size * weight.square().mean().sqrt())


def perturbed(loaded: LoadedModel, size: float, seed: int = 0) -> LoadedModel:
    """`loaded`, which must come from files, with noisy weights, on the CPU in float32."""
    weights = Noisy(find_checkpoint(loaded.name).weights(), size, seed)
    model = LlamaModel(loaded.config, weights, device=torch.device("cpu"), dtype=torch.float32)
    return replace(loaded, model=model, fingerprint=f"{loaded.fingerprint}/noise {size:g}/{seed}")


def shouted(llm: LLM, prompts: Sequence[Prompt], max_tokens: int) -> Corpus:
    """The target's own greedy answers to first turns, in capitals: what it knows, in a style it does not have."""
    asked = [Talk(replace(p, turns=p.turns[:1]), 0.0, []) for p in prompts]
    answers, tokenizer = [], llm.tokenizer
    end = min(llm.engine.model_config.eos_ids)
    for a in converse(llm, asked, GenerateConfig((0.0,), max_tokens)):
        text = tokenizer.decode(a.tokens[a.prompt_len : len(a.tokens) - a.ended]).upper()
        tokens = a.tokens[: a.prompt_len] + tokenizer.encode(text) + [end]
        answers.append(Answer(tokens, a.prompt_len, 0.0, True, a.prompt_id, a.domain))
    return make_corpus(answers)


def fine_tuned(
    model: str, texts: Corpus, stops: Sequence[int], work: Path, *, lr: float = 5e-5, rows: int = 2, max_len: int = 128, seed: int = 0
) -> Iterator[tuple[int, float, Path]]:
    """Train the whole target on `texts` (loss on the answers alone, AdamW, constant rate) and stop after each of `stops` steps.

    -> (steps done, mean loss since the stop before, directory of the checkpoint, which lives until the next one is asked for).
    rows: texts a step, cut to `max_len` tokens. Step 0 is the target itself, in float32.
    """
    from transformers import AutoModelForCausalLM

    if not stops or list(stops) != sorted(set(stops)) or stops[0] < 0:
        raise ConfigError(f"stops must be rising numbers of steps from 0, got {list(stops)}", param="steps")
    texts = texts.cut(max_len)
    start = export(find_checkpoint(model), work / "start")
    net: Any = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    net.train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=lr, weight_decay=0.0)
    order, done = _order(len(texts), rows, seed), 0
    for stop in stops:
        losses = []
        for _ in range(stop - done):
            losses.append(_step(net, optimizer, texts.take(next(order))))
        done = stop
        directory = work / f"step-{stop}"
        shutil.copytree(start, directory)
        net.save_pretrained(directory)
        yield stop, sum(losses) / max(len(losses), 1), directory
        shutil.rmtree(directory)


def _order(count: int, rows: int, seed: int) -> Iterator[list[int]]:
    """Batches of a shuffled pass after another, without end."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(count, generator=generator).tolist()
        yield from (order[i : i + rows] for i in range(0, count - rows + 1, rows))


def _step(net: Any, optimizer: torch.optim.Optimizer, batch: Corpus) -> float:
    length = int(batch.lengths.max())
    ids, labels = torch.zeros(len(batch), length, dtype=torch.int64), torch.full((len(batch), length), IGNORED)
    for row, (start, stop) in enumerate(zip(batch.offsets[:-1].tolist(), batch.offsets[1:].tolist(), strict=True)):
        tokens = batch.tokens[start:stop]
        ids[row, : len(tokens)] = tokens
        labels[row, int(batch.prompt_len[row]) : len(tokens)] = tokens[int(batch.prompt_len[row]) :]
    loss = net(input_ids=ids, labels=labels).loss  # causal: padding on the right changes nothing before it
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())
