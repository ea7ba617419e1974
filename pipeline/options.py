"""The options of the data source: names, meaning and defaults of Spark's Kafka connector.

An option that is unknown, malformed, out of place or contradicts another one is refused before
anything runs. Kafka's own client properties come as ``kafka.…``; those that have no meaning here
(:data:`WITHOUT_EFFECT`) are accepted, so that a job moves by changing the format's name, and
nothing else of theirs is.
"""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from kept.client.consume.positions import EARLIEST, LATEST
from kept.client.core.metadata import parse_bootstrap
from kept.pipeline.connection import COMMAND_CONFIG, SECURITY, BadOption, Connection, security_of
from kept.storage.errors import InvariantViolation
from kept.storage.types import MAX_INT32, MAX_INT64, Codec, IsolationLevel, TopicPartition

_T = TypeVar("_T")

WITHOUT_EFFECT: Final = frozenset(
    name.lower()
    for name in (
        "groupIdPrefix",
        "kafka.group.id",
        "kafka.receive.buffer.bytes",
        "kafka.send.buffer.bytes",
        "kafka.max.poll.records",
        "kafka.session.timeout.ms",
        "kafka.heartbeat.interval.ms",
        "kafka.enable.auto.commit",
        "kafka.linger.ms",
        "kafka.buffer.memory",
        "kafka.retries",
        "kafka.retry.backoff.ms",
        "kafka.max.in.flight.requests.per.connection",
        "kafka.connections.max.idle.ms",
        "kafka.metadata.max.age.ms",
        "kafka.max.poll.interval.ms",
        "kafka.metadata.max.idle.ms",
        "kafka.retry.backoff.max.ms",
        "kafka.reconnect.backoff.ms",
        "kafka.reconnect.backoff.max.ms",
        "kafka.socket.connection.setup.timeout.ms",
        "kafka.socket.connection.setup.timeout.max.ms",
        "kafka.fetch.min.bytes",
        "kafka.client.dns.lookup",
        "kafka.delivery.timeout.ms",
        "kafka.max.block.ms",
        "kafka.max.request.size",
        "fetchOffset.numRetries",
        "fetchOffset.retryIntervalMs",
        "kafkaConsumer.consumeTimeoutMs",
    )
)
"""Options of the connector that are accepted and do nothing: there are no consumer groups, nothing
is buffered between tasks, and retries go on until the timeout."""

_MILLISECONDS: Final = {
    name: factor
    for factor, names in (
        (1, "ms"),
        (1_000, "s sec second seconds"),
        (60_000, "m min minute minutes"),
        (3_600_000, "h hour hours"),
        (86_400_000, "d day days"),
    )
    for name in names.split()
}

SHOWN: Final = 200
"""Characters of a value that a message repeats."""
MAX_DIGITS: Final = 30
"""Of a number; no option takes one of as many."""


# Which topics, and from where to where.


@dataclass(frozen=True, slots=True)
class Subscribe:
    """These topics, all of their partitions."""

    topics: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class SubscribePattern:
    """Topics whose whole name matches."""

    pattern: str


@dataclass(frozen=True, slots=True)
class Assign:
    """These partitions."""

    partitions: tuple[TopicPartition, ...]


Topics = Subscribe | SubscribePattern | Assign


@dataclass(frozen=True, slots=True)
class AtOffsets:
    """An offset, EARLIEST or LATEST: ``default`` for all partitions, or one for each."""

    option: str
    default: int | None = None
    by_partition: Mapping[TopicPartition, int] | None = None


@dataclass(frozen=True, slots=True)
class AtTimestamps:
    """The first offset whose record is that old or newer (ms)."""

    option: str
    default: int | None = None
    by_partition: Mapping[TopicPartition, int] | None = None


Where = AtOffsets | AtTimestamps


# What the options say.


@dataclass(frozen=True, slots=True)
class ReadOptions:
    """Options of a read; see docs/spark.md for each."""

    connection: Connection
    topics: Topics
    starting: Where
    ending: AtOffsets | AtTimestamps | None
    isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED
    fail_on_data_loss: bool = True
    include_headers: bool = False
    min_partitions: int | None = None
    max_records_per_partition: int | None = None
    max_bytes_per_partition: int | None = None
    replica: int | None = None
    until_caught_up: bool = False
    poll_timeout_ms: int = 60_000
    max_wait_ms: int = 500
    fetch_bytes: int = 8 << 20
    no_match_is_latest: bool = False
    max_per_trigger: int | None = None
    min_per_trigger: int | None = None
    max_trigger_delay_ms: int = 900_000


@dataclass(frozen=True, slots=True)
class WriteOptions:
    """Options of a write; see docs/spark.md for each."""

    connection: Connection
    topic: str | None = None
    codec: Codec = Codec.NONE
    batch_bytes: int = 512 << 10
    include_timestamps: bool = False
    exactly_once: bool = False
    ledger: str = "kept-spark-ledger"
    app_id: str | None = None
    version: int = 0


_CONNECTION: Final = (
    "kafka.bootstrap.servers",
    "bootstrap",
    "kafka.client.id",
    "kafka.request.timeout.ms",
    "kafka.default.api.timeout.ms",
    COMMAND_CONFIG,
)
_READ: Final = (
    *_CONNECTION,
    "subscribe",
    "subscribePattern",
    "assign",
    "startingOffsets",
    "startingTimestamp",
    "startingOffsetsByTimestamp",
    "startingOffsetsByTimestampStrategy",
    "failOnDataLoss",
    "includeHeaders",
    "minPartitions",
    "maxRecordsPerPartition",
    "maxBytesPerPartition",
    "kafka.isolation.level",
    "kafkaConsumer.pollTimeoutMs",
    "kafka.fetch.max.wait.ms",
    "kafka.max.partition.fetch.bytes",
    "kafka.fetch.max.bytes",
)
_BATCH_READ: Final = (
    "endingOffsets",
    "endingTimestamp",
    "endingOffsetsByTimestamp",
    "replica",
    "untilCaughtUp",
)
_STREAMING_READ: Final = ("maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxTriggerDelay")
_WRITE: Final = (
    *_CONNECTION,
    "topic",
    "kafka.compression.type",
    "kafka.batch.size",
    "includeTimestamps",
    "includeHeaders",
    "kafka.acks",
    "kafka.enable.idempotence",
    "exactlyOnce",
    "ledgerTopic",
)
_BATCH_WRITE: Final = ("txnAppId", "txnVersion")
_STREAMING_WRITE: Final = ("checkpointLocation", "queryName")
"""Spark's own; it hands them on to a sink."""
USES: Final[Mapping[str, tuple[str, ...]]] = {
    "a batch read": _READ + _BATCH_READ,
    "a streaming read": _READ + _STREAMING_READ,
    "a batch write": _WRITE + _BATCH_WRITE,
    "a streaming write": _WRITE + _STREAMING_WRITE,
}
"""Every option there is, by what it is for."""


class _Options:
    """The options given, every one of them known, to be taken one by one."""

    def __init__(self, given: Mapping[str, str], use: str) -> None:
        self.given = {
            name.lower(): value
            for name, value in given.items()
            if name.lower() not in WITHOUT_EFFECT
        }
        self.security = {n: v for n, v in self.given.items() if n.startswith(SECURITY)}
        self.given = {n: v for n, v in self.given.items() if n not in self.security}
        names = {name.lower(): name for name in USES[use]}
        for name in self.given.keys() - names.keys():
            raise BadOption(_unknown(name, use, names))

    def pop(self, name: str, parse: Callable[[str, str], _T], default: _T) -> _T:
        text = self.given.pop(name.lower(), None)
        return default if text is None else parse(name, text)

    def one_of(
        self, what: str, parsers: Mapping[str, Callable[[str, str], _T]]
    ) -> tuple[str, _T] | None:
        """At most one of several options that say the same thing in different ways."""
        given = [name for name in parsers if name.lower() in self.given]
        if len(given) > 1:
            raise BadOption(f"{' and '.join(given)}: only one of them can say {what}")
        if not given:
            return None
        name = given[0]
        return name, parsers[name](name, self.given.pop(name.lower()))

    def finish(self) -> None:
        if self.given:
            raise InvariantViolation(f"options that nobody reads: {', '.join(self.given)}")


def _unknown(name: str, use: str, known: Mapping[str, str]) -> str:
    """What to say of an option that does not exist, or not here."""
    elsewhere = [(other, n) for other, names in USES.items() for n in names if n.lower() == name]
    if elsewhere:
        other, spelled = elsewhere[0]
        return f"{spelled} is an option of {other}, not of {use}"
    close = difflib.get_close_matches(name, known, 1, 0.6)
    hint = f"; did you mean {known[close[0]]}?" if close else ""
    return f"{name} is no option of {use}{hint}"


def parse_read(given: Mapping[str, str], *, streaming: bool) -> ReadOptions:
    """The options of a batch or streaming read. Raises BadOption."""
    o = _Options(given, "a streaming read" if streaming else "a batch read")
    connection = _connection(o)
    where = o.one_of(
        "what to read",
        {"subscribe": _subscribe, "subscribePattern": _pattern, "assign": _assign},
    )
    if where is None:
        raise BadOption("what to read is missing: give subscribe, subscribePattern or assign")
    if streaming:
        starting, ending = _where(o, "starting", LATEST, nothing_at=None), None
    else:
        starting = _where(o, "starting", EARLIEST, nothing_at=LATEST)
        ending = _where(o, "ending", LATEST, nothing_at=EARLIEST)
    per_trigger: dict[str, Any] = {}
    if streaming:
        per_trigger = {
            "max_per_trigger": o.pop("maxOffsetsPerTrigger", _positive, None),
            "min_per_trigger": o.pop("minOffsetsPerTrigger", _positive, None),
            "max_trigger_delay_ms": o.pop("maxTriggerDelay", _duration, 900_000),
        }
        least, most = per_trigger["min_per_trigger"], per_trigger["max_per_trigger"]
        if least is not None and most is not None and least > most:
            raise BadOption(
                f"minOffsetsPerTrigger is {least}, which is above maxOffsetsPerTrigger {most}"
            )
    options = ReadOptions(
        connection,
        where[1],
        starting,
        ending,
        isolation=o.pop("kafka.isolation.level", _isolation, IsolationLevel.READ_UNCOMMITTED),
        fail_on_data_loss=o.pop("failOnDataLoss", _boolean, True),
        include_headers=o.pop("includeHeaders", _boolean, False),
        min_partitions=o.pop("minPartitions", _positive, None),
        max_records_per_partition=o.pop("maxRecordsPerPartition", _positive, None),
        max_bytes_per_partition=o.pop("maxBytesPerPartition", _positive, None),
        replica=None if streaming else o.pop("replica", _node, None),
        until_caught_up=not streaming and o.pop("untilCaughtUp", _boolean, False),
        poll_timeout_ms=o.pop("kafkaConsumer.pollTimeoutMs", _int32, 60_000),
        max_wait_ms=o.pop("kafka.fetch.max.wait.ms", _int32, 500),
        fetch_bytes=o.pop("kafka.max.partition.fetch.bytes", _int32, 8 << 20),
        no_match_is_latest=o.pop("startingOffsetsByTimestampStrategy", _strategy, False),
        **per_trigger,
    )
    o.pop("kafka.fetch.max.bytes", _int32, 0)
    o.finish()
    if options.until_caught_up:
        _check_until_caught_up(options)
    return options


def _check_until_caught_up(options: ReadOptions) -> None:
    """Refuse what would stop a task before it has caught up."""
    if options.ending != AtOffsets("endingOffsets", LATEST):
        assert options.ending is not None
        raise BadOption(
            f"untilCaughtUp=true and {options.ending.option} contradict each other: the first "
            "reads on to wherever the log ends"
        )
    for name, value in (
        ("minPartitions", options.min_partitions),
        ("maxRecordsPerPartition", options.max_records_per_partition),
        ("maxBytesPerPartition", options.max_bytes_per_partition),
    ):
        if value is not None:
            raise BadOption(
                f"untilCaughtUp=true reads each partition in one task: leave {name} out"
            )


def parse_write(given: Mapping[str, str], *, streaming: bool = False) -> WriteOptions:
    """The options of a batch or streaming write. Raises BadOption."""
    o = _Options(given, "a streaming write" if streaming else "a batch write")
    options = WriteOptions(
        _connection(o),
        topic=o.pop("topic", _topic, None),
        codec=o.pop("kafka.compression.type", _codec, Codec.NONE),
        batch_bytes=o.pop("kafka.batch.size", _int32, 512 << 10),
        include_timestamps=o.pop("includeTimestamps", _boolean, False),
        exactly_once=o.pop("exactlyOnce", _boolean, False),
        ledger=o.pop("ledgerTopic", _topic, "kept-spark-ledger"),
        **_transaction(o, streaming),
    )
    if options.app_id is not None and not options.exactly_once:
        raise BadOption("txnAppId and txnVersion are for exactlyOnce=true, which is not given")
    if options.exactly_once and options.topic is None:
        raise BadOption("exactlyOnce=true needs the option topic: one topic for all rows")
    if options.exactly_once and options.ledger == options.topic:
        raise BadOption(f"ledgerTopic is {options.ledger}, the topic that is written to")
    o.pop("includeHeaders", _boolean, False)  # a column headers is written where there is one
    o.pop("kafka.acks", _acks, None)
    o.pop("kafka.enable.idempotence", _idempotence, None)
    if streaming:
        o.pop("checkpointLocation", _any, None)
        o.pop("queryName", _any, None)
    o.finish()
    return options


def _transaction(o: _Options, streaming: bool) -> dict[str, Any]:
    """What a batch write is called when it is repeated."""
    if streaming:
        return {}
    app, version = o.pop("txnAppId", _app, None), o.pop("txnVersion", _version, None)
    if (app is None) != (version is None):
        raise BadOption("txnAppId and txnVersion name a write together: give both")
    return {} if version is None else {"app_id": app, "version": version}


def _connection(o: _Options) -> Connection:
    where = o.one_of(
        "where the cluster is", {"kafka.bootstrap.servers": _bootstrap, "bootstrap": _bootstrap}
    )
    if where is None:
        raise BadOption("kafka.bootstrap.servers is missing: host:port of one node or more")
    command_config = o.pop(COMMAND_CONFIG, _any, "") or ""
    timeout_ms = o.pop("kafka.request.timeout.ms", _int32, 30_000)
    return Connection(
        where[1],
        client_id=o.pop("kafka.client.id", lambda n, t: t and _app(n, t), "kept-spark"),
        timeout_ms=o.pop("kafka.default.api.timeout.ms", _int32, timeout_ms),
        security=security_of(o.security, command_config),
        command_config=command_config,
    )


def _where(o: _Options, which: str, default: int, *, nothing_at: int | None) -> Where:
    """Where to start or end, ``default`` where it is not said. At ``nothing_at`` is no record."""
    choice = o.one_of(
        f"where to {which.removesuffix('ing')}",
        {
            f"{which}Offsets": _offsets,
            f"{which}Timestamp": _timestamp,
            f"{which}OffsetsByTimestamp": _timestamps,
        },
    )
    if choice is None:
        return AtOffsets(f"{which}Offsets", default)
    where = choice[1]
    given = (where.default, *(where.by_partition or {}).values())
    if isinstance(where, AtOffsets) and nothing_at is not None and nothing_at in given:
        at = {EARLIEST: "ends at earliest (-2)", LATEST: "starts at latest (-1)"}[nothing_at]
        raise BadOption(f"{which}Offsets: a batch read that {at} has no records")
    return where


# Single values: each takes the option's name and its text.


def _any(name: str, text: str) -> str:
    del name
    return text


def _bad(name: str, text: str, wanted: str) -> BadOption:
    shown = repr(text) if len(text) <= SHOWN else f"{text[:SHOWN]!r} and so on"
    return BadOption(f"{name} is {shown}; it must be {wanted}")


def _named(values: Mapping[str, _T], wanted: str) -> Callable[[str, str], _T]:
    """A parser of words, in either case; ``values`` has them in capitals."""

    def parse(name: str, text: str) -> _T:
        if text.upper() not in values:
            raise _bad(name, text, wanted)
        return values[text.upper()]

    return parse


_boolean = _named({"TRUE": True, "FALSE": False}, "true or false")
_isolation = _named(IsolationLevel.__members__, "read_uncommitted or read_committed")
_strategy = _named({"ERROR": False, "LATEST": True}, "error or latest")
_codec = _named(Codec.__members__, "none, gzip, snappy, lz4 or zstd")
_acks = _named({"ALL": None, "-1": None}, "all: every record is written with acks=all")
_idempotence = _named({"TRUE": None}, "true: every record is written by an idempotent producer")


def _bootstrap(name: str, text: str) -> str:
    try:
        parse_bootstrap(text)
    except ValueError as error:
        raise BadOption(f"{name}: {error}") from None
    return text


def _number(least: int, most: int, wanted: str) -> Callable[[str, str], int]:
    """A parser of whole numbers."""

    def parse(name: str, text: str) -> int:
        digits = text.strip()
        if not _is_number(digits) or not least <= int(digits) <= most:
            raise _bad(name, text, wanted)
        return int(digits)

    return parse


def _is_number(digits: str) -> bool:
    """Python itself refuses to read a number of thousands of digits."""
    return digits.isascii() and digits.isdecimal() and len(digits) <= MAX_DIGITS


_positive = _number(1, MAX_INT64, "a whole number above 0")
_int32 = _number(1, MAX_INT32, f"a whole number from 1 to {MAX_INT32}")
_node = _number(0, MAX_INT32, "the id of a node")
_version = _number(0, MAX_INT64, "a whole number, higher for each new write")
_milliseconds = _number(0, MAX_INT64, f"milliseconds since 1970, up to {MAX_INT64}")


def _app(name: str, text: str) -> str:
    if not text or len(text) > 200:
        raise _bad(name, text, "a name of 1 to 200 characters")
    return text


def _duration(name: str, text: str) -> int:
    parsed = re.fullmatch(rf"([0-9]{{1,{MAX_DIGITS}}})\s*([a-z]*)", text.strip().lower())
    factor = _MILLISECONDS.get(parsed[2] or "ms") if parsed else None
    if not parsed or factor is None:
        raise _bad(name, text, "a time such as 30s, 15m or 1h")
    return int(parsed[1]) * factor


def _topic(name: str, text: str) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,249}", text) or text in (".", ".."):
        raise _bad(name, text, "a topic's name: letters, digits, '.', '_' and '-'")
    return text


def _subscribe(name: str, text: str) -> Topics:
    topics = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    if not topics:
        raise _bad(name, text, "topics, separated by commas")
    return Subscribe(tuple(_topic(name, topic) for topic in topics))


def _pattern(name: str, text: str) -> Topics:
    try:
        re.compile(text)
    except re.error as error:
        raise BadOption(f"{name} is {text!r}, which is no regular expression: {error}") from None
    if not text:
        raise _bad(name, text, "a regular expression for whole topic names")
    return SubscribePattern(text)


def _assign(name: str, text: str) -> Topics:
    wanted = 'JSON such as {"topic": [0, 1]}'
    tps = []
    for topic, numbers in _json_object(name, text, wanted).items():
        if not isinstance(numbers, list) or not all(_is_int(n) and n >= 0 for n in numbers):
            raise _bad(name, text, wanted)
        tps += [TopicPartition(topic, n) for n in numbers]
    if not tps:
        raise _bad(name, text, wanted)
    return Assign(tuple(sorted(set(tps))))


def _offsets(name: str, text: str) -> Where:
    words = {"earliest": EARLIEST, "latest": LATEST}
    if text.strip().lower() in words:
        return AtOffsets(name, words[text.strip().lower()])
    wanted = 'earliest, latest, or JSON such as {"topic": {"0": 23, "1": -1}}'
    by_partition = _by_partition(name, text, wanted)
    if any(offset < EARLIEST for offset in by_partition.values()):
        raise _bad(name, text, f"{wanted}; -1 is latest, -2 earliest")
    return AtOffsets(name, None, by_partition)


def _timestamp(name: str, text: str) -> Where:
    return AtTimestamps(name, _milliseconds(name, text))


def _timestamps(name: str, text: str) -> Where:
    wanted = 'JSON such as {"topic": {"0": 1700000000000}}, milliseconds since 1970'
    by_partition = _by_partition(name, text, wanted)
    if any(when < 0 for when in by_partition.values()):
        raise _bad(name, text, wanted)
    return AtTimestamps(name, None, by_partition)


def _by_partition(name: str, text: str, wanted: str) -> dict[TopicPartition, int]:
    values = {}
    for topic, numbers in _json_object(name, text, wanted).items():
        if not isinstance(numbers, dict):
            raise _bad(name, text, wanted)
        for partition, number in numbers.items():
            known = _is_number(partition) and partition == str(int(partition))
            if not known or not _is_int(number) or number > MAX_INT64:
                raise _bad(name, text, wanted)
            values[TopicPartition(topic, int(partition))] = number
    if not values:
        raise _bad(name, text, wanted)
    return values


def _json_object(name: str, text: str, wanted: str) -> dict[str, Any]:
    try:
        parsed = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise _bad(name, text, wanted)
    return parsed


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """What JSON gives twice is refused: which of the two counts would be a guess."""
    if len(unique := dict(pairs)) < len(pairs):
        raise ValueError
    return unique


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
