"""What a worker process keeps from task to task."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kept.pipeline import reading
from kept.pipeline.options import Connection
from kept.testing import Cluster


@pytest.fixture(autouse=True)
def clients() -> Iterator[None]:
    """None before, and none left open."""
    assert not reading._clients
    yield
    for client in reading._clients.values():
        client.close()
    reading._clients.clear()


def test_a_worker_stays_connected(kept_broker: Cluster) -> None:
    topic = kept_broker.create_topic()
    one = reading.client_for(Connection(kept_broker.bootstrap))
    one.bounds(topic)
    sockets = dict(one._sockets._sockets)
    assert sockets
    again = reading.client_for(Connection(kept_broker.bootstrap))
    again.bounds(topic)
    assert again is one and dict(one._sockets._sockets) == sockets


def test_it_stays_connected_to_a_few_clusters() -> None:
    made = [reading.client_for(Connection(f"h{n}:1")) for n in range(reading.MAX_CLIENTS + 1)]
    assert len({id(client) for client in made}) == len(made)
    assert list(reading._clients.values()) == made[1:]
    other = reading.client_for(Connection("h1:1", client_id="another"))
    assert other not in made
