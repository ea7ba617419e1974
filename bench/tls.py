"""Records over TLS 1.3, beside the same records without.

One connection of Python's ``ssl``, which sends a request as a few records of TLS, eight requests in
flight; no client certificates. Both listeners belong to one node, and both ways are measured in
turn, so that the difference is what TLS costs. Clients that make a record of TLS of each record of
Kafka's (librdkafka) cost the node more. The floor (``floor.c`` with OpenSSL) receives the same
records and writes them.
The cipher alone is a quarter of what TLS adds: AES-256-GCM, OpenSSL's first choice, takes 0.19
CPU-s/GB here (``openssl speed -evp aes-256-gcm -bytes 16384``), AES-128-GCM 0.16, ChaCha20 0.26, so
another one saves nothing. Receiving and parsing records of 16 KiB is the rest, and no transport
leaves that out: what TLS adds to the floor and what kept takes without TLS are together above the
goal of producing.
"""

from __future__ import annotations

import contextlib
import os
import socket
import ssl
import struct
import subprocess
import tempfile
import time
from collections.abc import Iterator

import brokers
from baseline import FLOOR, sunk, use_memory
from brokers import Broker
from confluent_kafka.admin import AdminClient, NewTopic
from harness import GB, HERE, Bench

from kept.client.protocol.api_keys import ApiKey
from kept.client.protocol.messages import encode_request
from kept.client.security.tls import client_context, tls_config
from kept.node.config.local_certificates import LocalCertificates
from kept.storage.records import build_batch

PRODUCED = (("1 KiB", 1024, 30_000), ("16 KiB", 16 * 1024, 20_000))
FETCHED_BYTES = 1 << 20
FETCHES = 1000
IN_FLIGHT = 8
TOPIC = "secured"


@contextlib.contextmanager
def both(opener: str) -> Iterator[Broker]:
    """A broker with a listener of each kind, and certificates made on the spot."""
    with tempfile.TemporaryDirectory(prefix="bench-tls-") as folder:
        certificates = LocalCertificates(folder)
        with getattr(brokers, opener)(keys=certificates.path("node")) as broker:
            broker.ca = certificates.ca_path
            yield broker


def tls(bench: Bench, broker: Broker) -> None:
    """Produce and fetch, without TLS and with it."""
    if broker.name == "kept":
        with bench.attempt("the floor of TLS"):
            floor(bench)
    admin = AdminClient({"bootstrap.servers": broker.bootstrap})
    admin.create_topics([NewTopic(TOPIC, 1, 1)])[TOPIC].result(60)
    for way in ("plain", "TLS"):
        for name, size, whole in PRODUCED:
            count = max(1000, int(whole * bench.scale))
            _produce(_connect(broker, way), size, count)  # what is measured runs on warm code
            before = broker.cpu_seconds()
            sent = _produce(_connect(broker, way), size, count)
            spent = broker.cpu_seconds() - before
            bench.add("TLS", f"produce {name}, {way}", broker.name, "CPU-us", 1e6 * spent / count)
            bench.add("TLS", f"produce {name}, {way}", broker.name, "CPU-s/GB", spent / sent * 1e9)
    for way in ("plain", "TLS"):
        before = broker.cpu_seconds()
        got = _fetch(_connect(broker, way), max(100, int(FETCHES * bench.scale)))
        spent = broker.cpu_seconds() - before
        bench.add("TLS", f"fetch 1 MiB, {way}", broker.name, "CPU-s/GB", spent / got * 1e9)


def floor(bench: Bench) -> None:
    """What receiving and writing the same requests takes of the machine, without TLS and with it.
    Needs the headers of OpenSSL.
    """
    program = bench.folder / "floor-tls"
    source = HERE / "floor.c"
    subprocess.run(["gcc", "-O2", "-DTLS", "-o", program, source, "-lssl", "-lcrypto"], check=True)
    with tempfile.TemporaryDirectory(dir=bench.folder) as keys:
        certificates = LocalCertificates(keys)
        pem = certificates.path("node")
        for way in ("plain", "TLS"):
            for name, size, whole in PRODUCED:
                count = max(1000, int(whole * bench.scale))
                use_memory(bench, count * size)
                ca = certificates.ca_path if way == "TLS" else ""

                def load(port: int, ca: str = ca, size: int = size, count: int = count) -> None:
                    with _connected("localhost", port, ca) as connection:
                        _produce(connection, size, count)

                own = (pem,) if way == "TLS" else ()
                spent = sunk(bench, program, len(_request(size)), load, own)
                total = spent["user"] + spent["system"]
                per_gigabyte = total / (spent["bytes"] / GB)
                bench.add("TLS", f"produce {name}, {way}", FLOOR, "CPU-s/GB", per_gigabyte)
                each = 1e6 * total / count
                bench.add("TLS", f"produce {name}, {way}", FLOOR, "CPU-us", each)


def _connect(broker: Broker, way: str) -> socket.socket:
    port = broker.port if way == "plain" else broker.tls_port
    return _connected(broker.host, port, "" if way == "plain" else broker.ca)


def _connected(host: str, port: int, ca: str) -> socket.socket:
    """A connection; over TLS, if there is an authority to believe."""
    sock = socket.create_connection((host, port), 60)
    if not ca:
        return sock
    context = client_context(tls_config({"ssl.truststore.location": ca}))
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    return context.wrap_socket(sock, server_hostname="localhost")


def _request(size: int) -> bytes:
    """A Produce of one batch of about so many bytes."""
    batch = build_batch([(int(time.time() * 1000), b"key", os.urandom(size - 80), ())])
    partition = {"index": 0, "records": batch}
    topic = {"name": TOPIC, "topic_id": None, "partition_data": [partition]}
    values = {"transactional_id": None, "acks": 1, "timeout": 60_000, "topic_data": [topic]}
    return encode_request(ApiKey.PRODUCE, 9, 1, "bench", values)


def _produce(sock: socket.socket, size: int, count: int) -> int:
    """Requests of one batch each; the bytes sent."""
    frame = _request(size)
    answer = memoryview(bytearray(4096))
    # One thread: of two, one would write while the other reads, which OpenSSL does not allow.
    for sent in range(count + IN_FLIGHT):
        if sent >= IN_FLIGHT:
            (length,) = struct.unpack(">i", _read(sock, answer[:4]))
            _read(sock, answer[:length])
        if sent < count:
            sock.sendall(frame)
    sock.close()
    return count * len(frame)


def _fetch(sock: socket.socket, count: int) -> int:
    """Fetches of one partition, each a piece further; the bytes that came."""
    buffer = memoryview(bytearray(2 * FETCHED_BYTES))
    total = 0
    for i in range(count):
        partition = {
            "partition": 0,
            "fetch_offset": 30 * i,
            "partition_max_bytes": FETCHED_BYTES,
            "current_leader_epoch": -1,
        }
        values = {
            "replica_id": -1,
            "max_wait": 0,
            "min_bytes": 1,
            "max_bytes": FETCHED_BYTES,
            "isolation_level": 0,
            "session_id": 0,
            "session_epoch": -1,
            "rack_id": "",
            "topics": [{"topic": TOPIC, "topic_id": None, "partitions": [partition]}],
            "forgotten_topics_data": (),
        }
        sock.sendall(encode_request(ApiKey.FETCH, 11, i, "bench", values))
        (length,) = struct.unpack(">i", _read(sock, buffer[:4]))
        _read(sock, buffer[:length])
        total += length
    sock.close()
    return total


def _read(sock: socket.socket, into: memoryview) -> memoryview:
    done = 0
    while done < len(into):
        read = sock.recv_into(into[done:])
        if not read:
            raise ConnectionError("the broker closed the connection")
        done += read
    return into
