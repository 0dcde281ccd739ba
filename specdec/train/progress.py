"""Progress bars that a log file can bear."""

from __future__ import annotations

import sys


def bar_interval() -> float:
    """Seconds between two drawings of a bar: live on a terminal, every quarter of a minute in a log."""
    return 0.1 if sys.stderr.isatty() else 15.0
