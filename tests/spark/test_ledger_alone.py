"""What the ledger makes of what an earlier attempt left, without a cluster."""

from __future__ import annotations

import pytest

from kept.pipeline.connection import BadOption
from kept.pipeline.write import ledger
from kept.pipeline.write.ledger import Begun, EarlierBatch, NotTheSame
from kept.storage.records import build_batch, read_header
from kept.storage.types import Codec, IsolationLevel, TopicPartition
from tests.support.fake_client import FakeClient

TP = TopicPartition("t", 2)


def batch(value: bytes, codec: Codec = Codec.NONE) -> bytes:
    return build_batch(
        [(1, b"k", value, ())], producer_id=7, producer_epoch=0, base_sequence=0, codec=codec
    )


def begun(there: bytes, **more) -> Begun:
    """A task of which one batch was written."""
    written = {(2, 0): EarlierBatch(0, 0, read_header(there).crc, 0)}
    return Begun(
        7, 0, 1, 3, 99, repeated=True, written=written, done={2: 1}, fetch=lambda *_: there, **more
    )


def test_other_rows_are_told_though_the_broker_made_the_batch_anew():
    assert begun(batch(b"a")).leaves_out(2, 0, 1, batch(b"a"))
    # Of a topic with a compression.type of its own: the same rows have another CRC there.
    assert begun(batch(b"a" * 99, Codec.GZIP)).leaves_out(2, 0, 1, batch(b"a" * 99))
    for there in (batch(b"a"), batch(b"a", Codec.GZIP)):
        for compacted in (False, True):
            with pytest.raises(NotTheSame, match="rows 0 to 0"):
                begun(there, compacted=compacted).leaves_out(2, 0, 1, batch(b"b"))


def test_what_retention_took_since_may_have_been_written():
    """To take it for unwritten would write it twice."""
    client = FakeClient(start=5, end=9)
    with pytest.raises(NotTheSame, match=r"t:2: the log starts at 5, .* from 3 on"):
        ledger._find(client, TP, 3, begun(batch(b"a")))


def test_a_log_start_that_moves_while_a_task_ends_is_no_reason_to_refuse_it(monkeypatch):
    """What the task has sent was acknowledged; what is still there is compared."""

    class Moving(FakeClient):
        def list_offsets(self, asked, isolation=IsolationLevel.READ_UNCOMMITTED):
            found = super().list_offsets(asked, isolation)
            self.start = min(self.start + 2, self.end)  # retention
            return found

    class Reader:
        def __init__(self, client, tp, start, end, limits, *, timeout_ms):
            looked.append((tp.partition, start, end))

        def chunks(self):
            return ()

    looked = []
    monkeypatch.setattr(ledger, "RangeReader", Reader)
    one = Begun(7, 0, 1, 3, 99, repeated=True, ends={0: 3, 2: 8})
    ledger.confirm(Moving(start=4, end=9), "t", one, {}, {})
    assert looked == [(0, 4, 9), (2, 8, 9)]
    with pytest.raises(NotTheSame, match="the log starts at 9"):
        ledger._find(FakeClient(start=9, end=9), TP, 3, one)


def test_a_ledger_that_has_records_of_others_is_refused():
    for value in (b"hello", b"[]", b'{"batch": 1}', b"\xff"):
        with pytest.raises(BadOption, match="ledgerTopic is users, which has records that are no"):
            ledger._read("users", value)
