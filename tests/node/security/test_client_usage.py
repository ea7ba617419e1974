"""Quotas of clients that come by HTTP and gRPC: what counts, who waits, and who is sent away."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from kept.client.protocol.api_keys import ApiKey
from kept.client.security.jaas import PLAIN_MODULE
from kept.cluster.metadata.records import ClientQuotaRecord
from kept.cluster.security.client_quotas import CLIENT_ID, USER, entity
from kept.node.admin.records.record_filter import RecordFilter
from kept.node.grpc.broker import Broker
from kept.node.grpc.callers import Callers
from kept.node.kafka.api import RequestContext
from kept.node.proto import broker_pb2
from kept.node.runtime import error_codes
from kept.node.runtime.clock import monotonic_ms
from kept.node.runtime.counters import Counters
from kept.node.security import client_usage
from kept.node.security.client_quotas import MAX_VIEWS, ClientQuotas
from kept.node.security.client_usage import (
    GRPC_CLIENT_ID,
    HTTP_CLIENT_ID,
    UNMETERED,
    ClientUsage,
    ClientUsages,
)
from kept.node.security.session import ALLOW_ALL, Session, node_session
from kept.storage.errors import (
    NetworkException,
    ThrottlingQuotaExceeded,
    UnknownTopicOrPartition,
)
from kept.storage.records import build_batch
from tests.node.conftest import Lone
from tests.support.given import Given
from tests.support.grpc_calls import basic, call, calling

# isort: split
import grpc
import grpc.aio

LISTENER = {
    "listeners": "SASL_PLAINTEXT://127.0.0.1:0",
    "sasl_enabled_mechanisms": "PLAIN",
    "plain_sasl_jaas_config": f'{PLAIN_MODULE} required user_ada="pencil" user_bob="pencil";',
    "kept_console_actions": "true",
}
ADA, BOB = basic("ada", "pencil"), basic("bob", "pencil")
EXHAUSTED = grpc.StatusCode.RESOURCE_EXHAUSTED


def usage_of(user: str = "ada", **quotas: float) -> tuple[ClientUsage, Counters]:
    made, counters = ClientQuotas(), Counters()
    made.replace({entity({USER: "ada"}): quotas})
    return ClientUsage(made, counters, f"User:{user}", HTTP_CLIENT_ID), counters


# What counts. Without a node.


class Clock:
    """Moves when a test says so."""

    def __init__(self) -> None:
        self.seconds = 1000.0

    def now_ms(self) -> int:
        return int(self.seconds * 1000)

    def now(self) -> float:
        return self.seconds

    def advance(self, seconds: float) -> None:
        self.seconds += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(client_usage, "monotonic_ms", made.now_ms)
    monkeypatch.setattr(client_usage, "perf_counter", made.now)
    return made


@pytest.mark.usefixtures("clock")
def test_bytes_over_a_rate_hold_back_what_draws_on_it_and_nothing_else() -> None:
    usage, counters = usage_of(producer_byte_rate=100.0)
    assert not usage.is_over("produce")
    usage.produced(1500)
    delay_ms, kind = usage.throttle_delay("produce")
    assert kind == "produce" and delay_ms == 5_000, "(150 - 100) / 100 * 10 s"
    assert not usage.is_over("fetch") and not usage.is_over("request")
    with pytest.raises(
        ThrottlingQuotaExceeded, match=r"User:ada by kept-http .*producer_byte_rate"
    ):
        asyncio.run(usage.admit("produce", 1.0))
    assert counters.throttled_seconds["produce"] == 5.0
    other, _ = usage_of("bob", producer_byte_rate=100.0)
    other.produced(10**9)
    assert not other.is_over("produce"), "another user's"


def test_who_waits_long_goes_on_soon_after_the_quota_is_taken_back() -> None:
    quotas, counters = ClientQuotas(), Counters()
    quotas.replace({entity({USER: "ada"}): {"consumer_byte_rate": 1.0}})
    usage = ClientUsage(quotas, counters, "User:ada", GRPC_CLIENT_ID)
    usage.consumed(10**9)
    assert usage.throttle_delay("fetch")[0] > 10**9

    async def scene() -> None:
        waits = asyncio.create_task(usage.admit("fetch"))
        await asyncio.sleep(0)
        quotas.replace({})
        await asyncio.wait_for(waits, 10)

    asyncio.run(scene())
    assert 0 < counters.throttled_seconds["fetch"] <= 2, "what was waited, not what was to be"


def test_a_fetch_brings_what_the_window_holds_at_most() -> None:
    usage, _ = usage_of(consumer_byte_rate=100.0)
    assert usage.most_fetched(1 << 20) == 1000 and usage.most_fetched(10) == 10
    usage.consumed(2000)
    assert usage.throttle_delay("fetch")[1] == "fetch" and not usage.is_over("produce")
    assert UNMETERED.most_fetched(1 << 20) == 1 << 20


def test_the_time_that_work_takes_of_the_loop_is_used_and_its_waiting_is_not(
    clock: Clock,
) -> None:
    usage, _ = usage_of(request_percentage=1.0)

    async def waits() -> str:
        for _ in range(20):
            asyncio.get_running_loop().call_soon(clock.advance, 0.15)
            await asyncio.sleep(0)
        return "done"

    async def works() -> None:
        await asyncio.sleep(0)
        clock.advance(0.15)  # 1 % of ten seconds is 0.1

    async def scene() -> None:
        assert await usage.run(waits()) == "done" and not usage.is_over("request")
        await usage.run(works())
        assert usage.is_over("request") and usage.is_over("fetch")
        assert usage.throttle_delay("produce")[0] <= 1000, "one sample at most"

    asyncio.run(scene())


def test_metered_work_fails_and_is_cancelled_as_any() -> None:
    usage, _ = usage_of(request_percentage=1.0)
    seen = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def fails() -> None:
        await asyncio.sleep(0)
        raise LookupError("planted")

    async def scene() -> None:
        task = asyncio.create_task(usage.run(work()))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        with pytest.raises(LookupError, match="planted"):
            await usage.run(fails())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(usage.run(asyncio.sleep(60)), 0.001)

    asyncio.run(scene())
    assert seen == ["cancelled"]


def test_nodes_use_nothing() -> None:
    quotas = ClientQuotas()
    quotas.replace({entity({USER: None}): {"request_percentage": 0.001}})
    usages = ClientUsages(quotas, Counters(), GRPC_CLIENT_ID)
    assert usages.of(node_session("NODE")) is UNMETERED
    usages.of(Session("User:ada")).produced(1)
    assert len(quotas) == 1


# By HTTP.


@pytest.fixture
def secure(lone_node: Any) -> Lone:
    """A node of ada's and bob's with a topic; what is used counts for ten seconds."""
    lone: Lone = lone_node(**LISTENER, num_partitions="3")
    lone.create("t")
    return lone


@pytest.fixture
def brief(lone_node: Any) -> Lone:
    """The same, where it counts for a second."""
    lone: Lone = lone_node(**LISTENER, quota_window_num="2")
    lone.create("t")
    return lone


def give(lone: Lone, of: dict[str, str | None], **quotas: float) -> None:
    records = [ClientQuotaRecord(tuple(of.items()), key, value) for key, value in quotas.items()]
    lone.run(lone.node.parts.metadata.propose(records))


def produce(lone: Lone, login: str, value: str) -> tuple[int, dict[str, str], Any]:
    body = json.dumps({"topic": "t", "partition": 0, "value": value})
    status, headers, answer = lone.http(
        "POST /api/v1/produce HTTP/1.1\r\nHost: localhost\r\nX-Kept: 1\r\n"
        f"Authorization: {login}\r\nContent-Length: {len(body)}\r\n\r\n{body}"
    )
    return status, headers, json.loads(answer)


def get(lone: Lone, path: str, login: str = ADA) -> tuple[int, dict[str, str], Any]:
    status, headers, body = lone.http(
        f"GET {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {login}\r\n\r\n"
    )
    return status, headers, json.loads(body)


def test_who_produces_too_much_by_http_is_sent_away_until_he_may_come_again(secure: Lone) -> None:
    give(secure, {"user": "ada"}, producer_byte_rate=10)
    status, _, done = produce(secure, ADA, "x" * 1000)
    assert (status, done["done"], done["offset"]) == (200, True, 0), "over it once, as in Kafka"
    status, headers, refused = produce(secure, ADA, "x")
    assert status == 429 and 50 <= int(headers["retry-after"]) <= 110, "(107 - 10) / 10 * 10 s"
    assert "User:ada by kept-http is over the quota producer_byte_rate" in str(refused)
    assert secure.node.parts.counters.throttled_seconds["produce"] > 50
    assert produce(secure, BOB, "y")[2]["offset"] == 1, "another user goes on"
    assert get(secure, "/api/v1/topics")[0] == 200, "and ada with what draws on something else"


def test_a_short_wait_is_waited_out(brief: Lone) -> None:
    size = len(build_batch([(1, None, b"x" * 1000, ())]))
    give(brief, {"client-id": HTTP_CLIENT_ID}, producer_byte_rate=size / 1.5)
    started = time.monotonic()
    assert produce(brief, ADA, "x" * 1000)[0] == 200
    status, _, done = produce(brief, BOB, "y")
    assert (status, done["offset"]) == (200, 1), "the client id is shared"
    assert time.monotonic() - started > 0.45, "(1.5 - 1) * 1 s"


def test_records_that_http_shows_count_as_they_are_fetched(secure: Lone) -> None:
    for number in range(4):
        assert produce(secure, ADA, f"{number}" * 3000)[0] == 200
    give(secure, {"user": "ada"}, consumer_byte_rate=30)
    status, _, page = get(secure, "/api/v1/records?topic=t&partition=0&offset=0")
    assert status == 200 and len(page["records"]) == 1, "the first batch, then he is over it"
    assert page["next_offset"] == 1
    for path in ("records?topic=t&partition=0", "search?topic=t", "tail?topic=t"):
        status, headers, refused = get(secure, f"/api/v1/{path}")
        assert status == 429 and int(headers["retry-after"]) >= 1, path
        assert "consumer_byte_rate" in str(refused), path
    assert get(secure, "/api/v1/topics/t")[0] == 200
    assert len(get(secure, "/api/v1/search?topic=t", BOB)[2]["records"]) == 4


def test_a_search_over_the_quota_says_where_to_go_on(secure: Lone) -> None:
    for number in range(40):
        assert produce(secure, BOB, f"{number:03}" * 1000)[0] == 200
    give(secure, {"user": "ada"}, consumer_byte_rate=2000)
    status, _, found = get(secure, "/api/v1/search?topic=t&contains=nothing")
    assert status == 200 and found["cursor"] and found["scanned"]["bytes"] < 80_000
    status, _, whole = get(secure, "/api/v1/search?topic=t&contains=nothing", BOB)
    assert whole["cursor"] is None and whole["scanned"]["bytes"] > 120_000


def test_the_loops_time_that_http_takes_holds_its_user_back(secure: Lone) -> None:
    give(secure, {"user": "ada"}, request_percentage=0.001)
    assert get(secure, "/api/v1/topics")[0] == 200
    started = time.monotonic()
    assert get(secure, "/api/v1/topics")[0] == 200, "a sample's time is waited"
    assert time.monotonic() - started > 0.5
    held_back = secure.node.parts.counters.throttled_seconds["request"]
    assert held_back > 0.5
    assert secure.http("GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n")[0] == 200
    assert get(secure, "/api/v1/topics", BOB)[0] == 200
    assert secure.node.parts.counters.throttled_seconds["request"] == held_back, "nobody else waits"


def test_a_tail_over_the_quota_pauses_and_goes_on_with_what_came(brief: Lone) -> None:
    give(brief, {"user": "ada"}, consumer_byte_rate=10_000)
    parts = brief.node.parts
    usage = ClientUsages(parts.client_quotas, parts.counters, HTTP_CLIENT_ID).of(
        Session("User:ada")
    )

    async def follow() -> None:
        tail = parts.admin.tails.tail(usage, "t", RecordFilter())
        try:
            await tail.begin()
            assert (await call(brief.port, "Produce", PRODUCE, BOB)).offset == 0
            usage.consumed(30_000)
            while (event := await tail.poll()) is not None and usage.is_over("fetch"):
                assert event.records == [] and event.left_out == 0
                await asyncio.sleep(0.05)
            found = event.records or (await tail.poll()).records
            assert [one.record.offset for one in found] == [0]
        finally:
            tail.close()

    brief.run(asyncio.wait_for(follow(), 60))
    assert parts.counters.throttled_seconds["fetch"] > 0


def test_topics_made_by_http_count_for_its_client_id(secure: Lone) -> None:
    give(secure, {"client-id": HTTP_CLIENT_ID}, controller_mutation_rate=0.1)

    def change(what: str, **values: Any) -> tuple[int, dict[str, str], Any]:
        body = json.dumps(values)
        status, headers, answer = secure.http(
            f"POST /api/v1/topics/{what} HTTP/1.1\r\nHost: localhost\r\nX-Kept: 1\r\n"
            f"Authorization: {ADA}\r\nContent-Length: {len(body)}\r\n\r\n{body}"
        )
        return status, headers, json.loads(answer)

    assert change("create", topic="one", partitions=5)[2]["done"]
    for what, values in (
        ("create", {"topic": "two"}),
        ("create", {"topic": "two", "validate_only": True}),
        ("alter", {"topic": "one", "partitions": 6}),
        ("delete", {"topic": "one"}),
    ):
        status, headers, refused = change(what, **values)
        assert status == 429 and int(headers["retry-after"]) > 20, (what, refused)
        assert "throttling quota" in str(refused).lower()
    assert change("alter", topic="one", set={"retention.ms": "1"})[2]["done"]
    status, _, half = change("alter", topic="one", partitions=6, set={"retention.ms": "2"})
    assert status == 200 and not half["done"]
    assert "the settings are changed, the partitions are not" in half["error"]


# By gRPC.


PRODUCE = broker_pb2.ProduceRequest(topic="t", partition=0, payload=b"x" * 1000)


def test_a_produce_of_grpc_waits_while_its_user_is_over_the_rate(brief: Lone) -> None:
    size = len(build_batch([(1, None, b"x" * 1000, ())]))
    give(brief, {"user": "ada"}, producer_byte_rate=size / 1.5)
    started = time.monotonic()
    for offset in range(2):
        assert brief.run(call(brief.port, "Produce", PRODUCE, ADA)).offset == offset
    assert time.monotonic() - started > 0.45
    assert brief.node.parts.counters.throttled_seconds["produce"] > 0


def test_a_call_that_would_wait_longer_than_it_may_is_refused_at_once(secure: Lone) -> None:
    give(secure, {"user": "ada"}, producer_byte_rate=1)
    assert secure.run(call(secure.port, "Produce", PRODUCE, ADA)).offset == 0

    async def refused() -> Any:
        async with calling(secure.port, "Produce", PRODUCE, ADA) as under_way:
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await under_way
            return ended.value

    error = secure.run(refused())
    assert error.code() is EXHAUSTED and "producer_byte_rate" in error.details()
    pushback = dict(error.trailing_metadata())["grpc-retry-pushback-ms"]
    assert int(pushback) > 60_000
    throttled_s = secure.node.parts.counters.throttled_seconds["produce"]
    assert throttled_s == int(pushback) / 1000, "told once, and no pause before"
    assert secure.run(call(secure.port, "Produce", PRODUCE, BOB)).offset == 1


def test_a_stream_of_grpc_is_as_fast_as_the_quota(brief: Lone) -> None:
    for number in range(4):
        assert brief.run(call(brief.port, "Produce", PRODUCE, BOB)).offset == number
    size = len(build_batch([(1, None, b"x" * 1000, ())]))
    give(brief, {"user": "ada"}, consumer_byte_rate=size)
    consume = broker_pb2.ConsumeRequest(topic="t", partition=0)

    async def read() -> float:
        started = time.monotonic()
        async with calling(brief.port, "Consume", consume, ADA) as stream:
            assert [record.offset async for record in stream] == [0, 1, 2, 3]
        return time.monotonic() - started

    assert brief.run(read()) > 0.9, "two batches are over it"


def owed_s(lone: Lone, user: str, client_id: str) -> float:
    """How long a client's bucket of ``controller_mutation_rate`` is overdrawn, in seconds."""
    now_ms = monotonic_ms()
    bucket = lone.node.parts.client_quotas.view(f"User:{user}", client_id.encode(), now_ms)
    assert bucket.mutations is not None
    return bucket.mutations.delay_ms(now_ms) / 1000


def made_by_grpc(lone: Lone, name: str, login: str) -> Any:
    request = broker_pb2.CreateTopicRequest(topic=name)
    return lone.run(call(lone.port, "CreateTopic", request, login))


@pytest.mark.parametrize("user", ["ada", None])
def test_topics_made_by_grpc_are_refused_once_nothing_is_left_to_their_user(
    secure: Lone, user: str | None
) -> None:
    give(secure, {"user": user}, controller_mutation_rate=0.01)
    assert made_by_grpc(secure, "new-0", ADA).partitions == 3
    assert made_by_grpc(secure, "new-1", ADA) is EXHAUSTED
    assert 250 < owed_s(secure, "ada", GRPC_CLIENT_ID) <= 289, "(3 - 11 * 0.01) / 0.01"
    assert made_by_grpc(secure, "new-2", BOB).partitions == 3, "another user's bucket is full"
    if user is None:
        assert not owed_s(secure, "ANONYMOUS", GRPC_CLIENT_ID), "nobody pays for somebody else"


def test_topics_made_by_grpc_are_charged_once_where_its_client_id_pays(secure: Lone) -> None:
    give(secure, {"client-id": GRPC_CLIENT_ID}, controller_mutation_rate=0.01)
    assert made_by_grpc(secure, "new", ADA).partitions == 3
    assert 250 < owed_s(secure, "ada", GRPC_CLIENT_ID) <= 289, "three partitions, not six"


def test_grpc_asks_for_a_topic_in_the_name_of_whoever_calls(
    secure: Lone, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So one bucket counts, the controller's, whichever node is asked."""
    handlers = secure.node.parts.handlers
    asked: list[tuple[str, str, str | None, bool]] = []
    handle = handlers.handle

    def noted(ctx: RequestContext, body: memoryview, request: Any) -> Any:
        if ctx.api_key == ApiKey.CREATE_TOPICS:
            session = ctx.session
            asked.append((session.principal, session.host, ctx.client_id, session.is_node))
        return handle(ctx, body, request)

    monkeypatch.setattr(handlers, "handle", noted)
    assert made_by_grpc(secure, "new", ADA).partitions == 3
    assert asked == [("User:ada", "127.0.0.1", GRPC_CLIENT_ID, False)]


def test_a_call_whose_connection_is_closed_is_not_served() -> None:
    """It would be one without quotas."""
    given: Any = Given()
    broker = Broker(
        runtime=given,
        metadata=given,
        inflating=given,
        client=given,
        new_client=given,
        callers=Callers(given),
        usages=Given(of=None),
    )
    served: list[str] = []

    async def serve(*_: Any) -> None:
        served.append("served")

    with pytest.raises(NetworkException, match="the connection of this call is closed"):
        asyncio.run(broker._metered(serve)(None, Given(peer=lambda: "unix:/tmp/x/c-4711")))
    assert not served


# Topics that are made because a client named them.


def test_internal_topics_are_nobodys_and_auto_created_ones_their_clients(lone_node: Any) -> None:
    lone = lone_node(num_partitions="3", auto_create_topics_enable="true")
    give(lone, {"user": None}, controller_mutation_rate=0.01)
    parts = lone.node.parts
    lone.run(parts.topics.create_internal("__consumer_offsets"))
    assert len(parts.metadata.image.topics["__consumer_offsets"].partitions) > 10
    assert not owed_s(lone, "ANONYMOUS", "")

    def auto_created(name: str, user: str) -> int:
        session = Session(f"User:{user}", authorizer=ALLOW_ALL)
        ctx = RequestContext(ApiKey.METADATA, 12, "app", session)
        return int(lone.run(parts.topics.create_for_client(name, ctx)))

    later = error_codes.code_for(UnknownTopicOrPartition(""))  # the client asks again
    assert [auto_created(name, "ada") for name in ("a", "b")] == [0, later]
    assert 250 < owed_s(lone, "ada", "app") <= 289
    assert auto_created("c", "bob") == 0
    assert not owed_s(lone, "ANONYMOUS", "")


def test_quotas_hold_where_nobody_logs_in(lone_node: Any) -> None:
    lone = lone_node(kept_console_actions="true")
    lone.create("t")
    give(lone, {"user": "ANONYMOUS"}, producer_byte_rate=1)
    assert lone.run(call(lone.port, "Produce", PRODUCE)).offset == 0
    assert lone.run(call(lone.port, "Produce", PRODUCE)) is EXHAUSTED
    status, answer = lone.post("/api/v1/produce", topic="t", value="v")
    assert status == 429, (answer, "it is one user's quota by whatever protocol")


def test_views_of_invented_users_are_bounded_as_kafkas() -> None:
    """They are the same table's (test_client_quotas): what is used is found by principal."""
    quotas = ClientQuotas()
    quotas.replace({entity({CLIENT_ID: None}): {"producer_byte_rate": 1.0}})
    usages = ClientUsages(quotas, Counters(), HTTP_CLIENT_ID)
    for number in range(MAX_VIEWS + 100):
        usages.of(Session(f"User:{number}")).produced(1)
    assert len(quotas) <= MAX_VIEWS
