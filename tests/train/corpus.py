"""Something to train on in seconds."""

from __future__ import annotations

import json
import random
from pathlib import Path

from specdec.train.data import Answer, make_corpus, write_shard
from tests.tiny import write_tiny

CYCLE = 17  # texts repeat with this period, so a head can learn them


def write_work(path: Path) -> Path:
    """Into `path`: a tiny target ("model"), "prompts.jsonl", and a corpus ("cycle") whose next token is a function of the last one."""
    write_tiny(path / "model", num_hidden_layers=4)
    rng = random.Random(0)
    answers = []
    for i in range(40):
        start, n = rng.randrange(CYCLE), rng.randrange(30, 90)
        answers.append(Answer([100 + (start + j) % CYCLE for j in range(n)], 5, float(i % 2), True, f"p{i}", "ab"[i % 3 // 2]))
    (path / "cycle").mkdir()
    write_shard(path / "cycle" / "shard-00000.safetensors", make_corpus(answers))
    rows = [{"id": f"q{i}", "domain": "ab"[i % 2], "turns": ["one two", "three"][: 1 + i % 2]} for i in range(6)]
    (path / "prompts.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return path
