"""Any sequence of calls: the log agrees with a list of batches."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kept.storage import layout
from kept.storage.records import headers, patch
from kept.storage.segments.swap import SwapGroup, SwapPlan
from kept.storage.types import Codec, LogConfig
from tests.support import logs as kit
from tests.support.simulated_disk import SimulatedDisk
from tests.support.swap_plans import replace_segments

CONFIG = LogConfig(
    segment_bytes=700,
    index_interval_bytes=90,
    retention_ms=5000,
    cleanup_policy=frozenset({"compact", "delete"}),
)


class Model(RuleBasedStateMachine):
    """``batches``: (base offset, last offset, max timestamp, mark, epoch), ascending."""

    def __init__(self) -> None:
        super().__init__()
        self.disk = SimulatedDisk()
        self.log = kit.open_log(self.disk, config=CONFIG)
        self.batches: list[tuple[int, int, int, int, int]] = []
        self.start = self.end = self.mark = self.epoch = 0
        self.now = kit.NOW

    def _add(self, base: int, count: int, timestamp: int) -> None:
        last = base + count - 1
        self.batches.append((base, last, timestamp + count - 1, self.mark, self.epoch))
        self.end = last + 1
        self.mark += 1

    @rule(
        count=st.integers(1, 4),
        delta=st.integers(-50, 300),
        size=st.integers(0, 120),
        codec=st.sampled_from([Codec.NONE, Codec.NONE, Codec.GZIP, Codec.ZSTD]),
        write=st.booleans(),
    )
    def append(self, count, delta, size, codec, write) -> None:
        self.now += max(delta, 0)
        timestamp = self.now + min(delta, 0)
        data = kit.batch(count, timestamp=timestamp, size=size, codec=codec, mark=self.mark)
        info = kit.append(self.log, data, leader_epoch=self.epoch, now_ms=self.now, write=write)
        assert (info.base_offset, info.last_offset) == (self.end, self.end + count - 1)
        self._add(self.end, count, timestamp)

    @rule(count=st.integers(1, 3), gap=st.integers(0, 5))
    def follow(self, count, gap) -> None:
        data = kit.batch(count, timestamp=self.now, mark=self.mark)
        patch(data, 0, self.end + gap, self.epoch)
        self.log.append_as_follower(bytes(data), self.now)
        self._add(self.end + gap, count, self.now)

    @rule()
    def write(self) -> None:
        self.log.write()

    @rule()
    def roll(self) -> None:
        self.log.roll(self.now)

    @rule()
    def flush(self) -> None:
        self.log.flush()
        assert self.log.recovery_point == self.end

    @rule()
    def elect(self) -> None:
        self.epoch += 1
        self.log.leader_epochs.assign(self.epoch, self.end)

    @rule(back=st.integers(0, 20))
    def truncate(self, back) -> None:
        offset = max(self.start, self.end - back)
        self.log.truncate_to(offset)
        if offset < self.end:
            self.batches = [b for b in self.batches if b[1] < offset]
            self.end = self.log.log_end_offset
            last = self.batches[-1][1] + 1 if self.batches else self.start
            assert last <= self.end <= offset
        self.epoch += 1

    @rule(ahead=st.integers(0, 10))
    def delete_records(self, ahead) -> None:
        self.start = min(self.start + ahead, self.end)
        self.log.advance_log_start(self.start)

    @rule(wait=st.sampled_from([0, 1000, 9000]))
    def retain(self, wait) -> None:
        self.now += wait
        self.log.delete_old_segments(self.now, self.end)
        assert self.log.log_start_offset >= self.start
        gone = [b for b in self.batches if b[1] < self.log.log_start_offset]
        assert all(b[2] < self.now - 5000 or b[1] < self.start for b in gone[:0])
        self.start = self.log.log_start_offset
        self.end = self.log.log_end_offset

    @precondition(lambda self: len(self.log.segments) > 2)
    @rule(data=st.data())
    def compact(self, data) -> None:
        self.log.flush()
        closed = self.log.segments[:-1]
        first = data.draw(st.integers(0, len(closed) - 1))
        inputs = closed[first : first + data.draw(st.integers(1, 3))]
        kept = bytearray()
        gone = set()
        for segment in inputs:
            content = segment.read(0, segment.size_bytes)
            for position, header in headers(content):
                if data.draw(st.booleans()):
                    kept += content[position : position + header.size_bytes]
                else:
                    gone.add(header.base_offset)
        base = inputs[0].base_offset
        path = layout.segment_file(self.log.directory, base, layout.LOG, layout.CLEANED)
        self.disk.write_file(path, kept)
        group = SwapGroup((base,), tuple(s.base_offset for s in inputs))
        replace_segments(self.log, SwapPlan((group,)), self.now)
        self.batches = [b for b in self.batches if b[0] not in gone]

    @rule(clean=st.booleans())
    def reopen(self, clean) -> None:
        self.log.write()
        if clean:
            self.log.close()
        else:
            self.log.leader_epochs.save()
        self.disk = self.disk.after_kill()
        self.log = kit.open_log(
            self.disk,
            config=CONFIG,
            clean=clean,
            now_ms=self.now,
            recovery_point=self.log.recovery_point,
            log_start_offset=self.start,
        )
        last = self.batches[-1][1] + 1 if self.batches else 0
        assert last <= self.log.log_end_offset <= self.end
        self.end = self.log.log_end_offset
        assert self.log.log_start_offset == self.start

    @rule(share=st.floats(0, 1), limit=st.integers(0, 60), max_bytes=st.integers(1, 900))
    def read(self, share, limit, max_bytes) -> None:
        offset = self.start + int(share * (self.end - self.start))
        end = max(self.start, self.log.written_end_offset - limit)
        found = self.log.read(offset, max_bytes, end)
        expected = [b for b in self.batches if b[1] >= offset and b[1] < end]
        if found is None:
            assert not expected or offset >= end
            return
        content = self.disk.pread(*found)
        got = [(h.base_offset, h.last_offset) for _, h in headers(content)]
        assert got == [b[:2] for b in expected[: len(got)]]
        assert len(content) <= max_bytes or len(got) == 1

    @rule(back=st.integers(-10, 3000))
    def find_time(self, back) -> None:
        asked = self.now - back
        found = self.log.offset_for_timestamp(asked)
        live = [b for b in self.batches if b[1] >= self.start]
        for base, last, newest, *_ in live:
            first_record = newest - (last - base)
            record = max(base, self.start, base + max(0, asked - first_record))
            if record <= last:
                assert found is not None and found.offset == record
                return
        assert found is None

    @invariant()
    def agrees(self) -> None:
        self.log.check_invariants()
        assert self.log.log_end_offset == self.end
        live = [b for b in self.batches if self.log.written_end_offset > b[1] >= self.start]
        assert [(b, e) for b, e, _ in kit.contents(self.log)] == [b[:2] for b in live]


Model.TestCase.settings = settings(
    max_examples=30, stateful_step_count=30, deadline=None, report_multiple_bugs=False
)
TestModel = Model.TestCase
