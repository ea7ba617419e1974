"""Finding faults among the records that replicas hold: frames in, one row a fault out.

:func:`held` makes one replica's records comparable; :func:`find` takes those of all replicas, and
perhaps of a reference (replica -1), and judges. What the kinds mean is said in
:mod:`kept.pipeline.audits`; nothing here reads a cluster.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kept.pipeline import survivors

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

    from kept.compaction.strategy import Rule

REFERENCE: Final = -1
"""Stands for the reference among the replicas."""
_WHERE: Final = ("topic", "partition", "offset", "key")


@dataclass(frozen=True, slots=True)
class Expected:
    """What is to be judged: partition -> nodes in sync, and the log start.

    ``covered`` are the offsets ``(first, end)`` that the reference is of, by partition.
    """

    nodes: Mapping[int, Sequence[int]]
    starts: Mapping[int, int]
    covered: Mapping[int, tuple[int, int]] | None = None


def held(rows: DataFrame, replica: int, rules: Sequence[Rule]) -> DataFrame:
    """The records that a replica holds: where, the key, and a digest of everything in them."""
    from pyspark.sql import functions as f

    def text(column: Column) -> Column:
        return f.coalesce(f.md5(column), f.lit("-"))

    headers = f.transform(
        "headers",
        lambda h: f.concat(
            f.hex(f.encode(h.getField("key"), "UTF-8")), f.lit(":"),
            f.coalesce(f.hex(h.getField("value")), f.lit("-")),
        ),
    )  # fmt: skip
    digest = f.md5(
        f.concat_ws(
            "|", text(f.col("key")), text(f.col("value")),
            f.unix_millis("timestamp").cast("string"),
            f.coalesce(f.concat_ws(",", headers), f.lit("")),
        ).cast("binary")
    )  # fmt: skip
    made = rows.withColumn("tombstone", f.col("value").isNull()).withColumn("digest", digest)
    made = survivors.with_version(made, rules).withColumn("replica", f.lit(replica))
    return made.select(*_WHERE, "tombstone", "version", "digest", "replica")


def find(
    records: DataFrame, rules: Sequence[Rule], expected: Expected, *, compacted: bool
) -> DataFrame:
    """The faults, a row each: kind, topic, partition, offset, key, replica, detail."""
    from pyspark.sql import functions as f

    starts = _map({p: f.lit(o) for p, o in expected.starts.items()})
    nodes = _map({p: f.array(*(f.lit(n) for n in ns)) for p, ns in expected.nodes.items()})
    there = records.filter(f.col("offset") >= starts[f.col("partition")])
    each = there.groupBy("topic", "partition", "offset").agg(
        f.max_by(f.struct("key", "tombstone", "version"), "replica").alias("one"),
        f.collect_set("replica").alias("holders"),
        f.count_distinct("digest").alias("digests"),
        f.sort_array(f.collect_set(f.struct("replica", "digest"))).alias("by_replica"),
    )
    each = each.select("topic", "partition", "offset", "one.*", "holders", "digests", "by_replica")
    each = each.withColumn("live", f.array_except("holders", f.array(f.lit(REFERENCE))))
    each = each.withColumn("absent", f.array_except(nodes[f.col("partition")], "holders"))
    each = each.withColumn("returned", _returned(expected))
    sound = each.filter(~f.col("returned"))
    if compacted:
        judged = survivors.surviving(sound, rules)
    else:
        judged = sound.withColumn("survives", f.lit(True))
    back = each.filter("returned").withColumn("survives", f.lit(False))
    judged = _winners(judged.unionByName(back))
    faults = [_divergent(each), _returns(judged), _missing(judged), *_outdated(judged)]
    made = faults[0]
    for one in faults[1:]:
        made = made.unionByName(one)
    return made


def _map(values: Mapping[int, Column]) -> Column:
    from pyspark.sql import functions as f

    return f.create_map(*(c for p, v in sorted(values.items()) for c in (f.lit(p), v)))


def _returned(expected: Expected) -> Column:
    """Whether a live record is at an offset that the reference is of, and has no record at."""
    from pyspark.sql import functions as f

    if expected.covered is None:
        return f.lit(False)
    first = _map({p: f.lit(a) for p, (a, _) in expected.covered.items()})[f.col("partition")]
    end = _map({p: f.lit(b) for p, (_, b) in expected.covered.items()})[f.col("partition")]
    within = (f.col("offset") >= first) & (f.col("offset") < end)
    return f.coalesce(within & ~f.array_contains("holders", REFERENCE), f.lit(False))


def _winners(judged: DataFrame) -> DataFrame:
    """``deleted``: the tombstone that is all that may be left of the key, and who has it;
    ``current``: where the newest value of the key is that must survive.
    """
    from pyspark.sql import functions as f
    from pyspark.sql.window import Window

    key = Window.partitionBy(*survivors.KEY)
    left = f.when(f.col("survives"), f.struct("offset", "tombstone", "holders"))
    alive = f.max(f.col("survives") & ~f.col("tombstone")).over(key)
    value = f.when(f.col("survives") & ~f.col("tombstone"), f.col("offset"))
    made = judged.withColumn("deleted", f.when(~alive, f.max(left).over(key)))
    return made.withColumn("current", f.max(value).over(key))


def _faults(rows: DataFrame, kind: str | Column, replica: Column, detail: Column) -> DataFrame:
    from pyspark.sql import functions as f

    return rows.select(
        f.lit(kind).alias("kind"), *_WHERE, replica.cast("int").alias("replica"),
        detail.alias("detail"),
    )  # fmt: skip


def _named(nodes: Column) -> Column:
    """``node 0, node 2`` or ``the reference``."""
    from pyspark.sql import functions as f

    def name(node: Column) -> Column:
        return f.when(node == REFERENCE, f.lit("the reference")).otherwise(
            f.concat(f.lit("node "), node.cast("string"))
        )

    return f.array_join(f.transform(f.sort_array(nodes), name), ", ")


def _divergent(each: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    shown = f.transform(
        "by_replica",
        lambda r: f.concat(
            _named(f.array(r.getField("replica"))), f.lit(" has "),
            f.substring(r.getField("digest"), 1, 8),
        ),
    )  # fmt: skip
    detail = f.concat(f.lit("different records: "), f.array_join(shown, ", "))
    return _faults(each.filter("digests > 1"), "divergent", f.lit(-1), detail)


def _returns(judged: DataFrame) -> DataFrame:
    """What the reference had no longer: merely left over where a newer value stands above it."""
    from pyspark.sql import functions as f

    rows = judged.filter("returned").withColumn("node", f.explode("live"))
    kind = f.when(f.col("current") > f.col("offset"), "superseded").otherwise("resurrected")
    detail = f.lit("the reference has no record there any more: it came back")
    return _faults(rows, kind, f.col("node"), detail)


def _missing(judged: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    rows = judged.filter("survives and not tombstone").withColumn("node", f.explode("absent"))
    detail = f.concat(f.lit("it must survive, and is on "), _named(f.col("holders")))
    return _faults(rows, "missing", f.col("node"), detail)


def _outdated(judged: DataFrame) -> list[DataFrame]:
    """Records that should be gone: alive where the key is deleted, or merely left over."""
    from pyspark.sql import functions as f

    every = judged.withColumn("node", f.explode("live"))
    newest = every.groupBy(*survivors.KEY, "node").agg(f.max("offset").alias("newest"))
    rows = every.filter("not survives and not returned").join(
        newest, [*survivors.KEY, "node"], "left"
    )
    alive = (
        ~f.col("tombstone")
        & f.col("deleted").isNotNull()
        & ~f.array_contains("deleted.holders", f.col("node"))
        & (f.col("newest") == f.col("offset"))
    )
    rows = rows.withColumn("alive", f.coalesce(alive, f.lit(False)))
    back = f.concat(
        f.lit("the newest of its key here; the tombstone at "),
        f.col("deleted.offset").cast("string"), f.lit(" is on "),
        _named(f.col("deleted.holders")),
    )  # fmt: skip
    left = f.concat(f.lit("compaction removed it on "), _named(f.col("absent")))
    return [
        _faults(rows.filter("alive"), "resurrected", f.col("node"), back),
        _faults(rows.filter("not alive and size(absent) > 0"), "superseded", f.col("node"), left),
    ]


def rows_of(faults: DataFrame, most: int) -> list[Any]:
    """The first faults, in the order of the log."""
    found: list[Any] = (
        faults.orderBy("partition", "offset", "kind", "replica").limit(most).collect()
    )
    return found
