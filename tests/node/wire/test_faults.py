"""Failing disks, addresses in use, kill -9: a clear reason, nothing acknowledged lost."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import struct
import subprocess
import sys

import pytest

from kept.client.protocol import messages as protocol
from kept.node.config.node_config import NodeConfig
from kept.node.node import Node
from kept.node.runtime.runtime import Runtime
from kept.storage.disk import Disk
from kept.storage.records import records
from kept.testing.ports import free_port
from tests.support.request_values import fetch_values, one_batch, produce_values
from tests.support.slow import rest_slow


class Served:
    """``kept serve`` with its own settings; ``output``: what it printed until ready or gone."""

    def __init__(self, fail_point="", **settings):
        command = [sys.executable, "-m", "kept", "serve"]
        for name, value in settings.items():
            command += ["--set", f"{name.replace('_', '.')}={value}"]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "KEPT_FAIL_POINT": fail_point},
        )
        self.output = ""
        while " ready on " not in self.output and (line := self.process.stdout.readline()):
            self.output += line

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.wait(60)
        self.process.stdout.close()


def all_offsets(wire, topic, end):
    found, offset = [], 0
    while offset < end:
        batch = list(records(bytes(wire.fetch(topic, offset).records)))
        found += [r.offset for r in batch]
        offset = found[-1] + 1
    return found


@pytest.mark.parametrize("kind", rest_slow(["eio", "enospc"], 1))
def test_a_write_that_fails_takes_the_only_directory_offline(kept_cluster, connect, kind):
    cluster = kept_cluster()
    wire = connect(cluster.port())
    topic = cluster.create_topic()
    assert wire.produce(topic, one_batch(1)).base_offset == 0
    cluster.stop()
    cluster.start(fail_point=f"append.write={kind}:3")
    wire = connect(cluster.port())
    acked = 1
    codes = []
    for _ in range(4):
        try:
            found = wire.produce(topic, one_batch(1), acks=-1)
        except ConnectionError:
            break
        codes.append(int(found.error_code))
        acked += found.error_code == 0
    assert codes[:3] == [0, 0, 56]
    assert cluster.wait() == 1
    assert "log directory offline" in cluster.log()
    assert "no log directory is left" in cluster.log()
    cluster.start()
    wire = connect(cluster.port())
    assert wire.end_offset(topic) == acked
    assert all_offsets(wire, topic, acked) == list(range(acked))


def test_one_of_two_directories_fails(tmp_path):
    settings = {
        "listeners": f"PLAINTEXT://127.0.0.1:{free_port()}",
        "log.dirs": f"{tmp_path}/a,{tmp_path}/b",
        "metadata.log.dir": f"{tmp_path}/meta",
    }
    armed = True

    def once():
        nonlocal armed
        if armed:
            armed = False
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    async def main():
        disk = Disk({})
        node = Node(NodeConfig.load(None, settings, {}), Runtime(disk))
        await node.start()
        for name in ("first", "second"):
            await node.parts.topics.create(name)
        disk.fail_points["append.write"] = once
        reader, writer = await asyncio.open_connection("127.0.0.1", node.parts.listeners[0].port)

        async def ask(key, version, values):
            writer.write(protocol.encode_request(key, version, 1, "t", values))
            (size,) = struct.unpack(">i", await reader.readexactly(4))
            return protocol.decode_response(key, version, await reader.readexactly(size))[1]

        async def produce(topic):
            found = await ask(0, 9, produce_values(topic, one_batch(1)))
            return int(found.responses[0].partition_responses[0].error_code)

        codes = [await produce(topic) for topic in ("first", "first", "second")]
        fetched = await ask(1, 11, fetch_values("first", 0))
        metadata = await ask(3, 9, {"topics": None})
        reasons = [directory.offline for directory in node.parts.table.directories]
        writer.close()
        await node.stop()
        return codes, fetched, metadata, reasons, node.parts.shutdown.failure

    codes, fetched, metadata, reasons, failure = asyncio.run(main())
    assert (codes, failure) == ([56, 56, 0], "")
    assert int(fetched.responses[0].partitions[0].error_code) == 56
    topics = {topic.name: topic.partitions[0] for topic in metadata.topics}
    assert (topics["first"].leader_id, topics["first"].offline_replicas) == (-1, (0,))
    assert (topics["second"].leader_id, topics["second"].offline_replicas) == (0, ())
    assert [reason is None for reason in reasons].count(True) == 1
    marks = [(tmp_path / name / ".kafka_cleanshutdown").exists() for name in "ab"]
    assert marks == [reason is None for reason in reasons]


def test_a_failed_fsync_is_not_acknowledged(kept_cluster, connect):
    cluster = kept_cluster()
    topic = cluster.create_topic(config={"flush.messages": "1"})
    wire = connect(cluster.port())
    assert wire.produce(topic, one_batch(1)).base_offset == 0
    cluster.stop()
    cluster.start(fail_point="flush.synced=eio:2")
    wire = connect(cluster.port())
    codes = []
    for _ in range(2):
        try:
            codes.append(int(wire.produce(topic, one_batch(1)).error_code))
        except ConnectionError:
            codes.append(56)
    assert codes == [0, 56]
    assert cluster.wait() == 1


def test_kill_9_loses_nothing_that_was_acknowledged(kept_cluster, connect):
    cluster = kept_cluster()
    topic = cluster.create_topic(config={"segment.bytes": "2000"})
    acked = 0
    for round_ in range(3):
        wire = connect(cluster.port())
        for _ in range(40):
            wire.send(0, 9, **produce_values(topic, one_batch(1), acks=-1))
        for _ in range(25):
            found = wire.response(0, 9)[1].responses[0].partition_responses[0]
            assert (int(found.error_code), found.base_offset >= acked) == (0, True)
            acked = found.base_offset + 1
        cluster.kill()
        cluster.start()
        wire = connect(cluster.port())
        end = wire.end_offset(topic)
        assert end >= acked, round_
        assert all_offsets(wire, topic, end) == list(range(end))
        acked = end


def test_a_clean_stop_keeps_all_and_says_so(kept_cluster, connect):
    cluster = kept_cluster()
    topic = cluster.create_topic()
    wire = connect(cluster.port())
    for _ in range(5):
        wire.produce(topic, one_batch(3))
    wire.send(1, 11, **fetch_values(topic, 15, max_wait=200_000))
    assert cluster.stop() == 0
    with open(cluster.log_dir() + "/.kafka_cleanshutdown", encoding="utf-8") as mark:
        assert json.load(mark)["version"] == 0
    cluster.start()
    wire = connect(cluster.port())
    assert wire.end_offset(topic) == 15
    metadata = wire.ask(3, 9, topics=[{"name": topic}])
    assert metadata.topics[0].partitions[0].leader_epoch > 0  # a new process, a new epoch


def refused(tmp_path, **settings):
    """What a start that must fail prints: one line, no traceback; it exits with 1."""
    given = {"log_dirs": f"{tmp_path}/log", "metadata_log_dir": f"{tmp_path}/meta", **settings}
    given.setdefault("listeners", f"PLAINTEXT://127.0.0.1:{free_port()}")
    with Served(**given) as served:
        assert served.process.wait(60) == 1
    assert served.output.count("\n") == 1
    return served.output


def test_the_port_is_in_use(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refused(tmp_path, listeners=f"PLAINTEXT://127.0.0.1:{port}")
    assert f"port {port} on 127.0.0.1 is in use" in said


def test_the_directory_is_in_use(kept_cluster, tmp_path):
    cluster = kept_cluster()
    assert "locked by another process" in refused(tmp_path, log_dirs=cluster.log_dir())
    meta = cluster.data_dir() + "/meta"
    assert "locked by another process" in refused(tmp_path, metadata_log_dir=meta)
    assert cluster.running()


def test_no_metadata_is_written_into_a_directory_of_apache_kafka(tmp_path):
    kafka = tmp_path / "kafka"
    kafka.mkdir()
    (kafka / "meta.properties").write_text("version=1\ncluster.id=x\nnode.id=0\n")
    for place in (kafka, kafka / "__cluster_metadata-0", kafka / "meta"):
        said = refused(tmp_path, metadata_log_dir=str(place))
        assert f"{kafka} is Apache Kafka's" in said
    assert [one.name for one in kafka.iterdir()] == ["meta.properties"]


def test_a_directory_of_apache_kafka_is_refused_and_left_unlocked(tmp_path):
    properties = tmp_path / "log" / "meta.properties"
    properties.parent.mkdir()
    properties.write_text("version=1\ncluster.id=x\nnode.id=0\n")
    assert "Apache Kafka's" in refused(tmp_path)
    properties.unlink()
    listeners = f"PLAINTEXT://127.0.0.1:{free_port()}"
    dirs = {"log_dirs": f"{tmp_path}/log", "metadata_log_dir": f"{tmp_path}/meta"}
    with Served(listeners=listeners, **dirs) as served:
        assert " ready on " in served.output


def test_several_listeners_answer_with_their_own_address(connect, tmp_path):
    inner, outer = free_port(), free_port()
    with Served(
        listeners=f"IN://127.0.0.1:{inner},OUT://127.0.0.1:{outer}",
        advertised_listeners=f"IN://localhost:{inner},OUT://kept.example:4444",
        listener_security_protocol_map="IN:PLAINTEXT,OUT:PLAINTEXT",
        log_dirs=f"{tmp_path}/log",
        metadata_log_dir=f"{tmp_path}/meta",
    ) as served:
        assert " ready on " in served.output
        for port, expected in ((inner, ("localhost", inner)), (outer, ("kept.example", 4444))):
            (broker,) = connect(port).ask(3, 9, topics=()).brokers
            assert (broker.host, broker.port) == expected


def test_http_and_kafka_share_the_port(kept_broker, connect):
    for method in (b"GET", b"HEAD"):
        wire = connect(kept_broker.port())
        wire.raw(method + b" /healthz HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
        assert wire.exactly(15) == b"HTTP/1.1 200 OK"
    wire = connect(kept_broker.port())
    wire.raw(b"G")
    wire.raw(b"E")
    wire.raw(b"T /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")
    assert wire.exactly(15) == b"HTTP/1.1 200 OK"


def test_a_partial_request_at_the_end_is_dropped(kept_broker, connect):
    wire = connect(kept_broker.port())
    wire.raw(struct.pack(">ihhih", 100, 3, 9, 1, -1))
    wire.socket.shutdown(socket.SHUT_WR)
    assert wire.is_closed()
