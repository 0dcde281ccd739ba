"""A server process around the fake engine: `python -m tests.server.fake_server PORT [--step S] [--seqs N] [--queue N]`."""

from __future__ import annotations

import argparse
import logging
import sys

from specdec.config import EngineConfig, SpecConfig
from specdec.server.run import run
from specdec.server.service import Settings
from tests.server.fake_engine import FakeEngine


def main() -> int:
    p = argparse.ArgumentParser()
    p.add_argument("port", type=int)
    p.add_argument("--step", type=float, default=0.0)
    p.add_argument("--seqs", type=int, default=32)
    p.add_argument("--queue", type=int, default=None)
    p.add_argument("--drain-timeout", type=float, default=60.0)
    args = p.parse_args()
    logging.basicConfig(level="INFO")
    config = EngineConfig(model="fake", speculation=SpecConfig(method="ngram"), max_num_seqs=args.seqs, max_queue=args.queue)
    return run(
        lambda: FakeEngine(config, step_seconds=args.step), Settings(), host="127.0.0.1", port=args.port, drain_timeout=args.drain_timeout
    )


if __name__ == "__main__":
    sys.exit(main())
