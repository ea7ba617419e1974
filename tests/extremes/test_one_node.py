"""One node with 50 consumers that hardly read, one that is flooded with halves of requests, one
with 10,000 partitions, which is killed: what it holds stays within what docs/operations.md says.
And a group of 200 members.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import resource
import socket
import struct
import time
import urllib.request

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from kept.client.protocol import messages as protocol
from tests.support.raw_client import RawClient

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MIB = 1 << 20


def resident_mib(cluster):
    with open(f"/proc/{cluster.pid()}/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize() / MIB


def produce(cluster, sizes):
    """Send (topic, partition, value); all must be acknowledged."""
    failed = []
    producer = Producer(
        {"bootstrap.servers": cluster.bootstrap, "enable.idempotence": True, "log_level": 0}
    )
    for topic, partition, value in sizes:
        while True:
            try:
                producer.produce(
                    topic,
                    value,
                    partition=partition,
                    on_delivery=lambda error, _: failed.append(error) if error else None,
                )
                break
            except BufferError:
                producer.poll(0.1)
    assert producer.flush(120) == 0
    assert not failed, failed[:3]


def fetch_frame(topic, max_bytes):
    partition = {"partition": 0, "fetch_offset": 0, "partition_max_bytes": max_bytes}
    values = {
        "max_wait": 500,
        "min_bytes": 1,
        "max_bytes": max_bytes,
        "isolation_level": 0,
        "topics": [{"topic": topic, "partitions": [partition]}],
    }
    return protocol.encode_request(1, 4, 1, "slow", values)


def test_consumers_that_hardly_read(kept_cluster):
    """50 of them want 50 MB each and take 1 kB now and then; others are served."""
    cluster = kept_cluster()
    topic, other = cluster.create_topic(), cluster.create_topic()
    produce(cluster, ((topic, 0, os.urandom(500_000)) for _ in range(100)))
    before = resident_mib(cluster)
    with contextlib.ExitStack() as stack:
        several = []
        for _ in range(50):
            slow = stack.enter_context(socket.socket())
            slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            slow.connect((cluster.host(), cluster.port()))
            slow.sendall(fetch_frame(topic, 50_000_000))
            several.append(slow)
        end = time.monotonic() + 10
        while time.monotonic() < end:
            for slow in several:
                assert slow.recv(1000)
            produce(cluster, [(other, 0, b"x")])
            assert resident_mib(cluster) < before + 30
    consumer = Consumer({"bootstrap.servers": cluster.bootstrap, "group.id": "g"})
    consumer.assign([TopicPartition(other, 0, 0)])
    assert consumer.poll(60).value() == b"x"
    consumer.close()


def test_halves_of_requests_from_many_addresses(kept_cluster):
    """They come, stay unfinished, go, and come again; memory is what the settings say."""
    limit = 64 * MIB
    cluster = kept_cluster(kept_inflight_max_bytes=limit, socket_request_max_bytes=16 * MIB)
    topic = cluster.create_topic()
    before = resident_mib(cluster)
    head = struct.pack(">ihhih", 15 * MIB, 0, 7, 1, -1)
    for _ in range(5):
        with contextlib.ExitStack() as stack:
            for number in range(30):
                half = stack.enter_context(socket.socket())
                half.bind((f"127.0.1.{number}", 0))
                half.connect((cluster.host(), cluster.port()))
                half.settimeout(0.2)
                with contextlib.suppress(TimeoutError):
                    half.sendall(head + bytes(14 * MIB))
            with urllib.request.urlopen(f"{cluster.url()}/healthz", timeout=60) as answer:
                assert answer.status == 200
        produce(cluster, [(topic, 0, b"x")])
        assert resident_mib(cluster) < before + 64 + 2 * 16 + 20


def test_ten_thousand_partitions_outlive_a_kill_and_go_when_they_are_deleted(kept_cluster):
    cluster = kept_cluster(log_segment_delete_delay_ms=1000)
    before = resident_mib(cluster)
    names = [cluster.create_topic(partitions=1000) for _ in range(10)]
    places = [(name, partition) for name in names for partition in range(0, 1000, 7)]
    produce(cluster, ((name, partition, b"%d" % partition) for name, partition in places))
    assert resident_mib(cluster) < before + 150
    cluster.kill()
    cluster.start()
    with cluster.client() as client:
        for name in names:
            bounds = client.bounds(name)
            assert len(bounds) == 1000
            written = {partition for partition, (_, end) in bounds.items() if end}
            assert written == set(range(0, 1000, 7))
        assert len(os.listdir(f"/proc/{cluster.pid()}/fd")) > 10_000
        client.delete_topics(names)
    cluster.wait_until(
        lambda: len(os.listdir(f"/proc/{cluster.pid()}/fd")) < 1000, "their files are closed", 200
    )
    assert not [name for name in os.listdir(cluster.log_dir()) if name.endswith("-stray")]


MEMBERS = 200
SESSION_MS = 6000


class GroupMember:
    """Joins a group and sends heartbeats until it leaves, or is gone without a word."""

    def __init__(self, client, port):
        self.client = client
        self.port = port
        self.member_id = ""
        self.generation = 0
        self.size = 0
        """Of the generation that it is in, if it leads the group."""
        self.task = asyncio.create_task(self.live())

    async def live(self):
        while True:
            joined = await self.client.ask(
                11,
                5,
                group_id="large",
                session_timeout=SESSION_MS,
                rebalance_timeout=30_000,
                member_id=self.member_id,
                group_instance_id=None,
                protocol_type="consumer",
                protocols=[{"name": "range", "metadata": bytes(100)}],
            )
            self.member_id = joined.member_id
            if joined.error_code.name != "none":
                continue
            self.generation = joined.generation_id
            me = {
                "group_id": "large",
                "generation_id": self.generation,
                "member_id": self.member_id,
                "group_instance_id": None,
            }
            everybody = [{"member_id": m.member_id, "assignment": b"x"} for m in joined.members]
            synced = await self.client.ask(14, 3, **me, assignments=everybody)
            if synced.error_code.name != "none":
                continue
            self.size = len(everybody)
            while (await self.client.ask(12, 3, **me)).error_code.name == "none":
                await asyncio.sleep(1)

    async def leave(self, says_so):
        self.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.task
        self.client.close()
        if says_so:
            other = await RawClient.connect(self.port)
            me = [{"member_id": self.member_id, "group_instance_id": None}]
            left = await other.ask(13, 3, group_id="large", members=me)
            assert left.error_code.name == "none"
            other.close()


def test_a_group_of_many_members_comes_goes_and_is_killed(kept_cluster):
    """All are in one generation a while after they came, went, or fell silent."""
    cluster = kept_cluster()

    async def settled(members):
        async with asyncio.timeout(60):
            while True:
                one = {member.generation for member in members}
                if len(one) == 1 and max(member.size for member in members) == len(members):
                    return
                await asyncio.sleep(0.1)

    async def come(count):
        port = cluster.port()
        return [GroupMember(await RawClient.connect(port), port) for _ in range(count)]

    async def go():
        first = await RawClient.connect(cluster.port())
        await first.ask(10, 4, key_type=0, coordinator_keys=["large"])
        first.close()
        members = await come(MEMBERS)
        await settled(members)
        for says_so in (True, False):
            await asyncio.gather(*(member.leave(says_so) for member in members[:20]))
            members = members[20:]
            await settled(members)
        members += await come(40)
        await settled(members)
        for member in members:
            member.task.cancel()
            member.client.close()

    asyncio.run(go())
