"""Connections to a real node, which a test closes as it ends."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tests.support.kafka_connection import Connection


@pytest.fixture
def connect() -> Iterator[Callable[[int], Connection]]:
    """``connect(port)``: a :class:`Connection`, closed when the test ends."""
    opened: list[Connection] = []

    def dial(port: int) -> Connection:
        opened.append(Connection(f"127.0.0.1:{port}"))
        return opened[-1]

    yield dial
    for one in opened:
        one.close()


@pytest.fixture
def wire(kept_broker: Any, connect: Callable[[int], Connection]) -> Connection:
    """A connection to the shared node."""
    return connect(kept_broker.port())
