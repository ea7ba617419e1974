"""``kept consume``: records of a topic as lines, as JSON, or as a table of latest values."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import click

from kept.cli.output import (
    NO_KEY,
    TOMBSTONE,
    echo,
    json_line,
    moment,
    progress,
    put_bytes,
    reader_is_gone,
    show_table,
    text,
    write,
)
from kept.cli.shell import Failure, WholeNumber, bootstrap_option, examples
from kept.cli.unavailable import explained, open_client
from kept.client.bootstrap import Bootstrap
from kept.client.client import Client
from kept.client.consume.consumer import ConsumedRecord, Consumer, GroupConsumer
from kept.client.consume.fetch import FetchLimits
from kept.client.consume.positions import EARLIEST, LATEST
from kept.storage.errors import UnknownTopicOrPartition
from kept.storage.printable import printable_line
from kept.storage.types import IsolationLevel, TopicPartition


@click.command(
    epilog=examples(
        "kept consume users --from-beginning",
        "kept consume users --table",
        "kept consume users --partition 0 --offset 42 --max 1 --json",
        "kept consume users --group readers --from-beginning",
    )
)
@click.argument("topic")
@click.option(
    "--from-beginning", is_flag=True, help="Start with the first record instead of the next one."
)
@click.option(
    "--offset",
    type=WholeNumber(0),
    help="Start at this offset; needs --partition. Above the end: warn, and wait for what comes "
    "next, as kcat and Kafka's console consumer do (with --until-end: fail). Below the log start: "
    "warn, and start there.",
)
@click.option("--partition", type=WholeNumber(0), help="Read this partition only.")
@click.option("--max", "maximum", type=WholeNumber(1), help="Stop after this many records.")
@click.option("--until-end", is_flag=True, help="Stop at the present end of the log.")
@click.option("--group", help="Read as a member of this group, and commit what was printed.")
@click.option("--value-only", is_flag=True, help="Print values and nothing else.")
@click.option(
    "--isolation",
    type=click.Choice([level.name.lower() for level in IsolationLevel]),
    default="read_uncommitted",
    show_default=True,
    help="read_committed leaves out aborted transactions, and ends before the first open one.",
)
@click.option("--read-committed", is_flag=True, help="The same as --isolation read_committed.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object a line.")
@click.option("--table", is_flag=True, help="Print the latest value of every key, and stop.")
@bootstrap_option
def consume(
    *,
    topic: str,
    from_beginning: bool,
    offset: int | None,
    partition: int | None,
    maximum: int | None,
    until_end: bool,
    group: str | None,
    value_only: bool,
    isolation: str,
    read_committed: bool,
    as_json: bool,
    table: bool,
    bootstrap: Bootstrap,
) -> None:
    """Print the records of TOPIC, from now on, until Ctrl-C."""
    _refuse(from_beginning and offset is not None, "--from-beginning and --offset")
    _refuse(
        group is not None and (offset is not None or partition is not None),
        "--group and --offset or --partition",
    )
    _refuse(group is not None and until_end, "--group and --until-end")
    _refuse(value_only and as_json, "--value-only and --json")
    _refuse(
        table and bool(offset or group or maximum or value_only),
        "--table and --offset, --group, --max or --value-only",
    )
    if offset is not None and partition is None:
        raise click.UsageError("--offset needs --partition: offsets count per partition")

    level = IsolationLevel.READ_COMMITTED if read_committed else IsolationLevel[isolation.upper()]
    limits = FetchLimits(isolation=level)
    start = EARLIEST if from_beginning or table else LATEST
    waiting = open_client(bootstrap)
    with explained(bootstrap, topic), waiting as client:
        if group is not None:
            batches = _of_group(client, group, topic, start, limits, maximum=maximum)
        else:
            where = start if offset is None else offset
            batches = _of_partitions(
                client, topic, partition, where, limits, to_end=table or until_end
            )
            if maximum is not None:
                batches = _limited(batches, maximum)
        with contextlib.closing(batches):
            if table:
                _show_table(_flat(batches), as_json)
            else:
                _show_lines(batches, as_json, value_only)


def _refuse(both: bool, names: str) -> None:
    if both:
        raise click.UsageError(f"{names} contradict each other")


def _of_partitions(
    client: Client, topic: str, partition: int | None, start: int, limits: Any, *, to_end: bool
) -> Generator[list[ConsumedRecord], None, None]:
    known = client.topic(topic)
    if partition is not None and partition not in known.partitions:
        count = len(known.partitions)
        raise UnknownTopicOrPartition(f"topic {topic} has partitions 0 to {count - 1}")
    numbers = known.partitions if partition is None else (partition,)
    if start >= 0 and partition is not None:
        _compare(
            topic, partition, start, client.bounds(topic, [partition])[partition], to_end=to_end
        )
    consumer = Consumer(client, {TopicPartition(topic, p): start for p in numbers}, limits)
    if not to_end:
        while True:
            yield consumer.poll()
    bounds = client.bounds(topic, numbers)
    total = sum(bounds[p][1] - bounds[p][0] for p in numbers)
    done = 0
    with progress(f"reading {topic}", total) as advance:
        for batch in consumer.batches_until_end():
            yield batch
            done += len(batch)
            advance(done)


def _compare(
    topic: str, partition: int, offset: int, bounds: tuple[int, int], *, to_end: bool
) -> None:
    """Warn when the first offset is not there to be read."""
    start, end = bounds
    if offset > end:
        complaint = f"offset {offset} is above the end of {topic}-{partition}, which is {end}"
        if to_end:
            raise Failure(f"{complaint}: there is nothing to read up to it")
        echo(f"kept: {complaint}; waiting for records from the end on", err=True)
    elif offset < start:
        complaint = f"offset {offset} is below the log start of {topic}-{partition}"
        echo(f"kept: {complaint}; reading from {start} on", err=True)


def _of_group(
    client: Client, group: str, topic: str, start: int, limits: Any, *, maximum: int | None
) -> Generator[list[ConsumedRecord], None, None]:
    """Batches for a member. Only what the caller came back from is committed."""
    client.topic(topic)
    member = GroupConsumer(client, group, [topic], reset=start, limits=limits)
    left = maximum
    batch: list[ConsumedRecord] = []
    try:
        while left is None or left > 0:
            batch = member.poll()
            if left is not None:
                member.give_back(batch[left:])
                batch = batch[:left]
                left -= len(batch)
            yield batch
            batch = []
    finally:
        member.give_back(batch)
        refused = member.close()
        if refused is not None:
            echo(
                f"kept: what was printed last is not committed and will be read again: {refused}",
                err=True,
            )


def _limited(
    batches: Iterable[list[ConsumedRecord]], maximum: int
) -> Generator[list[ConsumedRecord], None, None]:
    left = maximum
    for batch in batches:
        yield batch[:left]
        left -= len(batch)
        if left <= 0:
            return


def _flat(batches: Iterable[list[ConsumedRecord]]) -> Iterator[ConsumedRecord]:
    for batch in batches:
        yield from batch


def _show_lines(batches: Iterable[list[ConsumedRecord]], as_json: bool, value_only: bool) -> None:
    """Print each record; what has come is out before the next poll."""
    out = sys.stdout.buffer
    for batch in batches:
        for record in batch:
            out.write(_line(record, as_json, value_only))
        out.flush()
        if not batch and reader_is_gone():
            return


def _line(record: ConsumedRecord, as_json: bool, value_only: bool) -> bytes:
    if value_only:
        return (record.value or b"") + b"\n"
    if as_json:
        return json_line(as_object(record)).encode("utf-8", "surrogatepass")
    key, value = text(record.key, NO_KEY), text(record.value, TOMBSTONE)
    place = f"{record.partition}:{record.offset}"
    headers = "".join(f"  {printable_line(k)}={text(v, 'null')}" for k, v in record.headers)
    return f"{place}  {moment(record.timestamp) or '-'}  {key}  {value}{headers}\n".encode()


def as_object(record: ConsumedRecord) -> dict[str, Any]:
    """A record as ``--json`` prints it."""
    out: dict[str, Any] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp": record.timestamp,
    }
    put_bytes(out, "key", record.key)
    put_bytes(out, "value", record.value)
    headers = []
    for name, value in record.headers:
        header: dict[str, Any] = {"key": name}
        put_bytes(header, "value", value)
        headers.append(header)
    out["headers"] = headers
    return out


def _show_table(records: Iterable[ConsumedRecord], as_json: bool) -> None:
    latest: dict[tuple[int, bytes], ConsumedRecord] = {}
    keyless = 0
    for record in records:
        if record.key is None:
            keyless += 1
        elif record.value is None:
            latest.pop((record.partition, record.key), None)
        else:
            latest[record.partition, record.key] = record
    rows = sorted(latest.values(), key=lambda r: (r.key or b"", r.partition))
    if as_json:
        for record in rows:
            write(json_line(as_object(record)))
    else:
        show_table(
            ("key", "value", "partition", "offset", "timestamp"),
            [
                (text(r.key, ""), text(r.value, ""), r.partition, r.offset, moment(r.timestamp))
                for r in rows
            ],
        )
    sys.stdout.flush()
    _warn(rows, keyless)


def _warn(rows: list[ConsumedRecord], keyless: int) -> None:
    """Warn on standard error of what makes a table misleading."""
    if keyless:
        echo(f"kept: {keyless} records without a key are not in the table", err=True)
    counts: dict[bytes | None, int] = {}
    twice = [r.key for r in rows if counts.setdefault(r.key, r.partition) != r.partition]
    if twice:
        echo(
            f"kept: {len(twice)} keys are in more than one partition, such as {twice[0]!r}: "
            "their producers choose partitions in different ways",
            err=True,
        )
