"""Peers run as child processes that speak JSON lines: {"ids": [...], "max_tokens": n} in, {"tokens", "decode_s", "first_s"} out.

A peer may live in another Python environment; only the standard library is needed on this side.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any


class Peer:
    """A child process answering one request at a time."""

    def __init__(self, name: str, python: str, *args: str):
        self.name = name
        command = [python, "-m", f"bench.peers.{name}", *args]
        root = Path(__file__).resolve().parents[2]
        self._process = subprocess.Popen(command, cwd=root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        hello = self._read()
        self.info = hello["ready"]

    def run(self, ids: list[int], max_tokens: int) -> dict[str, Any]:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"ids": ids, "max_tokens": max_tokens}) + "\n")
        self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"peer {self.name} died with exit code {self._process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()


def serve(info: dict[str, Any], tokens_of: Callable[[list[int], int], Iterator[int]]) -> None:
    """Child side: `tokens_of(ids, max_tokens)` yields greedy tokens; decode time runs from the first to the last one."""
    import time

    print(json.dumps({"ready": info}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        start = time.perf_counter()
        stamps, tokens = [], []
        for token in tokens_of(request["ids"], request["max_tokens"]):
            stamps.append(time.perf_counter())
            tokens.append(token)
        answer = {"tokens": tokens, "first_s": stamps[0] - start, "decode_s": stamps[-1] - stamps[0]}
        print(json.dumps(answer), flush=True)
