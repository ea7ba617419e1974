"""From Arrow to the record kernel: slices, nulls and types. Needs pyarrow, not Spark."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from kept.pipeline.connection import Connection
from kept.pipeline.options import WriteOptions
from kept.pipeline.write.task import TopicWriter
from kept.storage.records import BatchBuilder, build_area_batch, records
from kept.storage.types import Codec
from tests.support.fake_client import FakeClient

pytestmark = [pytest.mark.slow, pytest.mark.spark]

OPTIONS = WriteOptions(Connection("h:1"), topic="t", include_timestamps=True)


def written(batch: Any) -> list[tuple[Any, ...]]:
    from kept.pipeline.write.task import rows_of

    rows = rows_of(batch, OPTIONS, 0)
    builder = BatchBuilder(1, 1 << 20)
    assert builder.append(rows, 0, 0) == rows.total
    data = build_area_batch(
        builder.drain()[0], codec=Codec.NONE, producer_id=1, producer_epoch=0, base_sequence=0
    )
    return [tuple(r)[1:] for r in records(data)]


def test_slices_and_nulls() -> None:
    import pyarrow as pa

    when = datetime.datetime(2026, 11, 21, tzinfo=datetime.UTC)
    ms = int(when.timestamp() * 1000)
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    batch = pa.record_batch(
        {
            "key": pa.array(["a", None, "", "dé"]),
            "value": pa.array([b"1", b"2", None, b""], pa.binary()),
            "headers": pa.array([None, [], [("h", b"x"), ("i", None)], [("j", b"")]], headers),
            "timestamp": pa.array(
                [when + datetime.timedelta(microseconds=1500 * n) for n in range(4)],
                pa.timestamp("us", "UTC"),
            ),
        }
    )
    wanted = [
        (ms, b"a", b"1", ()),
        (ms + 1, None, b"2", ()),
        (ms + 3, b"", None, (("h", b"x"), ("i", None))),
        (ms + 4, "dé".encode(), b"", (("j", b""),)),
    ]
    assert written(batch) == wanted
    for start in range(4):
        for end in range(start + 1, 5):
            assert written(batch.slice(start, end - start)) == wanted[start:end]


@pytest.mark.parametrize(
    ("partitions", "most", "given", "size"),
    [
        (3, "1048588", 512 << 10, 512 << 10),
        (3, "2000", 512 << 10, 1939),
        (3, "10", 99, 1),
        (1024, "1048588", 512 << 10, 64 << 10),
        (100_000, "1048588", 512 << 10, 16 << 10),
        (3, None, 1000, 1000),
    ],
)
def test_a_batch_has_room_in_the_topic_and_in_the_worker(
    partitions: int, most: str | None, given: int, size: int
) -> None:
    from kept.pipeline.write.task import largest_batch

    client = FakeClient({"t": partitions}, settings=[("max.message.bytes", most)])
    options = WriteOptions(Connection("h:1"), topic="t", batch_bytes=given)
    assert largest_batch(client, options, "t") == size


def test_many_topics_are_not_all_held(monkeypatch: pytest.MonkeyPatch) -> None:
    import pyarrow as pa

    from kept.pipeline.write import task as write_task

    monkeypatch.setattr(write_task, "MANY_TOPICS", 2)
    client = FakeClient(dict.fromkeys("abcd", 1))
    writer = TopicWriter(client, WriteOptions(Connection("h:1")))
    for topics in (["a", "b"], ["a", "b", "c"], ["d"]):
        writer.write(pa.record_batch({"value": topics, "topic": topics}))
    assert client.sent == ["a", "b", "c", "d"]
    assert writer.finish() == 6 and client.sent == ["a", "b", "c", "d"]
