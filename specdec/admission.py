"""How many sequences run, and how many are held: one rule for the scheduler and for the server, which judges whole requests.

At most `max_running + max_queue` sequences are unfinished at a time, whoever of them runs. A request that would make them more is
refused whole: with QueueFull, or for good if it is larger than that by itself.
"""

from __future__ import annotations

from specdec.config import EngineConfig
from specdec.errors import InvalidRequest, QueueFull


def max_running(config: EngineConfig) -> int:
    """How many sequences run at once: everybody running gets a row in every step."""
    return min(config.max_num_seqs, config.max_num_batched_tokens)


def check_room(config: EngineConfig, max_queue: int | None, count: int, *, running: int, waiting: int) -> None:
    """QueueFull unless `count` sequences that come together find room; InvalidRequest if they never could.

    max_queue: unfinished sequences beyond `max_running`, None = any number. running, waiting: the sequences that are unfinished.
    """
    if max_queue is None:
        return
    places = max_running(config)
    rule = f"at most {places + max_queue} are held at a time ({places} that can run + max_queue {max_queue})"
    if count > places + max_queue:
        raise InvalidRequest(
            f"the request needs {count} sequences (prompts × n), but {rule}; send fewer at once, or start with a larger max_queue",
            param="n",
        )
    if running + waiting + count > places + max_queue:
        raise QueueFull(f"{running} sequences are running and {waiting} waiting, the request needs {count}, but {rule}; try again later")
