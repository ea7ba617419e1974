"""Writes that are repeated and in the topic once: the tasks of a stream, without Spark."""

from __future__ import annotations

import importlib.util
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from kept.client.client import Client, OutRecord
from kept.client.consume.fetch import FetchLimits
from kept.client.partitioner import partition_for_key
from kept.pipeline.connection import BadOption, Connection
from kept.pipeline.options import WriteOptions, parse_write
from kept.pipeline.write import ledger
from kept.pipeline.write.ledger import NotTheSame
from kept.pipeline.write.task import TopicWriter
from kept.storage.records import headers
from kept.storage.types import Codec, TopicPartition
from kept.testing import Cluster
from tests.spark.topics import COMPACTED, compact, eventually
from tests.tools.needs import cannot_run

pytestmark = [pytest.mark.slow, pytest.mark.spark]

LEDGER = "kept-spark-ledger"
ROWS = [(None if n % 3 == 0 else f"k{n % 5}", f"value {n}") for n in range(100)]


class Dies(Exception):
    pass


class Attempt:
    """One attempt at a task: a client of its own, which dies after some sends."""

    def __init__(
        self, client: Client, topic: str, batch: int, task: int = 0, *, size: int, run: str
    ) -> None:
        ledger._seen.clear()  # as in a worker of its own
        self.client, self.topic = client, topic
        ledger.create(self.client, LEDGER)
        self.options = WriteOptions(
            Connection(client.bootstrap), topic, Codec.ZSTD, size, exactly_once=True
        )
        self.batch = ledger.Batch("app", batch, topic, run=run)
        self.begun = ledger.begin(self.client, LEDGER, self.batch, task, size)
        self.writer = TopicWriter(self.client, self.options, self.begun)

    def run(self, rows: list[Any], dies_after: int | None = None) -> int:
        import pyarrow as pa

        sends = 0
        real = self.client.append

        def append(topic: str, batches: Any) -> Any:
            nonlocal sends
            if sends == dies_after:
                raise Dies
            sends += 1
            return real(topic, batches)

        self.client.append = append
        for at in range(0, len(rows), 30):
            part = list(zip(*rows[at : at + 30], strict=True))
            arrays = [pa.array(column, pa.string()) for column in part]
            self.writer.write(pa.RecordBatch.from_arrays(arrays, names=["key", "value"]))
        self.writer.finish()
        return sends


@pytest.fixture
def attempt(kept_broker: Cluster) -> Iterator[Callable[..., Attempt]]:
    """Attempts at the tasks of one query that writes to a new topic."""
    if importlib.util.find_spec("pyarrow") is None:
        cannot_run("pyarrow", "it is not installed")
    topic, clients = kept_broker.create_topic(partitions=3), list[Client]()

    def begin(batch: int, task: int = 0, size: int = 100, run: str = "1") -> Attempt:
        client = kept_broker.client()
        clients.append(client)
        return Attempt(client, topic, batch, task, size=size, run=run)

    yield begin
    for client in clients:
        client.close()


def number(value: str) -> int:
    return int(value.split()[1])


def values(client: Client, topic: str) -> list[str]:
    return sorted((r.value.decode() for r in client.read(topic)), key=number)


def test_an_attempt_that_died_anywhere_is_taken_up(attempt: Callable[..., Attempt]) -> None:
    expected: list[str] = []
    for batch in itertools.count():
        one = attempt(batch)
        try:
            sends = one.run(ROWS, dies_after=batch)
            break
        except Dies:
            pass
        two = attempt(batch)
        assert two.begun.producer_id == one.begun.producer_id
        two.run(ROWS)
        expected += [v for _, v in ROWS]
        assert values(two.client, two.topic) == sorted(expected, key=number), batch
    assert sends >= 4, "it died in the middle"
    assert attempt(batch).run(ROWS) == 0, "the whole batch is there"


def test_an_attempt_goes_on_with_another_size_of_batches(attempt: Callable[..., Attempt]) -> None:
    """The option kafka.batch.size may change from run to run."""
    with pytest.raises(Dies):
        attempt(1).run(ROWS, dies_after=3)
    two = attempt(1, size=999)
    two.run(ROWS)
    assert values(two.client, two.topic) == [v for _, v in ROWS]


def test_one_that_lives_on_writes_nothing_twice(attempt: Callable[..., Attempt]) -> None:
    with pytest.raises(Dies):
        attempt(1).run(ROWS, 2)
    new = attempt(1)
    new.run(ROWS)
    late = attempt(1)
    late.begun.done.clear()  # it knows of nothing
    with pytest.raises(NotTheSame, match=r"OUT_OF_ORDER.* is ahead of this one"):
        late.run(ROWS)
    assert values(new.client, new.topic) == [v for _, v in ROWS]


def test_one_that_lives_on_and_writes_other_rows_first_is_told(
    attempt: Callable[..., Attempt],
) -> None:
    """The broker takes the later ones for a repetition, by their sequences, and acknowledges."""
    other = [(k, v[:-1] + "x") for k, v in ROWS]
    for rows in (ROWS, other):
        batch = 1 if rows is ROWS else 2
        zombie, new = attempt(batch, size=9999), attempt(batch, size=9999)
        assert new.begun.repeated and not new.begun.done
        zombie.run(rows)
        if rows is ROWS:
            new.run(ROWS)
            continue
        with pytest.raises(NotTheSame, match="not those that its first attempt wrote"):
            new.run(ROWS)


@pytest.mark.parametrize("same", [True, False])
def test_the_first_is_told_when_a_later_one_has_written_other_rows(
    attempt: Callable[..., Attempt], same: bool
) -> None:
    """Two drivers that give two writes one name: neither may believe that its rows are there."""
    first, later = attempt(1, size=9999), attempt(1, size=9999)
    later.run([(k, v[:-1] + "x") for k, v in ROWS] if not same else ROWS)
    if same:
        first.run(ROWS)
        return
    with pytest.raises(NotTheSame, match="not those that its first attempt wrote"):
        first.run(ROWS)


def test_a_topic_that_grows_between_two_attempts(
    attempt: Callable[..., Attempt], kept_broker: Cluster
) -> None:
    """The rows of the first one must not go to other partitions by the second one."""
    one = attempt(0)
    with pytest.raises(Dies):
        one.run(ROWS, dies_after=3)
    grow(one.client, one.topic, 7)
    attempt(0).run(ROWS)
    expected = [v for _, v in ROWS]
    assert values(one.client, one.topic) == sorted(expected, key=number)
    three = attempt(1)
    three.run(ROWS)
    keyed = [r for r in three.client.read(three.topic) if r.key and r.partition > 2]
    assert keyed == [r for r in keyed if r.partition == partition_for_key(r.key, 7)] != []


def test_a_worker_notices_that_a_topic_has_grown(kept_broker: Cluster) -> None:
    """Or a key is in two partitions, as soon as another worker writes it."""
    import pyarrow as pa

    topic, options = kept_broker.create_topic(), WriteOptions(Connection(kept_broker.bootstrap))
    keys = [b"k%d" % n for n in range(50)]
    columns = {"key": keys, "value": keys, "topic": [topic] * len(keys)}
    rows = pa.RecordBatch.from_pydict(columns)
    with kept_broker.client() as client, kept_broker.client() as worker:
        for count in (1, 4):
            grow(client, topic, count)
            writer = TopicWriter(worker, options)
            writer.write(rows)
            writer.finish()
        late = [r for r in client.read(topic) if r.partition or r.offset >= len(keys)]
    assert len(late) == len(keys)
    assert all(r.partition == partition_for_key(r.key, 4) for r in late)


def grow(client: Client, topic: str, count: int) -> None:
    if len(client.metadata([topic]).topics[topic].partitions) < count:
        client.create_partitions(topic, count)
    eventually(lambda: len(client.metadata([topic]).topics[topic].partitions) == count)


def test_what_cannot_be_repeated_is_refused(attempt: Callable[..., Attempt]) -> None:
    one = attempt(5)
    one.run(ROWS)
    other = [*ROWS[:50], ("k1", "another"), *ROWS[51:]]
    told = []
    for rows in (other, ROWS[1:], [(k, v[::-1]) for k, v in ROWS]):
        with pytest.raises(NotTheSame) as raised:
            attempt(5).run(rows)
        told.append(str(raised.value))
    assert told == [
        f"partition 2: rows 17 to 22 {ledger._WHY}",
        f"partition 1: rows 0 to 5 {ledger._WHY}",
        f"partition 0: rows 0 to 1 {ledger._WHY}",
    ]
    with pytest.raises(NotTheSame) as raised:
        attempt(4)
    assert str(raised.value) == (
        f"{LEDGER}: app has written batch 5 of task 0 to {one.topic} already, this is batch 4: it "
        "was set back to an older checkpoint, or its txnVersion is too low"
    )
    assert values(one.client, one.topic) == [v for _, v in ROWS]
    one.client.produce(one.topic, [OutRecord(b"k", b"value 100")])
    attempt(6).run([("k", "value 101")])
    assert values(one.client, one.topic)[-2:] == ["value 100", "value 101"]


@pytest.mark.parametrize("left", [0, 1, 40, 99])
def test_a_repetition_with_fewer_rows_than_were_written_is_refused(
    attempt: Callable[..., Attempt], left: int
) -> None:
    """Also where what it has is the same, so that it has nothing to send."""
    one, rows = attempt(1, size=9999), [("k", v) for _, v in ROWS]
    one.run(rows)
    where = partition_for_key(b"k", 3)
    why = f"partition {where}: 100 rows were written and the repetition has {left}: rows {left} to"
    with pytest.raises(NotTheSame, match=why if not left else "rows .* not those that its first"):
        attempt(1, size=9999).run(rows[:left])
    assert values(one.client, one.topic) == [v for _, v in ROWS]


def test_a_repetition_with_fewer_whole_batches_is_refused(attempt: Callable[..., Attempt]) -> None:
    one, rows = attempt(1, size=1), [("k", v) for _, v in ROWS]  # a row is a batch
    one.run(rows)
    where = partition_for_key(b"k", 3)
    why = f"partition {where}: 100 rows were written and the repetition has 60: rows 60 to 99 of"
    with pytest.raises(NotTheSame, match=why):
        attempt(1, size=1).run(rows[:60])
    assert attempt(1, size=1).run(rows) == 0, "the same rows are still taken for those"


def test_an_empty_task_learns_that_another_attempt_had_rows(
    attempt: Callable[..., Attempt],
) -> None:
    first, later = attempt(1), attempt(1)
    later.run(ROWS)
    with pytest.raises(NotTheSame, match="rows were written and the repetition has 0"):
        first.run([])
    attempt(2).run([])
    attempt(2).run([])  # nothing was written, nothing is there


def test_rows_that_the_target_has_compacted_away_are_not_written_again(
    attempt: Callable[..., Attempt], kept_broker: Cluster
) -> None:
    rows = [(f"k{n % 5}", f"value {n}") for n in range(100)]
    one = attempt(1)
    one.client.alter_topic(one.topic, COMPACTED)
    with pytest.raises(Dies):
        one.run(rows, dies_after=3)
    newer = [OutRecord(b"k%d" % n, b"newer" + b"x" * 900) for n in range(5)]
    for _ in range(4):
        one.client.produce(one.topic, newer)
    compact(kept_broker, one.topic)
    left = [r for r in one.client.read(one.topic) if r.value.startswith(b"value")]
    two = attempt(1)
    done = sum(two.begun.done.values())
    assert len(left) < done < 100, "some of what was written is gone"
    two.run(rows)
    again = [r for r in two.client.read(one.topic) if r.value.startswith(b"value")]
    assert len(again) == len(left) + 100 - done


def test_tombstones_that_the_cleaner_has_dated_are_the_same_rows(
    attempt: Callable[..., Attempt], kept_broker: Cluster
) -> None:
    """A delete horizon makes the batch anew, though all of its records are left."""
    rows = [(f"k{n}", None) for n in range(100)]
    one = attempt(1)
    one.client.alter_topic(one.topic, COMPACTED)
    with pytest.raises(Dies):
        one.run(rows, dies_after=3)
    for _ in range(4):
        one.client.produce(one.topic, [OutRecord(b"x", b"x" * 900, (), None, p) for p in range(3)])
    compact(kept_broker, one.topic)
    dated = [
        one.client.fetch_partition(TopicPartition(one.topic, p), 0, FetchLimits(), 5000)
        for p in range(3)
    ]
    assert any(h.has_delete_horizon for got in dated for _, h in headers(got.records))
    attempt(1).run(rows)
    assert sum(r.value is None for r in one.client.read(one.topic)) == 100
    with pytest.raises(NotTheSame, match="not those that its first attempt wrote"):
        attempt(1).run([(k, "value 1") for k, _ in rows])


def test_rows_in_another_order_are_told_where_the_topic_compresses_by_itself(
    attempt: Callable[..., Attempt],
) -> None:
    one = attempt(1)
    one.client.alter_topic(one.topic, {"compression.type": "gzip"})
    with pytest.raises(Dies):
        one.run(ROWS, dies_after=3)
    other = [ROWS[0], (ROWS[1][0], ROWS[2][1]), (ROWS[2][0], ROWS[1][1]), *ROWS[3:]]
    with pytest.raises(NotTheSame, match="not those that its first attempt wrote"):
        attempt(1).run(other)
    attempt(1).run(ROWS)
    assert values(one.client, one.topic) == [v for _, v in ROWS]


def test_a_ledger_that_forgets_is_refused(attempt: Callable[..., Attempt]) -> None:
    one = attempt(1)
    for policy in ("delete", "compact,delete"):
        one.client.alter_topic(one.topic, {"cleanup.policy": policy})
        with pytest.raises(BadOption, match=f"cleanup.policy is {policy}: it must be compact"):
            ledger.create(one.client, one.topic)


def test_a_ledger_that_grows_is_the_same_ledger(attempt: Callable[..., Attempt]) -> None:
    tasks = range(6)
    before = [attempt(1, task).begun.producer_id for task in tasks]
    client = attempt(1).client
    grow(client, LEDGER, ledger.PARTITIONS + 3)
    assert [attempt(1, task).begun.producer_id for task in tasks] == before


def test_a_ledger_that_was_deleted_is_not_remembered(kept_broker: Cluster) -> None:
    """A worker that lives on would take new rows that are like the last ones for those."""
    import pyarrow as pa

    topic, name = kept_broker.create_topic(), kept_broker.topic("ledger")
    options = WriteOptions(Connection(kept_broker.bootstrap), topic, exactly_once=True)
    rows = pa.RecordBatch.from_arrays([pa.array(["still", "alive"])], names=["value"])
    with kept_broker.client() as client, kept_broker.client() as worker:
        for number in range(3):
            if number == 2:
                client.delete_topics([name])
            ledger.create(client, name)
            begun = ledger.begin(worker, name, ledger.Batch("app", number, topic), 0, 9999)
            writer = TopicWriter(worker, options, begun)
            writer.write(rows)
            writer.finish()
        assert [r.value for r in client.read(topic)] == [b"still", b"alive"] * 3


def test_an_attempt_with_more_tasks_than_its_repetition_is_told(
    attempt: Callable[..., Attempt],
) -> None:
    for task in range(3):
        attempt(7, task).run(ROWS)
    one = attempt(7)
    assert one.begun.repeated
    ledger.end(one.client, LEDGER, one.batch, 3)
    with pytest.raises(NotTheSame, match="was begun with 3 tasks or more and repeated with 2"):
        ledger.end(one.client, LEDGER, one.batch, 2)
    assert not attempt(8).begun.repeated


def test_tasks_that_only_another_run_had_are_told(attempt: Callable[..., Attempt]) -> None:
    """Of all tasks the killed run had begun the last one only, as where that found its data."""
    attempt(1, run="1").run(ROWS)
    attempt(2, task=5, run="1").run(ROWS)
    one = attempt(2, run="2")
    assert one.begun.first_of_run and not one.begun.repeated
    with pytest.raises(NotTheSame, match="was begun with 6 tasks or more and repeated with 1"):
        ledger.end(one.client, LEDGER, one.batch, 1)
    assert not attempt(3, run="2").begun.first_of_run, "which saves looking"


def test_a_write_that_has_ended_is_not_begun_again(attempt: Callable[..., Attempt]) -> None:
    one = attempt(0)
    one.run(ROWS)
    ledger.forget(one.client, LEDGER, one.batch, 1)
    with pytest.raises(NotTheSame, match="has ended already"):
        attempt(0)


def test_of_two_that_begin_at_once_the_first_counts_also_after_a_compaction(
    attempt: Callable[..., Attempt], kept_broker: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, earlier = ledger._announce, list[Attempt]()

    def announce(*where: Any) -> int:
        monkeypatch.setattr(ledger, "_announce", real)
        earlier.append(attempt(3))
        return real(*where)

    monkeypatch.setattr(ledger, "_announce", announce)
    second = attempt(3)
    (first,) = earlier
    assert second.begun.producer_id == first.begun.producer_id and second.begun.repeated
    first.client.alter_topic(LEDGER, {"segment.bytes": "1024", "min.cleanable.dirty.ratio": "0.01"})
    for n in range(40):  # closes the segments of all entries
        attempt(n, task=n + 1)
    compact(kept_broker, LEDGER)
    assert attempt(3).begun.producer_id == first.begun.producer_id


def test_options() -> None:
    where = {"bootstrap": "h:1", "topic": "t"}
    given = parse_write({**where, "exactlyOnce": "true", "ledgerTopic": "l"}, streaming=True)
    assert (given.exactly_once, given.ledger) == (True, "l")
    for wrong, why in (
        ({"bootstrap": "h:1", "exactlyOnce": "true"}, "needs the option topic"),
        ({**where, "exactlyOnce": "true", "ledgerTopic": "t"}, "the topic that is written to"),
    ):
        with pytest.raises(BadOption, match=why):
            parse_write(wrong, streaming=True)
        with pytest.raises(BadOption, match=why):
            parse_write(wrong)
    once = {**where, "exactlyOnce": "true"}
    batch = parse_write({**once, "txnAppId": "nightly", "txnVersion": "7"})
    assert (batch.exactly_once, batch.app_id, batch.version) == (True, "nightly", 7)
    assert parse_write(once).app_id is None
    for given_too, why in (
        ({**once, "txnAppId": "a"}, "give both"),
        ({**once, "txnAppId": "a", "txnVersion": "-1"}, "txnVersion is '-1'; it must be a whole"),
        ({**where, "txnAppId": "a", "txnVersion": "1"}, "are for exactlyOnce=true"),
    ):
        with pytest.raises(BadOption, match=why):
            parse_write(given_too)
    with pytest.raises(BadOption, match="an option of a batch write, not of a streaming write"):
        parse_write({**once, "txnAppId": "a", "txnVersion": "1"}, streaming=True)
