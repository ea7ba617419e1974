"""``kept topic``: create, list, describe, alter and delete topics, on kept or on Apache Kafka."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import click

from kept.cli.bootstrap_option import bootstrap_option
from kept.cli.completion import TOPIC, TOPIC_SETTING, TOPIC_SETTING_NAME
from kept.cli.output import (
    counted,
    echo,
    moment,
    percent,
    show_json,
    show_rows,
    show_table,
    size,
    write,
)
from kept.cli.position_syntax import Position, PositionKind, PositionType, offsets_at
from kept.cli.shell import (
    Failure,
    Group,
    WholeNumber,
    did_you_mean,
    examples,
    for_each,
    internal_option,
    json_option,
    pairs,
    show_each,
)
from kept.cli.topic_partition import TopicPartitionArgument
from kept.cli.unavailable import named_partitions, open_client, warn_unanswered
from kept.client.admin.topics import NewTopic
from kept.client.bootstrap import Bootstrap
from kept.client.client import Client
from kept.client.consume.positions import EARLIEST, LATEST
from kept.client.core.broker_errors import ConnectionFailed, NoResponse
from kept.client.json_api import PRESENT_S, HttpFailed, JsonApi
from kept.storage.errors import KeptError, TopicAlreadyExists
from kept.storage.printable import printable_line
from kept.storage.types import IsolationLevel


@click.group(
    cls=Group,
    epilog=examples("kept topic create users --partitions 3 --config cleanup.policy=compact"),
)
def topic() -> None:
    """Create, list, describe, alter and delete topics."""


@topic.command(
    epilog=examples(
        "kept topic create events --partitions 12",
        "kept topic create users --config cleanup.policy=compact --config segment.bytes=1048576",
    )
)
@click.argument("names", metavar="NAME …", nargs=-1, required=True)
@click.option(
    "--partitions", type=WholeNumber(1), help="Number of partitions.  [default: num.partitions]"
)
@click.option(
    "--replication-factor",
    type=WholeNumber(1),
    help="Replicas of each partition.  [default: default.replication.factor]",
)
@click.option(
    "--config",
    "config",
    metavar="K=V",
    multiple=True,
    type=TOPIC_SETTING,
    help="A setting of the topic; may be repeated.",
)
@click.option("--if-not-exists", is_flag=True, help="Do nothing if the topic exists.")
@click.option("--dry-run", is_flag=True, help="Only check that it would be created.")
@bootstrap_option
def create(
    *,
    names: tuple[str, ...],
    partitions: int | None,
    replication_factor: int | None,
    config: tuple[str, ...],
    if_not_exists: bool,
    dry_run: bool,
    bootstrap: Bootstrap,
) -> int:
    """Create topics."""
    settings = pairs("--config", config)
    with open_client(bootstrap) as client:

        def create_topic(name: str) -> str:
            new = NewTopic(name, partitions or -1, replication_factor or -1, settings)
            try:
                client.create_topics([new], validate_only=dry_run)
            except TopicAlreadyExists:
                if not if_not_exists:
                    raise
                return f"topic {name} exists"
            if dry_run:
                return f"would create topic {name}"
            count = len(client.topic(name).partitions)
            return f"created topic {name} with {counted(count, 'partition')}"

        return for_each(names, create_topic)


@topic.command("list", epilog=examples("kept topic list", "kept topic list --internal --json"))
@internal_option("Also list internal topics such as __consumer_offsets.")
@json_option
@bootstrap_option
def list_topics(*, internal: bool, as_json: bool, bootstrap: Bootstrap) -> None:
    """List all topics."""
    with open_client(bootstrap) as client:
        topics = client.metadata().topics
    rows = [
        {
            "name": t.name,
            "partitions": len(t.partitions),
            "replicas": max((len(p.replicas) for p in t.partitions.values()), default=0),
            "internal": t.internal,
            "topic_id": None if t.topic_id is None else str(t.topic_id),
        }
        for _, t in sorted(topics.items())
        if internal or not t.internal
    ]
    empty = f"{client.none_of('topics')}: kept topic create NAME makes one"
    show_rows(("name", "partitions", "replicas"), rows, as_json, empty=empty)


@topic.command(epilog=examples("kept topic describe users", "kept topic describe users --all"))
@click.argument("names", metavar="NAME …", nargs=-1, required=True, type=TOPIC)
@click.option("--all", "all_settings", is_flag=True, help="Also show settings at their default.")
@json_option
@bootstrap_option
def describe(
    *, names: tuple[str, ...], all_settings: bool, as_json: bool, bootstrap: Bootstrap
) -> int:
    """Show topics: settings, and where each partition stands."""
    with open_client(bootstrap) as client:
        return show_each(names, lambda name: _describe(client, name, all_settings), _show, as_json)


def _describe(client: Client, name: str, all_settings: bool) -> dict[str, Any]:
    known = client.topic(name)
    states = client.partition_states(name)
    leaders = {number: p.leader for number, p in known.partitions.items()}
    silent: set[int] = set()
    for number, state in states.items():
        if isinstance(state.unknown, NoResponse | ConnectionFailed):
            silent.add(leaders[number])
        elif state.unknown is not None:
            echo(f"kept: {state.unknown}", err=True)
    if silent:
        warn_unanswered(silent, "the state of the partitions that it leads is unknown")
        leaders = {number: leader for number, leader in leaders.items() if leader not in silent}
    settings = client.topic_configs([name])[name]
    config = {
        c.name: {"value": c.value, "source": c.source}
        for c in settings
        if all_settings or c.source == "topic"
    }
    policy = next((c.value for c in settings if c.name == "cleanup.policy"), "")
    compaction = _compaction(client, name, leaders) if "compact" in (policy or "") else {}
    partitions = []
    for number, p in sorted(known.partitions.items()):
        start, end, size, _ = states.get(number, (None, None, None, None))
        partitions.append(
            {
                "partition": number,
                "leader": p.leader,
                "leader_epoch": p.leader_epoch,
                "replicas": list(p.replicas),
                "isr": list(p.isr),
                "log_start_offset": start,
                "high_watermark": end,
                "size_bytes": size,
                **compaction.get(number, {}),
            }
        )
    return {
        "name": name,
        "topic_id": None if known.topic_id is None else str(known.topic_id),
        "internal": known.internal,
        "config": config,
        "compacted": bool(compaction),
        "partitions": partitions,
    }


def _compaction(client: Client, name: str, leaders: dict[int, int]) -> dict[int, dict[str, Any]]:
    """What kept's own API knows of compaction, from the leaders; nothing of Apache Kafka."""
    out: dict[int, dict[str, Any]] = {}
    for node, endpoint in client.view.nodes.items():
        if node not in leaders.values():
            continue
        try:
            answer = JsonApi(endpoint, PRESENT_S, client.security).get("compaction", topic=name)
        except HttpFailed:
            continue
        for partition in answer["partitions"]:
            number = int(partition["partition"])
            if leaders.get(number) != node:
                continue
            out[number] = {
                key: partition[key]
                for key in ("dirty_ratio", "last_compaction_ms", "state", "reason")
            }
    return out


def _show(described: dict[str, Any]) -> None:
    write(f"Topic: {described['name']}\n")
    if described["topic_id"] is not None:
        write(f"Topic id: {described['topic_id']}\n")
    write(f"Partitions: {len(described['partitions'])}\n")
    write("Config:\n" if described["config"] else "Config: defaults\n")
    for name, entry in described["config"].items():
        source = "" if entry["source"] == "topic" else f"  ({entry['source']})"
        value = "-" if entry["value"] is None else printable_line(entry["value"])
        write(f"  {name}: {value}{source}\n")
    write("\n")
    columns = ["partition", "leader", "isr", "log start", "high watermark", "size"]
    compacted = described["compacted"]
    if compacted:
        columns += ["dirty ratio", "last compaction", "why"]
    rows = []
    for p in described["partitions"]:
        leader = p["leader"] if p["leader"] >= 0 else "none"
        row = [p["partition"], leader, p["isr"], p["log_start_offset"], p["high_watermark"]]
        row.append(size(p["size_bytes"]))
        if compacted:
            due = p.get("reason") or p.get("state") or ""
            row += [
                percent(p.get("dirty_ratio")),
                moment(p.get("last_compaction_ms")) or "never",
                due,
            ]
        rows.append(row)
    show_table(columns, rows)


@topic.command(
    epilog=examples(
        "kept topic alter users --config min.cleanable.dirty.ratio=0.1",
        "kept topic alter users --delete-config segment.ms --partitions 6",
    )
)
@click.argument("names", metavar="NAME …", nargs=-1, required=True, type=TOPIC)
@click.option(
    "--config",
    "config",
    metavar="K=V",
    multiple=True,
    type=TOPIC_SETTING,
    help="Set a topic setting.",
)
@click.option(
    "--delete-config",
    metavar="K",
    multiple=True,
    type=TOPIC_SETTING_NAME,
    help="Reset a topic setting to its default.",
)
@click.option("--partitions", type=WholeNumber(1), help="Raise the number of partitions.")
@bootstrap_option
def alter(
    *,
    names: tuple[str, ...],
    config: tuple[str, ...],
    delete_config: tuple[str, ...],
    partitions: int | None,
    bootstrap: Bootstrap,
) -> int:
    """Change settings of topics, or give them more partitions."""
    changes = pairs("--config", config)
    if not changes and not delete_config and partitions is None:
        raise click.UsageError("nothing to alter: give --config, --delete-config or --partitions")
    both = set(changes) & set(delete_config)
    if both:
        raise click.UsageError(f"{sorted(both)[0]} is both set and deleted")
    with open_client(bootstrap) as client:

        def alter_topic(name: str) -> str:
            has = len(client.topic(name).partitions)
            if partitions is not None and partitions < has:
                counts = counted(has, "partition")
                raise Failure(f"topic {name} has {counts}: their number only grows")
            if delete_config:
                _refuse_unknown(delete_config, [c.name for c in client.topic_configs([name])[name]])
            if changes or delete_config:
                client.alter_topic(name, changes, delete_config)
            elif partitions == has:
                raise Failure(f"topic {name} has {counted(has, 'partition')} already")
            if partitions is not None and partitions != has:
                try:
                    client.create_partitions(name, partitions)
                except KeptError as error:
                    if not changes and not delete_config:
                        raise
                    raise Failure(
                        f"its settings are changed, its partitions not: {error}"
                    ) from error
            return f"altered topic {name}"

        return for_each(names, alter_topic)


def _refuse_unknown(names: tuple[str, ...], known: list[str]) -> None:
    """A misspelt name is an error here: deleting it is none for the broker, and does nothing."""
    for name in names:
        if name not in known:
            near = did_you_mean(name, known)
            raise Failure(f"--delete-config {name}: there is no such topic setting{near}")


@topic.command(epilog=examples("kept topic delete users"))
@click.argument("names", metavar="NAME …", nargs=-1, required=True, type=TOPIC)
@bootstrap_option
def delete(*, names: tuple[str, ...], bootstrap: Bootstrap) -> int:
    """Delete topics with all their records."""
    with open_client(bootstrap) as client:

        def delete_topic(name: str) -> str:
            client.topic(name)
            client.delete_topics([name])
            return f"deleted topic {name}"

        return for_each(names, delete_topic)


@topic.command(
    "delete-records",
    epilog=examples(
        "kept topic delete-records events:0 events:1 --before 1200",
        "kept topic delete-records events --before @-7d --dry-run",
    ),
)
@click.argument(
    "targets", metavar="TOPIC[:PARTITION] …", nargs=-1, required=True, type=TopicPartitionArgument()
)
@click.option(
    "--before",
    type=PositionType(),
    required=True,
    metavar="OFFSET|-N|@TIME|latest",
    help="The first offset that stays; -N keeps the last N, @TIME those from then on, latest none.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be deleted.")
@json_option
@bootstrap_option
def delete_records(
    *,
    targets: tuple[tuple[str, int | None], ...],
    before: Position,
    dry_run: bool,
    as_json: bool,
    bootstrap: Bootstrap,
) -> int:
    """Delete the oldest records of partitions: their logs then start at --before.

    All partitions are checked before anything is deleted. Topics that are only compacted are
    refused: they keep the latest record of each key.
    """
    if before.kind is PositionKind.TIME and before.number > time.time() * 1000:
        raise click.UsageError(f"--before: {moment(before.number)} is in the future")
    with open_client(bootstrap) as client:
        tps = named_partitions(client, targets)
        _check_deletable(client, sorted({tp.topic for tp in tps}))
        starts = client.list_offsets(dict.fromkeys(tps, EARLIEST))
        ends = client.list_offsets(dict.fromkeys(tps, LATEST))
        wanted = offsets_at(client, tps, before, IsolationLevel.READ_UNCOMMITTED)
        for tp, offset in wanted.items():
            if offset > ends[tp].offset:
                raise Failure(f"--before {offset}: {tp.place} ends at {ends[tp].offset}")
        moved = {tp: offset for tp, offset in wanted.items() if offset > starts[tp].offset}
        results = client.delete_records(moved) if moved and not dry_run else {}
    rows: dict[str, dict[str, Any]] = {}
    errors: dict[str, KeptError] = {}
    for tp in tps:
        place, result = tp.place, results.get(tp)
        if isinstance(result, KeptError):
            errors[place] = client.named(result)
            continue
        start = starts[tp].offset
        rows[place] = {
            "topic": tp.topic,
            "partition": tp.partition,
            "before": start,
            "log_start_offset": max(start, wanted[tp]) if result is None else result,
            "high_watermark": ends[tp].offset,
        }
    if as_json:
        show_json(list(rows.values()))
    elif rows:
        start_name = "would be" if dry_run else "log start"
        columns = ("topic", "partition", "was", start_name, "log end")
        show_table(columns, [list(row.values()) for row in rows.values()])

    def refused(place: str) -> None:
        raise errors[place]

    return for_each(list(errors), refused)


def _check_deletable(client: Client, names: Sequence[str]) -> None:
    """A Failure for a topic whose records no broker deletes on request."""
    for name, entries in client.topic_configs(names).items():
        if client.topic(name).internal:
            raise Failure(f"{name} is an internal topic: its records are not deleted on request")
        policy = next((e.value or "" for e in entries if e.name == "cleanup.policy"), "delete")
        if "delete" not in policy:
            raise Failure(
                f"{name} has cleanup.policy={policy}: it keeps the latest record of each key. To "
                "delete one of them write a tombstone"
            )
