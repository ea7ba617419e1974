"""What a worker does: it keeps its clients from task to task, and reads on until it caught up."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from kept.client.client import OutRecord
from kept.client.consume.range_reader import OffsetsLost
from kept.pipeline.connection import Connection
from kept.pipeline.options import parse_read
from kept.pipeline.read import task as read_task
from kept.pipeline.read.plan import Range
from kept.storage.types import IsolationLevel, TopicPartition
from kept.testing import Cluster
from tests.spark.topics import COMPACTED, compact, delete_before, fill


@pytest.fixture(autouse=True)
def clients() -> Iterator[None]:
    """None before, and none left open."""
    assert not read_task._clients
    yield
    for client in read_task._clients.values():
        client.close()
    read_task._clients.clear()


def test_a_worker_loads_no_tools_for_tests() -> None:
    """kio takes in hypothesis where it is installed, as it is here. Others can import it still."""
    code = (
        "import kept.pipeline.read.task, sys; print('hypothesis' in sys.modules)\nimport hypothesis"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_a_worker_stays_connected(kept_broker: Cluster) -> None:
    topic = kept_broker.create_topic()
    one = read_task.client_for(Connection(kept_broker.bootstrap))
    one.bounds(topic)
    sockets = dict(one._sockets._sockets)
    assert sockets
    again = read_task.client_for(Connection(kept_broker.bootstrap))
    again.bounds(topic)
    assert again is one and dict(one._sockets._sockets) == sockets


def test_it_stays_connected_to_a_few_clusters() -> None:
    made = [read_task.client_for(Connection(f"h{n}:1")) for n in range(read_task.MAX_CLIENTS + 1)]
    assert len({id(client) for client in made}) == len(made)
    assert list(read_task._clients.values()) == made[1:]
    other = read_task.client_for(Connection("h1:1", client_id="another"))
    assert other not in made


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize("isolation", IsolationLevel)
def test_no_key_is_missed_when_the_log_is_compacted_meanwhile(
    kept_broker: Cluster, isolation: IsolationLevel
) -> None:
    import pyarrow as pa

    topic = kept_broker.create_topic(config=COMPACTED)
    keys = [b"k%02d" % n for n in range(50)]
    options = parse_read(
        {
            "bootstrap": kept_broker.bootstrap,
            "subscribe": topic,
            "untilCaughtUp": "true",
            "kafka.max.partition.fetch.bytes": "500",
            "kafka.isolation.level": isolation.name,
        },
        streaming=False,
    )
    with kept_broker.client() as client:

        def write(value: bytes) -> None:
            for key in keys:
                client.produce(topic, [OutRecord(key, value * 50)])

        write(b"old")
        schema = pa.schema([("key", pa.binary()), ("value", pa.binary())])
        planned = Range(topic, 0, 0, client.bounds(topic)[0][1])
        for on in (True, False):
            found: dict[bytes, bytes] = {}
            batches = read_task.read_range(planned, options, schema, until_caught_up=on)
            for number, batch in enumerate(batches):
                found |= zip(*batch.to_pydict().values(), strict=True)
                if number == 0 and on:
                    write(b"new")
                    write(b"last")
                    compact(kept_broker, topic)
            assert len(found) == len(keys) if on else len(found) < len(keys)
            assert not on or found[keys[-1]].startswith(b"last")


@pytest.mark.slow
@pytest.mark.spark
@pytest.mark.parametrize("cut", [50, 100])
@pytest.mark.parametrize("fails", ["true", "false"])
def test_what_is_deleted_while_a_task_reads_is_lost_and_named(
    kept_broker: Cluster, fails: str, cut: int
) -> None:
    import pyarrow as pa

    topic = kept_broker.create_topic()
    tp = TopicPartition(topic, 0)
    options = parse_read(
        {
            "bootstrap": kept_broker.bootstrap,
            "subscribe": topic,
            "failOnDataLoss": fails,
            "kafka.max.partition.fetch.bytes": "400",
        },
        streaming=False,
    )
    found: list[int] = []
    with kept_broker.client() as client:
        for n in range(100):
            fill(client, topic, [n])
        batches = read_task.read_range(
            Range(topic, 0, 0, 100), options, pa.schema([("offset", pa.int64())])
        )
        found += next(batches).column(0).to_pylist()
        delete_before(client, tp, cut)
        if fails == "true":
            with pytest.raises(
                OffsetsLost, match=rf"{tp.place}: offsets \d+ to {cut - 1} are lost"
            ):
                list(batches)
            return
        for batch in batches:
            found += batch.column(0).to_pylist()
    assert found[-1] < cut if cut == 100 else found[-50:] == list(range(50, 100))
    assert found == sorted(set(found))
