"""`python -m specdec.server`."""

from __future__ import annotations

import logging
import sys

from specdec.errors import SpecdecError
from specdec.server import args as command_line
from specdec.server.loop import Engine
from specdec.server.run import run

log = logging.getLogger("specdec.server")


def backends(device: str) -> str:
    """The backend of every op on `device`, one phrase per backend."""
    from specdec import ops

    by_backend: dict[str, list[str]] = {}
    for op, backend in ops.explain(device).items():
        by_backend.setdefault(backend, []).append(op)
    return "; ".join(f"{', '.join(names)}: {backend}" for backend, names in by_backend.items())


def main(argv: list[str] | None = None) -> int:
    """Serve until SIGTERM; the exit code. Settings that cannot work end it before anything is loaded."""
    args = command_line.parser().parse_args(argv)
    logging.basicConfig(level=args.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        options = command_line.llm_arguments(args)
    except SpecdecError as error:
        print(f"specdec.server: {error}", file=sys.stderr)
        return 2

    def build() -> Engine:
        from specdec.llm import LLM  # imports torch: after the port is open, so that probes answer while it loads

        engine = LLM(**options).engine
        log.info("device %s; %s", engine.runner.device, backends(str(engine.runner.device.type)))
        return engine

    return run(
        build, command_line.settings(args), host=args.host, port=args.port, drain_timeout=args.drain_timeout, access_log=args.access_log
    )


if __name__ == "__main__":
    sys.exit(main())
