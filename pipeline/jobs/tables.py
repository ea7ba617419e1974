"""The latest value of every key: a topic as a table.

Within a partition the newest record of a key is the one with the highest offset. Where a key is in
several partitions (their number was raised), the newest timestamp decides, then the higher
partition. A tombstone removes its key.

A table of now is read until each partition has caught up with its log, and again whenever the frame
is used: so every key is there although compaction goes on. (As everywhere with Kafka, a read that
takes longer than ``delete.retention.ms`` may miss a tombstone.)

**As of** an offset or a moment the table is made of the records before it that are still there: a
key whose record of then was superseded and compacted away is missing. It is exact as far back as
nothing was compacted.

:func:`refresh` keeps a table in Parquet and reads only what is new. That is right only as long as
no tombstone can have come and gone in between, and nothing was cut off by retention; where it can
have been, the whole topic is read again, and the result says why.
"""

from __future__ import annotations

import json
import re
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from kept.client.consume.positions import LATEST
from kept.pipeline.connection import BadOption
from kept.pipeline.jobs.job_directory import BEGUN, JobDirectory
from kept.pipeline.lazy_imports import f
from kept.pipeline.options import Subscribe
from kept.pipeline.read import offsets
from kept.pipeline.session import (
    TopicBounds,
    bounds_of,
    check_partitions,
    connect,
    current_records,
    records,
    register,
)
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from kept.client.bootstrap import Bootstrap
    from kept.client.client import Client
    from kept.client.consume.leader_offsets import OffsetAt

COLUMNS: Final = ("key", "value", "partition", "offset", "timestamp", "headers")
STATE: Final = "_kept.json"
FORMAT: Final = 1
_NAMED: Final = re.compile(r"table-(\d+)(?:-[0-9a-f]+)?")
"""Directories of tables: their number, and what tells two apart that have the same."""


def latest(rows: DataFrame) -> DataFrame:
    """The newest row of every key, tombstones among them; rows without a key are left out."""
    fields = f.struct("value", "timestamp", "headers", "offset")
    by_partition = (
        rows.filter("key is not null")
        .groupBy("key", "partition")
        .agg(f.max_by(fields, "offset").alias("row"))
    )
    newest = by_partition.groupBy("key").agg(
        f.max_by(f.struct("row", "partition"), f.struct("row.timestamp", "partition")).alias("one")
    )
    return newest.selectExpr(
        "key",
        "one.row.value",
        "one.partition",
        "one.row.offset",
        "one.row.timestamp",
        "one.row.headers",
    )


def table(
    spark: SparkSession,
    bootstrap: str | Bootstrap,
    topic: str,
    *,
    as_of_offset: int | Mapping[int, int] | None = None,
    as_of_ms: int | None = None,
) -> DataFrame:
    """The latest value of every key, with ``key, value, partition, offset, timestamp, headers``.

    ``as_of_offset`` is exclusive: one number for a topic of one partition, or one for each.
    ``as_of_ms``: everything before the first record that is newer. Raises BadOption and
    UnknownTopicOrPartition at once for what cannot be.
    """
    register(spark)
    with connect(bootstrap) as client:
        bounds = _as_of(client, bounds_of(client, topic), as_of_offset, as_of_ms)
    if as_of_offset is None and as_of_ms is None:
        rows = current_records(spark, bootstrap, topic)
    else:
        rows = records(spark, bootstrap, bounds)
    return latest(rows).filter("value is not null")


def _as_of(
    client: Client, bounds: TopicBounds, offset: int | Mapping[int, int] | None, at_ms: int | None
) -> TopicBounds:
    if offset is not None and at_ms is not None:
        raise BadOption("as of an offset and as of a timestamp contradict each other: give one")
    if at_ms is not None:
        if at_ms < -1:  # what is below 0 there asks for other things: the end, the beginning
            raise BadOption(f"as of {at_ms} ms: brokers look up no moment before 1970")
        tps = [TopicPartition(bounds.topic, p) for p in bounds.ends]
        at_time = client.list_offsets(dict.fromkeys(tps, at_ms + 1))
        after = {tp.partition: at.offset for tp, at in at_time.items() if at.offset >= 0}
        return replace(bounds, ends={p: min(after.get(p, e), e) for p, e in bounds.ends.items()})
    if offset is None:
        return bounds
    if isinstance(offset, int):
        if len(bounds.ends) > 1:
            raise BadOption(
                f"as of offset {offset}: {bounds.topic} has {len(bounds.ends)} partitions, give "
                'one for each, such as {"0": 10, "1": 12}'
            )
        offset = {0: offset}
    check_partitions(offset, bounds, "as of offset")
    return replace(bounds, ends=dict(offset))


# A table in Parquet.


@dataclass(frozen=True, slots=True)
class Refreshed:
    """What a refresh did. ``whole`` says why all of the topic was read; None: only what was new."""

    path: str
    rows: int
    offsets_read: int
    whole: str | None


def refresh(spark: SparkSession, bootstrap: str | Bootstrap, topic: str, path: str) -> Refreshed:
    """Bring the table in directory ``path`` up to now; :func:`saved` reads it.

    Each refresh writes a directory of its own and then replaces the file that names it, so whoever
    reads has one state or the next; the one before stays until the next refresh. One that fails
    leaves nothing; of those that were killed the last one's remains stay, until two others have
    ended. Raises BadOption when another refresh has ended in between: the table is that one's then.
    """
    register(spark)
    store = JobDirectory(spark, path)
    before = _state(store, topic)
    _remove_unfinished(store, before)
    began_ms = time.time_ns() // 1_000_000  # before the ends are asked for: what is new is newer
    with connect(bootstrap) as client:
        tps = offsets.find_partitions(client, Subscribe((topic,)))
        epochs = {tp: at.leader_epoch for tp, at in _newest(client, tps).items()}
        now = bounds_of(client, topic)
        whole = _why_whole(before, now, began_ms)
        if before is not None and whole is None and _cut_back(client, before, epochs):
            whole = "a leader without some of what was read was elected: records were cut back"
    if before is not None and before["directory"] not in store.names():
        whole = f"its directory {before['directory']} is gone"
    name = _next(store, before)
    _write(spark, bootstrap, store, None if whole else before, now, name=name)
    if whole is None and (late := _why_whole(before, now, time.time_ns() // 1_000_000)):
        store.remove(name)
        whole, name = late, _next(store, before)
        _write(spark, bootstrap, store, None, now, name=name)
    removed = store.read(f"{name}/{BEGUN}") is None
    if removed or _state(store, topic) != before:
        store.remove(name)
        raise BadOption(
            f"{path}: another refresh removed what this one wrote; refresh again"
            if removed
            else f"{path}: another refresh ended meanwhile, and the table is that one's"
        )
    state = {
        "format": FORMAT,
        "topic": topic,
        "topic_id": now.topic_id,
        "directory": name,
        "starts": {str(p): o for p, o in now.starts.items()},
        "offsets": {str(p): o for p, o in now.ends.items()},
        "refreshed_ms": began_ms,
        "leader_epochs": {str(tp.partition): epoch for tp, epoch in epochs.items()},
    }
    _put(store, json.dumps(state), name)
    store.remove(f"{name}/{BEGUN}")
    if before is not None:
        _remove_older(store, before["directory"])
    began = _start(None if whole else before, now)
    read = sum(end - began[p] for p, end in now.ends.items())
    return Refreshed(store.at(name), store.rows(name).count(), read, whole)


def saved(spark: SparkSession, path: str) -> DataFrame:
    """The table that the last :func:`refresh` left. Raises BadOption where there is none."""
    store = JobDirectory(spark, path)
    state = store.note(STATE, FORMAT, "directory", "a table")
    if state is None:
        raise BadOption(f"{path} has no table: {STATE} is not there; refresh it first")
    return store.rows(state["directory"])


def _state(store: JobDirectory, topic: str) -> dict[str, Any] | None:
    state = store.note(STATE, FORMAT, "directory", "a table")
    if state is None:
        return None
    try:
        state.setdefault("leader_epochs", {})  # the first notes had none
        for name in ("offsets", "starts", "leader_epochs"):
            _offsets(state, name)
        int(state["refreshed_ms"]), state["topic_id"]
        of = state["topic"]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        raise BadOption(f"{store.path}: {STATE} is damaged: {error}") from error
    if of != topic:
        raise BadOption(f"{store.path} is the table of {of}, not of {topic}")
    return state


def _offsets(state: Mapping[str, Any], name: str = "offsets") -> dict[int, int]:
    return {int(p): int(o) for p, o in state[name].items()}


def _start(before: Mapping[str, Any] | None, now: TopicBounds) -> dict[int, int]:
    """Where each partition is read from; one that is new since ``before`` from its beginning."""
    reached = {} if before is None else _offsets(before)
    return {p: max(reached.get(p, first), first) for p, first in now.starts.items()}


def _why_whole(before: Mapping[str, Any] | None, now: TopicBounds, at_ms: int) -> str | None:
    """Why what is new since ``before`` is not enough; None when it is."""
    if before is None:
        return "there was no table yet"
    reached = _offsets(before)
    if before["topic_id"] != now.topic_id:
        return "the topic was deleted and created again"
    if any(now.ends.get(p, -1) < offset for p, offset in reached.items()):
        return "the log ends before what was read: records were cut back"
    was = _offsets(before, "starts")
    if any(now.starts[p] > was[p] for p in was):  # the policy may be another one by now
        return "retention removed records since"
    policy = now.config.get("cleanup.policy", "delete")
    age_ms = at_ms - int(before["refreshed_ms"])
    keeps_ms = int(now.config.get("delete.retention.ms", 86_400_000))
    if "compact" in policy and not 0 <= age_ms < keeps_ms:
        return (
            f"the last refresh was {age_ms // 1000} s ago, and a tombstone is sure to be there "
            f"for delete.retention.ms only, which is {keeps_ms // 1000} s"
        )
    return None


def _newest(client: Client, tps: list[TopicPartition]) -> dict[TopicPartition, OffsetAt]:
    return client.list_offsets(dict.fromkeys(tps, LATEST))


def _cut_back(
    client: Client, before: Mapping[str, Any], epochs: Mapping[TopicPartition, int]
) -> bool:
    """Whether a log was cut below what was read and grew again: the epoch in which that was there
    ends before it. Asked where the leader has changed; without epochs nothing is known.
    """
    reached, known = _offsets(before), _offsets(before, "leader_epochs")
    wanted = {
        tp: known[tp.partition]
        for tp, epoch in epochs.items()
        if 0 <= known.get(tp.partition, epoch) != epoch
    }
    ends = client.epoch_ends(wanted) if wanted else {}
    return any(0 <= end < reached[tp.partition] for tp, end in ends.items())


def _write(
    spark: SparkSession,
    bootstrap: str | Bootstrap,
    store: JobDirectory,
    before: Mapping[str, Any] | None,
    now: TopicBounds,
    *,
    name: str,
) -> None:
    """Write the table to a directory of its own."""
    if before is None:
        rows = records(spark, bootstrap, now, until_caught_up=True)
    else:
        since = replace(now, starts=_start(before, now))
        new = records(spark, bootstrap, since, until_caught_up=True)
        old = store.rows(before["directory"])
        rows = old.select(*COLUMNS).unionByName(new.select(*COLUMNS))
    with store.removed_on_failure(name):
        store.claim(f"{name}/{BEGUN}")  # where it is gone, so is some of the table
        kept = latest(rows).filter("value is not null")
        kept.write.mode("append").parquet(store.at(name))


def _put(store: JobDirectory, state: str, name: str) -> None:
    """Replace the note that names the table; where that fails, directory ``name`` goes, unless it
    is the table by then.
    """
    try:
        store.replace(STATE, state)
    except BaseException:
        if store.read(STATE) != state:
            store.remove(name)
        raise


def _next(store: JobDirectory, before: Mapping[str, Any] | None) -> str:
    """A new directory's name, with a higher number than those that are there, or are named."""
    number = max([_reached(before), *_numbered(store).values()]) + 1
    return f"table-{number:06}-{uuid.uuid4().hex[:8]}"


def _reached(before: Mapping[str, Any] | None) -> int:
    return 0 if before is None else _number(before["directory"])


def _numbered(store: JobDirectory) -> dict[str, int]:
    """The directories of tables; whatever else is there is not ours."""
    return {name: number for name in store.names() if (number := _number(name))}


def _number(name: str) -> int:
    named = _NAMED.fullmatch(name)
    return 0 if named is None else int(named[1])


def _remove_unfinished(store: JobDirectory, before: Mapping[str, Any] | None) -> None:
    """Remove what refreshes after ``before`` left that were killed, but for the newest of them,
    which may be at work.
    """
    later = sorted((n, name) for name, n in _numbered(store).items() if n > _reached(before))
    for _, name in later[:-1]:
        store.remove(name)


def _remove_older(store: JobDirectory, before: str) -> None:
    """Leave the table that was replaced, which somebody may read, and what was begun after it: a
    refresh that ends at the same moment names its directory as the table.
    """
    for name, number in _numbered(store).items():
        if number <= _number(before) and name != before:
            store.remove(name)
