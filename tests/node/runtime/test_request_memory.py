"""What one connection, one address and one batch may make a node hold, by its own accounts."""

from __future__ import annotations

import asyncio
import contextlib
import random
import struct
import threading
from typing import Any

import lz4.frame
import pytest

from kept.client.protocol import messages as protocol
from kept.node.admin.records.partition_records import PIECE_RECORDS, Reader
from kept.node.http.server import UNDRAWN_BYTES
from kept.node.kafka.connection import BASE_BUFFER_BYTES, KEPT_BUFFER_BYTES
from kept.node.kafka.handlers.records import batch_checks, produce
from kept.node.kafka.handlers.records.produce import ProduceHandler
from kept.node.runtime.memory_budget import BudgetShare
from kept.node.runtime.time_slices import LOOP_BYTES
from kept.node.security.client_usage import UNMETERED
from kept.node.security.session import Session
from kept.storage.records import build_batch, check
from kept.storage.records.header import HEADER_BYTES
from kept.storage.types import Codec, TopicPartition
from tests.support.raw_client import RawClient
from tests.support.request_values import fetch_values, produce_values

MIB = 1 << 20
PATIENCE_S = 60


async def until(condition: Any) -> None:
    """Let the loop turn until something holds."""
    async with asyncio.timeout(PATIENCE_S):
        while not condition():
            await asyncio.sleep(0.001)


class Client(RawClient):
    """Knows the node's side of its connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        super().__init__(reader, writer)
        self.host, port = writer.get_extra_info("sockname")[:2]
        self.peer = f"{self.host}:{port}"

    def mine(self, lone: Any) -> Any:
        """The node's side of it."""
        of_node = lone.node.parts.listeners[0].connections
        return next(one for one in of_node if one.peer == self.peer)

    def answers(self) -> bool:
        return bool(self.reader._buffer)  # type: ignore[attr-defined]

    async def produced(self) -> Any:
        """Result of the only partition of a Produce v9."""
        response = protocol.decode_response(0, 9, await self.frame())[1]
        return response.responses[0].partition_responses[0]


def frame(*batches: bytes, topic: str = "t", acks: int = 1) -> bytes:
    values = produce_values(topic, *batches, acks=acks)
    return protocol.encode_request(0, 9, 1, "test", values)


def plain(size: int) -> bytes:
    return build_batch([(0, b"k", bytes(size), ())])


@contextlib.asynccontextmanager
async def clients(lone: Any, *hosts: str):
    opened = [await Client.connect(lone.port, host=host) for host in hosts]
    try:
        yield opened
    finally:
        for one in opened:
            one.writer.close()


async def test_a_frame_that_is_announced_reserves_what_has_come(lone):
    async with clients(lone, "127.0.0.1", "127.0.0.1") as (client, _):
        client.writer.write(struct.pack(">ihhih", 100_000_000, 0, 9, 1, -1) + bytes(300_000))
        await until(lambda: client.mine(lone)._end >= 300_000)
        assert lone.node.parts.memory.in_flight.used_bytes <= KEPT_BUFFER_BYTES
        client.writer.write(bytes(10_000_000))
        await until(lambda: client.mine(lone)._end >= 10_000_000)
        come = client.mine(lone)._end
        assert (
            come
            <= lone.node.parts.memory.in_flight.used_bytes + BASE_BUFFER_BYTES
            <= 2 * come + 6 * MIB
        )
    await until(lambda: not lone.node.parts.memory.in_flight.used_bytes)


async def test_a_large_buffer_is_given_back_with_its_request(lone):
    """A client that once sent much, and then little, held the buffer of the largest for ever."""
    await lone.created("t", max_message_bytes="20000000")
    async with clients(lone, "127.0.0.1") as (client,):
        client.writer.write(frame(plain(900_000)))
        assert (await client.produced()).error_code == 0
        mine = client.mine(lone)
        assert len(mine._buffer) >= 900_000, "the next one of its size finds room"
        assert lone.node.parts.memory.in_flight.used_bytes == len(mine._buffer) - BASE_BUFFER_BYTES
        client.writer.write(frame(plain(9_000_000)))
        assert (await client.produced()).error_code == 0
        assert len(mine._buffer) == BASE_BUFFER_BYTES, "at once, not when it is idle"
        assert lone.node.parts.memory.in_flight.used_bytes == 0


async def test_nothing_is_kept_between_requests_while_memory_is_short(lone):
    await lone.created("t")
    async with clients(lone, "127.0.0.1") as (client,):
        held = lone.node.parts.memory.in_flight.limit_bytes // 2 + 1
        lone.node.parts.memory.in_flight.overdraw(held)
        client.writer.write(frame(plain(900_000)))
        assert (await client.produced()).error_code == 0
        assert lone.node.parts.memory.in_flight.used_bytes == held, "at once, not when it is idle"
        lone.node.parts.memory.in_flight.release(held)


def test_frames_that_are_half_read_do_not_wait_for_each_other(lone_node):
    lone = lone_node(kept_inflight_max_bytes=str(4 * MIB), kept_inflight_max_bytes_per_ip="4194304")
    lone.create("t", max_message_bytes="4000000")
    whole = frame(plain(3_000_000))

    async def go():
        async with clients(lone, *["127.0.0.1"] * 4) as several:
            for client in several:
                client.writer.write(whole[:1_500_000])
            budget = lone.node.parts.memory.in_flight
            await until(lambda: budget.used_bytes >= 3 * MIB)
            for client in several:
                client.writer.write(whole[1_500_000:])
            for client in several:
                assert (await client.produced()).error_code == 0
            assert budget.used_bytes <= budget.limit_bytes + len(whole)

    lone.run(go())


def test_one_address_may_hold_its_part_and_others_go_on(lone_node):
    lone = lone_node(
        kept_inflight_max_bytes=str(16 * MIB), kept_inflight_max_bytes_per_ip=str(4 * MIB)
    )
    lone.create("t")
    whole = frame(plain(1_000_000))

    async def go():
        async with clients(lone, *["127.0.0.1"] * 8, "127.0.0.2") as (*crowd, other):
            for client in crowd:
                client.writer.write(whole[:-10])
            await until(lambda: sum(c.mine(lone).blocked for c in crowd) >= 3)
            assert lone.node.parts.memory.in_flight.used_bytes <= 4 * MIB + len(whole)
            other.writer.write(whole)
            assert (await other.produced()).error_code == 0, "another address is not concerned"
            for client in crowd:
                client.writer.write(whole[-10:])
            for client in crowd:
                assert (await client.produced()).error_code == 0

    lone.run(go())


async def test_http_bodies_draw_on_the_budget(lone):
    async with clients(lone, "127.0.0.1", "127.0.0.1") as (first, second):
        head = (
            b"POST /api/v1/compaction/compact HTTP/1.1\r\nHost: localhost\r\nX-Kept: 1\r\n"
            b"Content-Length: 900000\r\n\r\n"
        )
        first.writer.write(head + bytes(500_000))
        await until(lambda: lone.node.parts.memory.in_flight.used_bytes >= 500_000 - UNDRAWN_BYTES)
        lone.node.parts.memory.in_flight.overdraw(lone.node.parts.memory.in_flight.limit_bytes)
        second.writer.write(head + bytes(500_000))
        async with asyncio.timeout(PATIENCE_S):
            assert (await second.reader.readline()).startswith(b"HTTP/1.1 503")
        lone.node.parts.memory.in_flight.release(lone.node.parts.memory.in_flight.limit_bytes)
    await until(lambda: not lone.node.parts.memory.in_flight.used_bytes)


async def test_probes_and_metrics_are_answered_whatever_clients_hold(lone):
    """A liveness probe that hears 503 has its node killed, by whoever sends half of a request."""
    lone.node.parts.memory.in_flight.overdraw(lone.node.parts.memory.in_flight.limit_bytes)
    for path in (b"/healthz", b"/readyz", b"/metrics"):
        async with clients(lone, "127.0.0.1") as (client,):
            client.writer.write(b"GET " + path + b" HTTP/1.1\r\nHost: localhost\r\n\r\n")
            async with asyncio.timeout(PATIENCE_S):
                assert (await client.reader.readline()).startswith(b"HTTP/1.1 200"), path
    lone.node.parts.memory.in_flight.release(lone.node.parts.memory.in_flight.limit_bytes)


async def test_the_buffer_of_a_closed_connection_goes_at_once(lone):
    """It was given back to the budget, and stayed in memory until garbage was collected."""
    async with clients(lone, "127.0.0.1") as (client,):
        client.writer.write(struct.pack(">ihhih", 100_000_000, 0, 9, 1, -1) + bytes(3_000_000))
        await until(lambda: client.mine(lone)._end >= 3_000_000)
        mine = client.mine(lone)
    await until(lambda: not lone.node.parts.memory.in_flight.used_bytes)
    assert not mine._buffer


# What batches inflate to.


def bomb(codec: Codec, size: int = 20 * MIB) -> bytes:
    return build_batch([(0, b"k", bytes(size), ())], codec=codec)


def untold(size: int) -> bytes:
    """lz4, without its size in the header, as clients write it."""
    batch = build_batch([(0, b"k", bytes(size), ())], codec=Codec.LZ4)
    assert not lz4.frame.get_frame_info(batch[HEADER_BYTES:])["content_size"]
    return batch


@pytest.fixture
def watched(monkeypatch):
    """(thread is the loop's, bytes walked, bytes drawn for threads) of every check."""
    seen: list[tuple[bool, int]] = []
    here = threading.get_ident()

    def watch(batch, rules, now_ms):
        on_loop = threading.get_ident() == here
        seen.append((on_loop, rules.max_inflated_bytes))
        return check(batch, rules, now_ms)

    monkeypatch.setattr(batch_checks, "check", watch)
    monkeypatch.setattr(produce, "check", watch)
    return seen


@pytest.mark.parametrize("acks", [1, 0])
@pytest.mark.parametrize(
    "codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD], ids=lambda c: c.name
)
async def test_small_batches_that_inflate_to_much_inflate_in_a_thread(lone, watched, codec, acks):
    await lone.created("t", max_message_bytes="3000000")
    batch = bomb(codec)
    async with clients(lone, "127.0.0.1") as (client,):
        client.writer.write(frame(batch, acks=acks) + frame(plain(10)))
        found = await client.produced()
        assert found.error_code == 0 and found.base_offset == acks ^ 1
    assert all(limit <= LOOP_BYTES for on_loop, limit in watched if on_loop)
    assert any(not on_loop for on_loop, _ in watched)
    assert lone.node.parts.memory.inflating.used_bytes == 0


async def test_a_thread_inflates_into_what_was_drawn(lone, watched, monkeypatch):
    await lone.created("t")
    drawn, draw = [], BudgetShare.draw

    def spy(self, size_bytes, granted):
        drawn.append(size_bytes)
        draw(self, size_bytes, granted)

    monkeypatch.setattr(BudgetShare, "draw", spy)
    async with clients(lone, "127.0.0.1") as (client,):
        client.writer.write(frame(untold(20 * MIB)))
        assert (await client.produced()).error_code == 0
    limits = [limit for on_loop, limit in watched if not on_loop]
    (limit,) = drawn
    assert limits == drawn and 20 * MIB < limit < 21 * MIB, "its blocks tell how large it is"
    assert lone.node.parts.memory.inflating.used_bytes == 0


async def test_batches_wait_for_room_to_inflate_and_others_go_on(lone):
    await lone.created("t")
    inflating = lone.node.parts.memory.inflating
    inflating.draw(inflating.limit_bytes, lambda: None)
    async with clients(lone, "127.0.0.1", "127.0.0.1") as (client, other):
        client.writer.write(frame(bomb(Codec.GZIP)))
        await until(lambda: inflating._queue)
        other.writer.write(frame(plain(10)))
        assert (await other.produced()).base_offset == 0
        assert not client.answers()
        inflating.release(inflating.limit_bytes)
        assert (await client.produced()).base_offset == 1
    assert inflating.used_bytes == 0


async def test_inflating_does_not_wait_for_the_frames_that_wait_for_it(lone):
    await lone.created("t")
    budget = lone.node.parts.memory.in_flight
    async with clients(lone, "127.0.0.1") as (client,):
        budget.overdraw(budget.limit_bytes)
        client.writer.write(frame(bomb(Codec.ZSTD)))
        assert (await client.produced()).error_code == 0
        budget.release(budget.limit_bytes)


def test_a_bomb_is_refused_and_the_rest_of_its_request_is_not(lone_node):
    lone = lone_node(kept_inflated_max_bytes=str(10 * MIB))
    lone.create("t", partitions=4)

    async def go():
        async with clients(lone, "127.0.0.1") as (client,):
            client.writer.write(
                frame(plain(10), untold(20 * MIB), untold(9 * MIB), bomb(Codec.GZIP))
            )
            response = protocol.decode_response(0, 9, await client.frame())[1]
            found = response.responses[0].partition_responses
            assert [int(one.error_code) for one in found] == [0, 87, 0, 87]

    lone.run(go())
    assert lone.node.parts.memory.inflating.used_bytes == 0


async def test_many_batches_of_one_request_are_not_all_checked_on_the_loop(lone, watched):
    await lone.created("t", partitions=20)
    batch = bomb(Codec.ZSTD, 900_000)
    async with clients(lone, "127.0.0.1") as (client,):
        client.writer.write(frame(*[batch] * 20))
        response = protocol.decode_response(0, 9, await client.frame())[1]
        found = response.responses[0].partition_responses
        assert [int(one.error_code) for one in found] == [0] * 20
    on_loop = sum(1 for on_loop, _ in watched if on_loop)
    assert on_loop <= 6 and len(watched) == 20


def test_a_run_of_small_requests_is_broken_off(lone, watched):
    """Between two looks at the clock the loop walks no more than one large batch and a bit."""
    lone.create("t")
    one = frame(bomb(Codec.ZSTD, 900_000))
    runs, handle_run = [], ProduceHandler.handle_run

    async def go():
        async with clients(lone, "127.0.0.1") as (client,):
            client.writer.write(one * 12)
            for n in range(12):
                assert (await client.produced()).base_offset == n

    with pytest.MonkeyPatch.context() as patch:

        def handled(*given):
            runs.append(handle_run(*given))
            return runs[-1]

        patch.setattr(ProduceHandler, "handle_run", handled)
        lone.run(go())
    assert max(runs) <= 2 and sum(runs) == 12


async def test_a_large_batch_is_compressed_for_its_topic_in_a_thread(lone, watched):
    await lone.created("t", compression_type="gzip")
    async with clients(lone, "127.0.0.1") as (client,):
        client.writer.write(frame(plain(900_000)))
        assert (await client.produced()).error_code == 0
    assert watched[-1][0] is False


async def test_a_connection_that_goes_while_its_batch_waits_holds_its_bytes_until_then(lone):
    await lone.created("t")
    inflating = lone.node.parts.memory.inflating
    inflating.draw(inflating.limit_bytes, lambda: None)
    mine = None
    async with clients(lone, "127.0.0.1") as (client,):
        noise = random.Random(1).randbytes(500_000) + bytes(5 * MIB)
        client.writer.write(frame(build_batch([(0, b"k", noise, ())], codec=Codec.GZIP)))
        await until(lambda: inflating._queue)
        mine = client.mine(lone)
        mine.abort()
    await until(lambda: mine.transport is None)
    assert lone.node.parts.memory.in_flight.used_bytes > inflating.limit_bytes + 400_000
    inflating.release(inflating.limit_bytes)
    await until(lambda: not lone.node.parts.memory.in_flight.used_bytes)


# What outlives its connection.


def test_joins_of_connections_that_are_gone_are_given_back(lone_node):
    lone = lone_node(group_initial_rebalance_delay_ms="60000")

    def join(group: str, size: int) -> bytes:
        values = {
            "group_id": group,
            "session_timeout": 600_000,
            "rebalance_timeout": 600_000,
            "member_id": "",
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": bytes(size)}],
        }
        return protocol.encode_request(11, 3, 1, "test", values)

    async def go():
        memory = lone.node.parts.groups.memory
        async with clients(lone, *["127.0.0.1"] * 5) as (first, *several):
            find = {"key": "g", "key_type": 0}
            first.writer.write(protocol.encode_request(10, 3, 1, "test", find))
            await first.frame()
            empty = memory.used_bytes
            for n, client in enumerate(several):
                client.writer.write(join(f"g{n}", 10 * MIB))
            await until(lambda: memory.used_bytes - empty > 40 * MIB)
            first.writer.write(join("large", 16 * MIB - 100))  # and what a member costs
            refused = protocol.decode_response(11, 3, await first.frame())[1]
            assert int(refused.error_code) == 81, "GROUP_MAX_SIZE_REACHED"
        await until(lambda: memory.used_bytes - empty < MIB)
        await until(lambda: not lone.node.parts.memory.in_flight.used_bytes)

    lone.run(go())


def fetch(count: int) -> bytes:
    """Begins a session of so many partitions that are not there."""
    values = fetch_values("nowhere", count=count, session_epoch=0)
    return protocol.encode_request(1, 12, 1, "test", values)


async def test_a_client_that_goes_while_its_fetch_takes_slices_holds_nothing(lone):
    async with clients(lone, "127.0.0.1") as (client,):
        client.writer.write(fetch(20_000))
        mine = client.mine(lone)
        await until(lambda: mine.parked and mine.blocked)
        assert lone.node.parts.memory.in_flight.used_bytes
        mine.abort()
        await until(lambda: mine.transport is None)
        await until(lambda: not lone.node.parts.memory.in_flight.used_bytes)


def test_a_large_fetch_session_is_none(lone_node):
    lone = lone_node(kept_fetch_sessions_max_partitions="1000")

    async def go():
        async with clients(lone, "127.0.0.1") as (client,):
            client.writer.write(fetch(5000) + fetch(900))
            large, small = [
                protocol.decode_response(1, 12, await client.frame())[1] for _ in range(2)
            ]
            assert large.session_id == 0 and small.session_id != 0
            assert len(large.responses[0].partitions) == 5000
            assert lone.node.parts.fetch_sessions.held_partitions == 900
            assert not client.mine(lone).positions, "nobody is anywhere in what is not there"

    lone.run(go())


# Readers of records.


def tiny(count: int) -> bytes:
    return build_batch([(0, None, b"", ())] * count, codec=Codec.ZSTD)


def reading_of(lone):
    """A client of the cluster, and a reader of t-0 through it."""
    parts = lone.node.parts
    gateway = parts.admin.new_client()
    tp = TopicPartition("t", 0)
    return gateway, Reader(
        parts.runtime, parts.metadata, parts.memory.inflating, gateway, tp, UNMETERED
    )


def counted(monkeypatch):
    """How many records are made objects of."""
    from kept.node.admin.records import partition_records as reading

    pieces, read_piece = [], reading.read_piece

    def count(*args, **more):
        found = read_piece(*args, **more)
        pieces.append(len(found))
        return found

    monkeypatch.setattr(reading, "read_piece", count)
    return pieces


def test_the_record_browser_makes_objects_of_what_it_shows(lone, monkeypatch):
    pieces = counted(monkeypatch)
    lone.create("t")

    async def go():
        async with clients(lone, "127.0.0.1") as (client,):
            client.writer.write(frame(tiny(100_000)))
            assert (await client.produced()).error_code == 0
        return await lone.node.parts.admin.records.browse(UNMETERED, "t", 0, offset=70_000, limit=3)

    found = lone.run(go())
    assert [record.offset for record in found.records] == [70_000, 70_001, 70_002]
    assert found.next_offset == 70_003
    assert sum(pieces) == 3
    assert lone.node.parts.memory.inflating.used_bytes == 0


def test_a_reader_holds_a_piece_of_a_batch(lone, monkeypatch):
    pieces = counted(monkeypatch)
    lone.create("t")

    async def go():
        async with clients(lone, "127.0.0.1") as (client,):
            client.writer.write(frame(tiny(50_000)))
            assert (await client.produced()).error_code == 0
        gateway, reader = reading_of(lone)
        await reader.seek(0)
        (batch,) = await reader.fetch(wait=False)
        taken = 0
        async for record in reader.records_of(batch):
            assert record.offset == taken
            taken += 1
            assert sum(pieces) <= taken + PIECE_RECORDS
            if taken % PIECE_RECORDS == 0:
                assert lone.node.parts.memory.inflating.used_bytes == 0, (
                    "nothing is held while it is taken"
                )
        gateway.close()
        return taken

    assert lone.run(go()) == 50_000


async def test_a_reader_that_is_given_up_gives_back(lone):
    await lone.created("t")
    inflating = lone.node.parts.memory.inflating
    gateway, reader = reading_of(lone)
    inflating.draw(inflating.limit_bytes, lambda: None)
    waiting = asyncio.ensure_future(reader._piece(tiny(50_000), 10))
    await until(lambda: inflating._queue)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    inflating.release(inflating.limit_bytes)
    await until(lambda: not inflating.used_bytes)
    gateway.close()


def test_addresses_of_one_network_of_ipv6_have_one_account(lone: Any) -> None:
    listener = lone.node.parts.listeners[0]

    async def go() -> None:
        sockets = [
            await listener.connect_here(Session("User:ada", host, listener.name))
            for host in ("2001:db8::1", "2001:db8::2", "2001:db8:0:1::1")
        ]
        await until(lambda: len(listener.connections) == 3)
        for accounts in zip(
            *((one.account, one.waiting_account) for one in listener.connections), strict=True
        ):
            assert accounts[0] is accounts[1] is not accounts[2]
        for sock in sockets:
            sock.close()

    lone.run(go())
