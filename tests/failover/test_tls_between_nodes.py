"""Three nodes whose traffic between each other is in TLS, both sides with certificates."""

from __future__ import annotations

import json
import socket
import ssl
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.request import urlopen

import pytest

from kept.client.client import OutRecord
from kept.client.security.tls import client_context, tls_config
from kept.node.internode.hello import PREFACE
from kept.testing import Cluster
from tests.support.certificates import Authority

pytestmark = pytest.mark.slow

NODES = 3
AUTHORIZER = "org.apache.kafka.metadata.authorizer.StandardAuthorizer"


class Site:
    """The cluster; all nodes use one key store, that of ``node``."""

    def __init__(self, directory: Path) -> None:
        self.authority = Authority(directory)
        self.other = Authority(directory, "other")
        self.cluster = Cluster(
            NODES,
            listener_security_protocol_map="NODE:SSL",
            ssl_truststore_location=self.authority.ca,
            ssl_keystore_location=self.issue(self.authority, "node"),
            authorizer_class_name=AUTHORIZER,
            super_users="User:CN=node;User:ANONYMOUS",
            kept_tls_reload_ms=200,
        )

    @staticmethod
    def issue(authority: Authority, name: str) -> str:
        return authority.issue(name, "localhost", "127.0.0.1")

    def node_port(self, i: int) -> int:
        return self.cluster._nodes[i].node_port

    def write(self, topic: str, numbers: range) -> None:
        records = [OutRecord(b"%d" % i, b"v") for i in numbers]
        with self.cluster.client() as client:
            client.produce(topic, records)

    def replacements(self, i: int) -> int:
        return self.cluster.log(i).count("certificate replaced")

    def all_replaced(self, before: list[int]) -> bool:
        return all(self.replacements(i) > count for i, count in enumerate(before))

    def keys_of(self, topic: str) -> set[int]:
        with self.cluster.client() as client:
            return {int(record.key) for record in client.read(topic) if record.key is not None}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("tls"))
    with made.cluster:
        yield made


def test_a_killed_leader_loses_no_record(site: Site) -> None:
    topic = site.cluster.create_topic(partitions=6, replication_factor=3)
    site.write(topic, range(300))
    site.cluster.kill(1)
    site.write(topic, range(300, 600))
    site.cluster.start(1)
    site.write(topic, range(600, 900))
    assert site.keys_of(topic) == set(range(900))
    for i in range(NODES):  # a node reads what others lead
        for partition in range(6):
            url = f"{site.cluster.url(i)}/api/v1/records?topic={topic}&partition={partition}"
            with urlopen(url, timeout=30) as answer:
                assert json.load(answer)["records"]
    site.cluster.wait_until(lambda: in_sync(site, topic), "all replicas in sync")


def in_sync(site: Site, topic: str) -> bool:
    with site.cluster.client() as client:
        partitions = client.topic(topic).partitions.values()
        return all(len(partition.isr) == NODES for partition in partitions)


def test_certificates_are_replaced_under_load(site: Site) -> None:
    """Records go on being written while all nodes get another certificate, and while one of them
    is killed afterwards, so that the others connect with the new ones.
    """
    topic = site.cluster.create_topic(partitions=6, replication_factor=3)
    failed: list[Exception] = []
    done = threading.Event()
    written = 0

    def load() -> None:
        nonlocal written
        while not done.is_set():
            try:
                site.write(topic, range(written, written + 50))
            except Exception as error:  # noqa: BLE001
                failed.append(error)
                return
            written += 50

    writer = threading.Thread(target=load)
    writer.start()
    try:
        for _ in range(2):
            before = [site.replacements(i) for i in range(NODES)]
            site.issue(site.authority, "node")  # in the same file
            site.cluster.wait_until(partial(site.all_replaced, before), "it is replaced")
        site.cluster.kill(2)
        site.cluster.start(2)
    finally:
        done.set()
        writer.join()
    assert not failed
    assert site.keys_of(topic) == set(range(written)) and written


@pytest.mark.parametrize("who", ["nobody", "client", "other cluster", "plain"])
def test_who_is_no_node_says_nothing_on_the_listener_between_nodes(site: Site, who: str) -> None:
    """A Hello, however well made, is not read of one without a node's certificate."""
    context = None
    if who != "plain":
        stores = {"ssl.truststore.location": site.authority.ca}
        if who == "client":
            stores["ssl.keystore.location"] = site.issue(site.authority, "ada")
        elif who == "other cluster":
            stores["ssl.keystore.location"] = site.issue(site.other, "node")
        context = client_context(tls_config(stores))
    sock = socket.create_connection(("127.0.0.1", site.node_port(0)), 20)
    try:
        if context is not None:
            sock = context.wrap_socket(sock, server_hostname="localhost")
        sock.sendall(PREFACE + bytes(64))
        assert sock.recv(1) == b""
    except (ssl.SSLError, ConnectionError):
        pass  # refused in the handshake, of which TLS 1.3 tells at the first read
    finally:
        sock.close()
    if who == "client":
        site.cluster.wait_until(
            lambda: 'principal="User:CN=ada"' in site.cluster.log(0), "its name"
        )
