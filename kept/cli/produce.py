"""``kept produce``: lines of standard input become records."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from typing import Any, Final

import click

from kept.cli.output import echo, get_bytes
from kept.cli.shell import Failure, WholeNumber, bootstrap_option, examples
from kept.cli.unavailable import explained, open_client
from kept.client.bootstrap import Bootstrap
from kept.client.client import Client, OutRecord
from kept.client.consume.fetch import TRANSACTION_TIMEOUT_MS
from kept.client.transactional_producer import TransactionalProducer
from kept.storage.errors import (
    InvalidProducerEpoch,
    KeptError,
    ProducerFenced,
    UnsupportedVersion,
)
from kept.storage.types import Codec

READ_BYTES: Final = 256 * 1024
"""Lines that arrive together go into one batch a partition; so much is read at once."""
BATCH_BYTES: Final = 512 * 1024
"""A batch is closed above this, well below Kafka's limit of 1 MB."""
_ACKS: Final = {"all": -1, "1": 1, "0": 0}
_FIELDS: Final = frozenset(
    {"key", "key_base64", "value", "value_base64", "headers", "timestamp", "partition"}
    | {"topic", "offset"}
)


@click.command(
    epilog=examples(
        "echo 'alice:hello' | kept produce users --key-separator :",
        "echo 'alice:NULL' | kept produce users --key-separator : --null-marker NULL",
        "kept consume users --from-beginning --until-end --json | kept produce copy --json",
        "kept produce orders --transactional-id nightly < orders.txt",
    )
)
@click.argument("topic")
@click.option("--key-separator", metavar="S", help="Text between key and value of a line.")
@click.option("--null-marker", metavar="S", help="A value equal to S becomes a tombstone.")
@click.option(
    "--partition", type=WholeNumber(0), help="Partition for all records.  [default: by key]"
)
@click.option("--acks", type=click.Choice(list(_ACKS)), default="all", show_default=True)
@click.option(
    "--compression",
    type=click.Choice(["none", "gzip", "snappy", "lz4", "zstd"]),
    default="none",
    show_default=True,
    help="Codec of the batches.",
)
@click.option("--json", "as_json", is_flag=True, help="Lines are JSON, as consume --json prints.")
@click.option(
    "--transactional-id",
    metavar="ID",
    help="Write everything in one transaction of this id: all or nothing.",
)
@click.option(
    "--transaction-timeout",
    type=WholeNumber(1, 2_147_483),
    metavar="SECONDS",
    help="The transaction is aborted if it takes longer.  [default: 60]",
)
@bootstrap_option
def produce(
    *,
    topic: str,
    key_separator: str | None,
    null_marker: str | None,
    partition: int | None,
    acks: str,
    compression: str,
    as_json: bool,
    transactional_id: str | None,
    transaction_timeout: int | None,
    bootstrap: Bootstrap,
) -> None:
    """Write each line of standard input to TOPIC.

    A line is the value; with --key-separator it is key and value. Keys go to the partition that
    Java's client would choose (murmur2). With --json a line is an object with key, value (or
    key_base64, value_base64), headers, timestamp and partition; null is a null.

    With --transactional-id the records of one run are one transaction, which is committed at the
    end of the input, and aborted after an error or Ctrl-C.
    """
    if as_json and (key_separator is not None or null_marker is not None):
        raise click.UsageError("--json excludes --key-separator and --null-marker")
    if key_separator == "":
        raise click.UsageError("--key-separator is empty")
    if transactional_id == "":
        raise click.UsageError("--transactional-id is empty")
    if transactional_id is None and transaction_timeout is not None:
        raise click.UsageError("--transaction-timeout needs --transactional-id")
    if transactional_id is not None and acks != "all":
        raise click.UsageError(f"--transactional-id needs --acks all, not {acks}")

    batches = _Lines(key_separator, null_marker, partition, as_json).batches(0)
    codec = Codec[compression.upper()]
    with open_client(bootstrap) as client:
        if transactional_id is not None:
            timeout_ms = 1000 * (transaction_timeout or TRANSACTION_TIMEOUT_MS // 1000)
            producer = TransactionalProducer(client, transactional_id, timeout_ms)
            written = _write_transaction(producer, topic, batches, codec, bootstrap)
        else:
            sink = _Sink(client, topic, _ACKS[acks], codec)
            written = _write(sink, batches, bootstrap)
    if sys.stderr.isatty():
        echo(f"{written} records written to {topic}", err=True)


def _write(sink: _Sink, batches: Iterator[list[OutRecord]], bootstrap: Bootstrap) -> int:
    """Write each batch as it comes; how many records there were."""
    for batch in batches:
        try:
            with explained(bootstrap, sink.topic):
                sink.write(batch)
        except Exception as error:
            _report_written(error, sink.written)
            raise
    return sink.written


def _write_transaction(
    producer: TransactionalProducer,
    topic: str,
    batches: Iterator[list[OutRecord]],
    codec: Codec,
    bootstrap: Bootstrap,
) -> int:
    """Write all batches in one transaction; how many records there were."""
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
            raise Failure(f"{error} (nothing is written: {why})") from error
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


def _report_written(error: Exception, written: int) -> None:
    if written and isinstance(error, KeptError):
        raise Failure(f"{error} (the {written} records before it are written)") from error


class _Sink:
    """Writes batches: idempotent where the other side offers it, so that no retry repeats one."""

    def __init__(self, client: Client, topic: str, acks: int, codec: Any) -> None:
        self.client = client
        self.topic = topic
        self.acks = acks
        self.codec = codec
        self.written = 0
        self._producer: tuple[int, int, dict[int, int]] | None = None
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
            auto_create=True,
        )
        self.written += len(batch)

    def _init(self) -> tuple[int, int, dict[int, int]] | None:
        try:
            return self.client.init_producer()
        except UnsupportedVersion:
            return None


class _Lines:
    """Turns lines into records."""

    def __init__(
        self, separator: str | None, null: str | None, partition: int | None, as_json: bool
    ) -> None:
        self._separator = None if separator is None else separator.encode()
        self._null = None if null is None else null.encode()
        self._partition = partition
        self._as_json = as_json
        self._number = 0

    def batches(self, fd: int) -> Iterator[list[OutRecord]]:
        """What has arrived at ``fd``, again and again, in batches of bounded size."""
        rest = b""
        while True:
            chunk = os.read(fd, READ_BYTES)
            lines = (rest + chunk).split(b"\n")
            rest = lines.pop() if chunk else b""
            if not chunk and lines and not lines[-1]:
                lines.pop()
            yield from self._bounded(lines)
            if not chunk:
                return

    def _bounded(self, lines: list[bytes]) -> Iterator[list[OutRecord]]:
        batch: list[OutRecord] = []
        size = 0
        for line in lines:
            self._number += 1
            if batch and size + len(line) > BATCH_BYTES:
                yield batch
                batch, size = [], 0
            size += len(line)
            batch.append(self._record(line.removesuffix(b"\r")))
        if batch:
            yield batch

    def _record(self, line: bytes) -> OutRecord:
        if self._as_json:
            try:
                return self._from_json(line)
            except ValueError as error:
                raise Failure(f"line {self._number}: {error}") from error
        key, value = None, line
        if self._separator is not None:
            key, separator, value = line.partition(self._separator)
            if not separator:
                text = self._separator.decode()
                raise Failure(f"line {self._number} has no key separator {text!r}")
        null = self._null is not None and value == self._null
        return OutRecord(key, None if null else value, partition=self._partition)

    def _from_json(self, line: bytes) -> OutRecord:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise ValueError("not a JSON object")
        unknown = sorted(set(row) - _FIELDS)
        if unknown:
            raise ValueError(f"unknown field {unknown[0]!r}")
        headers = []
        for header in row.get("headers") or ():
            if not isinstance(header, dict) or not isinstance(header.get("key"), str):
                raise ValueError("headers are objects with key and value")
            headers.append((header["key"], get_bytes(header, "value")))
        where = row.get("partition") if self._partition is None else self._partition
        when = row.get("timestamp")
        for name, number in (("partition", where), ("timestamp", when)):
            if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
                raise ValueError(f"{name} is not a whole number")
        return OutRecord(
            get_bytes(row, "key"), get_bytes(row, "value"), tuple(headers), when, where
        )
