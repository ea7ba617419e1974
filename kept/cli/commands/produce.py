"""``kept produce``: lines of standard input become records."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Final

import click
import msgspec

from kept.cli.bootstrap_option import bootstrap_option
from kept.cli.output import counted, echo, get_bytes, unescaped
from kept.cli.shell import Failure, WholeNumber, examples
from kept.cli.topic_partition import TopicPartitionArgument
from kept.cli.unavailable import explained, no_partition, open_client
from kept.client.bootstrap import Bootstrap
from kept.client.client import Client, IdempotentProducer, OutRecord
from kept.client.core.authorization_errors import NotAuthorized
from kept.client.produce import TRANSACTION_TIMEOUT_MS, RecordTooLarge, unwritten
from kept.client.transactional_producer import TransactionalProducer
from kept.storage.errors import (
    InvalidProducerEpoch,
    KeptError,
    ProducerFenced,
    UnknownTopicOrPartition,
    UnsupportedVersion,
)
from kept.storage.printable import printable_text
from kept.storage.types import MAX_INT32, MAX_INT64, Codec

READ_BYTES: Final = 256 * 1024
"""Lines that arrive together go into one batch a partition; so much is read at once."""
BATCH_BYTES: Final = 512 * 1024
"""A batch is closed above this, well below Kafka's limit of 1 MB."""
_FRAMING_BYTES: Final = 32
"""At most, of a record: its lengths, attributes, timestamp and offset; of a header a third."""
_NO_TIMESTAMP: Final = -1
_SHOWN_LINES: Final = 10
"""At most, of the lines that are not written and stand between others."""
_ACKS: Final = {"all": -1, "1": 1, "0": 0}
_FIELDS: Final = frozenset(
    {"key", "key_base64", "value", "value_base64", "headers", "timestamp", "partition"}
    | {"topic", "offset"}
)


@click.command(
    epilog=examples(
        "echo 'alice:hello' | kept produce users --key-separator :",
        "echo 'alice:NULL' | kept produce users --key-separator : --null-marker NULL",
        "kept produce events --key-separator '\\t' --header source=nightly --create < events.tsv",
        "kept produce images --key logo --file logo.png",
        "kept consume users --until-end --json | kept produce copy --json",
        "kept produce orders --transactional-id nightly < orders.txt",
    )
)
@click.argument("target", metavar="TOPIC[:PARTITION]", type=TopicPartitionArgument())
@click.option(
    "--key-separator",
    metavar="S",
    help="Text between key and value of a line; \\t is a tab (also \\n, \\r, \\0, \\xHH, \\\\).",
)
@click.option("--key", metavar="K", help="The key of all records.")
@click.option(
    "--header", "headers", metavar="K=V", multiple=True, help="A header of all records; repeatable."
)
@click.option(
    "--file",
    "files",
    metavar="FILE",
    multiple=True,
    type=click.Path(exists=True, dir_okay=False, allow_dash=True),
    help="Write FILE as a whole as one record, - for standard input; repeatable.",
)
@click.option("--null-marker", metavar="S", help="A value equal to S becomes a tombstone.")
@click.option(
    "--partition",
    type=WholeNumber(0),
    help="The same as TOPIC:PARTITION: all records go there.  [default: by key]",
)
@click.option(
    "--repartition",
    is_flag=True,
    help="With --json: choose partitions by key, whatever a line says.",
)
@click.option(
    "--acks",
    type=click.Choice(list(_ACKS)),
    default="all",
    show_default=True,
    help="Who must have a batch before it counts as written: all replicas in sync, the leader, "
    "nobody (then what a broker refuses is lost without an error).",
)
@click.option(
    "--compression",
    type=click.Choice(["none", "gzip", "snappy", "lz4", "zstd"]),
    default="none",
    show_default=True,
    help="Codec of the batches.",
)
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Lines are JSON objects, as kept consume --json prints them.",
)
@click.option(
    "--create/--no-create",
    default=None,
    help="Create TOPIC if there is none, with the defaults of the cluster.  [default: ask in a "
    "terminal, else fail]",
)
@click.option(
    "--transactional-id",
    metavar="ID",
    help="Write everything in one transaction of this id: all or nothing.",
)
@click.option(
    "--transaction-timeout",
    type=WholeNumber(1, 2_147_483),
    metavar="SECONDS",
    help="Abort the transaction if it takes longer.  [default: 60]",
)
@bootstrap_option
def produce(
    *,
    target: tuple[str, int | None],
    key_separator: str | None,
    key: str | None,
    headers: tuple[str, ...],
    files: tuple[str, ...],
    null_marker: str | None,
    partition: int | None,
    repartition: bool,
    acks: str,
    compression: str,
    as_json: bool,
    create: bool | None,
    transactional_id: str | None,
    transaction_timeout: int | None,
    bootstrap: Bootstrap,
) -> None:
    """Write each line of standard input to TOPIC, or to one partition of it.

    A line is the value; with --key-separator it is key and value. Keys go to the partition that
    Java's client would choose (murmur2). With --json a line is an object with key, value (or
    key_base64, value_base64), headers, timestamp and partition; a value of null is a
    tombstone.

    An error says which lines are written and with which to go on. With --transactional-id the
    records of one run are one transaction, which is committed at the end of the input, and aborted
    after an error or Ctrl-C.
    """
    topic, named = target
    if named is not None and partition is not None:
        raise click.UsageError("TOPIC:PARTITION and --partition contradict each other")
    partition = named if partition is None else partition
    lined = key_separator is not None or null_marker is not None
    if as_json and (lined or key is not None):
        raise click.UsageError("--json excludes --key-separator, --key and --null-marker")
    if repartition and (partition is not None or not as_json):
        raise click.UsageError("--repartition needs --json, and excludes a partition for all")
    if files and (lined or as_json):
        raise click.UsageError("--file excludes --key-separator, --null-marker and --json")
    if key is not None and key_separator is not None:
        raise click.UsageError("--key and --key-separator contradict each other")
    _check_transaction(transactional_id, transaction_timeout, acks)
    shape = _Shape(
        separator=_separator(key_separator),
        key=None if key is None else key.encode("utf-8", "surrogateescape"),
        null=None if null_marker is None else null_marker.encode("utf-8", "surrogateescape"),
        headers=tuple(_header(text) for text in headers),
        partition=partition,
        as_json=as_json,
        repartition=repartition,
    )
    unit = "file" if files else "line"
    given = file_batches(files, shape) if files else line_batches(0, shape)
    codec = Codec[compression.upper()]
    with open_client(bootstrap) as client:
        _require_topic(client, topic, create)
        batches = _to_known_partitions(client, topic, given, unit)
        if transactional_id is not None:
            timeout_ms = 1000 * (transaction_timeout or TRANSACTION_TIMEOUT_MS // 1000)
            producer = TransactionalProducer(client, transactional_id, timeout_ms)
            written = _write_transaction(
                producer, topic, batches, codec=codec, bootstrap=bootstrap, unit=unit
            )
        else:
            sink = _Sink(client, topic, _ACKS[acks], codec)
            written = _write(sink, batches, bootstrap, unit)
    if sys.stderr.isatty():
        echo(f"{counted(written, 'record')} written to {topic}", err=True)


def _check_transaction(transactional_id: str | None, timeout: int | None, acks: str) -> None:
    if transactional_id == "":
        raise click.UsageError("--transactional-id is empty")
    if transactional_id is None and timeout is not None:
        raise click.UsageError("--transaction-timeout needs --transactional-id")
    if transactional_id is not None and acks != "all":
        raise click.UsageError(f"--transactional-id needs --acks all, not {acks}")


def _separator(given: str | None) -> bytes | None:
    if given is None:
        return None
    try:
        separator = unescaped(given)
    except ValueError as error:
        raise click.UsageError(f"--key-separator: {error}") from None
    if not separator:
        raise click.UsageError("--key-separator is empty")
    return separator


def _header(text: str) -> tuple[str, bytes | None]:
    name, equals, value = text.partition("=")
    if not equals or not name:
        raise click.UsageError(f"--header {text!r} is not KEY=VALUE")
    if not _is_unicode(name):
        raise click.UsageError(f"--header {text!r}: its key is not UTF-8")
    return name, value.encode("utf-8", "surrogateescape")


def _require_topic(client: Client, topic: str, create: bool | None) -> None:
    """Have the topic, or fail: it is created if ``create`` is true, or None and somebody at the
    terminal says so.
    """
    try:
        client.topic(topic)
    except NotAuthorized:
        return  # writing fails as well, and says which right it takes
    except UnknownTopicOrPartition as error:
        if create is None:
            create = _is_confirmed(f"kept: {error}\nCreate {topic}? [y/N] ")
        if not create:
            raise Failure(f"{error} (--create creates it)") from None
        client.create_topic(topic)
        count = len(client.topic(topic).partitions)
        echo(f"created topic {topic} with {counted(count, 'partition')}", err=True)


def _is_confirmed(question: str) -> bool:
    """Whether somebody at the terminal says yes; standard input may hold records."""
    if not sys.stderr.isatty():
        return False
    try:
        with open("/dev/tty", encoding="utf-8") as terminal:
            click.echo(printable_text(question), nl=False, err=True)
            return terminal.readline().strip().lower() in ("y", "yes")
    except OSError:
        return False


def _to_known_partitions(
    client: Client, topic: str, batches: Iterator[list[OutRecord]], unit: str
) -> Iterator[list[OutRecord]]:
    """These batches up to the first record for a partition that the topic does not have: a Failure
    names the ``unit`` that it is, once those before it are written.
    """
    before = 0
    for batch in batches:
        for at, record in enumerate(batch):
            if record.partition is not None and not _has_partition(client, topic, record.partition):
                if at:
                    yield batch[:at]
                count = len(client.topic(topic).partitions)
                wrong = no_partition(topic, record.partition, count)
                raise Failure(f"{unit} {before + at + 1}: {wrong}")
        yield batch
        before += len(batch)


def _has_partition(client: Client, topic: str, partition: int) -> bool:
    """Whether a topic has it, by now: partitions may be added while a command writes."""
    if partition in client.topic(topic).partitions:
        return True
    client.metadata([topic])
    return partition in client.topic(topic).partitions


def _write(sink: _Sink, batches: Iterator[list[OutRecord]], bootstrap: Bootstrap, unit: str) -> int:
    """Write each batch as it comes; how many records there were. Each is one ``unit`` of the input,
    a line or a file.
    """
    pending: list[OutRecord] = []
    try:
        for batch in batches:
            pending = batch
            with explained(bootstrap, sink.topic):
                sink.write(batch)
            pending = []
    except KeptError as error:
        why = _named(error, sink.written, unit)
        raise Failure(f"{why} ({_progress(sink, pending, error, unit)})") from error
    except KeyboardInterrupt as error:
        if not sys.stdin.isatty():
            echo(f"kept: interrupted: {_progress(sink, pending, error, unit)}", err=True)
        raise
    return sink.written


def _named(error: KeptError, before: int, unit: str) -> str:
    """An error with the line that it is about, where it is about one: ``before`` come before the
    batch.
    """
    if isinstance(error, RecordTooLarge):
        return f"{unit} {before + error.unwritten[0] + 1}: {error}"
    return str(error)


def _progress(sink: _Sink, batch: list[OutRecord], error: BaseException, unit: str) -> str:
    """Which lines of the input are written, and with which to go on. ``batch`` failed, if any."""
    done, end = sink.written, sink.written + len(batch)
    known = unwritten(error)
    if known is not None and known.places is not None:
        return _progress_until(done, end, known.places, unit)
    word = "written" if sink.acks else "sent"
    said = []
    if done:
        said.append(f"{_span(unit, 1, done)} {_are(done)} {word}")
    if batch and (known is not None or isinstance(error, KeyboardInterrupt)):
        which = _span(unit, done + 1, end)
        some = f"of {which} some" if len(batch) > 1 else which
        said.append(f"{some} may be" if done else f"{some} may be {word}")
    elif batch and done:
        said.append(f"{_span(unit, done + 1, end)} {_are(len(batch))} not")
    if not done:
        return said[0] if said else f"nothing is {word}"
    return f"{', '.join(said)}; {_go_on(unit, done + 1)}"


def _progress_until(before: int, end: int, places: Sequence[int], unit: str) -> str:
    """Which lines are written where one of a batch is refused, and so are not those after it in its
    partition: at these ``places``. The batch has the lines from ``before`` to ``end``.
    """
    done = before + places[0]
    if end - done != len(places):  # lines after it are in other partitions
        numbers = [str(before + place + 1) for place in places]
        if len(numbers) > _SHOWN_LINES:
            numbers[_SHOWN_LINES - 1 :] = [f"{len(numbers) - _SHOWN_LINES + 1} more"]
        listed = numbers[0] if len(numbers) == 1 else f"{', '.join(numbers[:-1])} and {numbers[-1]}"
        then = f"go on with these, then with {unit} {end + 1}"
        return f"{_span(unit, 1, end)} are written, except {listed}; {then}"
    if not done:
        return "nothing is written"
    rest = f"{_span(unit, done + 1, end)} {_are(end - done)} not"
    return f"{_span(unit, 1, done)} {_are(done)} written, {rest}; {_go_on(unit, done + 1)}"


def _go_on(unit: str, number: int) -> str:
    hint = f": tail -n +{number}" if unit == "line" else ""
    return f"go on with {unit} {number}{hint}"


def _are(count: int) -> str:
    return "is" if count == 1 else "are"


def _span(unit: str, first: int, last: int) -> str:
    return f"{unit} {first}" if first == last else f"{unit}s {first} to {last}"


def _write_transaction(
    producer: TransactionalProducer,
    topic: str,
    batches: Iterator[list[OutRecord]],
    *,
    codec: Codec,
    bootstrap: Bootstrap,
    unit: str,
) -> int:
    """Write all batches in one transaction; how many records there were. Each is one ``unit`` of
    the input.
    """
    written = 0
    try:
        with explained(bootstrap, topic):
            for batch in batches:
                producer.produce(topic, batch, codec=codec)
                written += len(batch)
    except BaseException as error:
        end = "is aborted"
        try:
            producer.abort()
        except (InvalidProducerEpoch, ProducerFenced):
            pass  # whoever took its epoch has aborted it
        except KeptError:
            end = "is not committed, and aborted once its timeout is over"
        if isinstance(error, KeptError):
            why = f"the transaction {end}{_taken_over(error)}"
            named = _named(error, written, unit)
            raise Failure(f"{named} (nothing is written: {why})") from error
        raise
    try:
        producer.commit()
    except KeptError as error:
        more = f"`kept transaction describe {producer.transactional_id}` shows what became of it"
        why = f"the transaction may be committed or not{_taken_over(error)}"
        raise Failure(f"{error} ({why}; {more})") from error
    return written


def _taken_over(error: KeptError) -> str:
    """Why the epoch of a transactional producer is not the newest."""
    if isinstance(error, InvalidProducerEpoch | ProducerFenced):
        return ", for another producer has that id now, or it took longer than its timeout"
    return ""


class _Sink:
    """Writes batches: idempotent where the other side offers it, so that no retry repeats one."""

    def __init__(self, client: Client, topic: str, acks: int, codec: Any) -> None:
        self.client = client
        self.topic = topic
        self.acks = acks
        self.codec = codec
        self.written = 0
        self._producer: IdempotentProducer | None = None
        self._began = False

    def write(self, batch: list[OutRecord]) -> None:
        """Write records and wait for the acknowledgement."""
        if not self._began and self.acks == -1:
            self._producer = self._init()
        self._began = True
        self.client.produce(
            self.topic,
            batch,
            acks=self.acks,
            codec=self.codec,
            producer=self._producer,
        )
        self.written += len(batch)

    def _init(self) -> IdempotentProducer | None:
        try:
            return self.client.init_producer()
        except UnsupportedVersion:
            return None


class _Shape(msgspec.Struct, frozen=True):
    """How a line becomes a record, and what all records have in common."""

    separator: bytes | None
    key: bytes | None
    null: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    partition: int | None
    as_json: bool
    repartition: bool

    def record(self, line: bytes) -> OutRecord:
        """The record that a line is. ValueError says what is wrong with it."""
        if self.as_json:
            return self._from_json(line)
        key, value = self.key, line
        if self.separator is not None:
            key, found, value = line.partition(self.separator)
            if not found:
                raise ValueError(
                    f"has no key separator {self.separator.decode(errors='replace')!r}"
                )
        is_null = self.null is not None and value == self.null
        return OutRecord(key, None if is_null else value, self.headers, None, self.partition)

    def _from_json(self, line: bytes) -> OutRecord:
        try:
            row = json.loads(line)
            return self._from_row(row)
        except RecursionError:
            raise ValueError("it is nested too deeply") from None

    def _from_row(self, row: Any) -> OutRecord:
        if not isinstance(row, dict):
            raise ValueError("not a JSON object")
        unknown = sorted(set(row) - _FIELDS)
        if unknown:
            raise ValueError(f"unknown field {unknown[0]!r}")
        given = None if self.repartition else row.get("partition")
        where = given if self.partition is None else self.partition
        when = row.get("timestamp")
        _check_number("partition", where, 0, MAX_INT32)
        _check_number("timestamp", when, _NO_TIMESTAMP, MAX_INT64)
        return OutRecord(
            get_bytes(row, "key"),
            get_bytes(row, "value"),
            (*_headers_of(row.get("headers")), *self.headers),
            when,
            where,
        )


def _headers_of(given: Any) -> Iterator[tuple[str, bytes | None]]:
    """The headers of a record in JSON. ValueError says what is wrong with them."""
    if given is not None and not isinstance(given, list):
        raise ValueError("headers are a list of objects with key and value")
    for header in given or ():
        if not isinstance(header, dict) or not isinstance(header.get("key"), str):
            raise ValueError("headers are objects with key and value")
        if not _is_unicode(header["key"]):
            raise ValueError(f"header {header['key']!r} is not Unicode text")
        yield header["key"], get_bytes(header, "value")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _check_number(name: str, given: Any, least: int, most: int) -> None:
    """ValueError unless it is None or a whole number of that range."""
    if given is None:
        return
    if not isinstance(given, int) or isinstance(given, bool):
        raise ValueError(f"{name} is not a whole number")
    if not least <= given <= most:
        raise ValueError(f"{name} {given} is not in the range from {least} to {most}")


def file_batches(files: Sequence[str], shape: _Shape) -> Iterator[list[OutRecord]]:
    """Each file as a record of its own, in a batch of its own; ``-`` is standard input."""
    for path in files:
        if path == "-":
            value = sys.stdin.buffer.read()
        else:
            with open(path, "rb") as file:
                value = file.read()
        yield [shape.record(value)]


def line_batches(fd: int, shape: _Shape) -> Iterator[list[OutRecord]]:
    """What has arrived at ``fd``, again and again, in batches of bounded size. A Failure names the
    line that is no record, after those before it.
    """
    rest = b""
    number = 1
    while True:
        chunk = os.read(fd, READ_BYTES)
        lines = (rest + chunk).split(b"\n")
        rest = lines.pop() if chunk else b""
        if not chunk and lines and not lines[-1]:
            lines.pop()
        yield from _bounded(lines, number, shape)
        number += len(lines)
        if not chunk:
            return


def _bounded(lines: list[bytes], number: int, shape: _Shape) -> Iterator[list[OutRecord]]:
    """Batches of these lines, of which the first is the ``number``th."""
    batch: list[OutRecord] = []
    size = 0
    for at, line in enumerate(lines, number):
        try:
            record = shape.record(line.removesuffix(b"\r"))
        except ValueError as error:
            if batch:
                yield batch
            colon = ":" if shape.as_json else ""
            raise Failure(f"line {at}{colon} {error}") from error
        adds = _size_bytes(record)
        if batch and size + adds > BATCH_BYTES:
            yield batch
            batch, size = [], 0
        size += adds
        batch.append(record)
    if batch:
        yield batch


def _size_bytes(record: OutRecord) -> int:
    """What a record takes in a batch that is not compressed, at most."""
    size = _FRAMING_BYTES + len(record.key or b"") + len(record.value or b"")
    for name, value in record.headers:
        size += _FRAMING_BYTES // 3 + len(name.encode()) + len(value or b"")
    return size
