"""``kept consume``: records of topics as lines, as JSON, or as a table of latest values."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import Any

import click
import msgspec

from kept.cli.bootstrap_option import bootstrap_option
from kept.cli.completion import GROUP
from kept.cli.output import counted, echo, moment, progress, reader_is_gone, show_table, text
from kept.cli.position_syntax import (
    EARLIEST,
    LATEST,
    Position,
    PositionKind,
    PositionType,
    TimeType,
    offsets_at,
)
from kept.cli.record_format import (
    FIELDS,
    Renderer,
    as_json_line,
    for_people,
    formatted,
    key_line,
    printable,
    value_line,
)
from kept.cli.shell import Failure, WholeNumber, examples
from kept.cli.topic_partition import TopicPartitionArgument
from kept.cli.unavailable import explained, named_partitions, open_client
from kept.client.bootstrap import Bootstrap
from kept.client.client import Client
from kept.client.consume import positions
from kept.client.consume.consumer import ConsumedRecord, Consumer, GroupConsumer
from kept.client.consume.fetch import FetchLimits
from kept.storage.errors import KeptError, RetriableError
from kept.storage.types import IsolationLevel, TopicPartition

Batches = Generator[list[ConsumedRecord], None, None]
_FORMAT_HELP = ", ".join(f"%{letter} {meaning}" for letter, (meaning, _) in FIELDS.items())


class _Reading(msgspec.Struct, frozen=True):
    """What is read. ``until_ms``: up to the first record that is as new; ``to_end``: up to the
    present end.
    """

    topics: tuple[str, ...]
    partitions: tuple[TopicPartition, ...]
    start: Position
    to_end: bool
    until_ms: int | None
    maximum: int | None
    isolation: IsolationLevel


@click.command(
    epilog=examples(
        "kept consume users --from-beginning",
        "kept consume users --table",
        "kept consume users --offset -10 --until-end",
        "kept consume users --offset @-1h --until @-30m --json",
        "kept consume users:0 --offset 42 --max 1 --json",
        "kept consume 'orders\\..*' --regex --format '%t %p %o %k %v\\n' --until-end",
        "kept consume users --group readers --from-beginning",
    )
)
@click.argument(
    "targets",
    metavar="TOPIC[:PARTITION] …",
    nargs=-1,
    required=True,
    type=TopicPartitionArgument(),
)
@click.option(
    "--regex", is_flag=True, help="TOPIC is a regular expression that the whole name must match."
)
@click.option("--internal", is_flag=True, help="With --regex: internal topics, too.")
@click.option("--partition", type=WholeNumber(0), help="The same as TOPIC:PARTITION.")
@click.option(
    "--from-beginning", is_flag=True, help="Start with the first record instead of the next one."
)
@click.option(
    "--offset",
    "start",
    type=PositionType(),
    metavar="N|-N|@TIME",
    help="Start at offset N of a partition, N offsets before the end of each, or with the first "
    "record as new as TIME: 2026-01-31T12:00:00Z (without a zone local time), -90m (s, m, h, d "
    "ago) or milliseconds; also earliest and latest. Above the end: warn, and wait for what comes "
    "next (with --until-end: fail). Below the log start: warn, and start there.",
)
@click.option("--max", "maximum", type=WholeNumber(1), help="Stop after this many records.")
@click.option(
    "--until-end",
    is_flag=True,
    help="Stop at the present end of the log. Starts with the first record unless told otherwise.",
)
@click.option(
    "--until",
    "until_ms",
    type=TimeType(),
    metavar="@TIME",
    help="Stop before the first record of each partition that is as new as TIME, or at its present "
    "end.",
)
@click.option(
    "--group",
    type=GROUP,
    help="Read on from what this group has committed, and commit what was printed.",
)
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
@click.option(
    "--format",
    "format_string",
    metavar="F",
    help=f"Print each record as F says: {_FORMAT_HELP}. Escapes: \\n \\r \\t \\0 \\xHH \\\\",
)
@click.option("--value-only", is_flag=True, help="Print values and nothing else.")
@click.option("--key-only", is_flag=True, help="Print keys and nothing else.")
@click.option("--headers/--no-headers", default=True, help="Print headers.  [default: headers]")
@bootstrap_option
def consume(
    *,
    targets: Sequence[tuple[str, int | None]],
    regex: bool,
    internal: bool,
    partition: int | None,
    from_beginning: bool,
    start: Position | None,
    maximum: int | None,
    until_end: bool,
    until_ms: int | None,
    group: str | None,
    isolation: str,
    read_committed: bool,
    table: bool,
    bootstrap: Bootstrap,
    **shown: Any,
) -> None:
    """Print the records of topics, from now on, until Ctrl-C.

    A line is partition:offset, time, key, value and headers; of several topics it begins with the
    topic. Bytes that are no text are escaped, but not by --format, --value-only and --key-only
    where they write to a file or a pipe.
    """
    _refuse(from_beginning and start is not None, "--from-beginning and --offset")
    _refuse(until_end and until_ms is not None, "--until-end and --until")
    alone = start is not None or partition is not None or until_ms is not None
    _refuse(group is not None and alone, "--group and --offset, --partition or --until")
    restricted = start is not None or bool(group or maximum)
    _refuse(table and restricted, "--table and --offset, --group or --max")
    _check_targets(targets, regex, internal, partition, group)
    of_one = len(targets) == 1 and not regex and (partition, targets[0][1]) != (None, None)
    if start is not None and start.kind is PositionKind.OFFSET and not of_one:
        raise click.UsageError("--offset N needs one TOPIC:PARTITION: offsets count per partition")
    several = regex or len({topic for topic, _ in targets}) > 1
    render = _renderer(table, several=several, **shown)
    to_end = table or until_end
    begin = EARLIEST if from_beginning or to_end or until_ms is not None else LATEST
    level = IsolationLevel.READ_COMMITTED if read_committed else IsolationLevel[isolation.upper()]

    with contextlib.ExitStack() as stack:
        client = stack.enter_context(open_client(bootstrap))
        if regex:
            targets = [(topic, None) for topic in _matching(client, targets, internal)]
        if partition is not None:
            targets = [(topic, partition) for topic, _ in targets]
        topics = tuple(dict.fromkeys(topic for topic, _ in targets))
        for topic in topics:
            stack.enter_context(explained(bootstrap, topic))
        reading = _Reading(
            topics=topics,
            partitions=tuple(named_partitions(client, targets)),
            start=start or begin,
            to_end=to_end,
            until_ms=until_ms,
            maximum=maximum,
            isolation=level,
        )
        _invite(reading, group)
        has_bar = table or not sys.stdout.isatty()
        batches = _of_partitions(client, reading, has_bar=has_bar)
        if group is not None:
            batches = _of_group(client, group, reading)
        elif maximum is not None:
            batches = _limited(batches, maximum)
        stack.enter_context(contextlib.closing(batches))
        if table:
            _show_table(_flat(batches), shown["as_json"], several=len(topics) > 1)
        else:
            _show_lines(batches, render, reading)


def _refuse(both: bool, names: str) -> None:
    if both:
        raise click.UsageError(f"{names} contradict each other")


def _check_targets(
    targets: Sequence[tuple[str, int | None]],
    regex: bool,
    internal: bool,
    partition: int | None,
    group: str | None,
) -> None:
    """Whether the named topics and partitions go together with the options."""
    if internal and not regex:
        raise click.UsageError("--internal needs --regex: a topic that is named is read anyway")
    of_partitions = any(number is not None for _, number in targets)
    _refuse(of_partitions and partition is not None, "TOPIC:PARTITION and --partition")
    _refuse(of_partitions and group is not None, "TOPIC:PARTITION and --group")
    _refuse(of_partitions and regex, "TOPIC:PARTITION and --regex")
    for topic, number in targets:
        if targets.count((topic, number)) > 1 or (number is not None and (topic, None) in targets):
            what = f"topic {topic}" if number is None else f"{topic}:{number}"
            raise click.UsageError(f"{what} is given twice")
    for name in [topic for topic, _ in targets] if regex else ():
        try:
            re.compile(name)
        except re.error as error:
            raise click.UsageError(f"{name!r} is no regular expression: {error}") from None


def _renderer(
    table: bool,
    *,
    several: bool,
    as_json: bool,
    format_string: str | None,
    value_only: bool,
    key_only: bool,
    headers: bool,
) -> Renderer:
    """What writes a record; a usage error where options contradict each other."""
    chosen = {
        "--json": as_json,
        "--format": format_string is not None,
        "--value-only": value_only,
        "--key-only": key_only,
    }
    given = [name for name, is_given in chosen.items() if is_given]
    if table:
        given += ["--table"] if given != ["--json"] else []
    _refuse(len(given) > 1, " and ".join(given))
    if as_json:
        return as_json_line
    if format_string is not None:
        try:
            raw = formatted(format_string)
        except ValueError as error:
            raise click.UsageError(f"--format: {error}") from None
    elif value_only or key_only:
        raw = value_line if value_only else key_line
    else:
        return for_people(topics=several, headers=headers)
    return printable(raw) if sys.stdout.isatty() else raw


def _matching(
    client: Client, targets: Iterable[tuple[str, int | None]], internal: bool
) -> list[str]:
    """The topics that the regular expressions match; a Failure where there is none."""
    patterns = [re.compile(name) for name, _ in targets]
    topics = client.metadata().topics
    matching = [name for name in sorted(topics) if any(p.fullmatch(name) for p in patterns)]
    names = [name for name in matching if internal or not topics[name].internal]
    if not names:
        hint = "; internal topics only with --internal" if matching else ""
        raise Failure(f"no topic is named {' or '.join(p.pattern for p in patterns)}{hint}")
    return names


def _of_partitions(client: Client, reading: _Reading, *, has_bar: bool) -> Batches:
    """Batches of the partitions, up to an end or for ever; ``has_bar``: with a progress bar, which
    records on the same terminal would break.
    """
    tps, isolation = reading.partitions, reading.isolation
    starts = offsets_at(client, tps, reading.start, isolation)
    if reading.start.kind is PositionKind.OFFSET:
        starts = {
            tp: _in_the_log(client, tp, offset, to_end=reading.to_end)
            for tp, offset in starts.items()
        }
    consumer = Consumer(client, starts, FetchLimits(isolation=isolation))
    if reading.until_ms is not None:
        ends = offsets_at(client, tps, Position(PositionKind.TIME, reading.until_ms), isolation)
    elif reading.to_end:
        ends = offsets_at(client, tps, LATEST, isolation)
    else:
        while True:
            yield consumer.poll()
    total = sum(max(0, ends[tp] - starts[tp]) for tp in tps)
    done = 0
    bar = progress(f"reading {', '.join(reading.topics)}", total)
    with bar if has_bar else contextlib.nullcontext(lambda _: None) as advance:
        for batch in consumer.batches_until(ends):
            yield batch
            done += len(batch)
            advance(done)


def _in_the_log(client: Client, tp: TopicPartition, offset: int, *, to_end: bool) -> int:
    """Where to begin: ``offset``, or with a warning the end of the log that is nearest to it."""
    start, end = client.bounds(tp.topic, [tp.partition])[tp.partition]
    if offset > end:
        complaint = f"offset {offset} is above the end of {tp.place}, which is {end}"
        if to_end:
            raise Failure(f"{complaint}: there is nothing to read up to it")
        echo(f"kept: {complaint}; waiting for records from the end on", err=True)
    elif offset < start:
        complaint = f"offset {offset} is below the log start of {tp.place}"
        echo(f"kept: {complaint}; reading from {start} on", err=True)
    return min(max(offset, start), end)


def _of_group(client: Client, group: str, reading: _Reading) -> Batches:
    """Batches for a member. Only what the caller came back from is committed."""
    reset = positions.LATEST if reading.start is LATEST else positions.EARLIEST
    limits = FetchLimits(isolation=reading.isolation)
    member = GroupConsumer(client, group, list(reading.topics), reset=reset, limits=limits)
    left = reading.maximum
    batch: list[ConsumedRecord] = []
    ends: dict[TopicPartition, int] = {}
    try:
        while left is None or left > 0:
            batch = member.poll()
            if left is not None:
                member.give_back(batch[left:])
                batch = batch[:left]
                left -= len(batch)
            yield batch
            batch = []
            if reading.to_end and _is_at_end(client, member, ends):
                return
    finally:
        member.give_back(batch)
        try:
            member.close()
        except KeptError as error:
            doubtful = isinstance(error, RetriableError)
            what = "may not be" if doubtful else "is not"
            more = "may" if doubtful else "will"
            echo(
                f"kept: what was printed last {what} committed and {more} be read again: {error}",
                err=True,
            )


def _is_at_end(client: Client, member: GroupConsumer, ends: dict[TopicPartition, int]) -> bool:
    """Whether a member has read every partition it has to the end that this had when it came.
    ``ends`` keeps them from one call to the next.
    """
    if member.generation < 0:
        return False
    mine = member.consumer.positions
    new = [tp for tp in mine if tp not in ends]
    if new:
        ends |= offsets_at(client, new, LATEST, member.consumer.limits.isolation)
    return all(position >= ends[tp] for tp, position in mine.items())


def _limited(batches: Iterable[list[ConsumedRecord]], maximum: int) -> Batches:
    left = maximum
    for batch in batches:
        yield batch[:left]
        left -= len(batch)
        if left <= 0:
            return


def _flat(batches: Iterable[list[ConsumedRecord]]) -> Iterator[ConsumedRecord]:
    for batch in batches:
        yield from batch


def _invite(reading: _Reading, group: str | None) -> None:
    """Tell a terminal that there is nothing to see until somebody writes."""
    follows = not reading.to_end and reading.until_ms is None and reading.start is LATEST
    if follows and group is None and sys.stderr.isatty():
        names = ", ".join(reading.topics)
        echo(
            f"kept: waiting for new records of {names}; --from-beginning reads what is there, "
            "Ctrl-C ends",
            err=True,
        )


def _summarize(reading: _Reading, count: int) -> None:
    """Tell a terminal at the end how much was read, and up to where."""
    if not sys.stderr.isatty() or not (reading.to_end or reading.until_ms is not None):
        return
    end = ", up to the end" if reading.until_ms is None else f", up to {moment(reading.until_ms)}"
    if count == reading.maximum:
        end = ""
    echo(f"kept: read {counted(count, 'record')} of {', '.join(reading.topics)}{end}", err=True)


def _show_lines(
    batches: Iterable[list[ConsumedRecord]], render: Renderer, reading: _Reading
) -> None:
    """Print each record; what has come is out before the next poll."""
    out = sys.stdout.buffer
    count = 0
    for batch in batches:
        for record in batch:
            out.write(render(record))
        out.flush()
        count += len(batch)
        if not batch and reader_is_gone():
            return
    _summarize(reading, count)


def _show_table(records: Iterable[ConsumedRecord], as_json: bool, *, several: bool) -> None:
    latest: dict[tuple[str, int, bytes], ConsumedRecord] = {}
    keyless = 0
    for record in records:
        if record.key is None:
            keyless += 1
            continue
        place = (record.topic, record.partition, record.key)
        if record.value is None:
            latest.pop(place, None)
        else:
            latest[place] = record
    rows = sorted(latest.values(), key=lambda r: (r.topic, r.key or b"", r.partition))
    if as_json:
        for record in rows:
            sys.stdout.buffer.write(as_json_line(record))
    else:
        columns: tuple[str, ...] = ("key", "value", "partition", "offset", "timestamp")
        cells: list[tuple[Any, ...]] = [
            (text(r.key, ""), text(r.value, ""), r.partition, r.offset, moment(r.timestamp))
            for r in rows
        ]
        if several:
            columns = ("topic", *columns)
            cells = [(r.topic, *row) for r, row in zip(rows, cells, strict=True)]
        show_table(columns, cells)
    sys.stdout.flush()
    _warn(rows, keyless)


def _warn(rows: list[ConsumedRecord], keyless: int) -> None:
    """Warn on standard error of what makes a table misleading."""
    if keyless:
        left_out = counted(keyless, "record")
        echo(f"kept: {left_out} without a key {_are(keyless)} not in the table", err=True)
    counts: dict[tuple[str, bytes | None], int] = {}
    twice = [r.key for r in rows if counts.setdefault((r.topic, r.key), r.partition) != r.partition]
    if twice:
        echo(
            f"kept: {counted(len(twice), 'key')} {_are(len(twice))} in more than one partition, "
            f"such as {twice[0]!r}: their producers choose partitions in different ways",
            err=True,
        )


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
