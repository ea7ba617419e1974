"""Finding faults among the records that replicas hold: frames in, one row a fault out.

:func:`held` makes one replica's records comparable; :func:`find` takes those of all replicas, and
perhaps of a reference (replica -1), and judges. What the kinds mean is said in
:mod:`kept.pipeline.jobs.audits`; nothing here reads a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from kept.compaction.strategy import rules
from kept.pipeline.jobs import survivors
from kept.pipeline.lazy_imports import f

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from kept.compaction.strategy import Strategy

REFERENCE: Final = -1
"""Stands for the reference among the replicas."""
NEWER: Final = -2
"""Stands for what was written while the replicas were read."""
_WHERE: Final = ("topic", "partition", "offset", "key")


@dataclass(frozen=True, slots=True)
class Expected:
    """What is to be judged: partition -> nodes in sync, and the log start.

    ``covered`` are the offsets ``(first, end)`` that the reference is of, by partition.
    """

    nodes: Mapping[int, Sequence[int]]
    starts: Mapping[int, int]
    covered: Mapping[int, tuple[int, int]] | None = None


def held(rows: DataFrame, replica: int, strategy: Strategy) -> DataFrame:
    """The records that a replica holds: where, the key, a digest of everything in them, and what
    the strategy goes by.
    """

    def text(column: Column) -> Column:
        return f.coalesce(f.md5(column), f.lit("-"))

    headers = f.transform(
        "headers",
        lambda h: f.concat(
            f.hex(f.encode(h.getField("key"), "UTF-8")),
            f.lit(":"),
            f.coalesce(f.hex(h.getField("value")), f.lit("-")),
        ),
    )
    digest = f.md5(
        f.concat_ws(
            "|",
            text(f.col("key")),
            text(f.col("value")),
            f.unix_millis("timestamp").cast("string"),
            f.coalesce(f.concat_ws(",", headers), f.lit("")),
        ).cast("binary")
    )
    made = rows.withColumn("tombstone", f.col("value").isNull()).withColumn("digest", digest)
    made = made.withColumn("replica", f.lit(replica))
    known = rules(strategy)
    if known is not None:
        made = survivors.with_version(made, known)
    return made.select(*_WHERE, "tombstone", *_goes_by(strategy), "digest", "replica")


def _goes_by(strategy: Strategy) -> tuple[str, ...]:
    """The columns that a strategy needs: one that is not built in takes whole records."""
    return ("value", "headers", "timestamp") if rules(strategy) is None else ("version",)


def find(
    records: DataFrame, strategy: Strategy, expected: Expected, *, compacted: bool
) -> DataFrame:
    """The faults, a row each: kind, topic, partition, offset, key, replica, detail; and ``lone``:
    only the reference has the record, ``forgotten``: nor is an older one of its key on a replica.

    One pass: the records of an offset come together, then those of a key, and then each offset says
    what is wrong with it.
    """
    each = _each(records, strategy, expected).withColumn("later", _later(expected))
    if compacted:
        # What came back counts for nothing, so it is judged apart.
        judged = survivors.judged(each.filter("not returned"), strategy)
    else:
        judged = each.filter("not returned").withColumn("survives", f.lit(True))
    again = each.filter("returned").withColumn("survives", f.lit(False))
    judged = judged.unionByName(again)
    findings = f.concat(_divergent(), _returns(), _missing(compacted), _outdated())
    winners = _winners(judged) if compacted else _no_winners(judged)
    told = winners.select(*_WHERE, "lone", "forgotten", f.explode(findings).alias("fault"))
    lone = (f.col("fault.kind") == "missing") & f.col("lone")
    return told.select(
        "fault.kind",
        *_WHERE,
        "fault.replica",
        "fault.detail",
        lone.alias("lone"),
        (lone & f.col("forgotten")).alias("forgotten"),
    )


def overtaken(
    faults: DataFrame, records: DataFrame, newer: DataFrame, strategy: Strategy, expected: Expected
) -> DataFrame:
    """The faults without those ``lone`` ones whose record need not survive any more, by what is
    ``newer`` than all that was read of the replicas.

    A key that is written all the time may be on no replica below the end that was noted: what was
    there then is superseded, and compacted away, before it is read.
    """
    there = _each(records, strategy, expected).filter("not returned")
    named = (*_WHERE, "tombstone", *_goes_by(strategy))
    judged = survivors.judged(there.select(*named).unionByName(newer.select(*named)), strategy)
    left = judged.filter("survives").select("partition", "offset")
    lone = faults.filter("lone").join(left, ["partition", "offset"], "left_semi")
    return faults.filter("not lone").unionByName(lone)


def _each(records: DataFrame, strategy: Strategy, expected: Expected) -> DataFrame:
    """A row for every offset: the record there, who holds it, and who should and does not."""
    starts = _map({p: f.lit(o) for p, o in expected.starts.items()})
    nodes = _map({p: f.array(*(f.lit(n) for n in ns)) for p, ns in expected.nodes.items()})
    there = records.filter(f.col("offset") >= starts[f.col("partition")])
    each = there.groupBy("topic", "partition", "offset").agg(
        f.max_by(f.struct("key", "tombstone", *_goes_by(strategy)), "replica").alias("one"),
        f.collect_set("replica").alias("holders"),
        f.sort_array(f.collect_set(f.struct("replica", "digest"))).alias("digests"),
    )
    each = each.select("topic", "partition", "offset", "one.*", "holders", "digests")
    each = each.withColumn("live", f.array_except("holders", f.array(f.lit(REFERENCE))))
    each = each.withColumn("absent", f.array_except(nodes[f.col("partition")], "holders"))
    each = each.withColumn("lone", f.size("live") == 0)
    return each.withColumn("returned", _returned(expected))


def _map(values: Mapping[int, Column]) -> Column:
    return f.create_map(*(c for p, v in sorted(values.items()) for c in (f.lit(p), v)))


def _returned(expected: Expected) -> Column:
    """Whether a live record is at an offset that the reference is of, and has no record at."""
    if expected.covered is None:
        return f.lit(False)
    first = _map({p: f.lit(a) for p, (a, _) in expected.covered.items()})[f.col("partition")]
    end = _map({p: f.lit(b) for p, (_, b) in expected.covered.items()})[f.col("partition")]
    within = (f.col("offset") >= first) & (f.col("offset") < end)
    return f.coalesce(within & ~f.array_contains("holders", REFERENCE), f.lit(False))


def _later(expected: Expected) -> Column:
    """Whether an offset is after what the reference is of. A tombstone that the reference alone has
    says nothing of it: it had expired, perhaps, before a record of a lower version was written.
    """
    if expected.covered is None:
        return f.lit(False)
    end = _map({p: f.lit(b) for p, (_, b) in expected.covered.items()})[f.col("partition")]
    return f.coalesce(f.col("offset") >= end, f.lit(True))


def _winners(judged: DataFrame) -> DataFrame:
    """What is known of each record's key: ``deleted``, the tombstone that is all that may be left
    of it, and who has that; ``current``, where its newest value is that must survive;
    ``newest_on``, the replicas on which this record is the newest of its key; ``forgotten``,
    whether no replica has one that is as old.
    """
    from pyspark.sql.window import Window

    key = Window.partitionBy(*survivors.KEY)
    newer = key.orderBy(f.col("offset").desc()).rowsBetween(Window.unboundedPreceding, -1)
    left = f.when(f.col("survives"), f.struct("offset", "tombstone", "holders"))
    alive = f.max(f.col("survives") & ~f.col("tombstone")).over(key)
    value = f.when(f.col("survives") & ~f.col("tombstone"), f.col("offset"))
    above = f.flatten(f.collect_set("live").over(newer))
    oldest = f.min(f.when(~f.col("lone"), f.col("offset"))).over(key)
    return (
        judged.withColumn("deleted", f.when(~alive, f.max(left).over(key)))
        .withColumn("current", f.max(value).over(key))
        .withColumn("newest_on", f.array_except("live", above))
        .withColumn("forgotten", f.coalesce(oldest > f.col("offset"), f.lit(True)))
    )


def _no_winners(judged: DataFrame) -> DataFrame:
    """The same columns where a topic is not compacted: no record stands for another one there, and
    the records without a key, perhaps all, need not come together.
    """
    nothing = f.lit(None)
    return (
        judged.withColumn("deleted", nothing.cast("struct<offset:bigint,holders:array<int>>"))
        .withColumn("current", nothing.cast("bigint"))
        .withColumn("newest_on", f.array().cast("array<int>"))
        .withColumn("forgotten", f.lit(False))
    )


def _fault(kind: str | Column, replica: Column, detail: Column) -> Column:
    named = f.lit(kind) if isinstance(kind, str) else kind
    return f.struct(
        named.alias("kind"), replica.cast("int").alias("replica"), detail.alias("detail")
    )


def _only_if(condition: Column, faults: Column) -> Column:
    """The faults, or an empty list of them."""
    return f.filter(faults, lambda _: f.coalesce(condition, f.lit(False)))


def _named(nodes: Column) -> Column:
    """``node 0, node 2`` or ``the reference``."""

    def name(node: Column) -> Column:
        return f.when(node == REFERENCE, f.lit("the reference")).otherwise(
            f.concat(f.lit("node "), node.cast("string"))
        )

    return f.array_join(f.transform(f.sort_array(nodes), name), ", ")


def _divergent() -> Column:
    shown = f.transform(
        "digests",
        lambda r: f.concat(
            _named(f.array(r.getField("replica"))),
            f.lit(" has "),
            f.substring(r.getField("digest"), 1, 8),
        ),
    )
    detail = f.concat(f.lit("different records: "), f.array_join(shown, ", "))
    kinds = f.array_distinct(f.transform("digests", lambda r: r.getField("digest")))
    return _only_if(f.size(kinds) > 1, f.array(_fault("divergent", f.lit(-1), detail)))


def _returns() -> Column:
    """What the reference had no longer: merely left over where a newer value stands above it."""
    kind = f.when(f.col("current") > f.col("offset"), "superseded").otherwise("resurrected")
    detail = f.lit("the reference has no record there any more: it came back")
    faults = f.transform("live", lambda node: _fault(kind, node, detail))
    return _only_if(f.col("returned"), faults)


def _missing(compacted: bool) -> Column:
    """Where a topic is compacted, tombstones expire, on one replica before another."""
    detail = f.concat(f.lit("it must survive, and is on "), _named(f.col("holders")))
    faults = f.transform("absent", lambda node: _fault("missing", node, detail))
    stays = ~f.col("tombstone") if compacted else f.lit(True)
    return _only_if(f.col("survives") & stays, faults)


def _outdated() -> Column:
    """Records that should be gone: alive where the key is deleted, or merely left over."""
    back = f.concat(
        f.lit("the newest of its key here; the tombstone at "),
        f.col("deleted.offset").cast("string"),
        f.lit(" is on "),
        _named(f.col("deleted.holders")),
    )
    left = f.concat(f.lit("compaction removed it on "), _named(f.col("absent")))

    def alive(node: Column) -> Column:
        told = (
            ~f.col("tombstone")
            & f.col("deleted").isNotNull()
            & ~f.array_contains("deleted.holders", node)
            & ~(f.col("later") & (f.array_max("deleted.holders") == REFERENCE))
            & f.array_contains("newest_on", node)
        )
        return f.coalesce(told, f.lit(False))

    def fault(node: Column) -> Column:
        return _fault(
            f.when(alive(node), "resurrected").otherwise("superseded"),
            node,
            f.when(alive(node), back).otherwise(left),
        )

    told = f.filter("live", lambda node: alive(node) | (f.size("absent") > 0))
    outdated = ~f.col("survives") & ~f.col("returned")
    return _only_if(outdated, f.transform(told, fault))
