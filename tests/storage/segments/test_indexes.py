"""Offset and time index: Kafka's bytes, look-ups against a model, what is refused at open."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kept.storage.errors import DamagedData
from kept.storage.segments import offset_index, time_index
from kept.storage.segments.offset_index import OffsetIndex
from kept.storage.segments.time_index import TimeIndex
from tests.support.simulated_disk import SimulatedDisk

ascending = st.lists(st.integers(1, 1000), max_size=40).map(
    lambda steps: [sum(steps[: i + 1]) for i in range(len(steps))]
)


def test_bytes() -> None:
    data = offset_index.encode_entries(array("i", [1, 300]), array("i", [70, 4200]))
    assert data.hex() == "00000001000000460000012c00001068"
    data = time_index.encode_entries(array("q", [1, 2**40]), array("i", [0, 300]))
    assert data.hex() == "00000000000000010000000000000100000000000000012c"


@given(ascending, st.integers(0, 3))
def test_offset_entries_come_back_without_the_preallocated_zeros(values, zeros) -> None:
    entries = array("i", values), array("i", [7 * v for v in values])
    data = offset_index.encode_entries(*entries) + bytes(8 * zeros)
    assert offset_index.decode_entries(data) == entries


@given(ascending, st.integers(0, 3))
def test_time_entries_come_back_without_the_preallocated_zeros(values, zeros) -> None:
    entries = array("q", [v * 256 for v in values]), array("i", [v * 65536 for v in values])
    data = time_index.encode_entries(*entries) + bytes(12 * zeros)
    assert time_index.decode_entries(data) == entries


@given(ascending, st.integers(0, 50_000))
def test_the_floor_is_the_last_entry_at_or_below(values, asked) -> None:
    index = OffsetIndex(SimulatedDisk(), "/x", 100, loaded=True)
    index.offsets, index.positions = array("i", values), array("i", [7 * v for v in values])
    below = [v for v in values if v + 100 <= asked]
    assert index.floor(asked) == (7 * below[-1] if below else 0)
    above = [v for v in values if v + 100 >= asked]
    assert index.ceiling_entry(asked) == ((100 + above[0], 7 * above[0]) if above else None)
    assert index.position_floor(asked) == max([7 * v for v in values if 7 * v <= asked], default=0)
    index.truncate(asked)
    assert list(index.positions) == [7 * v for v in values if 7 * v < asked]


@given(ascending, st.integers(0, 50_000))
def test_no_batch_before_the_time_floor_reaches_the_timestamp(values, asked) -> None:
    index = TimeIndex(SimulatedDisk(), "/x", 100, loaded=True)
    for value in values:
        index.append(value, 100 + value)
        index.append(value, 100 + value + 1)
    assert list(index.timestamps) == values, "only larger timestamps are added"
    below = [v for v in values if v < asked]
    assert index.floor_offset(asked) == 100 + (below[-1] if below else 0)


def offset_file(data: bytes) -> OffsetIndex:
    disk = SimulatedDisk()
    disk.write_file("/x", data)
    return OffsetIndex(disk, "/x", 0, loaded=False)


def time_file(data: bytes) -> TimeIndex:
    disk = SimulatedDisk()
    disk.write_file("/x", data)
    return TimeIndex(disk, "/x", 0, loaded=False)


def test_what_is_refused_at_open() -> None:
    good = offset_index.encode_entries(array("i", [1, 5]), array("i", [70, 4200]))
    offset_file(good).check(4201)
    offset_file(b"").check(0)
    for data, log_bytes in (
        (good, 4200),
        (good[:-1], 9999),
        (good + bytes(8), 9999),
        (b"\xff" * 8, 9999),
    ):
        with pytest.raises(DamagedData):
            offset_file(data).check(log_bytes)
    with pytest.raises(DamagedData):
        offset_file(good + good).load()
    with pytest.raises(FileNotFoundError):
        OffsetIndex(SimulatedDisk(), "/x", 0, loaded=False).load()
    times = time_index.encode_entries(array("q", [5, 9]), array("i", [1, 3]))
    assert time_file(times).check() == (9, 3)
    assert time_file(b"").check() == (-1, 0)
    for data in (times[:-1], times + bytes(12), b"\xff" * 12):
        with pytest.raises(DamagedData):
            time_file(data).check()
    with pytest.raises(DamagedData):
        time_file(times + times).load()
