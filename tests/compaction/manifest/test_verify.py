"""Digests of what replicas have on disk, and where the first difference is."""

from __future__ import annotations

import gzip
import json
import struct
from dataclasses import asdict, replace

import pytest

from kept.client.admin.replica_digests import verify
from kept.client.json_api import HttpFailed
from kept.compaction.cleaner.cleaner_run import read_manifest
from kept.compaction.cleaner.job import Source
from kept.compaction.cleaner.log_snapshot import view
from kept.compaction.manifest import follow
from kept.compaction.manifest import verify as digests
from kept.compaction.manifest.apply import CompactionState
from kept.storage import layout
from kept.storage.errors import KeptError
from kept.storage.records import crc32c
from kept.storage.types import Codec
from tests.support.installing import install

ROWS = 400
HEADER = 61
"""Bytes of a batch before its records."""


class Replica:
    """A replica's answers, as its node would give them."""

    def __init__(self, kit, world) -> None:
        self.kit, self.world = kit, world
        self.generation = None if world.state.applied is None else str(world.state.applied)
        self.moved = 0

    def get(self, path: str, *, topic: str, partition: int, **asked):
        log = self.world.log
        if path == "compaction/replica":
            return {
                "generation": self.generation,
                "log_start_offset": log.log_start_offset,
                "high_watermark": log.log_end_offset,
            }
        assert path == "compaction/digests"
        if self.moved:
            self.moved -= 1
            raise HttpFailed("it was compacted meanwhile", 503)
        applied = self.world.state.applied
        question = {
            "directory": self.kit.DIRECTORY,
            "sources": [asdict(source) for source in sources(log)],
            "applied": None if applied is None else tuple(applied),
            "start": asked["start"],
            "end": asked["end"],
            "parts": asked.get("parts"),
        }
        question = json.loads(json.dumps(question))
        try:
            return json.loads(json.dumps(digests.digest_ranges(question, self.world.disk)))
        except (KeptError, OSError) as error:
            raise HttpFailed(str(error), 400) from error


def sources(log) -> list[Source]:
    seen = view(log, CompactionState(), log.log_end_offset)
    return [
        Source(s.base_offset, s.end_offset, s.size_bytes, s.mtime_ms)
        for s in seen.segments
        if s.size_bytes
    ]


def recompressed(data: bytes) -> bytes:
    """A batch of gzip as another version of the codec would have written it."""
    batch = bytearray(data[:HEADER]) + gzip.compress(gzip.decompress(data[HEADER:]), 0, mtime=1)
    struct.pack_into(">i", batch, 8, len(batch) - 12)
    struct.pack_into(">I", batch, 17, crc32c(batch[21:]))
    return bytes(batch)


@pytest.fixture(params=[Codec.NONE, Codec.ZSTD, Codec.GZIP])
def replicas(kit, request):
    """A leader that compacted most of its log, and a follower that applied that; of gzip the bytes
    that were compacted are others in each (rule 17).
    """
    worlds = [kit.World(segment_bytes=4_000) for _ in range(2)]
    leader, follower = worlds
    for row in range(ROWS):
        leader.append((b"k%d" % (row % 60), b"%d" % row), (b"x%d" % row, b""), codec=request.param)
        if row == ROWS - 50:
            leader.roll()
    for header, data in leader.read():
        if header.base_offset == 200:
            follower.roll()
        if request.param is Codec.GZIP and header.base_offset < 2 * (ROWS - 60):
            assert recompressed(data) != data
            data = recompressed(data)
        follower.log.append_as_follower(data, follower.now)
        follower.log.write()
    leader.clean()
    found = read_manifest(kit.DIRECTORY, leader.state.applied, leader.disk)
    result = follow.follow(follow.job_for(follower.log, found, None, follower.now), follower.disk)
    follower.state = install(follower.log, result, follower.state.applied, follower.now)
    assert found.end_offset < leader.log.log_end_offset
    return {1: Replica(kit, leader), 2: Replica(kit, follower)}


def verdict(replicas, patience_s: float = 0):
    return verify("t", 0, replicas, (), patience_s)


def damage(replica: Replica, offset: int, back: int) -> None:
    """Another value for one byte, ``back`` from the end of the batch of ``offset``."""
    log = replica.world.log
    segment = next(s for s in reversed(list(log.segments)) if s.base_offset <= offset)
    position, size = segment.locate(offset)[:2]
    path = segment.path(layout.LOG)
    at = position + size - back
    disk = replica.world.disk
    disk.writev(disk.open_append(path), [bytes([disk.read(path)[at] ^ 1])], at)


def test_equal_replicas(replicas):
    found = verdict(replicas)
    assert (found.equal, found.generation, found.differences) == (True, "0.1", [])
    assert 0 < found.covered_end < found.end_offset == 2 * ROWS
    assert found.segments > 2


def test_a_damaged_batch_is_named_where_it_is(replicas):
    leader = replicas[1].world
    for offset in (leader.offsets()[30], 2 * ROWS - 1):
        damage(replicas[2], offset, 3)
        found = verdict(replicas)
        assert found.equal is False
        said = found.differences[-1].replicas
        assert "wrong CRC" in said[2] or "is damaged" in said[2]
        assert "digest" in said[1]


def test_the_first_record_that_differs(kit, replicas):
    """A follower with another record, as sound as the leader's."""
    other = replicas[2].world
    there = [(h, d) for h, d in other.read() if h.base_offset >= 2 * ROWS - 40]
    end = there[0][0].base_offset
    other.log.truncate_to(end)
    for number, (header, data) in enumerate(there):
        batch = bytearray(data)
        if number == 7:
            fresh = kit.World()
            fresh.append((b"another", b"record"), (b"and", b"more"))
            batch = bytearray(fresh.read()[0][1])
            batch[:8] = header.base_offset.to_bytes(8, "big")
        other.log.append_as_follower(bytes(batch), other.now)
    other.log.write()
    found = verdict(replicas)
    assert found.equal is False
    assert [one.offset for one in found.differences] == [end + 14]


def test_segments_that_are_not_there(replicas):
    segment = replicas[2].world.log.segments[0]
    assert segment.first_timestamp >= 0, "this was looked at before"
    replicas[2].world.disk.unlink(segment.path(layout.LOG))
    found = verdict(replicas)
    assert found.equal is False
    assert found.differences[0].base_offset == 0


def test_a_log_start_within_a_segment(replicas):
    """Below it nobody need have anything."""
    for replica, start in zip(replicas.values(), (25, 33), strict=True):
        replica.world.log.advance_log_start(start)
    at = next(o for o in replicas[1].world.offsets() if o > 40)
    damage(replicas[1], 24, 3)
    found = verdict(replicas)
    assert (found.equal, found.start_offset) == (True, 33)
    damage(replicas[1], at, 3)
    assert verdict(replicas).equal is False


def test_replicas_at_two_generations_are_waited_for(replicas):
    replicas[2].generation = "0.0"
    found = verdict(replicas)
    assert found.equal is None
    assert "node 2 at 0.0" in found.why
    replicas[2].generation = "0.1"
    replicas[1].moved = 1
    assert verdict(replicas).equal is None
    replicas[1].moved = 2
    assert verdict(replicas, 30).equal is True


def test_logs_that_were_never_compacted(kit):
    worlds = [kit.World() for _ in range(2)]
    for world in worlds:
        for row in range(50):
            world.append((b"k", b"%d" % row))
    replicas = {n: Replica(kit, world) for n, world in enumerate(worlds)}
    found = verdict(replicas)
    assert (found.equal, found.generation, found.covered_end, found.end_offset) == (
        True,
        None,
        0,
        50,
    )
    damage(replicas[1], 20, 3)
    assert verdict(replicas).equal is False


def test_records_that_are_not_the_generations_are_told(kit):
    """Comparing replicas alone would call them equal."""
    world = kit.World()
    for n in range(20):
        world.append((b"k%d" % (n % 5), b"v"))
    world.roll()
    world.clean()
    found = digests.read_manifest(kit.DIRECTORY, world.state.applied, world.disk)
    files = digests.ReplicaFiles(kit.DIRECTORY, world.disk, tuple(sources(world.log)))
    assert [one.wrong for one in digests.covered(files, found, 0)] == [None]
    other = found.with_segments([replace(s, digest=bytes(16)) for s in found.segments])
    (one,) = digests.covered(files, other, 0)
    assert one.wrong == "its records are not those of the generation"
