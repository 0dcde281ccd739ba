"""How many sequences run, and how many may wait: one rule for the scheduler and for the server, which judges whole requests."""

from __future__ import annotations

from specdec.config import EngineConfig
from specdec.errors import QueueFull


def max_running(config: EngineConfig) -> int:
    """How many sequences run at once: everybody running gets a row in every step."""
    return min(config.max_num_seqs, config.max_num_batched_tokens)


def check_room(limit: int | None, count: int, *, waiting: int, free: int) -> None:
    """QueueFull unless `count` sequences that come together find room, or nobody waits before them.

    limit: sequences that may wait, None = any number. waiting: those that do. free: places among the running ones.
    The exception keeps a group larger than the whole queue from being refused for ever; what arrives after it is refused
    until its own sequences are few enough.
    """
    if limit is None:
        return
    room = limit + max(0, free) - waiting
    if room <= 0 or (waiting and count > room):
        text = f"{waiting} sequences are waiting, max_queue is {limit}, the request needs {count}"
        raise QueueFull(f"{text}; try again later, or send fewer prompts and choices at once")
