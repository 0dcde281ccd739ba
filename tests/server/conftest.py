"""Servers shared by the tests of one module."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server.fake_engine import FakeEngine
from tests.server.harness import Served, served


@pytest.fixture(scope="module")
def fake() -> Iterator[Served]:
    """A server around the fake engine, with default settings."""
    with served(FakeEngine) as server:
        yield server
