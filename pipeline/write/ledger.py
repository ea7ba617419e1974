"""Writes that are in the topic once, also when they are repeated.

The target has no transactions to hold a batch together, but it takes each sequence number of an
idempotent producer once. So every task of every batch is one producer, and a repetition goes on as
that same producer:

1. Before its first row a task writes to the **ledger**, a compacted topic, under (application,
   topic, task): the batch's version, its producer id and epoch, where the target's partitions end,
   the time that its records get, and how large its batches of records are. The first such entry of
   a batch counts, also for another attempt of the task.
2. A task that finds an entry of its own batch was begun before. It puts that entry there again,
   reads the target from where it ended then, finds by the producer id what was written, leaves out
   as much, and goes on with the next sequence number. Whatever an attempt that still lives sends
   late has a number that is taken; whether one sent other rows before ours is looked at when the
   task ends, also when the task was the first and there are further entries by then.
3. An entry of a later batch means that this one was written long ago: refused.
4. When a batch has ended that was begun before, or the first of a run, its driver looks whether an
   earlier attempt had tasks that this one has not: what those wrote is there twice, which is said.

The application and the version are a stream's query and batch ids; of a batch write what its
options ``txnAppId`` and ``txnVersion`` say. Without them a write has a name of its own, which
covers the tasks that Spark repeats but not a repetition of the whole; its entries become tombstones
when it has ended.

What this rests on: a repeated task has **the same rows in the same order**, as Spark gives them
where a batch is replayed from its offsets without a shuffle. Each batch of records that is left out
is compared with what was written: by its CRC, and record by record where that differs, because the
broker made the batch anew (a ``compression.type`` of the topic) or its cleaner did. Where the rows
are not the same (they came in another order, fewer came than were written, or the source was
compacted in between) the task fails and says so instead of writing twice or skipping what is new.
Where the target itself is compacted, a record that is gone was written: its sequence number is
below one that is there, and what is left of a producer always includes its last batch.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from kept.client.client import OutRecord
from kept.client.consume.fetch import FetchLimits
from kept.client.consume.positions import EARLIEST, LATEST
from kept.client.consume.range_reader import RangeReader
from kept.client.partitioner import partition_for
from kept.pipeline.connection import BadOption
from kept.storage.errors import PeerError, TopicAlreadyExists
from kept.storage.records import headers, read_header, records
from kept.storage.types import TimestampType, TopicPartition

if TYPE_CHECKING:
    from kept.client.client import Client
    from kept.storage.records import BatchHeader

PARTITIONS: Final = 8
SEGMENT_BYTES: Final = 1 << 20
"""A small segment closes soon, so that old entries are compacted away and a restart reads few."""
TIMEOUT_MS: Final = 60_000
_FIELDS: Final = {"batch", "producer_id", "epoch", "at_ms", "starts"}

Entry = Mapping[str, Any]
_ENDED: Final[Entry] = {}
"""A tombstone: the write is over."""


@dataclass(slots=True)
class _Known:
    """What the ledger says of a key: of the newest batch the first entry, and whether there are
    more of that batch, which other attempts have put there.
    """

    entry: Entry
    others: bool = False


_seen: dict[tuple[object, ...], tuple[int, dict[bytes, _Known]]] = {}
"""(bootstrap, ledger, its id, partition) -> how far it was read, and the entries: kept by a worker.
"""


class NotTheSame(PeerError):
    """A repeated task has other rows than its first attempt, or its query went back in time."""


@dataclass(frozen=True, slots=True)
class Batch:
    """What is written once: the ``version``-th batch of an application into a topic.

    A ``passing`` one is never repeated as a whole. ``run`` names the driver's attempt at the
    application, where that is known.
    """

    app: str
    version: int
    topic: str
    passing: bool = False
    run: str | None = None

    def key(self, task: int) -> bytes:
        """Of a task's entry."""
        return f"{self.app}/{self.topic}/{task}".encode()

    def task(self, key: bytes) -> int | None:
        """The task of an entry; None when it is of something else."""
        prefix, _, number = key.decode(errors="replace").rpartition("/")
        return int(number) if prefix == f"{self.app}/{self.topic}" else None


@dataclass(frozen=True, slots=True)
class EarlierBatch:
    """A batch of records that an earlier attempt left in the target."""

    last_sequence: int
    base_offset: int
    crc: int
    attributes: int


def _nothing(partition: int, offset: int) -> bytes:
    del partition, offset
    return b""


def _alone() -> bool:
    return False


@dataclass(slots=True)
class Begun:
    """A task's producer, and what its earlier attempts have written: (partition, first sequence) ->
    batch, and how many rows of each partition that makes. ``partitions`` are those that the topic
    had at first: rows that went by that many would go elsewhere by another number; and batches of
    another size than ``batch_bytes`` could not be compared. ``ends`` is how far each partition was
    looked through; ``fetch`` brings what is in a partition of the target at an offset; ``others``
    says whether another attempt has begun since. The ``first_of_run`` may have been begun by
    another run, with other tasks.
    """

    producer_id: int
    epoch: int
    at_ms: int
    partitions: int
    batch_bytes: int
    repeated: bool = False
    compacted: bool = False
    written: dict[tuple[int, int], EarlierBatch] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    ends: dict[int, int] = field(default_factory=dict)
    first_of_run: bool = False
    fetch: Callable[[int, int], bytes] = _nothing
    others: Callable[[], bool] = _alone

    def leaves_out(self, partition: int, first: int, total: int, batch: bytes) -> bool:
        """Whether a batch of these sequences is there already. Raises NotTheSame."""
        done = self.done.get(partition, 0)
        if first >= done:
            return False
        there = self.written.get((partition, first))
        if there is None and self.compacted and first + total <= done:
            return True
        if (
            there is None
            or there.last_sequence != first + total - 1
            or (
                there.crc != read_header(batch).crc and not self._made_anew(partition, there, batch)
            )
        ):
            raise NotTheSame(f"partition {partition}: rows {first} to {first + total - 1} {_WHY}")
        return True

    def _made_anew(self, partition: int, there: EarlierBatch, batch: bytes) -> bool:
        """Whether a batch with another CRC has the same records nevertheless, or, of a compacted
        topic, those that are left of them.
        """
        for at, header in headers(fetched := self.fetch(partition, there.base_offset)):
            if header.base_offset != there.base_offset:
                break
            timed = header.timestamp_type is TimestampType.CREATE_TIME
            contents = _contents(fetched[at : at + header.size_bytes], timed)
            ours = _contents(batch, timed)
            if self.compacted:
                return contents.items() <= ours.items()
            return contents == ours
        return self.compacted


_Content = tuple[int, bytes | None, bytes | None, tuple[tuple[str, bytes | None], ...]]


def _contents(batch: bytes, timed: bool) -> dict[int, _Content]:
    """The records of a batch, by their place in it; without timestamps that the broker has set."""
    base = read_header(batch).base_offset
    return {
        r.offset - base: (r.timestamp if timed else 0, r.key, r.value, r.headers)
        for r in records(batch)
    }


_NO_ENTRIES: Final = "which has records that are no entries of it"
_WHY: Final = (
    "of the repeated micro-batch are not those that its first attempt wrote: exactlyOnce needs "
    "tasks that repeat the same rows in the same order (exactlyOnce=false goes on at least once)"
)


def create(client: Client, ledger: str) -> None:
    """Make the ledger where it is not there. Raises BadOption for a topic that would lose entries,
    and rows would be written twice.
    """
    if ledger not in client.metadata(None).topics:
        config = {"cleanup.policy": "compact", "segment.bytes": str(SEGMENT_BYTES)}
        try:
            client.create_topic(ledger, partitions=PARTITIONS, config=config)
        except TopicAlreadyExists:
            pass
        else:
            return
    policy = _policy(client, ledger)
    if policy != "compact":
        raise BadOption(
            f"ledgerTopic is {ledger}, whose cleanup.policy is {policy}: it must be compact, or "
            "what was written is forgotten; give the name of a topic that is not there yet"
        )


def _policy(client: Client, topic: str) -> str:
    settings = client.topic_configs([topic])[topic]
    return (
        next((setting.value for setting in settings if setting.name == "cleanup.policy"), None)
        or "delete"
    )


def begin(client: Client, ledger: str, batch: Batch, task: int, batch_bytes: int) -> Begun:
    """Begin a task of a batch, or find out how far it came. Raises NotTheSame."""
    key = batch.key(task)
    client.metadata([ledger])  # it may be another one of that name, to which no entry belongs
    entry = _entry(client, ledger, key)
    if entry is None or (entry is not _ENDED and entry["batch"] < batch.version):
        new_run = entry is None or batch.run is None or entry.get("run") != batch.run
        ours = _announce(client, ledger, batch, key, batch_bytes)
        entry = _entry(client, ledger, key)
        assert entry is not None
        if entry["producer_id"] == ours:
            begun = _begun(entry, batch_bytes)
            begun.first_of_run = new_run
            begun.others = partial(_others, client, ledger, key)
            return begun
    if entry is _ENDED:
        raise NotTheSame(f"{ledger}: the write {batch.app} to {batch.topic} has ended already")
    if entry["batch"] > batch.version:
        raise NotTheSame(
            f"{ledger}: {batch.app} has written batch {entry['batch']} of task {task} to "
            f"{batch.topic} already, this is batch {batch.version}: it was set back to an older "
            "checkpoint, or its txnVersion is too low"
        )
    # The first attempt may live, and shall know of this one; compaction, which entry counts.
    _put(client, ledger, key, entry)
    begun = _begun(entry, batch_bytes)
    begun.repeated = True
    begun.compacted = "compact" in _policy(client, batch.topic)
    begun.fetch = partial(_at, client, batch.topic)
    for partition, start in entry["starts"].items():
        _find(client, TopicPartition(batch.topic, int(partition)), int(start), begun)
    return begun


def _begun(entry: Entry, batch_bytes: int) -> Begun:
    return Begun(
        entry["producer_id"],
        entry["epoch"],
        entry["at_ms"],
        len(entry["starts"]),
        entry.get("batch_bytes", batch_bytes),
        ends={int(partition): int(start) for partition, start in entry["starts"].items()},
    )


def end(client: Client, ledger: str, batch: Batch, tasks: int) -> None:
    """A batch that may have been begun before has now ended, with so many tasks. Raises NotTheSame
    when an earlier attempt had more.
    """
    most = _most_tasks(client, ledger, batch)
    if most > tasks:
        raise NotTheSame(
            f"{batch.topic}: batch {batch.version} of {batch.app} was begun with {most} tasks or "
            f"more and repeated with {tasks}: rows of the others may be there twice"
        )


def confirm(
    client: Client,
    topic: str,
    begun: Begun,
    sent: Mapping[tuple[int, int], BatchHeader],
    rows: Mapping[int, int],
) -> None:
    """Whether a task that is not the only attempt has the rows that are there: the batches that it
    has sent, by partition and first sequence, and no fewer ``rows`` of each partition than any
    attempt has written. Raises NotTheSame.

    An attempt that lives on may have sent other rows of the same sequences in the meantime: the
    broker took ours for a repetition, and acknowledged them. Where the broker makes batches anew,
    that cannot be seen. All partitions are looked through: its rows may have gone to others.
    """
    seen = replace(begun, written={}, done=dict(begun.done), ends=dict(begun.ends))
    for partition, start in begun.ends.items():
        _find(client, TopicPartition(topic, partition), start, seen, needs_all=False)
    for (partition, first), ours in sent.items():
        there = seen.written.get((partition, first))
        if there is None or there.attributes != ours.attributes or there.crc == ours.crc:
            continue
        last = first + ours.record_count - 1
        raise NotTheSame(f"partition {partition}: rows {first} to {last} {_WHY}")
    for partition, done in sorted(seen.done.items()):
        have = rows.get(partition, 0)
        if have < done:
            raise NotTheSame(
                f"partition {partition}: {done} rows were written and the repetition has {have}: "
                f"rows {have} to {done - 1} {_WHY}"
            )


def forget(client: Client, ledger: str, batch: Batch, tasks: int) -> None:
    """A passing batch is over: whatever comes late is refused, and compaction removes it."""
    for task in range(tasks):
        _put(client, ledger, batch.key(task), None)


def _most_tasks(client: Client, ledger: str, batch: Batch) -> int:
    most = 0
    for partition in sorted(client.topic(ledger).partitions):
        for key, entry in _entries(client, ledger, partition).items():
            task = batch.task(key)
            if task is not None and entry.entry.get("batch") == batch.version:
                most = max(most, task + 1)
    return most


def _announce(client: Client, ledger: str, batch: Batch, key: bytes, batch_bytes: int) -> int:
    """Write a task's entry; the producer id in it."""
    producer = client.init_producer()
    client.metadata([batch.topic])  # it may have grown since this worker asked
    tps = [TopicPartition(batch.topic, p) for p in client.topic(batch.topic).partitions]
    ends = client.list_offsets(dict.fromkeys(tps, LATEST))
    entry = {
        "batch": batch.version,
        "run": batch.run,
        "producer_id": producer.id,
        "epoch": producer.epoch,
        "at_ms": time.time_ns() // 1_000_000,
        "batch_bytes": batch_bytes,
        "starts": {str(tp.partition): at.offset for tp, at in ends.items()},
    }
    _put(client, ledger, key, entry)
    return producer.id


def _put(client: Client, ledger: str, key: bytes, entry: Entry | None) -> None:
    where = _partition(client, ledger, key)
    value = None if entry is None else json.dumps(dict(entry)).encode()
    client.produce(ledger, [OutRecord(key, value, (), None, where)])


def _entry(client: Client, ledger: str, key: bytes) -> Entry | None:
    entry = _entries(client, ledger, _partition(client, ledger, key)).get(key)
    return None if entry is None else entry.entry


def _others(client: Client, ledger: str, key: bytes) -> bool:
    """Whether other attempts at the newest batch have begun since its first entry."""
    return _entries(client, ledger, _partition(client, ledger, key))[key].others


def _partition(client: Client, ledger: str, key: bytes) -> int:
    """Where a task's entries are. Those of a ledger that is given more partitions stay there."""
    return partition_for(key, min(PARTITIONS, len(client.topic(ledger).partitions)), 0)


def _entries(client: Client, ledger: str, partition: int) -> Mapping[bytes, _Known]:
    """What the ledger says of each key."""
    at = (client.bootstrap, ledger, client.topic(ledger).topic_id, partition)
    position, entries = _seen.get(at, (EARLIEST, {}))
    for record in client.read(ledger, [partition], offset=position):
        position = record.offset + 1
        if record.key is None:
            raise BadOption(f"ledgerTopic is {ledger}, {_NO_ENTRIES}")
        if record.value is None:
            entries[record.key] = _Known(_ENDED)
            continue
        entry = _read(ledger, record.value)
        previous = entries.get(record.key)
        if previous is None or (
            previous.entry is not _ENDED and previous.entry["batch"] < entry["batch"]
        ):
            entries[record.key] = _Known(entry)
        else:
            previous.others = True
    _seen[at] = position, entries
    return entries


def _read(ledger: str, value: bytes) -> Entry:
    """An entry. Raises BadOption for what is none."""
    try:
        entry = json.loads(value)
    except ValueError:
        entry = None
    if not isinstance(entry, dict) or not entry.keys() >= _FIELDS:
        raise BadOption(f"ledgerTopic is {ledger}, {_NO_ENTRIES}")
    return entry


def _find(
    client: Client, tp: TopicPartition, start: int, begun: Begun, *, needs_all: bool = True
) -> None:
    """Note what the producer has written to a partition from ``start`` on. Where the log starts
    later: from there on, or NotTheSame if it ``needs_all``.
    """
    bounds = {when: client.list_offsets({tp: when})[tp].offset for when in (EARLIEST, LATEST)}
    if start < bounds[EARLIEST] and not needs_all:
        start = bounds[EARLIEST]
    if start < bounds[EARLIEST]:
        raise NotTheSame(
            f"{tp.place}: the log starts at {bounds[EARLIEST]}, and what the micro-batch wrote "
            f"from {start} on can no longer be seen"
        )
    reader = RangeReader(
        client,
        tp,
        start,
        bounds[LATEST],
        FetchLimits(partition_max_bytes=8 << 20),
        timeout_ms=TIMEOUT_MS,
    )
    for chunk in reader.chunks():
        for _, header in headers(chunk.records):
            reader.position = header.last_offset + 1
            if (header.producer_id, header.producer_epoch) != (begun.producer_id, begun.epoch):
                continue
            last = header.base_sequence + header.last_offset_delta
            begun.written[tp.partition, header.base_sequence] = EarlierBatch(
                last, header.base_offset, header.crc, header.attributes
            )
            begun.done[tp.partition] = max(begun.done.get(tp.partition, 0), last + 1)
    begun.ends[tp.partition] = bounds[LATEST]


def _at(client: Client, topic: str, partition: int, offset: int) -> bytes:
    """The batch at an offset of the target; others may follow."""
    tp = TopicPartition(topic, partition)
    limits = FetchLimits(partition_max_bytes=1)
    return client.fetch_partition(tp, offset, limits, TIMEOUT_MS).records


def micro_batch(topic: str, property_: Callable[[str], str | None]) -> Batch:
    """The micro-batch that a task belongs to, from Spark's own properties.

    Raises NotTheSame where Spark does not say.
    """
    query = property_("sql.streaming.queryId")
    batch = property_("streaming.sql.batchId")
    if query is None or batch is None:
        raise NotTheSame("exactlyOnce needs the query id and the batch id, Spark did not give them")
    return Batch(query, int(batch), topic, run=property_("spark.jobGroup.id"))
