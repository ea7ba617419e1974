"""What the tests of compaction share: a log on a simulated disk that is written, cleaned and
read.
"""

from __future__ import annotations

import random
import struct
import uuid
from dataclasses import replace

import pytest

from kept.compaction.cleaner import job_builder, log_snapshot, planner
from kept.compaction.cleaner.cleaner_run import discard, run_pass
from kept.compaction.kernels import kernel
from kept.compaction.manifest import apply as applying
from kept.storage.directory import Checkpoint
from kept.storage.log.log import Log
from kept.storage.records import CheckRules, build_batch, check, headers, records
from kept.storage.records import filter as records_filter
from kept.storage.types import MAX_INT64, Codec, LogConfig, TimestampType, TopicPartition
from tests.reference import offset_map, rule_map, segment_filter
from tests.support.installing import install, log_directory
from tests.support.simulated_disk import SimulatedDisk
from tests.tools.needs import need

try:
    from kept.compaction.kernels import _kernel, _strategies
    from kept.storage.records import _filter
except ImportError:  # no compiler at install time: the twins are all there is
    _kernel = _strategies = _filter = None

NOW = 1_700_000_000_000
TP = TopicPartition("t", 0)
TOPIC_ID = uuid.UUID(int=7)
DIRECTORY = "/t-0"
COMPACT = frozenset({"compact"})


@pytest.fixture(params=["cython", "python"])
def each_kernel(request, monkeypatch):
    """Runs the test over both kernels."""
    if request.param == "cython":
        need("kernels")
        maps, filters = _kernel, _filter.SegmentFilter
    else:
        maps, filters = offset_map, segment_filter.SegmentFilter
    use_kernel(monkeypatch, maps, filters)
    use_strategies(monkeypatch, _strategies if request.param == "cython" else rule_map)
    return request.param


def use_strategies(monkeypatch, module):
    for name in ("RecordScan", "RuleMap", "RuleScan", "class_of"):
        monkeypatch.setattr(kernel, name, getattr(module, name))


def use_kernel(monkeypatch, maps, filters):
    monkeypatch.setattr(kernel, "OffsetMap", maps.OffsetMap)
    monkeypatch.setattr(kernel, "SegmentScan", maps.SegmentScan)
    monkeypatch.setattr(records_filter, "SegmentFilter", filters)


def config(**changes):
    return LogConfig(**{"cleanup_policy": COMPACT, "segment_bytes": 1 << 30, **changes})


class World:
    """One log and its cleaner. ``now`` is the clock."""

    def __init__(self, disk=None, **changes):
        self.disk = disk or SimulatedDisk()
        self.now = NOW
        self.config = config(**changes)
        self.seed = random.Random(1)
        self.open()

    def open(self):
        self.disk.now_ms = self.now
        state = applying.load_state(DIRECTORY, self.disk)
        self.log = Log.open(
            DIRECTORY,
            TP,
            TOPIC_ID,
            self.config,
            self.disk,
            now_ms=self.now,
            recovery_point=self.checkpointed(Checkpoint.RECOVERY_POINTS),
            unfinished_swap=state.unfinished,
            compacted_to=state.end_offset if state.applied else None,
        )
        self.state = applying.complete_swap(DIRECTORY, self.disk, state)
        return self

    def checkpointed(self, kind):
        """What a checkpoint on disk says of the log; None: nothing."""
        return log_directory(DIRECTORY, self.disk).checkpoints[kind].get(TP)

    def append(self, *rows, codec=Codec.NONE, pid=-1, epoch=0, sequence=-1, transactional=False):
        """One batch of (key, value) or (key, value, timestamp[, headers]); returns its base."""
        full = [
            (row[2] if len(row) > 2 else self.now, row[0], row[1], row[3] if len(row) > 3 else ())
            for row in rows
        ]
        data = build_batch(
            full,
            codec=codec,
            producer_id=pid,
            producer_epoch=epoch if pid >= 0 else -1,
            base_sequence=sequence,
            is_transactional=transactional,
            leader_epoch=0,
            base_offset=self.log.log_end_offset if transactional else 0,
        )
        if transactional:
            self.log.append_as_follower(data, self.now)
            self.log.write()
            return self.log.log_end_offset - len(full)
        rules = CheckRules(
            timestamp_type=self.config.message_timestamp_type, timestamp_after_max_ms=MAX_INT64
        )
        checked = check(bytearray(data), rules, self.now)
        if checked.size_bytes > self.config.segment_bytes:  # as if segment.bytes was lowered since
            self.roll()
            self.log.update_config(replace(self.config, segment_bytes=1 << 30))
        info = self.log.append(checked, 0, self.now)
        self.log.write()
        self.log.update_config(self.config)
        return info.base_offset

    def marker(self, pid, *, commit, epoch=0):
        """End a transaction."""
        value = struct.pack(">hi", 0, 0)
        data = build_batch(
            [(self.now, struct.pack(">hh", 0, int(commit)), value, ())],
            producer_id=pid,
            producer_epoch=epoch,
            is_transactional=True,
            is_control=True,
            leader_epoch=0,
            base_offset=self.log.log_end_offset,
        )
        self.log.append_as_follower(data, self.now)
        self.log.write()
        return self.log.log_end_offset - 1

    def roll(self):
        self.disk.now_ms = self.now
        self.log.roll(self.now)

    def plan(self, *, on_demand=True, lso=None, **limits):
        lso = self.log.log_end_offset if lso is None else lso
        self.view = log_snapshot.view(self.log, self.state, lso)
        return planner.plan(self.view, self.now, planner.Limits(**limits), on_demand=on_demand)

    def job(self, made, **limits):
        generation = planner.next_generation(self.state.applied, 0)
        return job_builder.job_for(
            self.log,
            made,
            generation,
            now_ms=self.now,
            hash_key=self.seed.randbytes(16),
            limits=planner.Limits(**limits),
        )

    def clean(self, *, on_demand=True, lso=None, **limits):
        """One pass if it is due; returns its result, or None."""
        made = self.plan(on_demand=on_demand, lso=lso)
        if isinstance(made, planner.PassSkipped):
            return None
        discard(DIRECTORY, self.disk)
        job = self.job(made, **limits)
        self.result = run_pass(job, self.disk)
        self.state = install(self.log, self.result, self.state.applied, self.now)
        self.log.check_invariants()
        return self.result

    def clean_all(self, **limits):
        """Passes until none is due."""
        for _ in range(100):
            if self.clean(**limits) is None:
                return
        raise AssertionError("cleaning does not end")

    def read(self):
        """(position in the log, header, bytes) of all batches."""
        found, offset = [], self.log.log_start_offset
        while offset < self.log.log_end_offset:
            data = self.log.read_batches(offset, 1 << 24, self.log.log_end_offset)
            if not data:
                break
            for at, header in headers(data):
                found.append((header, data[at : at + header.size_bytes]))
            offset = found[-1][0].next_offset
        return found

    def headers(self):
        return [header for header, _ in self.read()]

    def records(self):
        return [r for _, batch in self.read() for r in records(batch)]

    def pairs(self):
        return [(r.offset, r.key, r.value) for r in self.records()]

    def offsets(self):
        return [r.offset for r in self.records()]


def batches(data):
    """The batches in a run of bytes."""
    return [data[at : at + header.size_bytes] for at, header in headers(data)]


@pytest.fixture
def world():
    return World


class Kit:
    """What tests need of this module, which they cannot import."""

    NOW = NOW
    DIRECTORY = DIRECTORY
    World = World
    TimestampType = TimestampType
    records = staticmethod(records)
    batches = staticmethod(batches)
    config = staticmethod(config)
    use_kernel = staticmethod(use_kernel)
    cython = (_kernel, _filter and _filter.SegmentFilter)
    python = (offset_map, segment_filter.SegmentFilter)


@pytest.fixture
def kit():
    return Kit
