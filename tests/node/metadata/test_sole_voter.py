"""A cluster whose quorum is one voter with a listener for nodes: brokers may join it later."""

from __future__ import annotations

from kept.testing import Cluster
from kept.testing.ports import free_port


def test_it_starts_and_starts_again():
    port, node_port = free_port(), free_port()
    with Cluster(
        1,
        listeners=f"PLAINTEXT://localhost:{port},NODE://localhost:{node_port}",
        listener_security_protocol_map="PLAINTEXT:PLAINTEXT,NODE:PLAINTEXT",
        controller_quorum_voters=f"0@localhost:{node_port}",
    ) as cluster:
        assert cluster.stop(0) == 0
        cluster.start(0)
        assert cluster.log().count("event=controller ") == 2
