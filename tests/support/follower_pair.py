"""A log that is cleaned, and a replica that applies its manifests."""

from __future__ import annotations

from dataclasses import replace

from kept.compaction.cleaner.cleaner_run import discard, read_manifest
from kept.compaction.manifest import follow
from kept.storage.types import MAX_INT32, Codec
from tests.support.installing import install

HOUR_MS = 3_600_000


class Pair:
    """A leader that cleans, and a follower that fetches from it and applies."""

    def __init__(self, kit, **changes) -> None:
        self.kit = kit
        self.leader = kit.World(**changes)
        self.follower = kit.World(**changes)

    def fetch(self, *, roll_at=lambda base: False) -> None:
        mine, theirs = self.follower.log, self.leader.log
        while (offset := mine.log_end_offset) < theirs.log_end_offset:
            data = theirs.read_batches(offset, 1 << 24, theirs.log_end_offset)
            for batch in self.kit.batches(data):
                base = int.from_bytes(batch[:8], "big")
                if mine.active_segment.size_bytes and roll_at(base):
                    mine.roll(self.follower.now)
                mine.append_as_follower(batch, self.follower.now)
                mine.write()

    def generation(self):
        return read_manifest(self.kit.DIRECTORY, self.leader.state.applied, self.leader.disk)

    def previous(self):
        applied = self.follower.state.applied
        if applied is None:
            return None
        return read_manifest(self.kit.DIRECTORY, applied, self.follower.disk)

    def build(self):
        world = self.follower
        discard(self.kit.DIRECTORY, world.disk)
        job = follow.job_for(world.log, self.generation(), self.previous(), world.now)
        return follow.follow(job, world.disk)

    def apply(self):
        """The follower comes to the leader's generation; returns the result."""
        world = self.follower
        result = self.build()
        world.state = install(world.log, result, world.state.applied, world.now)
        world.log.check_invariants()
        self.check()
        return result

    def check(self) -> None:
        """Records and digests are equal below the end of the manifest."""
        end = self.generation().end_offset
        theirs, mine = (
            [
                (h, tuple(map(str, self.kit.records(data))))
                for h, data in world.read()
                if h.base_offset < end
            ]
            for world in (self.leader, self.follower)
        )
        plain = [
            [(replace(h, crc=0, batch_length=0, **emptied(h)), r) for h, r in side]
            for side in (theirs, mine)
        ]
        assert plain[0] == plain[1]
        ours = self.previous()
        assert [(s.base_offset, s.end_offset, s.digest, s.survivors) for s in ours.segments] == [
            (s.base_offset, s.end_offset, s.digest, s.survivors) for s in self.generation().segments
        ]
        assert all(segment.digest for segment in ours.segments)
        self.check_same_when_read_again()

    def check_same_when_read_again(self) -> None:
        """The digests are of what is in the files: a build from nothing finds nothing to do."""
        world = self.follower
        job = follow.job_for(world.log, self.generation(), None, world.now)
        again = follow.follow(job, world.disk)
        assert again.bytes_after == 0
        discard(self.kit.DIRECTORY, world.disk)


def emptied(header) -> dict[str, int]:
    """Of an empty batch maxTimestamp says what the last pass found in it."""
    return {} if header.record_count else {"max_timestamp": -1}


def fill(pair, rows: int, keys: int, rolls=(), *, value=b"v" * 40, codec=Codec.NONE) -> None:
    for row in range(rows):
        key = b"k%d" % (row % keys)
        pair.leader.append((key, None if row % 7 == 3 else value), codec=codec)
        if row in rolls:
            pair.leader.roll()
    pair.leader.roll()


def write(both, rnd) -> None:
    world = both.leader
    for _ in range(rnd.randint(5, 60)):
        kind = rnd.random()
        rows = [
            (b"k%d" % rnd.randrange(12), None if rnd.random() < 0.25 else rnd.randbytes(20))
            for _ in range(rnd.randint(1, 4))
        ]
        if kind < 0.15:
            pid = rnd.randrange(3)
            world.append(*rows, pid=pid, sequence=0, epoch=0, transactional=True)
            world.marker(pid, commit=rnd.random() < 0.5)
        elif kind < 0.3:
            timed = [(*row, world.now + rnd.randrange(9)) for row in rows]
            world.append(*timed, pid=10 + rnd.randrange(1 << 40), sequence=0)
        else:
            world.append(*rows, codec=rnd.choice((Codec.NONE, Codec.NONE, Codec.ZSTD, Codec.GZIP)))
        if rnd.random() < 0.1:
            world.roll()
    if rnd.random() < 0.8:
        world.roll()
    assert world.log.log_end_offset < MAX_INT32
