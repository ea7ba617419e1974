"""From Arrow to the record kernel: slices, nulls and types. Needs pyarrow, not Spark."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from kept.pipeline.options import Connection, WriteOptions
from kept.storage.records import Packer, pack_batch, records
from kept.storage.types import Codec

pytestmark = [pytest.mark.slow, pytest.mark.spark]

OPTIONS = WriteOptions(Connection("h:1"), topic="t", include_timestamps=True)


def written(batch: Any) -> list[tuple[Any, ...]]:
    from kept.pipeline.writing import rows_of

    rows = rows_of(batch, OPTIONS, 0)
    packer = Packer(1, 1 << 20)
    assert packer.feed(rows, 0, 0) == rows.total
    data = pack_batch(
        packer.take()[0], codec=Codec.NONE, producer_id=1, producer_epoch=0, base_sequence=0
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
            "headers": pa.array(
                [None, [], [("h", b"x"), ("i", None)], [("j", b"")]], headers
            ),
            "timestamp": pa.array(
                [when + datetime.timedelta(microseconds=1500 * n) for n in range(4)],
                pa.timestamp("us", "UTC"),
            ),
        }
    )  # fmt: skip
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
