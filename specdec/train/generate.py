"""The target writes the answers: our own engine, speculation off, many sequences at once, resumable by shard."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import zlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from specdec.config import SamplingParams
from specdec.errors import ConfigError
from specdec.llm import LLM
from specdec.train import bulk
from specdec.train.bulk import Question
from specdec.train.data import Answer, make_corpus, write_shard
from specdec.train.progress import bar_interval
from specdec.train.prompts import Prompt

LANES = 2048  # sequences at once on a GPU


@dataclass(frozen=True, slots=True)
class GenerateConfig:
    """What the answers depend on. Written beside the shards; a directory holds the answers of one such config.

    temperatures: every prompt is answered once at each. shard_size: conversations a shard.
    """

    temperatures: tuple[float, ...] = (0.0, 0.7, 1.0)
    max_tokens: int = 512
    seed: int = 0
    shard_size: int = 4096


@dataclass(slots=True)
class Talk:
    """A conversation under way: `messages` so far, at one temperature."""

    prompt: Prompt
    temperature: float
    messages: list[dict[str, str]]


def generate(
    llm: LLM,
    prompts: Sequence[Prompt],
    directory: Path,
    config: GenerateConfig,
    *,
    part: tuple[int, int] = (0, 1),
    progress: bool = True,
) -> int:
    """Write the missing shards of share `part` = (i, n) of the work; returns the number of answer tokens written.

    Several processes may work at once, each on its own share. Sampled answers depend only on the config and the prompt.
    """
    directory.mkdir(parents=True, exist_ok=True)
    digest = hashlib.sha256(json.dumps([(p.id, p.turns) for p in prompts]).encode()).hexdigest()[:16]
    _claim(directory / "generate.json", asdict(config) | {"prompts": digest})
    jobs = [Talk(p, t, []) for t in config.temperatures for p in prompts]
    starts = range(0, len(jobs), config.shard_size)
    mine = [(i, start) for i, start in enumerate(starts) if i % part[1] == part[0]]
    missing = [(file, start) for i, start in mine if not (file := directory / f"shard-{i:05d}.safetensors").exists()]
    total = 0
    with tqdm(missing, disable=not progress, unit="shard", desc=f"generate {part[0]}/{part[1]}", mininterval=bar_interval()) as bar:
        for file, start in bar:
            answers = converse(llm, jobs[start : start + config.shard_size], config, progress=progress and sys.stderr.isatty())
            write_shard(file, make_corpus(answers))
            total += sum(len(a.tokens) - a.prompt_len for a in answers)
            bar.set_postfix(tokens=total)
    return total


def _claim(file: Path, facts: dict[str, Any]) -> None:
    """Refuse to mix answers of two configs, or to two lists of prompts, in one directory."""
    wanted = json.dumps(facts)
    if not file.exists():
        part = file.with_suffix(f".part{os.getpid()}")
        part.write_text(wanted, encoding="utf-8")
        part.replace(file)
    found = file.read_text(encoding="utf-8")
    if json.loads(found) != json.loads(wanted):
        raise ConfigError(f"{file.parent} holds answers of another config or to other prompts ({found}); choose another", param="out")


def converse(llm: LLM, talks: Sequence[Talk], config: GenerateConfig, *, progress: bool = False) -> list[Answer]:
    """Answer all conversations, turn by turn: one sequence for each turn, with the turns before it in its prompt.

    A conversation whose next prompt would leave no room for `max_tokens` is cut short there.
    """
    answers: list[Answer] = []
    waiting, turn = list(talks), 0
    room = llm.engine.max_model_len - config.max_tokens
    while waiting := [t for t in waiting if turn < len(t.prompt.turns)]:
        ready: list[tuple[Talk, list[int]]] = []
        for talk in waiting:
            talk.messages.append({"role": "user", "content": talk.prompt.turns[turn]})
            ids = llm.tokenizer.apply_chat_template(talk.messages, add_generation_prompt=True)
            if len(ids) <= room:
                ready.append((talk, ids))
        if not ready:
            break
        questions = [Question(ids, talk.temperature, _seed(talk, turn, config)) for talk, ids in ready]
        for (talk, ids), tokens in zip(ready, _answer(llm, questions, config.max_tokens, progress), strict=True):
            ended = tokens[-1] in llm.engine.model_config.eos_ids
            talk.messages.append({"role": "assistant", "content": llm.tokenizer.decode(tokens[:-1] if ended else tokens)})
            answers.append(Answer(ids + tokens, len(ids), talk.temperature, ended, talk.prompt.id, talk.prompt.domain))
        waiting, turn = [talk for talk, _ in ready], turn + 1
    return answers


def _answer(llm: LLM, questions: Sequence[Question], max_tokens: int, progress: bool) -> list[list[int]]:
    """Tokens of every answer, end token included: by the engine, or on a GPU in bulk, which gives the same tokens faster."""
    model, limit = llm.engine.runner.model, llm.engine.max_model_len
    if model.device.type == "cuda":
        with tqdm(total=len(questions), disable=not progress, unit="answer", leave=False) as bar:
            return bulk.answer(model, questions, lanes=LANES, max_len=limit, max_tokens=max_tokens, done=lambda n: bar.update(n))
    params = [SamplingParams(temperature=q.temperature, max_tokens=max_tokens, seed=q.seed) for q in questions]
    return [o.outputs[0].token_ids for o in llm.generate([q.ids for q in questions], params, use_tqdm=progress)]


def _seed(talk: Talk, turn: int, config: GenerateConfig) -> int:
    return zlib.crc32(f"{config.seed}/{talk.prompt.id}/{turn}/{talk.temperature}".encode())


def open_target(model: str, **options: Any) -> LLM:
    """The engine that answers: no speculation."""
    return LLM(model, speculation="off", **options)
