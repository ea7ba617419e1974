"""The strategy keeps the laws of kept's test kit, and does what it says."""

from first_and_latest import FirstAndLatest

from kept.storage.records import Record
from kept.testing.strategies import check_strategy, clean


def test_it_keeps_the_laws():
    check_strategy(FirstAndLatest())


def test_it_keeps_the_first_and_the_latest():
    values = [b"created", b"changed", b"changed again"]
    log = [Record(offset, 0, b"user", value, ()) for offset, value in enumerate(values)]
    assert [record.offset for record in clean(FirstAndLatest(), log)] == [0, 2]
    gone = Record(3, 0, b"user", None, ())
    back = Record(4, 0, b"user", b"created again", ())
    assert [record.offset for record in clean(FirstAndLatest(), [*log, gone, back])] == [3, 4]
