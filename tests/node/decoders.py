"""The decoders of files and messages of our own, fed with damage. Run in a process of its own:

    python -m tests.node.decoders

prints what a decoder did that it may not, a line each. Whatever bytes it is given, a decoder gives
the value that they had before, or (where nothing guards the bytes) another one, or raises an error
of ours; a guarded one never gives another value.
"""

from __future__ import annotations

import json
import resource
import signal
import struct
import sys
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any, Final

from pyroaring import BitMap

from kept.cluster.controller.heartbeats import HeartbeatRequest
from kept.cluster.metadata import replica_history, snapshot, wal
from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import (
    ConfigRecord,
    ResourceType,
    TopicRecord,
    decode_batch,
    encode_batch,
)
from kept.cluster.metadata.replica_history import ReplicaHistory
from kept.cluster.metadata.voters import Voter
from kept.cluster.metadata.wal import Entry, HardState, WriteAheadLog
from kept.cluster.raft.messages import AppendEntries, InstallSnapshot, LeaderHint
from kept.compaction.cleaner import removal_log
from kept.compaction.manifest import manifest, manifest_store
from kept.node.coordinator.groups import records as group_records
from kept.node.coordinator.groups.records import (
    GroupMetadataValue,
    MemberMetadata,
    OffsetCommitValue,
)
from kept.node.internode import protobuf_conversion
from kept.node.internode.hello import hello_from
from kept.node.internode.identity import Hello
from kept.node.internode.protobuf_conversion import codecs
from kept.storage import checkpoints
from kept.storage.errors import KeptError
from kept.storage.log.leader_epoch_cache import LeaderEpochCache
from kept.storage.producers import snapshots
from kept.storage.producers.producer_states import ProducerStates
from kept.storage.records import (
    CheckRules,
    build_batch,
    check,
    check_replica,
    headers,
    records,
)
from kept.storage.records.checksum import crc32c
from kept.storage.segments import txn_index
from kept.storage.segments.offset_index import OffsetIndex
from kept.storage.segments.swap import SwapGroup, SwapPlan
from kept.storage.segments.time_index import TimeIndex
from kept.storage.segments.txn_index import AbortedTxn
from kept.storage.types import Codec, Generation, TopicPartition
from tests.support.simulated_disk import SimulatedDisk

MEMORY_BYTES: Final = 1 << 30
"""More than it begins with no decoder may have."""
SECONDS: Final = 5
"""No input takes longer; all of these together take a few."""
EACH: Final = 250
"""Damaged inputs of a decoder, besides the systematic ones."""
TOPIC: Final = uuid.UUID(int=7)


@dataclass(frozen=True)
class Decoder:
    """``guarded``: a checksum covers all of the bytes. ``mend`` puts the checksums of damaged bytes
    right: what a liar would send, and what lies below the checksum is tried, too.
    """

    name: str
    data: bytes
    decode: Callable[[bytes], Any]
    guarded: bool = False
    mend: Callable[[bytearray], None] | None = None
    same: Callable[[Any, Any], bool] = field(default=lambda value, was: bool(value == was))


# Damage.


def damaged(data: bytes, random: Random) -> Iterator[bytes]:
    """Cut, flipped, overwritten with the numbers that lengths must not be, repeated."""
    for end in {*range(min(len(data), 40)), *range(0, len(data), max(1, len(data) // 40))}:
        yield data[:end]
    yield data + b"\0" * 100
    yield data + data
    yield b"\xff" * 64
    yield b"[" * 200_000
    yield b"0\n" + b"9" * 5000
    numbers = [
        struct.pack(code, value)
        for code, value in (
            (">i", -1),
            (">i", 2**31 - 1),
            (">i", -(2**31)),
            (">q", 2**63 - 1),
            (">q", -(2**63)),
            (">h", -1),
            (">h", 2**15 - 1),
            (">I", 2**31),
            (">q", 0),
        )
    ]
    numbers += [b"\xff\xff\xff\xff\x0f", b"\xfe\xff\xff\xff\x0f", b"9" * 25, b"-1", b" ", b"\n"]
    for _ in range(EACH):
        made = bytearray(data)
        for _ in range(random.choice((1, 1, 1, 2, 4))):
            at = random.randrange(len(made) or 1)
            kind = random.random()
            if kind < 0.5 and made:
                made[at] ^= 1 << random.randrange(8)
            elif kind < 0.8:
                number = random.choice(numbers)
                made[at : at + len(number)] = number
            elif kind < 0.9:
                del made[at : at + random.choice((1, 2, 4, 8, 46))]
            else:
                made[at:at] = made[: random.randrange(64)]
        yield bytes(made)


# What there is to decode.


def of_disk(name: str, read: Callable[[SimulatedDisk, str], Any]) -> Callable[[bytes], Any]:
    """A decoder of a file on a disk."""

    def decode(data: bytes) -> Any:
        disk = SimulatedDisk()
        disk.mkdir("/d")
        disk.write_file(f"/d/{name}", data)
        return read(disk, f"/d/{name}")

    return decode


def file_of(name: str, write: Callable[[SimulatedDisk], Any]) -> bytes:
    """The bytes of a file that ``write`` wrote into /d."""
    disk = SimulatedDisk()
    disk.mkdir("/d")
    write(disk)
    return disk.read(f"/d/{name}")


def crc_at_end(data: bytearray) -> None:
    """``wal.with_crc``."""
    if len(data) >= 4:
        data[-4:] = struct.pack(">I", crc32c(bytes(data[:-4])))


def crc_of_producers(data: bytearray) -> None:
    """A producer snapshot's."""
    data[2:6] = struct.pack(">I", crc32c(bytes(data[6:])))


def crc_of_batch(data: bytearray) -> None:
    """A record batch's, and its length."""
    if len(data) >= 21:
        data[8:12] = struct.pack(">i", len(data) - 12)
        data[17:21] = struct.pack(">I", crc32c(bytes(data[21:])))


def crcs_of_sections(data: bytearray) -> None:
    """Those of a manifest or journal, as far as there are sections."""
    at, head = manifest._FILE.size, manifest._SECTION
    while len(data) - at >= head.size:
        name, length, _ = head.unpack_from(data, at)
        content = bytes(data[at + head.size : at + head.size + max(length, 0)])
        length = min(max(length, 0), len(content))
        head.pack_into(data, at, name, length, manifest._crc(name, content))
        at += head.size + length


def entries_of_wal(data: bytes) -> list[Entry]:
    """Of a log that is opened and read."""
    disk = SimulatedDisk()
    disk.mkdir("/d")
    disk.write_file(f"/d/{wal.WAL_NAME}", data)
    log = WriteAheadLog.open("/d", disk)
    return log.entries(log.base_index + 1, 1 << 40) if log.last_index > log.base_index else []


def wal_bytes() -> bytes:
    """Three entries."""

    def write(disk: SimulatedDisk) -> None:
        log = WriteAheadLog.open("/d", disk)
        for index in (1, 2, 3):
            log.append([Entry(1, index, metadata())])

    return file_of(wal.WAL_NAME, write)


def metadata() -> bytes:
    """Records of the metadata log."""
    return encode_batch(
        [TopicRecord("orders", TOPIC), ConfigRecord(ResourceType.TOPIC, "orders", "a", "b")]
    )


def history() -> ReplicaHistory:
    """With all that it can hold."""
    made = ReplicaHistory(1, 9, 9)
    made.removed |= {(TOPIC, 0), (TOPIC, 3)}
    made.unclean[TOPIC, 1] = 4
    return made


def a_manifest() -> manifest.Manifest:
    """Two segments."""
    bits = BitMap([0, 1, 5, 9])
    parts = [
        manifest.OutputSegment(
            base,
            base + 10,
            bits,
            BitMap([3]),
            {1000: BitMap([5])},
            (AbortedTxn(7, base, base + 5, base + 5),),
            b"d" * 16,
            100,
            tombstones=BitMap([5]),
        )
        for base in (0, 10)
    ]
    return manifest.Manifest(TOPIC, 0, Generation(1, 2), 0, 20, 20, 1, 2, tuple(parts))


def producers() -> bytes:
    """Two of them."""
    states = ProducerStates(1000)
    states.update(1, 0, 0, 4, 4, 1000, is_transactional=False)
    states.update(2, 3, 7, 0, 5, 1000, True)
    return snapshots.encode(states)


def index_of(cls: Any, read: Callable[[Any], Any]) -> Callable[[bytes], Any]:
    """An index file: opened, then loaded."""

    def decode(disk: SimulatedDisk, path: str) -> Any:
        found = cls(disk, path, 100, loaded=False)
        read(found)
        found.load()
        return found.offsets

    return of_disk("i", decode)


def batch(codec: Codec) -> bytes:
    """Ten records."""
    rows = [(1000 + n, b"key%d" % n, b"value" * 20, (("h", b"x"),)) for n in range(10)]
    return bytes(build_batch(rows, codec=codec, producer_id=5, producer_epoch=0, base_sequence=0))


def through_batch(data: bytes) -> Any:
    """As a node, a follower and a reader take it."""
    check(data, CheckRules(), 1000)
    for position, _ in headers(data):
        check_replica(data, position)
    return [tuple(record) for record in records(data, inflate_limit=1 << 22)]


def group_pairs() -> list[tuple[bytes, bytes]]:
    """Keys and values of __consumer_offsets."""
    commit = group_records.GroupRecord(
        group_records.OffsetCommitKey("g", "t", 1), OffsetCommitValue(5, "m", 1000)
    )
    member = MemberMetadata("m", None, "c", "h", 1000, 1000, b"s", b"a")
    value = GroupMetadataValue("consumer", 3, "range", "m", 5, (member,))
    group = group_records.GroupRecord(group_records.GroupMetadataKey("g"), value)
    pairs = [record.encode() for record in (commit, group)]
    return [(key, value) for key, value in pairs if value is not None]


def raft(message: Any) -> bytes:
    """As it travels."""
    return protobuf_conversion.encode_raft(message)


def from_raft(data: bytes) -> Any:
    """As it is read."""
    return protobuf_conversion.decode_raft(data)


def hard_state(disk: SimulatedDisk) -> None:
    wal.write_hard_state(disk, "/d", HardState(3, 1, TOPIC))


def decoders() -> Iterator[Decoder]:
    """All of them."""
    yield from metadata_decoders()
    yield from compaction_decoders()
    yield from checkpoint_decoders()
    yield from log_decoders()
    yield from message_decoders()


def metadata_decoders() -> Iterator[Decoder]:
    """The files of the metadata directory."""
    yield Decoder(
        "metadata log",
        wal_bytes(),
        entries_of_wal,
        True,
        same=lambda value, was: value == was[: len(value)] or value[:3] == was,
    )
    yield Decoder(
        "hard state",
        file_of(wal.HARD_STATE_NAME, hard_state),
        of_disk(wal.HARD_STATE_NAME, lambda disk, _: wal.read_hard_state(disk, "/d")),
        True,
        crc_at_end,
    )
    image, _ = Image().apply(decode_batch(metadata()))
    yield Decoder(
        "metadata snapshot",
        snapshot.encode_snapshot(image, 1),
        lambda data: snapshot.decode_snapshot("snapshot", data),
        True,
        crc_at_end,
    )
    yield Decoder("metadata records", metadata(), decode_batch)
    yield Decoder(
        "replica history",
        file_of(replica_history.FILE, lambda d: replica_history.write_history(d, "/d", history())),
        lambda data: replica_history.decode_history("history", data),
        True,
        crc_at_end,
    )


def compaction_decoders() -> Iterator[Decoder]:
    """What a pass leaves."""
    plan = SwapPlan((SwapGroup((0, 10), (0, 5, 10)),))
    yield Decoder(
        "manifest",
        manifest.encode(a_manifest(), plan),
        lambda data: manifest.decode("manifest", data),
        True,
        crcs_of_sections,
    )
    yield Decoder(
        "held manifest",
        manifest_store.encode(a_manifest()),
        lambda data: manifest_store.decode("held", data),
        True,
        crcs_of_sections,
    )
    removals = removal_log.Removals(
        Generation(1, 2), 5, {removal_log.Reason.SUPERSEDED: [(0, BitMap([1, 2, 900]))]}
    )
    yield Decoder(
        "removal journal",
        removal_log.encode(removals),
        lambda data: removal_log.decode("journal", data),
        True,
        crcs_of_sections,
    )


def log_decoders() -> Iterator[Decoder]:
    """The files of a log, and what is in them."""
    yield Decoder(
        "producer snapshot",
        producers(),
        lambda data: [
            (i, s.epoch, s.batches, s.txn_first_offset) for i, s in snapshots.decode("p", data)
        ],
        True,
        crc_of_producers,
    )
    entries = struct.pack(">6i", 1, 100, 5, 200, 9, 300)
    yield Decoder("offset index", entries, index_of(OffsetIndex, lambda i: i.check(1000)))
    entries = struct.pack(">qiqiqi", 1000, 1, 2000, 5, 3000, 9)
    yield Decoder("time index", entries, index_of(TimeIndex, lambda i: i.check()))
    aborted = txn_index.encode([AbortedTxn(1, 100, 105, 105), AbortedTxn(2, 103, 109, 109)])
    yield Decoder("txn index", aborted, lambda data: txn_index.decode("t", data, 100))
    for codec in Codec:
        yield Decoder(
            f"record batch, {codec.name}", batch(codec), through_batch, False, crc_of_batch
        )
    for key, value in group_pairs():
        yield Decoder("group key", key, group_records.decode_key)
        yield Decoder(
            "group value", value, lambda data, key=key: group_records.decode_record(key, data)
        )


def message_decoders() -> Iterator[Decoder]:
    """What nodes say to each other."""
    voters = (Voter(1, TOPIC, "h", 9),)
    head = {"term": 1, "sender": 1, "to": 2}
    for message in (
        AppendEntries(prev_index=0, prev_term=0, entries=(Entry(1, 1, b"x"),), **head),
        InstallSnapshot(last_index=1, last_term=1, image_bytes=b"abc", voters=voters, **head),
        LeaderHint(leader_id=1, last_index=2, voters=(1, 2), cluster_id="c", **head),
    ):
        yield Decoder(type(message).__name__, raft(message), from_raft)
    hello = Hello("c", 1, TOPIC, directory_id=TOPIC, host="h", port=1)
    yield Decoder("Hello", codecs().hello.to_bytes(hello), hello_from)
    beat = codecs().calls["Heartbeat"][0]
    yield Decoder("Heartbeat", beat.to_bytes(HeartbeatRequest(1, 2, 3)), beat.from_bytes)


def checkpoint_decoders() -> Iterator[Decoder]:
    """The small files of a data directory: text, which nothing guards."""
    offsets = {TopicPartition("orders", 0): 5, TopicPartition("orders", 12): 1 << 40}
    yield Decoder(
        "offset checkpoint",
        file_of("c", lambda d: checkpoints.write_offsets(d, "/d/c", offsets)),
        of_disk("c", checkpoints.read_offsets),
    )
    yield Decoder(
        "leader epochs",
        file_of("c", lambda d: checkpoints.write_epochs(d, "/d/c", [(0, 0), (3, 17), (5, 900)])),
        of_disk("c", lambda disk, path: LeaderEpochCache.load(disk, path).entries),
    )
    yield Decoder(
        "partition.metadata",
        file_of("c", lambda d: checkpoints.write_partition_metadata(d, "/d/c", TOPIC)),
        of_disk("c", checkpoints.read_partition_metadata),
    )
    properties = {"version": "1", "cluster.id": "c", "node.id": "1", "directory.id": "x=:y"}
    yield Decoder(
        "meta.properties",
        file_of("c", lambda d: checkpoints.write_properties(d, "/d/c", properties)),
        of_disk("c", checkpoints.read_properties),
    )
    yield Decoder(
        "clean mark",
        file_of("c", lambda d: checkpoints.write_clean_shutdown(d, "/d/c", 5)),
        of_disk("c", checkpoints.read_clean_shutdown),
    )
    yield Decoder(
        "running mark",
        file_of("c", lambda d: checkpoints.write_running(d, "/d/c", 5, "boot")),
        of_disk("c", checkpoints.read_running),
    )


# The trial.


def fits(value: Any) -> bool:
    """Whether numbers have 64 bits at most: what is larger fails later, and elsewhere."""
    if isinstance(value, int):
        return -(2**63) <= value < 2**64
    if isinstance(value, dict):
        return all(fits(part) for pair in value.items() for part in pair)
    return not isinstance(value, list | tuple) or all(map(fits, value))


def faults(decoder: Decoder, seed: int) -> Iterator[str]:
    """What the decoder did that it may not."""
    was = decoder.decode(decoder.data)
    for number, made in enumerate(damaged(decoder.data, Random(f"{decoder.name} {seed}"))):
        inputs = [(made, decoder.guarded)]
        if decoder.mend is not None:
            mended = bytearray(made)
            decoder.mend(mended)
            inputs.append((bytes(mended), False))
        for data, guarded in inputs:
            signal.alarm(SECONDS)
            try:
                value = decoder.decode(data)
            except KeptError:
                continue
            except Exception as error:  # noqa: BLE001 - that is what is looked for
                yield f"{decoder.name}: input {number}: {error!r:.200}"
                continue
            finally:
                signal.alarm(0)
            if guarded and not decoder.same(value, was):
                yield f"{decoder.name}: input {number} is taken for {value!r:.200}"
            if not fits(value):
                yield f"{decoder.name}: input {number}: a number too large in {value!r:.200}"


def main() -> None:
    """Try all, with little memory."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY_BYTES, used + MEMORY_BYTES))
    seed = int(sys.argv[1]) if len(sys.argv) > 1 else 1
    count = 0
    for decoder in decoders():
        count += 1
        for fault in faults(decoder, seed):
            print(fault)
    print(json.dumps({"decoders": count}))


if __name__ == "__main__":
    main()
