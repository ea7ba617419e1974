"""KeptContainer: a node in a container for the tests of others."""

from __future__ import annotations

import os
import uuid

import pytest
from confluent_kafka import Consumer, Producer

os.environ["TESTCONTAINERS_RYUK_DISABLED"] = "true"  # read when it is imported

from testcontainers.core.network import Network

from kept.client.client import Client
from kept.testing import NodeFailed
from kept.testing.container import KeptContainer
from tests.deploy.containers import docker, image

pytestmark = [pytest.mark.slow, pytest.mark.docker, pytest.mark.timeout(700)]


def test_clients_on_the_host_and_on_its_network_use_it():
    with (
        Network() as network,
        KeptContainer(image(), num_partitions=3).with_network(network) as node,
    ):
        assert node.get_bootstrap_server() == node.bootstrap
        producer = Producer({"bootstrap.servers": node.bootstrap})
        producer.produce("users", b"hello", b"alice")
        assert producer.flush(20) == 0
        consumer = Consumer(
            {"bootstrap.servers": node.bootstrap, "group.id": "g", "auto.offset.reset": "earliest"}
        )
        consumer.subscribe(["users"])
        (message,) = consumer.consume(1, 20)
        assert (message.key(), message.value()) == (b"alice", b"hello")
        consumer.close()
        with Client(node.bootstrap) as client:
            assert len(client.metadata().topics["users"].partitions) == 3
        there = docker(
            "run",
            "--rm",
            "--network",
            network.name,
            image(),
            "consume",
            "users",
            "--from-beginning",
            "--max",
            "1",
            "--bootstrap",
            node.inside,
        )
        assert "hello" in there
        name = node.get_wrapped_container().name
    assert name not in docker("ps", "-a", "--format", "{{.Names}}").split()


def test_a_setting_that_is_refused_is_told():
    name = f"kept-test-{uuid.uuid4().hex[:8]}"
    with pytest.raises(NodeFailed, match="KEPT_NUM_PARTITIONS"):
        KeptContainer(image(), num_partitions=0).with_name(name).start()
    assert name not in docker("ps", "-a", "--format", "{{.Names}}").split()
