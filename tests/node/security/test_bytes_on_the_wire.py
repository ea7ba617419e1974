"""Produce and Fetch, which are asked where their bytes come in, refuse strangers in every version;
and a session that is over is served nothing, whatever it asks.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from kio.static.constants import EntityType

from kept.client.protocol import messages as protocol
from kept.node.config.checks import STANDARD_AUTHORIZER
from kept.node.kafka import api
from kept.node.security.session import ALLOW_ALL, Session
from kept.storage.records import build_batch
from tests.support.made_requests import about_each, made
from tests.support.strangers import STRANGERS, stranger

PRODUCE, FETCH, TOPIC_REFUSED = 0, 1, 29
BATCH = build_batch([(1, None, b"v", ())])
EXISTS, ABSENT, OTHER = "veiled", "absent", "nobody"


@asynccontextmanager
async def connected(lone: Any, session: Session) -> AsyncIterator[Any]:
    """A connection whose session is another than its login, or its absence, says."""
    (listener,) = lone.node.parts.listeners
    listener.session = lambda *_: session
    reader, writer = await asyncio.open_connection("127.0.0.1", lone.port)
    yield reader, writer
    writer.close()


async def answer(stream: Any, frame: bytes) -> bytes:
    """The response to one request; none: the connection is closed."""
    reader, writer = stream
    writer.write(frame)
    try:
        size = await asyncio.wait_for(reader.readexactly(4), 60)
        return bytes(await reader.readexactly(*struct.unpack(">i", size)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return b""


def request(key: int, version: int, name: str, topic_id: Any, *more: str, acks: int = 1) -> bytes:
    values = made(protocol.message_type(key, version, EntityType.request), name)
    values = about_each(values, name, (name, *more))
    if key == PRODUCE:
        values.update(acks=acks, transactional_id=None)
        for topic in values["topic_data"]:
            topic["topic_id"] = topic_id
            for partition in topic["partition_data"]:
                partition.update(index=0, records=BATCH)
    else:
        values.update(session_id=0, session_epoch=-1, min_bytes=0, forgotten_topics_data=[])
        for topic in values["topics"]:
            topic["topic_id"] = topic_id
            for partition in topic["partitions"]:
                partition.update(partition=0, fetch_offset=0)
    names = {name for name in values if name in {"replica_id"}}
    values.update(dict.fromkeys(names, -1))
    return protocol.encode_request(key, version, 7, "test", values)


def codes(key: int, version: int, frame: bytes) -> list[int]:
    response = protocol.decode_response(key, version, frame)[1]
    if key == PRODUCE:
        return [int(p.error_code) for t in response.responses for p in t.partition_responses]
    return [int(p.error_code) for t in response.responses for p in t.partitions]


@pytest.fixture
def guarded(lone_node: Any) -> Any:
    lone = lone_node(authorizer_class_name=STANDARD_AUTHORIZER, super_users="User:admin")
    lone.topic_id = lone.create(EXISTS).topic_id
    return lone


@pytest.mark.parametrize("who", STRANGERS)
def test_strangers_produce_and_fetch_nothing(
    guarded: Any, who: str, capfd: pytest.CaptureFixture[str]
) -> None:
    log = guarded.node.parts.table.replicas

    async def go() -> None:
        for key in (PRODUCE, FETCH):
            served = api.served()[key]
            for version in range(
                served.refused_below or served.min_version, served.max_version + 1
            ):
                async with connected(guarded, stranger(who)) as stream:
                    there, absent = [
                        await answer(stream, request(key, version, name, guarded.topic_id))
                        for name in (EXISTS, ABSENT)
                    ]
                about = f"{served.name} v{version} for {who}"
                assert codes(key, version, there) == [TOPIC_REFUSED], about
                assert there.replace(EXISTS.encode(), ABSENT.encode()) == absent, about
                if key == PRODUCE:
                    async with connected(guarded, stranger(who)) as stream:
                        unheard = request(key, version, EXISTS, guarded.topic_id, acks=0)
                        assert not await answer(stream, unheard), f"{about}: it is closed"

    guarded.run(go())
    said = capfd.readouterr().err
    assert f"topic={EXISTS} " in said and f"topic={guarded.topic_id} " in said
    assert [replica.partition.log.log_end_offset for replica in log.values()] == [0]


@pytest.mark.parametrize("who", STRANGERS)
def test_answers_about_several_are_in_no_order_that_tells_what_is_there(
    guarded: Any, who: str
) -> None:
    async def go() -> None:
        for key, by_id in ((PRODUCE, 13), (FETCH, 13)):
            served = api.served()[key]
            for version in range(served.refused_below or served.min_version, by_id):
                for names in ((EXISTS, ABSENT), (ABSENT, EXISTS)):
                    absent = [name.replace(EXISTS, OTHER) for name in names]
                    async with connected(guarded, stranger(who)) as stream:
                        known, unknown = [
                            await answer(stream, request(key, version, one, None, other))
                            for one, other in (names, absent)
                        ]
                    about = f"{served.name} v{version} for {who}"
                    assert codes(key, version, known) == [TOPIC_REFUSED] * 2, about
                    assert known.replace(EXISTS.encode(), OTHER.encode()) == unknown, about

    guarded.run(go())


def test_the_same_requests_of_whoever_may_are_served(guarded: Any) -> None:
    admin = Session("User:admin", "10.0.0.1", "PLAINTEXT", authorizer=ALLOW_ALL)

    async def go() -> None:
        for key in (PRODUCE, FETCH):
            served = api.served()[key]
            for version in range(
                served.refused_below or served.min_version, served.max_version + 1
            ):
                async with connected(guarded, admin) as stream:
                    frame = await answer(stream, request(key, version, EXISTS, guarded.topic_id))
                assert codes(key, version, frame) == [0], f"{served.name} v{version}"

    guarded.run(go())


def test_a_session_that_is_over_is_served_nothing_but_a_login(guarded: Any) -> None:
    over = Session("User:admin", "10.0.0.1", "PLAINTEXT", authorizer=ALLOW_ALL, expires_at=0.0)

    async def go() -> None:
        for served in api.APIS:
            name, version = served.name, max(served.refused_below, served.min_version)
            values = made(protocol.message_type(served.key, version, EntityType.request), EXISTS)
            frame = protocol.encode_request(served.key, version, 7, "test", values)
            async with connected(guarded, over) as stream:
                told = await answer(stream, frame)
            assert bool(told) == (served.key in api.BEFORE_LOGIN), name

    guarded.run(go())
    assert guarded.node.parts.counters.expired_sessions == len(api.APIS) - len(api.BEFORE_LOGIN)
