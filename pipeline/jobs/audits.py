"""An independent audit of compaction: what must survive, against what each replica holds.

Spark reads every replica that is in sync from its own node (KIP-392), and recomputes with its own
implementation of the topic's strategy (:mod:`kept.pipeline.jobs.survivors`), from all records that
any of them or the reference holds, what must be there. Findings, each with its offset:

missing     a record that must survive is not on a replica
resurrected a key that is deleted has its old value as newest record on a replica; or, against a
            reference, a record came back that the reference had no longer
superseded  a replica still has a record that compaction removed from another one
divergent   the same offset holds different records

A **reference** is an export taken earlier. Without one some faults leave no trace in the records:
:data:`BLIND` says which, and every result repeats it. One that is older than delete.retention.ms
knows records whose tombstone may have come and gone since: that nothing is left of their key is no
fault then (:data:`TOO_OLD`).

A log in use moves while it is read: compaction removes on one replica what was read on another.
So whatever is found is looked for again, with new ends, and only what stays is reported. What looks
superseded is looked for until patience is over: a replica in sync may not have come yet to applying
what the leader removed. A look that fails because the topic moved under it (retention, a node that
went) is made again too.

Where replicas are cleaned each by itself, as in Apache Kafka, ``superseded`` is no fault.

A strategy that is not built in is run as it is, over what is there: every replica is judged by it,
the strategy by nothing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

from kept.compaction.strategy import rules
from kept.pipeline.connection import BadOption
from kept.pipeline.jobs import survivors
from kept.pipeline.jobs.audit_faults import NEWER, REFERENCE, Expected, find, held, overtaken
from kept.pipeline.jobs.exports import Export, load
from kept.pipeline.session import TopicBounds, bounds_of, connect, records, register

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from kept.client.bootstrap import Bootstrap
    from kept.client.client import Client

_Seen = TypeVar("_Seen")

KINDS: Final = ("missing", "resurrected", "superseded", "divergent")
MOST: Final = 10_000
"""Findings that are brought to the driver; more are counted."""
BLIND: Final = (
    "a record that every replica lost, without a newer one of its key",
    "a deleted key that came back on every replica, its tombstone gone everywhere",
    "whether a key that is on some replicas only, and has no other record anywhere, was lost where "
    "it is not or came back where it is: it is reported as missing",
    "a record that was changed in the same way on every replica",
    "a superseded record that is on every replica: compaction may not have come to it yet",
)
"""What cannot be seen without a reference."""
STILL_BLIND: Final = (
    "what the reference itself had lost when it was taken",
    "in records that are newer than the reference: what cannot be seen without one",
)
"""What cannot be seen with one."""
TOO_OLD: Final = (
    "a record that every replica lost, with all that is older of its key: the reference is older "
    "than delete.retention.ms, the key may have been deleted since"
)
"""What cannot be seen, either, with a reference of that age."""
NEVER_SEEN: Final = (
    "what was written after it had begun, and what is superseded by that",
    "a tombstone that was removed before delete.retention.ms was over, where nothing older of its "
    "key is left",
    "replicas that are not in sync: they are not read",
)
OWN: Final = "whether the strategy {} is right: Spark runs it as it is, it has no other one of it"
"""Of a strategy that is not built in."""
DAY_MS: Final = 86_400_000
"""Kafka's default of delete.retention.ms."""
PAUSE_S: Final = 1.0
"""Between a look that failed and the next."""
_SAME: Final = ("partition", "offset", "kind", "replica")
"""What makes a fault the same in two looks."""
_OF_THE_CLUSTER: Final = re.compile(r"\bkept\.(?:client|storage\.errors|pipeline\.options)\.\w")
"""In errors of Spark's: it was our reading of the topic that failed."""


class Finding(NamedTuple):
    """One fault. ``replica`` -1 where it is about all of them; ``detail`` says against what."""

    kind: str
    topic: str
    partition: int
    offset: int
    key: bytes | None
    replica: int
    detail: str


@dataclass(slots=True)
class Audit:
    """What an audit found: ``findings`` are the first of ``total``; ``blind`` is what it cannot
    see. ``absent`` are replicas that are not in sync, by partition.
    """

    topic: str
    replicas: Sequence[int]
    absent: Mapping[int, tuple[int, ...]]
    records: int
    findings: list[Finding]
    total: int
    looks: int = 1
    reference: str | None = None
    blind: tuple[str, ...] = field(default=())

    @property
    def clean(self) -> bool:
        """Whether nothing was found."""
        return not self.total

    def counts(self) -> dict[str, int]:
        """Kind -> how many findings are listed."""
        by_kind = dict.fromkeys(KINDS, 0)
        for finding in self.findings:
            by_kind[finding.kind] += 1
        return by_kind


def audit(
    spark: SparkSession,
    bootstrap: str | Bootstrap,
    topic: str,
    *,
    reference: str | None = None,
    patience_s: float = 30.0,
) -> Audit:
    """Audit a topic. What is found is looked for again: once at least, then until a look changes
    nothing or ``patience_s`` is over.
    """
    register(spark)
    given = None if reference is None else load(spark, reference)
    end = time.monotonic() + patience_s

    def compare(known: DataFrame | None = None) -> tuple[Audit, DataFrame]:
        return _steady(lambda: _compare(spark, bootstrap, topic, given, known), end)

    comparison, faults = compare()
    try:
        while comparison.total:
            again, left = compare(faults)
            faults.unpersist()
            again.looks = comparison.looks + 1
            same, comparison, faults = again.total == comparison.total, again, left
            lagging = any(finding.kind == "superseded" for finding in comparison.findings)
            if (same and not lagging) or time.monotonic() >= end:
                break
    finally:
        faults.unpersist()
    comparison.reference = reference
    return comparison


def _steady(compare: Callable[[], _Seen], end: float) -> _Seen:
    """A look that came to its end: one that the topic moved under is made again until ``end``."""
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException

    while True:
        try:
            return compare()
        except (PySparkException, Py4JError) as error:
            if time.monotonic() >= end or not _OF_THE_CLUSTER.search(str(error)):
                raise
            time.sleep(PAUSE_S)


def _compare(
    spark: SparkSession,
    bootstrap: str | Bootstrap,
    topic: str,
    reference: tuple[Export, DataFrame] | None,
    known: DataFrame | None,
) -> tuple[Audit, DataFrame]:
    """Read everything once and judge it: what was found, of what is ``known`` if that is given, and
    the same as a frame, which is cached.
    """
    with connect(bootstrap) as client:
        bounds = bounds_of(client, topic)
        in_sync, absent = _replicas(client, topic)
    strategy = survivors.strategy_of(bounds.config)
    nodes = sorted({node for several in in_sync.values() for node in several})
    parts = []
    for node in nodes:
        there = [p for p, several in in_sync.items() if node in several]
        rows = records(spark, bootstrap, _only(bounds, there), replica=node)
        parts.append(held(rows, node, strategy))
    covered = None
    if reference is not None:
        export, rows = reference
        covered = _covered(export, bounds)
        parts.append(held(rows, REFERENCE, strategy))
    every = reduce(lambda a, b: a.unionByName(b), parts).cache()
    expected = Expected(in_sync, bounds.starts, covered)
    compacted = "compact" in bounds.config.get("cleanup.policy", "delete")
    faults = find(every, strategy, expected, compacted=compacted)
    if known is not None:
        faults = faults.join(known.select(*_SAME), [*_SAME], "left_semi")
    faults = faults.cache()
    try:
        blind = BLIND
        if reference is not None:
            faults.count()  # reads it all
            too_old = compacted and _too_old(reference[0], bounds)
            blind = (*STILL_BLIND, *((TOO_OLD,) if too_old else ()))
            if compacted and not faults.filter("lone").isEmpty():
                newer = held(_written_since(spark, bootstrap, bounds), NEWER, strategy)
                left = overtaken(faults, every, newer, strategy, expected)
                faults = _instead(faults, left.filter("not forgotten") if too_old else left)
        total = faults.count()
        listed = [_finding(row) for row in faults.orderBy(*_SAME).limit(MOST).collect()]
        made = Audit(topic, nodes, absent, every.count(), listed, total)
        own = () if rules(strategy) is not None else (OWN.format(type(strategy).__name__),)
        made.blind = (*own, *blind, *NEVER_SEEN)
    except BaseException:
        faults.unpersist()
        raise
    finally:
        every.unpersist()
    return made, faults


def _instead(cached: DataFrame, other: DataFrame) -> DataFrame:
    """The other frame, cached in place of the one that it is made of."""
    other = other.cache()
    other.count()
    cached.unpersist()
    return other


def _too_old(export: Export, bounds: TopicBounds) -> bool:
    """Whether a tombstone written after the export may be gone by now."""
    kept_ms = min(
        int(config.get("delete.retention.ms", DAY_MS)) for config in (export.config, bounds.config)
    )
    return time.time_ns() // 1_000_000 - export.taken_ms >= kept_ms


def _written_since(
    spark: SparkSession, bootstrap: str | Bootstrap, bounds: TopicBounds
) -> DataFrame:
    """What the leaders have from the ends on that were noted."""
    with connect(bootstrap) as client:
        now = bounds_of(client, bounds.topic)
    partitions = sorted(bounds.ends.keys() & now.ends.keys())
    begun = {p: max(now.starts[p], min(bounds.ends[p], now.ends[p])) for p in partitions}
    ends = {p: now.ends[p] for p in partitions}
    since = TopicBounds(now.topic, now.topic_id, begun, ends, now.config)
    return records(spark, bootstrap, since, until_caught_up=True)


def _finding(row: Any) -> Finding:
    key = None if row.key is None else bytes(row.key)
    return Finding(row.kind, row.topic, row.partition, row.offset, key, row.replica, row.detail)


def _replicas(
    client: Client, topic: str
) -> tuple[dict[int, tuple[int, ...]], dict[int, tuple[int, ...]]]:
    """Partition -> the replicas in sync, and those that are not."""
    partitions = client.metadata([topic]).topics[topic].partitions
    in_sync = {p: tuple(sorted(view.isr)) for p, view in partitions.items()}
    absent = {
        p: tuple(sorted(set(view.replicas) - set(view.isr)))
        for p, view in partitions.items()
        if set(view.replicas) - set(view.isr)
    }
    return in_sync, absent


def _only(bounds: TopicBounds, partitions: Sequence[int]) -> TopicBounds:
    return TopicBounds(
        bounds.topic,
        bounds.topic_id,
        {p: bounds.starts[p] for p in partitions},
        {p: bounds.ends[p] for p in partitions},
        bounds.config,
    )


def _covered(export: Export, bounds: TopicBounds) -> dict[int, tuple[int, int]]:
    """The offsets that a reference is of. Raises BadOption for one that cannot serve."""
    if (export.topic, export.topic_id) != (bounds.topic, bounds.topic_id):
        raise BadOption(
            f"reference: {export.path} is of {export.topic} with id {export.topic_id}, the topic "
            f"{bounds.topic} has id {bounds.topic_id}"
        )
    if export.compacted_to is not None:
        raise BadOption(f"reference: {export.path} was compacted: give the export itself")
    nothing = dict.fromkeys(bounds.ends, (0, 0))
    return nothing | {p: (first, export.ends[p]) for p, first in export.starts.items()}
