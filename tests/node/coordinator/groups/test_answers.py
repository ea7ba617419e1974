"""All group APIs in all versions over the wire: kept answers what Apache Kafka 4.3 answers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from kept.testing import Cluster
from kept.testing.ports import free_port
from tests.node.coordinator.groups.scenario import Scenario
from tests.support.kafka_connection import FIND, JOIN, SYNC, Connection

ANSWERS = Path(__file__).parent / "data" / "kafka-4.3.0-answers.json"


@pytest.fixture
def connect(kept_broker: Cluster) -> Iterator[Callable[[], Connection]]:
    """Makes connections and closes them."""
    opened: list[Connection] = []

    def new() -> Connection:
        opened.append(Connection(kept_broker.bootstrap))
        return opened[-1]

    yield new
    for connection in opened:
        connection.close()


@pytest.fixture
def scenario(kept_broker: Cluster) -> Iterator[Scenario]:
    """For its ways to ask; ``__consumer_offsets`` is there."""
    found = Scenario(kept_broker.bootstrap)
    try:
        assert found.ask(FIND, 2, key="any", key_type=0).error_code is ErrorCode.none
        yield found
    finally:
        found.connection.close()


def answers(bootstrap: str) -> list[tuple[str, Any]]:
    return list(Scenario(bootstrap).run())


def compare(found: list[tuple[str, Any]]) -> None:
    expected = json.loads(ANSWERS.read_text())
    assert [what for what, _ in found] == [what for what, _ in expected]
    for (what, answer), (_, kafkas) in zip(found, expected, strict=True):
        assert answer == kafkas, what


def test_kept_answers_as_apache_kafka_does() -> None:
    with Cluster() as cluster:
        compare(answers(cluster.bootstrap))


@pytest.mark.java
@pytest.mark.slow
def test_the_recorded_answers_are_apache_kafkas(tmp_path: Path) -> None:
    from tests.tools import kafka_dist

    with kafka_dist.Broker(tmp_path, free_port(above=[1])) as broker:
        compare(answers(broker.bootstrap))


@pytest.mark.parametrize(
    ("key_type", "code"),
    [
        (2, ErrorCode.invalid_request),
        (7, ErrorCode.invalid_request),
    ],
)
def test_other_coordinators_are_refused_with_a_message(
    connect: Callable[[], Connection], key_type: int, code: ErrorCode
) -> None:
    """Their clients must give up, with our message, and not ask again."""
    connection = connect()
    for version in (1, 3):
        one = connection.ask(FIND, version, key="t", key_type=key_type)
        assert one.error_code is code and one.error_message != "NONE"
    many = connection.ask(FIND, 6, coordinator_keys=["t", "u"], key_type=key_type).coordinators
    assert [c.key for c in many] == ["t", "u"]
    assert all(c.error_code is code and c.error_message for c in many)


def test_requests_repeated_on_one_connection_do_not_block_it(
    scenario: Scenario, connect: Callable[[], Connection]
) -> None:
    """Kafka never answers the first of them, but has one request per connection under way."""
    first = scenario.stable("repeat")
    impatient = connect()
    second = impatient.ask(JOIN, 9, **scenario.joining("repeat")).member_id
    for _ in range(3):
        impatient.send(JOIN, 9, **scenario.joining("repeat", second))
    again = ErrorCode.rebalance_in_progress
    assert [impatient.receive().error_code for _ in range(2)] == [again, again]
    assert scenario.join(9, "repeat", first).generation_id == 2
    assert impatient.receive().error_code is ErrorCode.none
    for _ in range(3):
        impatient.send(SYNC, 5, **scenario.syncing("repeat", second, 2))
    assert [impatient.receive().error_code for _ in range(2)] == [again, again]
    parts = [{"member_id": m, "assignment": b"part"} for m in (first, second)]
    assert scenario.sync(5, "repeat", first, 2, assignments=parts).error_code is ErrorCode.none
    assert impatient.receive().assignment == b"part"


def test_a_new_member_whose_connection_goes_while_it_joins_is_out(
    kept_broker: Cluster, scenario: Scenario, connect: Callable[[], Connection]
) -> None:
    """Apache Kafka keeps its place, which is nobody's, until its time is over."""

    def members() -> int:
        return len(scenario.describe("gone").groups[0].members)

    first = scenario.stable("gone", rebalance_timeout=4_000)
    leaver = connect()
    leaver.send(JOIN, 3, **scenario.joining("gone", rebalance_timeout=4_000))
    kept_broker.wait_until(lambda: members() == 2, "it joins")
    leaver.close()
    kept_broker.wait_until(lambda: members() == 1, "it is out")
    joined = scenario.join(9, "gone", first, rebalance_timeout=4_000)
    assert (joined.generation_id, [m.member_id for m in joined.members]) == (2, [first])
