"""``kept group reset-offsets | export-offsets | delete-offsets``: committed offsets of groups."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from typing import Any, BinaryIO, Final, NamedTuple

import click

from kept.cli import offset_file
from kept.cli.bootstrap_option import bootstrap_option
from kept.cli.completion import GROUP
from kept.cli.offset_file import FileOffset
from kept.cli.output import counted, echo, show_json, show_table, write
from kept.cli.position_syntax import Position, PositionType, offsets_at
from kept.cli.shell import Failure, WholeNumber, did_you_mean, examples, for_each, json_option
from kept.cli.topic_partition import TopicPartitionArgument
from kept.cli.unavailable import named_partitions, open_client
from kept.client.admin.groups import DEAD, GroupDescription, commit_each, delete_offsets
from kept.client.bootstrap import Bootstrap
from kept.client.client import Client
from kept.client.consume.positions import EARLIEST, LATEST
from kept.storage.errors import GroupIdNotFound, KeptError
from kept.storage.types import IsolationLevel, TopicPartition, decimal_number

NO_MEMBERS: Final = ("Empty", DEAD)
"""States of a group whose offsets may be set from outside."""
NAMED_ERRORS: Final = 5


class Shift(click.ParamType):  # type: ignore[type-arg]
    """``+10`` or ``-10``."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; a usage error for any other text."""
        if isinstance(value, int):
            return value
        number = decimal_number(value.removeprefix("+").removeprefix("-"))
        if number is None or value.startswith("+-"):
            self.fail(f"{value!r} is no number of offsets such as +10 or -10", param, ctx)
        return -number if value.startswith("-") else number


class Change(NamedTuple):
    """What becomes of a group's offset in a partition. ``wanted`` may lie outside of the log."""

    topic_partition: TopicPartition
    before: int | None
    wanted: int
    after: int

    def row(self, group: str) -> dict[str, Any]:
        """As JSON has it."""
        topic, partition = self.topic_partition
        return {
            "group": group,
            "topic": topic,
            "partition": partition,
            "before": self.before,
            "after": self.after,
            "wanted": self.wanted,
        }

    @property
    def note(self) -> str | None:
        """Why it is not what was wanted."""
        if self.wanted == self.after:
            return None
        where = "below the log start" if self.wanted < self.after else "above the log end"
        return f"{self.wanted} is {where}"


@click.command(
    "reset-offsets",
    epilog=examples(
        "kept group reset-offsets readers --topic users --to earliest",
        "kept group reset-offsets readers --topic users:0 --to @2026-01-31T12:00:00Z --dry-run",
        "kept group reset-offsets readers writers --all-topics --shift-by -100",
        "kept group reset-offsets readers --from-file offsets.csv",
    ),
)
@click.argument("names", metavar="GROUP …", nargs=-1, type=GROUP)
@click.option(
    "--topic",
    "topics",
    type=TopicPartitionArgument(),
    metavar="TOPIC[:PARTITION]",
    multiple=True,
    help="A topic or partition to reset; may be repeated.",
)
@click.option("--all-topics", is_flag=True, help="Reset all topics that the group has offsets of.")
@click.option("--partition", type=WholeNumber(0), hidden=True)
@click.option(
    "--to",
    type=PositionType(),
    metavar="earliest|latest|OFFSET|-N|@TIME",
    help="The new place; -N is N before the end, @TIME as in kept consume --offset.",
)
@click.option(
    "--shift-by",
    type=Shift(),
    metavar="+N|-N",
    help="Move so many offsets on, or back, from where the group is.",
)
@click.option(
    "--from-file",
    type=click.File("rb"),
    metavar="FILE",
    help="Take offsets from a file of kept group export-offsets or kafka-consumer-groups --export; "
    "- is standard input.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be committed.")
@json_option
@bootstrap_option
def reset_offsets(
    *,
    names: tuple[str, ...],
    topics: tuple[tuple[str, int | None], ...],
    all_topics: bool,
    partition: int | None,
    to: Position | None,
    shift_by: int | None,
    from_file: BinaryIO | None,
    dry_run: bool,
    as_json: bool,
    bootstrap: Bootstrap,
) -> int:
    """Set the committed offsets of groups, which must have no members.

    An offset outside of the log becomes its start or its end. For each group everything is checked
    before anything is committed.
    """
    if (to is not None) + (shift_by is not None) + (from_file is not None) != 1:
        raise click.UsageError("give one of --to, --shift-by and --from-file")
    if from_file is not None and (topics or all_topics):
        raise click.UsageError("--from-file names the partitions: no --topic, no --all-topics")
    if topics and all_topics:
        raise click.UsageError("--topic and --all-topics contradict each other")
    if from_file is None and not (topics or all_topics):
        raise click.UsageError("which topics? Give --topic or --all-topics")
    if partition is not None:
        if len(topics) != 1 or topics[0][1] is not None:
            raise click.UsageError("--partition needs one --topic; write --topic TOPIC:PARTITION")
        topics = ((topics[0][0], partition),)
    offsets = _read(from_file, names) if from_file is not None else None
    names = tuple(dict.fromkeys(names if offsets is None else offsets))
    if not names:
        raise click.UsageError("which group?")
    rows: list[dict[str, Any]] = []
    shown: list[tuple[Any, ...]] = []
    with open_client(bootstrap) as client:
        chosen = None if not topics else named_partitions(client, topics)

        def reset(name: str) -> None:
            if offsets is not None:
                changes = _to_offsets(client, name, offsets[name])
            elif to is not None:
                changes = _to_position(client, name, chosen, to)
            else:
                assert shift_by is not None
                changes = _shifted(client, name, chosen, shift_by)
            failed = {} if dry_run else _commit(client, name, changes)
            for change in changes:
                if change.topic_partition not in failed:
                    rows.append(change.row(name))
                    at = (name, *change.topic_partition, change.before, change.after)
                    shown.append((*at, change.note))
            if failed:
                raise Failure(
                    f"{len(failed)} of {counted(len(changes), 'offset')} were not committed: "
                    f"{_some(failed.values())}"
                )

        status = for_each(names, reset)
    if as_json:
        show_json(rows)
    elif shown:
        columns = ["group", "topic", "partition", "before", "would be" if dry_run else "after"]
        noted = any(row[-1] for row in shown)
        show_table([*columns, "note"][: 6 if noted else 5], [r[: 6 if noted else 5] for r in shown])
    return status


seek = copy(reset_offsets)
"""As rpk calls it."""
seek.name, seek.hidden = "seek", True


def _read(file: BinaryIO, names: Sequence[str]) -> dict[str, dict[TopicPartition, int]]:
    """The offsets of a file by group; of ``names`` alone where groups are named."""
    content = file.read(offset_file.MAX_BYTES + 1)
    if len(content) > offset_file.MAX_BYTES:
        raise Failure(f"{file.name} is larger than {offset_file.MAX_BYTES} bytes")
    try:
        entries = offset_file.parse_offsets(content)
    except ValueError as error:
        raise Failure(f"{file.name}: {error}") from None
    if entries[0].group is None:
        if len(names) != 1:
            raise click.UsageError(f"{file.name} names no group: name the one that it is for")
        entries = [entry._replace(group=names[0]) for entry in entries]
    by_group = _by_group(entries)
    for name in names:
        if name not in by_group:
            raise Failure(
                f"{file.name}: it has no offsets of group {name}{did_you_mean(name, by_group)}"
            )
    return {name: by_group[name] for name in names or by_group}


def _by_group(entries: Iterable[FileOffset]) -> dict[str, dict[TopicPartition, int]]:
    by_group: dict[str, dict[TopicPartition, int]] = {}
    for group, tp, offset in entries:
        by_group.setdefault(group or "", {})[tp] = offset
    return by_group


def _to_offsets(client: Client, name: str, wanted: Mapping[TopicPartition, int]) -> list[Change]:
    is_new = _check_free(client, name).state == DEAD
    named_partitions(client, [(topic, number) for topic, number in wanted])
    if is_new:
        _note_new_group(client, name)
    return _within_logs(client, client.committed(name, wanted), wanted)


def _to_position(
    client: Client, name: str, chosen: Sequence[TopicPartition] | None, to: Position
) -> list[Change]:
    is_new = _check_free(client, name).state == DEAD
    committed = client.committed(name, chosen)
    if chosen is None:
        chosen = _committed_partitions(client, name, committed)
    elif is_new:
        _note_new_group(client, name)
    wanted = offsets_at(client, chosen, to, IsolationLevel.READ_UNCOMMITTED)
    return _within_logs(client, committed, wanted)


def _note_new_group(client: Client, name: str) -> None:
    """Tell that a group without members is new, unless it has committed offsets, and which one may
    be meant.
    """
    if not client.committed(name):
        listed = [listing.group for listing in client.list_groups([])]
        echo(f"kept: group {name} is new{did_you_mean(name, listed)}", err=True)


def _shifted(
    client: Client, name: str, chosen: Sequence[TopicPartition] | None, shift: int
) -> list[Change]:
    _check_free(client, name)
    committed = client.committed(name, chosen)
    if chosen is None or not committed:
        chosen = _committed_partitions(client, name, committed)
    missing = [tp for tp in chosen if tp not in committed]
    if missing:
        raise Failure(
            f"it has no committed offset of {_some(missing)} to count from: give --to instead"
        )
    return _within_logs(client, committed, {tp: committed[tp] + shift for tp in chosen})


def _check_free(client: Client, name: str) -> GroupDescription:
    """The group, which has no members."""
    described = client.describe_group(name)
    if described.state not in NO_MEMBERS:
        raise Failure(f"group {name} is {described.state}: stop its members first")
    return described


def _committed_partitions(
    client: Client, name: str, committed: Mapping[TopicPartition, int]
) -> list[TopicPartition]:
    """Partitions that the group has offsets of. Raises GroupIdNotFound, Failure where none."""
    if not committed:
        if client.describe_group(name).state == DEAD:
            raise no_group(client, name)
        raise Failure(f"group {name} has committed no offsets: name topics with --topic and --to")
    return sorted(committed)


def _within_logs(
    client: Client,
    committed: Mapping[TopicPartition, int],
    wanted: Mapping[TopicPartition, int],
) -> list[Change]:
    first = client.list_offsets(dict.fromkeys(wanted, EARLIEST))
    last = client.list_offsets(dict.fromkeys(wanted, LATEST))
    return [
        Change(tp, committed.get(tp), offset, min(max(offset, first[tp].offset), last[tp].offset))
        for tp, offset in sorted(wanted.items())
    ]


def _commit(
    client: Client, name: str, changes: Iterable[Change]
) -> dict[TopicPartition, KeptError]:
    """Commit; what was refused, by partition."""
    offsets = {change.topic_partition: change.after for change in changes}
    failed = client.run(commit_each(name, offsets, client.timeout_ms))
    return {tp: client.named(error) for tp, error in failed.items()}


def _some(things: Iterable[object]) -> str:
    texts = list(dict.fromkeys(map(str, things)))
    more = f" and {len(texts) - NAMED_ERRORS} more" if len(texts) > NAMED_ERRORS else ""
    return "; ".join(texts[:NAMED_ERRORS]) + more


@click.command(
    "export-offsets",
    epilog=examples(
        "kept group export-offsets readers > offsets.csv",
        "kept group export-offsets readers writers --json > offsets.json",
    ),
)
@click.argument("names", metavar="GROUP …", nargs=-1, required=True, type=GROUP)
@json_option
@bootstrap_option
def export_offsets(*, names: tuple[str, ...], as_json: bool, bootstrap: Bootstrap) -> int:
    """Print the committed offsets of groups, as CSV or JSON that reset-offsets --from-file reads.

    CSV is that of kafka-consumer-groups: TOPIC,PARTITION,OFFSET, with several groups the group
    before it.
    """
    found: dict[str, dict[TopicPartition, int]] = {}
    with open_client(bootstrap) as client:

        def export(name: str) -> None:
            committed = client.committed(name)
            _committed_partitions(client, name, committed)
            found[name] = committed

        status = for_each(names, export)
    if as_json:
        show_json(offset_file.json_rows(found))
    else:
        write(offset_file.csv_text(found, named=len(names) > 1))
    return status


@click.command(
    "delete-offsets",
    epilog=examples(
        "kept group delete-offsets readers users", "kept group delete-offsets r users:3"
    ),
)
@click.argument("name", metavar="GROUP", type=GROUP)
@click.argument(
    "targets", metavar="TOPIC[:PARTITION] …", nargs=-1, required=True, type=TopicPartitionArgument()
)
@bootstrap_option
def delete_group_offsets(
    *, name: str, targets: tuple[tuple[str, int | None], ...], bootstrap: Bootstrap
) -> int:
    """Delete committed offsets of GROUP. No member of it may read these topics."""
    with open_client(bootstrap) as client:
        committed = client.committed(name)
        _committed_partitions(client, name, committed)
        chosen: dict[str, TopicPartition] = {}
        for topic, number in targets:
            its = [tp for tp in sorted(committed) if tp.topic == topic]
            its = [tp for tp in its if number in (None, tp.partition)]
            if not its:
                topics = {tp.topic for tp in committed}
                near = "" if topic in topics else did_you_mean(topic, topics)
                place = topic if number is None else f"{topic}:{number}"
                raise Failure(f"group {name} has no committed offset of {place}{near}")
            chosen.update({tp.place: tp for tp in its})
        failed = client.run(delete_offsets(name, chosen.values()))

        def told(place: str) -> str:
            if (error := failed.get(chosen[place])) is not None:
                raise client.named(error)
            return f"deleted the offset of {place}: it was {committed[chosen[place]]}"

        return for_each(list(chosen), told)


def no_group(client: Client, name: str) -> GroupIdNotFound:
    """That there is no such group, and which one may be meant."""
    near = did_you_mean(name, [listing.group for listing in client.list_groups([])])
    return GroupIdNotFound(f"no group {name}{near or '; kept group list shows those that exist'}")
