"""``kept group``: consumer groups, on kept or on Apache Kafka."""

from __future__ import annotations

import datetime
from typing import Any

import click

from kept.cli.output import echo, show_json, show_table, write
from kept.cli.shell import Failure, Group, WholeNumber, bootstrap_option, examples, json_option
from kept.cli.unavailable import warn_unanswered
from kept.client.bootstrap import Bootstrap
from kept.client.client import Client
from kept.client.consume.positions import EARLIEST, LATEST
from kept.client.core.metadata import TopicView
from kept.storage.errors import GroupIdNotFound
from kept.storage.printable import printable_line
from kept.storage.types import TopicPartition, decimal_number


@click.group(cls=Group, epilog=examples("kept group describe readers"))
def group() -> None:
    """List, describe, reset and delete consumer groups."""


@group.command("list", epilog=examples("kept group list --json"))
@json_option
@bootstrap_option
def list_groups(*, as_json: bool, bootstrap: Bootstrap) -> None:
    """List all groups."""
    silent: list[int] = []
    with _client(bootstrap) as client:
        groups = client.list_groups(silent)
    if silent:
        warn_unanswered(silent, "groups coordinated there are not listed")
    if as_json:
        show_json([g._asdict() for g in groups])
    else:
        show_table(
            ("group", "type", "state"), [(g.group, g.protocol_type, g.state) for g in groups]
        )


@group.command(epilog=examples("kept group describe readers"))
@click.argument("name", metavar="GROUP")
@json_option
@bootstrap_option
def describe(*, name: str, as_json: bool, bootstrap: Bootstrap) -> None:
    """Show members, committed offsets and lag of GROUP."""
    with _client(bootstrap) as client:
        described = _describe(client, name)
    if as_json:
        show_json(described)
        return
    write(f"Group: {name}\nState: {described['state']}\n")
    protocol = printable_line(described["protocol"] or "-")
    write(f"Protocol: {protocol}\nMembers: {len(described['members'])}\n\n")
    columns = ("topic", "partition", "committed", "log end", "lag", "member", "host")
    keys = ("topic", "partition", "committed_offset", "high_watermark", "lag", "member_id", "host")
    show_table(columns, [[row[k] for k in keys] for row in described["partitions"]])


def _describe(client: Client, name: str) -> dict[str, Any]:
    described = client.describe_group(name)
    committed = client.committed(name)
    if described.state == "Dead" and not committed:
        raise GroupIdNotFound(f"no group {name}; kept group list shows those that exist")
    owners = {tp: m for m in described.members for tp in m.partitions}
    tps = sorted({*committed, *owners})
    topics = client.metadata(sorted({tp.topic for tp in tps})).topics if tps else {}
    there = [tp for tp in tps if tp.topic in topics and _is_led(topics[tp.topic], tp.partition)]
    ends = client.list_offsets(dict.fromkeys(there, LATEST)) if there else {}
    rows = []
    for tp in tps:
        end = ends[tp].offset if tp in ends else None
        at = committed.get(tp)
        member = owners.get(tp)
        rows.append(
            {
                "topic": tp.topic,
                "partition": tp.partition,
                "committed_offset": at,
                "high_watermark": end,
                "lag": None if end is None or at is None else end - at,
                "member_id": None if member is None else member.member_id,
                "client_id": None if member is None else member.client_id,
                "host": None if member is None else member.host,
            }
        )
    return {
        "group": name,
        "state": described.state,
        "protocol_type": described.protocol_type,
        "protocol": described.protocol,
        "members": [
            {
                "member_id": m.member_id,
                "instance_id": m.instance_id,
                "client_id": m.client_id,
                "host": m.host,
                "partitions": [list(tp) for tp in m.partitions],
            }
            for m in described.members
        ],
        "partitions": rows,
    }


def _is_led(topic: TopicView, partition: int) -> bool:
    """Whether a leader knows the partition's end: it exists and is online."""
    return partition in topic.partitions and topic.partitions[partition].leader >= 0


@group.command(
    "reset-offsets",
    epilog=examples(
        "kept group reset-offsets readers --topic users --to earliest",
        "kept group reset-offsets readers --topic users --to 2026-01-31T12:00:00Z --dry-run",
    ),
)
@click.argument("name", metavar="GROUP")
@click.option("--topic", required=True)
@click.option("--partition", type=WholeNumber(0), help="Reset this partition only.")
@click.option(
    "--to",
    required=True,
    metavar="earliest|latest|OFFSET|TIMESTAMP",
    help="A timestamp is ISO 8601; without a zone it is local time.",
)
@click.option("--dry-run", is_flag=True, help="Show what would be committed.")
@json_option
@bootstrap_option
def reset_offsets(
    *,
    name: str,
    topic: str,
    partition: int | None,
    to: str,
    dry_run: bool,
    as_json: bool,
    bootstrap: Bootstrap,
) -> None:
    """Set the committed offsets of GROUP, which must have no members."""
    kind, number = _target(to)
    with _client(bootstrap) as client:
        partitions = sorted(client.topic(topic).partitions)
        if partition is not None and partition not in partitions:
            raise Failure(f"topic {topic} has partitions 0 to {len(partitions) - 1}")
        chosen = partitions if partition is None else [partition]
        tps = [TopicPartition(topic, p) for p in chosen]
        state = client.describe_group(name).state
        if state not in ("Empty", "Dead"):
            raise Failure(f"group {name} is {state}: stop its members first")
        before = client.committed(name, tps)
        after = _offsets(client, tps, kind, number)
        if not dry_run:
            client.commit(name, after)
    if as_json:
        show_json(
            [
                {"topic": t.topic, "partition": t.partition, "before": before.get(t), "after": o}
                for t, o in after.items()
            ]
        )
        return
    rows = [(t.topic, t.partition, before.get(t), o) for t, o in after.items()]
    show_table(("topic", "partition", "before", "would be" if dry_run else "after"), rows)


def _target(to: str) -> tuple[str, int]:
    """(earliest | latest | offset | timestamp, number)."""
    if to in ("earliest", "latest"):
        return to, 0
    offset = decimal_number(to)
    if offset is not None:
        return "offset", offset
    try:
        at = datetime.datetime.fromisoformat(to)
    except ValueError:
        raise click.UsageError(
            f"--to {to!r} is neither earliest, latest, an offset nor a time such as "
            "2026-01-31T12:00:00Z"
        ) from None
    return "timestamp", round(at.timestamp() * 1000)


def _offsets(
    client: Client, tps: list[TopicPartition], kind: str, number: int
) -> dict[TopicPartition, int]:
    first = client.list_offsets(dict.fromkeys(tps, EARLIEST))
    last = client.list_offsets(dict.fromkeys(tps, LATEST))
    if kind == "timestamp":
        located = client.list_offsets(dict.fromkeys(tps, number))
        return {tp: f.offset if f.offset >= 0 else last[tp].offset for tp, f in located.items()}
    if kind == "offset":
        return {tp: min(max(number, first[tp].offset), last[tp].offset) for tp in tps}
    chosen = first if kind == "earliest" else last
    return {tp: chosen[tp].offset for tp in tps}


@group.command(epilog=examples("kept group delete readers"))
@click.argument("names", metavar="GROUP …", nargs=-1, required=True)
@bootstrap_option
def delete(*, names: tuple[str, ...], bootstrap: Bootstrap) -> None:
    """Delete groups that have no members, and their offsets."""
    with _client(bootstrap) as client:
        for name in names:
            client.delete_group(name)
            echo(f"deleted group {name}")


def _client(bootstrap: Bootstrap) -> Client:
    return Client(bootstrap.servers, client_id="kept-cli", security=bootstrap.security)
