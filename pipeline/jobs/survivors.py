"""What must survive compaction, computed by Spark from the records alone.

The built-in strategies (:class:`kept.compaction.strategy.Rule`) as window functions over the
records of each key: an implementation of its own, which shares no code with the cleaner's kernel.
A strategy that is not built in runs as it is, key by key (:func:`by_itself`).

Frames here have ``topic, partition, offset, key``, ``tombstone`` (boolean) and ``version`` (from
:func:`with_version`); what else they have is left alone.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kept.compaction.strategy import (
    MAX_VERSION_DIGITS,
    From,
    Rule,
    RuleKind,
    Strategy,
    StrategyFailed,
    Verdict,
    resolve,
    rules,
)
from kept.pipeline.lazy_imports import f, pa
from kept.storage.errors import InvalidConfig, KeptError
from kept.storage.records import Record
from kept.storage.types import LogConfig, TopicPartition

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

KEY: Final = ("topic", "partition", "key")


def strategy_of(config: Mapping[str, str]) -> Strategy:
    """The strategy that a topic's settings name. Raises InvalidConfig for one that is not here, or
    cannot be made.
    """
    name = config.get("kept.compaction.strategy", "latest")
    try:
        return resolve(LogConfig(compaction_strategy=name, raw=dict(config)))
    except KeptError:
        raise
    except Exception as error:
        raise InvalidConfig(
            f"compaction strategy {name!r} cannot be made: {type(error).__name__}: {error}"
        ) from error


def with_version(rows: DataFrame, known: Sequence[Rule]) -> DataFrame:
    """The rows with ``version``: a string that orders the records of a key as their rule does."""
    column: Column = f.lit(None).cast("string")
    for rule in reversed(known):
        version = f.lit("")
        if rule.kind is RuleKind.TIMESTAMP:
            version = _sortable(f.unix_millis("timestamp").cast("decimal(38,0)"))
        elif rule.kind is RuleKind.VERSION:
            version = _header_version(rule.header.decode())
        column = f.when(_has_prefix(rule.prefix), version).otherwise(column)
    return rows.withColumn("version", column)


def surviving(rows: DataFrame, known: Sequence[Rule]) -> DataFrame:
    """The rows with ``survives``: whether the record is what its rule keeps of its key. Expired
    tombstones are among them; a record without a key never survives.
    """
    from pyspark.sql.window import Window

    key = Window.partitionBy(*KEY)
    newest = key.orderBy(f.col("offset").desc())
    newer = newest.rowsBetween(Window.unboundedPreceding, -1)
    best = key.orderBy(f.col("version").desc(), f.col("offset").desc())
    kinds = {rule.kind for rule in known}
    made = rows
    if kinds & {RuleKind.LATEST, RuleKind.LATEST_N}:
        made = made.withColumn("_rank", f.row_number().over(newest))
    if RuleKind.LATEST_N in kinds:
        counted = f.sum(f.col("tombstone").cast("int")).over(newer)
        made = made.withColumn("_deleted", f.coalesce(counted, f.lit(0)) > 0)
    if kinds & {RuleKind.TIMESTAMP, RuleKind.VERSION}:
        made = made.withColumn("_best", f.row_number().over(best) == 1)
    verdict = f.lit(False)
    for rule in reversed(known):
        if rule.kind is RuleKind.LATEST:
            kept = f.col("_rank") == 1
        elif rule.kind is RuleKind.LATEST_N:
            kept = (f.col("_rank") <= rule.n) & ~f.col("_deleted")
        else:
            kept = f.col("_best")
        verdict = f.when(_has_prefix(rule.prefix), kept).otherwise(verdict)
    verdict = f.coalesce(verdict & f.col("key").isNotNull(), f.lit(False))
    return made.withColumn("survives", verdict).drop("_rank", "_deleted", "_best")


def judged(rows: DataFrame, strategy: Strategy) -> DataFrame:
    """The rows with ``survives``, by any strategy: a built-in one as Spark computes it, another one
    by itself; for that, ``rows`` have ``value``, ``headers`` and ``timestamp`` as well.
    """
    known = rules(strategy)
    return by_itself(rows, strategy) if known is None else surviving(rows, known)


def _has_prefix(prefix: bytes) -> Column:
    if not prefix:
        return f.lit(True)
    return f.substring("key", 1, len(prefix)) == f.lit(bytearray(prefix))


def _sortable(number: Column) -> Column:
    """A whole number as a string of the same order, after the empty one: 40 digits and a sign."""
    lifted = (number + f.lit(str(2**63)).cast("decimal(20,0)")).cast("decimal(38,0)").cast("string")
    digits = number.cast("decimal(38,0)").cast("string")
    negative = f.concat(f.lit("0"), f.lpad(lifted, 40, "0"))
    return f.when(number < 0, negative).otherwise(f.concat(f.lit("1"), f.lpad(digits, 40, "0")))


def _header_version(name: str) -> Column:
    """Decimal digits, or a big-endian integer of 4 or 8 bytes, in the last header of that name."""
    named = f.filter("headers", lambda header: header.getField("key") == name)
    value = f.try_element_at(named, f.lit(-1)).getField("value")
    size = f.length(value)
    text = f.decode(f.when(f.hex(value).rlike("^(3[0-9])+$"), value), "US-ASCII")
    digits = f.concat(f.lit("1"), f.lpad(text, MAX_VERSION_DIGITS, "0"))
    raw = f.conv(f.hex(f.when(size.isin(4, 8), value)), 16, 10).cast("decimal(20,0)")
    half = f.when(size == 4, f.lit(2**31)).otherwise(f.lit(str(2**63)).cast("decimal(20,0)"))
    whole = f.when(size == 4, f.lit(2**32)).otherwise(f.lit(str(2**64)).cast("decimal(20,0)"))
    signed = f.when(raw >= half, raw - whole).otherwise(raw)
    number = f.when(text.isNotNull(), f.when(size <= MAX_VERSION_DIGITS, digits)).otherwise(
        _sortable(signed.cast("decimal(38,0)"))
    )
    return f.coalesce(number, f.lit(""))


# Strategies that are not built in.


def by_itself(rows: DataFrame, strategy: Strategy) -> DataFrame:
    """The rows with ``survives``, by any strategy, each key's history given to it by itself.

    ``rows`` have the columns of a read with headers. A key's records are held in memory at once.
    Where the strategy fails, or keeps no record of a key, the job does, with StrategyFailed: the
    cleaner would leave the topic as it is. Raises InvalidConfig for one that cannot be pickled.
    """
    from pyspark.sql.types import BinaryType, BooleanType, StructField, StructType

    sent = _send(strategy)
    subject = StructType([*rows.schema.fields, StructField("_subject", BinaryType())])
    told = StructType([*subject.fields, StructField("survives", BooleanType(), nullable=False)])
    order = ["topic", "partition", "_subject", "offset"]
    named = rows.mapInArrow(_subjects(sent), subject)
    grouped = named.repartition("topic", "partition", "_subject").sortWithinPartitions(*order)
    return grouped.mapInArrow(_judgements(sent), told).drop("_subject")


@dataclass(frozen=True, slots=True)
class _Sent:
    """A strategy on its way to the executors: taken out there, so that what fails has a reason."""

    name: str
    pickled: bytes

    def received(self) -> Strategy:
        """The strategy. Raises InvalidConfig where its module is missing."""
        try:
            strategy: Strategy = pickle.loads(self.pickled)
        except Exception as error:
            raise InvalidConfig(
                f"the strategy {self.name} is not where Spark's executors run, install it there "
                f"too: {type(error).__name__}: {error}"
            ) from error
        return strategy


def _send(strategy: Strategy) -> _Sent:
    from pyspark import cloudpickle

    name = type(strategy).__name__
    try:
        return _Sent(name, cloudpickle.dumps(strategy))
    except Exception as error:
        raise InvalidConfig(
            f"the strategy {name} cannot be sent to Spark's executors: "
            f"{type(error).__name__}: {error}"
        ) from error


def _subjects(sent: _Sent) -> Any:
    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        strategy = sent.received()
        for batch in batches:
            values: list[bytes | None] = []
            at = -1
            try:
                for record in record_objects(batch):
                    at = record.offset
                    values.append(None if record.key is None else strategy.key(record))
                    if values[-1] is None and record.key is not None:
                        raise TypeError("its key of that record is None")
                subjects = pa.array(values, pa.binary())
            except Exception as error:
                raise _failed(strategy, batch, error, at) from error
            yield batch.append_column("_subject", subjects)

    return run


def _failed(
    strategy: Strategy, rows: pa.RecordBatch, error: Exception, offset: int
) -> StrategyFailed:
    """What a strategy raised, or what is raised by what it said, as an error of ours."""
    return StrategyFailed(
        f"the strategy {type(strategy).__name__} failed at {_where(rows)}, offset {offset}: "
        f"{type(error).__name__}: {error}"
    )


def _where(rows: pa.RecordBatch) -> TopicPartition:
    return TopicPartition(*(rows.column(name)[0].as_py() for name in ("topic", "partition")))


def _judgements(sent: _Sent) -> Any:
    def run(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        strategy = sent.received()
        open_key: tuple[Any, ...] | None = None
        history: list[pa.RecordBatch] = []
        for batch in batches:
            for key, part in _runs(batch):
                if key != open_key and history:
                    yield from _flagged_history(strategy, history)
                    history = []
                open_key = key
                if key[-1] is None:  # records without a key
                    yield _flagged(part, set())
                else:
                    history.append(part)
        if history:
            yield from _flagged_history(strategy, history)

    return run


def _runs(batch: pa.RecordBatch) -> Iterator[tuple[tuple[Any, ...], pa.RecordBatch]]:
    """Stretches of rows of one key of one partition."""
    names = ("topic", "partition", "_subject")
    keys = list(zip(*(batch.column(n).to_pylist() for n in names), strict=True))
    start = 0
    for at in range(1, len(keys) + 1):
        if at == len(keys) or keys[at] != keys[start]:
            yield keys[start], batch.slice(start, at - start)
            start = at


def _flagged_history(strategy: Strategy, history: list[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """The rows of one key, and which of them the strategy keeps."""
    decoded = [record for part in history for record in record_objects(part)]
    tombstones = {record.offset for record in decoded if record.value is None}
    subject, at = history[0].column("_subject")[0].as_py(), decoded[0].offset
    try:
        state = strategy.init(1)
        for record in decoded:
            at = record.offset
            strategy.reduce(state, subject, record)
        verdicts = strategy.collect(state)
        kept = _kept(verdicts[subject], decoded, tombstones) if subject in verdicts else set()
    except Exception as error:
        raise _failed(strategy, history[0], error, at) from error
    if not kept:
        raise StrategyFailed(
            f"the strategy {type(strategy).__name__} keeps no record of key {subject!r}, whose "
            f"newest is at {_where(history[0])}, offset {at}: of every key one must stay"
        )
    for part in history:
        yield _flagged(part, kept)


def _flagged(part: pa.RecordBatch, kept: set[int]) -> pa.RecordBatch:
    told = [offset in kept for offset in part.column("offset").to_pylist()]
    return part.append_column("survives", pa.array(told, pa.bool_()))


def _kept(verdict: Verdict, found: Sequence[Record], tombstones: set[int]) -> set[int]:
    """The offsets that stay (rule 4a: a winning tombstone stands alone)."""
    offsets = {record.offset for record in found}
    if isinstance(verdict, From):
        stay = {offset for offset in offsets if offset >= verdict.offset}
    else:
        stay = offsets.intersection(verdict.offsets)
    winner = max(stay, default=-1)
    return {winner} if winner in tombstones else stay


def record_objects(batch: pa.RecordBatch) -> Iterator[Record]:
    """Rows as strategies take them."""
    columns = [batch.column(n).to_pylist() for n in ("offset", "key", "value", "headers")]
    stamps = batch.column("timestamp").cast(pa.int64()).to_pylist()
    for offset, key, value, headers, micros in zip(*columns, stamps, strict=True):
        pairs = tuple((header["key"], header["value"]) for header in headers or ())
        yield Record(offset, micros // 1000, key, value, pairs)
