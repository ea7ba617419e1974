"""A lone partition against a model of twenty lines, through restarts, kills and power cuts."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kept.replication.partition import Partition
from kept.storage.errors import OffsetOutOfRange
from kept.storage.records import headers
from tests.support import partitions as tools
from tests.support.simulated_disk import SimulatedDisk

ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("produce"), st.integers(1, 5)),
        st.tuples(st.just("delete"), st.integers(0, 40)),
        st.tuples(st.just("elect"), st.integers(1, 3)),
        st.tuples(st.just("retain"), st.integers(0, 3000)),
        st.tuples(st.just("restart"), st.sampled_from(["clean", "kill"])),
    ),
    max_size=25,
)


@dataclass
class Model:
    """Batches as (base, next offset, leader epoch)."""

    epoch: int = 0
    start: int = 0
    batches: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def end(self) -> int:
        return self.batches[-1][1] if self.batches else 0

    def from_offset(self, offset: int) -> list[tuple[int, int, int]]:
        return [batch for batch in self.batches if batch[1] > offset]


def batches(data: bytes) -> list[tuple[int, int, int]]:
    return [
        (header.base_offset, header.next_offset, header.partition_leader_epoch)
        for _, header in headers(data)
    ]


def read_all(partition: Partition, offset: int) -> list[tuple[int, int, int]]:
    """Fetch from ``offset`` to the end, as a consumer does."""
    found: list[tuple[int, int, int]] = []
    while offset < partition.high_watermark:
        fetched = partition.fetch(offset, 150)
        if fetched.slice is None:
            break
        found += batches(partition.log.disk.pread(*fetched.slice))
        offset = found[-1][1]
    return found


def check(partition: Partition, model: Model) -> None:
    partition.check_invariants()
    assert partition.high_watermark == partition.log_end_offset == model.end
    assert partition.log_start_offset == model.start
    assert partition.list_offset(-1) == (-1, model.end, model.epoch)
    assert partition.list_offset(-2).offset == model.start
    for offset in {model.start, (model.start + model.end) // 2, model.end}:
        assert read_all(partition, offset) == model.from_offset(offset)
    for offset in (model.start - 1, model.end + 1):
        with pytest.raises(OffsetOutOfRange):
            partition.fetch(offset, 1000)
    sizes = [partition.readable_bytes(o) for o in range(model.start, model.end)]
    assert all(sizes)
    epochs = {epoch for base, _, epoch in model.batches if base >= model.start}
    for epoch in epochs:
        last = max(after for _, after, written in model.batches if written == epoch)
        end = model.end if epoch == model.epoch else last
        assert partition.end_offset_for_epoch(model.epoch, epoch) == (epoch, end)


@settings(max_examples=120, deadline=None)
@given(ACTIONS, st.integers(0, 2**31))
def test_a_lone_partition(actions, seed) -> None:
    disk = SimulatedDisk(seed=seed)
    disk.mkdir("/d")
    disk.fsync_dir("/")
    model = Model()
    partition = Partition(tools.open_log(disk), 0)
    tools.lead(partition, model.epoch)
    for action, value in actions:
        match action:
            case "produce":
                info = tools.produce(partition, value)
                model.batches.append((model.end, model.end + value, model.epoch))
                assert (info.base_offset, info.last_offset + 1) == model.batches[-1][:2]
            case "delete" if value <= model.end:
                model.start = max(model.start, value)
                assert partition.delete_records(value) == model.start
            case "elect":
                model.epoch += value
                tools.lead(partition, model.epoch)
            case "retain":
                partition.update_config(tools.config(retention_bytes=value))
                gone = partition.retention(tools.NOW)
                assert all(base <= model.end for base, _ in gone)
                assert model.start <= partition.log_start_offset <= model.end
                model.start = partition.log_start_offset
            case "restart":
                partition = restart(disk, partition, value)
                disk = partition.log.disk
                model.epoch += 1
                tools.lead(partition, model.epoch)
        check(partition, model)


def restart(disk: SimulatedDisk, partition: Partition, how: str) -> Partition:
    """The checkpoints of the directory are at hand: log start, recovery point, HW."""
    known = {
        "log_start_offset": partition.log_start_offset,
        "recovery_point": partition.log.recovery_point,
    }
    high_watermark = partition.high_watermark
    if how == "clean":
        partition.log.close()
        known["recovery_point"] = partition.log.recovery_point
    else:
        disk = disk.after_kill()
    log = tools.open_log(disk, clean=how == "clean", **known)
    return Partition(log, 0, high_watermark=high_watermark)
