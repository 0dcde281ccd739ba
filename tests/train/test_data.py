"""Prompts, shards, batches, draft vocabulary."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from specdec.errors import ConfigError
from specdec.train.data import Answer, answer_counts, coverage, draft_vocabulary, epoch, join, make_corpus, read_corpus, write_shard
from specdec.train.prompts import held_out, read_prompts
from specdec.train.recipe import split


def answers(count: int, start: int = 0) -> list[Answer]:
    return [
        Answer([(3 * i + j) % 40 for j in range(5 + 37 * i % 300)], 2 + i % 3, 0.5 * (i % 3), i % 2 == 0, f"p{i}", "ab"[i % 2])
        for i in range(start, start + count)
    ]


def test_prompts_plain_and_gzip(tmp_path: Path) -> None:
    rows = [{"id": f"x{i}", "domain": "d", "turns": ["hel\u2028lo", "again"][: 1 + i % 2]} for i in range(4)]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows[2:])) + "\n\n", encoding="utf-8")
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress("\n".join(json.dumps(r, ensure_ascii=False) for r in rows[:3]).encode()))
    found = read_prompts([tmp_path])
    assert [(p.id, p.domain, list(p.turns)) for p in found] == [(r["id"], r["domain"], r["turns"]) for r in rows]


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "not JSON"), ('{"id": "a"}', "turns"), ('{"id": "a", "turns": []}', "turns"), ('{"turns": ["a"]}', "id"), ("[1]", "turns")],
)
def test_a_bad_prompt_is_named_by_file_and_line(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "p.jsonl"
    file.write_text('{"id": "ok", "turns": ["a"]}\n' + line + "\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=rf"p.jsonl:2: .*{message}"):
        read_prompts([file])


@pytest.mark.parametrize("name", ["absent", "empty", "broken.gz"])
def test_sources_without_prompts_are_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken.gz").write_bytes(b"not gzip")
    with pytest.raises(ConfigError, match=name):
        read_prompts([tmp_path / name])


def test_shards_come_back(tmp_path: Path) -> None:
    parts = [make_corpus(answers(5)), make_corpus([]), make_corpus(answers(4, 5))]
    for i, part in enumerate(parts):
        write_shard(tmp_path / f"shard-{i:05d}.safetensors", part)
    found, wanted = read_corpus(tmp_path), make_corpus(answers(9))
    for name in ("tokens", "offsets", "prompt_len", "temperature", "ended"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    assert (found.prompt_ids, found.domains) == (wanted.prompt_ids, wanted.domains)
    assert sorted(f.name for f in tmp_path.iterdir()) == [f"shard-{i:05d}.safetensors" for i in range(3)]


def test_broken_and_missing_shards_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no shards"):
        read_corpus(tmp_path)
    (tmp_path / "shard-00000.safetensors").write_bytes(b"torn")
    with pytest.raises(ConfigError, match="shard-00000"):
        read_corpus(tmp_path)


def test_cutting_keeps_the_beginning(tmp_path: Path) -> None:
    corpus = make_corpus([Answer(list(range(10)), 4, 0.0, True, "a", ""), Answer(list(range(9)), 8, 0.0, True, "b", "")])
    cut = corpus.cut(6)
    assert (cut.tokens.tolist(), cut.prompt_ids, cut.ended.tolist()) == (list(range(6)), ("a",), [False])
    whole = corpus.cut(10)
    assert torch.equal(whole.tokens, corpus.tokens) and whole.ended.tolist() == [True, True]
    endless = make_corpus([Answer(list(range(10)), 4, 0.0, ended, "a", "") for ended in (True, False)])
    assert endless.cut(9, unended=2).lengths.tolist() == [9, 6]


def test_an_epoch_holds_every_sequence_once_within_the_budget() -> None:
    corpus = make_corpus(answers(60))
    seen: Counter[tuple[int, ...]] = Counter()
    for batch in epoch(corpus, 1024, seed=3, number=2):
        assert batch.tokens.numel() <= 1024 and batch.tokens.shape[1] % 128 == 0
        for row in range(len(batch.lengths)):
            n = int(batch.lengths[row])
            text = tuple(batch.tokens[row, :n].tolist())
            assert text == tuple(corpus.tokens[batch.index[row, :n]].tolist()) and not bool(batch.tokens[row, n:].any())
            seen[(int(batch.index[row, 0]), int(batch.prompt_len[row]))] += 1
    assert seen == Counter(zip(corpus.offsets[:-1].tolist(), corpus.prompt_len.tolist(), strict=True))
    orders = [[b.index[0, 0].item() for b in epoch(corpus, 1024, seed=3, number=n)] for n in (2, 2, 3)]
    assert orders[0] == orders[1] != orders[2]


def test_draft_vocabulary_counts_answers_only_and_keeps_the_end_token() -> None:
    corpus = make_corpus([Answer([9, 9, 9, 1, 1, 2, 5], 3, 0.0, True, "a", ""), Answer([7, 4, 2], 1, 0.0, True, "b", "")])
    assert answer_counts(corpus, 12).tolist() == [0, 2, 2, 0, 1, 1, 0, 0, 0, 0, 0, 0]
    assert draft_vocabulary(corpus, 4, 12, [11]).tolist() == [1, 2, 4, 11]
    assert draft_vocabulary(corpus, 7, 12, [11]).tolist() == [0, 1, 2, 3, 4, 5, 11]
    assert coverage(corpus, torch.tensor([1, 2, 4, 11]), 12) == pytest.approx(5 / 6)
    with pytest.raises(ConfigError, match="draft_vocab"):
        draft_vocabulary(corpus, 13, 12, [11])


def test_the_split_goes_by_prompt() -> None:
    corpus = join([make_corpus(answers(200)), make_corpus(answers(200))])
    parts = split(corpus, 0.2)
    held = {i for i in corpus.prompt_ids if held_out(i, 0.2)}
    assert 20 <= len(held) <= 60
    assert set(parts.train.prompt_ids) == set(corpus.prompt_ids) - held
    assert set(parts.validation.prompt_ids) <= held and parts.validation.temperature.unique().tolist() == [0.0]
    assert held_out("p1", 1.0) and not held_out("p1", 0.0)
    with pytest.raises(ConfigError, match="validation"):
        split(corpus, 1.0)
