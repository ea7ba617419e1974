"""Streaming writes that are in the topic once, also when a micro-batch is repeated.

The target has no transactions to hold a batch together, but it takes each sequence number of an
idempotent producer once. So every task of every micro-batch is one producer, and a repetition goes
on as that same producer:

1. Before its first row a task writes to the **ledger**, a compacted topic, under (query id, task):
   the batch id, its producer id and epoch, where the target's partitions end, and the time that its
   records get. The first such entry of a batch counts, also for another attempt of the task.
2. A task that finds an entry of its own batch was begun before. It reads the target from where it
   ended then, finds by the producer id what was written, leaves out as much, and goes on with the
   next sequence number. Whatever an attempt that still lives sends late has a number that is taken.
3. An entry of a later batch means that the query was set back to an older checkpoint: refused.

What this rests on: a repeated task has **the same rows in the same order**, as Spark gives them
where a batch is replayed from its offsets without a shuffle. Each batch of records that is left out
is compared with what was written, by its CRC; where they differ (rows came in another order, or the
source was compacted in between) the task fails and says so instead of writing twice or skipping
what is new. The entry is kept by the topic's compaction for as long as the ledger is there.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from kept.client.blocking import OutRecord
from kept.client.partitioner import partition_for
from kept.client.ranges import RangeReader
from kept.client.records import EARLIEST, LATEST, FetchLimits
from kept.storage.errors import PeerError
from kept.storage.records import headers, read_header
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from kept.client.blocking import Client

PARTITIONS: Final = 8
SEGMENT_BYTES: Final = 1 << 20
"""A small segment closes soon, so that old entries are compacted away and a restart reads few."""
TIMEOUT_MS: Final = 60_000
_KIND: Final = 0x0F

_seen: dict[tuple[str, str, int], tuple[int, dict[bytes, dict[str, Any]]]] = {}
"""(bootstrap, ledger, partition) -> how far it was read, and the entries: kept by a worker."""


class NotTheSame(PeerError):
    """A repeated task has other rows than its first attempt, or its query went back in time."""


@dataclass(frozen=True, slots=True)
class Written:
    """A batch of records that an earlier attempt left in the target."""

    last_sequence: int
    count: int
    crc: int
    kind: int
    """Codec and timestamp type: where the topic has others, the broker made the batch anew."""


@dataclass(slots=True)
class Begun:
    """A task's producer, and what its earlier attempts have written: (partition, first sequence) ->
    batch, and how many rows of each partition that makes.
    """

    producer_id: int
    epoch: int
    at_ms: int
    written: dict[tuple[int, int], Written] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)

    def leaves_out(self, partition: int, first: int, total: int, batch: bytes) -> bool:
        """Whether a batch of these sequences is there already. Raises NotTheSame."""
        done = self.done.get(partition, 0)
        if first >= done:
            return False
        there = self.written.get((partition, first))
        if there is None or there.last_sequence != first + total - 1:
            raise NotTheSame(f"partition {partition}: rows {first} to {first + total - 1} {_WHY}")
        ours = read_header(batch)
        comparable = there.count == total and there.kind == ours.attributes & _KIND
        if comparable and there.crc != ours.crc:
            raise NotTheSame(f"partition {partition}: rows {first} to {first + total - 1} {_WHY}")
        return True


_WHY: Final = (
    "of the repeated micro-batch are not those that its first attempt wrote: exactlyOnce needs "
    "tasks that repeat the same rows in the same order (exactlyOnce=false goes on at least once)"
)


def create(client: Client, ledger: str) -> None:
    """Make the ledger where it is not there."""
    from kept.storage.errors import TopicAlreadyExists

    if ledger in client.metadata(None).topics:
        return
    config = {"cleanup.policy": "compact", "segment.bytes": str(SEGMENT_BYTES)}
    try:
        client.create_topic(ledger, partitions=PARTITIONS, config=config)
    except TopicAlreadyExists:
        return


def begin(
    client: Client, ledger: str, topic: str, *, query: str, task: int, batch: int
) -> Begun:  # fmt: skip
    """Begin a task of a micro-batch, or find out how far it came. Raises NotTheSame."""
    key = f"{query}/{task}".encode()
    entry = _entry(client, ledger, key)
    if entry is None or entry["batch"] < batch:
        _announce(client, ledger, topic, key, batch)
        entry = _entry(client, ledger, key)
        assert entry is not None
    if entry["batch"] > batch:
        raise NotTheSame(
            f"{ledger}: query {query} has written batch {entry['batch']} of task {task} already, "
            f"this is batch {batch}: it was set back to an older checkpoint"
        )
    if entry["topic"] != topic:
        raise NotTheSame(
            f"{ledger}: query {query} began batch {batch} in topic {entry['topic']}, not in {topic}"
        )
    begun = Begun(entry["producer_id"], entry["epoch"], entry["at_ms"])
    for partition, start in entry["starts"].items():
        _find(client, TopicPartition(topic, int(partition)), int(start), begun)
    return begun


def _announce(client: Client, ledger: str, topic: str, key: bytes, batch: int) -> None:
    producer_id, epoch, _ = client.init_producer()
    tps = [TopicPartition(topic, p) for p in client.topic(topic).partitions]
    ends = client.list_offsets(dict.fromkeys(tps, LATEST))
    entry = {
        "batch": batch, "topic": topic, "producer_id": producer_id, "epoch": epoch,
        "at_ms": time.time_ns() // 1_000_000,
        "starts": {str(tp.partition): at.offset for tp, at in ends.items()},
    }  # fmt: skip
    where = partition_for(key, len(client.topic(ledger).partitions), 0)
    client.produce(ledger, [OutRecord(key, json.dumps(entry).encode(), (), None, where)])


def _entry(client: Client, ledger: str, key: bytes) -> dict[str, Any] | None:
    """What the ledger says of a key: of the newest batch the first entry."""
    where = partition_for(key, len(client.topic(ledger).partitions), 0)
    at = (client.bootstrap, ledger, where)
    position, entries = _seen.get(at, (EARLIEST, {}))
    for record in client.read(ledger, [where], offset=position):
        position = record.offset + 1
        entry = json.loads(record.value)
        known = entries.get(record.key)
        if known is None or known["batch"] < entry["batch"]:
            entries[record.key] = entry
    _seen[at] = position, entries
    return entries.get(key)


def _find(client: Client, tp: TopicPartition, start: int, begun: Begun) -> None:
    """Note what the producer has written to a partition from ``start`` on."""
    bounds = {when: client.list_offsets({tp: when})[tp].offset for when in (EARLIEST, LATEST)}
    if start < bounds[EARLIEST]:
        raise NotTheSame(
            f"{tp}: the log starts at {bounds[EARLIEST]}, and what the micro-batch wrote from "
            f"{start} on can no longer be seen"
        )
    reader = RangeReader(
        client, tp, start, bounds[LATEST], FetchLimits(partition_max_bytes=8 << 20),
        timeout_ms=TIMEOUT_MS,
    )  # fmt: skip
    for chunk in reader.chunks():
        for _, header in headers(chunk.records):
            reader.position = header.last_offset + 1
            if (header.producer_id, header.producer_epoch) != (begun.producer_id, begun.epoch):
                continue
            last = header.base_sequence + header.last_offset_delta
            begun.written[tp.partition, header.base_sequence] = Written(
                last,
                header.record_count,
                header.crc,
                header.attributes & _KIND,
            )
            begun.done[tp.partition] = max(begun.done.get(tp.partition, 0), last + 1)


def task_of(properties: Mapping[str, str | None]) -> tuple[str, int]:
    """(query id, batch id) of the micro-batch that a task belongs to, from Spark's own properties.

    Raises NotTheSame where Spark does not say.
    """
    query = properties.get("sql.streaming.queryId")
    batch = properties.get("streaming.sql.batchId")
    if query is None or batch is None:
        raise NotTheSame("exactlyOnce needs the query id and the batch id, Spark did not give them")
    return query, int(batch)
