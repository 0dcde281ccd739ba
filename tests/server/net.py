"""Loopback sockets, and waiting for conditions."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

GUARD = 120.0  # seconds until a test that hangs fails; nothing is measured with it


def free_socket() -> socket.socket:
    """A bound loopback socket; a server that listens on it cannot lose its port."""
    sock = socket.socket()
    sock.bind(("127.0.0.1", 0))
    return sock


def until(condition: Callable[[], Any]) -> None:
    """Wait for a condition that must come true."""
    deadline = time.monotonic() + GUARD
    while not condition():
        assert time.monotonic() < deadline, "the condition never came true"
        time.sleep(0.002)
