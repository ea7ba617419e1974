"""``kept group``: consumer groups, on kept or on Apache Kafka."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from kept.cli.bootstrap_option import bootstrap_option
from kept.cli.commands.group_offsets import (
    delete_group_offsets,
    export_offsets,
    no_group,
    reset_offsets,
    seek,
)
from kept.cli.completion import GROUP, states_option
from kept.cli.output import counted, show_json, show_table, write
from kept.cli.shell import (
    Group,
    examples,
    for_each,
    internal_option,
    json_option,
    show_each,
)
from kept.cli.unavailable import open_client, warn_unanswered
from kept.client.admin.group_lag import group_lag, partition_lag
from kept.client.admin.group_survey import led_ends, partitions_of
from kept.client.admin.groups import DEAD, STATES, GroupDescription
from kept.client.bootstrap import Bootstrap
from kept.client.client import SILENT_MS, Client
from kept.storage.errors import GroupIdNotFound
from kept.storage.printable import printable_line
from kept.storage.types import TopicPartition


@click.group(cls=Group, epilog=examples("kept group describe readers"))
def group() -> None:
    """List, describe, reset and delete consumer groups."""


@group.command("list", epilog=examples("kept group list", "kept group list --state Empty --json"))
@states_option(STATES, "Only groups in this state, such as Empty.")
@internal_option("Also list groups whose names begin with __.")
@click.option(
    "--no-lag", is_flag=True, help="Leave out members and lag: faster where groups are many."
)
@json_option
@bootstrap_option
def list_groups(
    *, states: tuple[str, ...], internal: bool, no_lag: bool, as_json: bool, bootstrap: Bootstrap
) -> None:
    """List groups with their members and their lag.

    LAG is the sum over the partitions where it is known; UNKNOWN counts the others: without a
    committed offset, or without a leader that answers.
    """
    silent: list[int] = []
    with open_client(bootstrap) as client:
        listings = [
            each
            for each in client.list_groups(silent)
            if (internal or not is_internal_group(each.group))
            and (not states or each.state in states)
        ]
        surveyed = [] if no_lag else client.survey_groups(listings)
    if silent:
        warn_unanswered(silent, "groups coordinated there are not listed")
    rows = [listing._asdict() for listing in listings]
    columns = ["group", "type", "protocol_type", "state"]
    if not no_lag:
        columns += ["members", "lag", "partitions_unknown"]
        for row, of in zip(rows, surveyed, strict=True):
            row |= {"members": of.members, "topics": of.topics, **of.lag._asdict()}
    if as_json:
        show_json(rows)
        return
    shown = {"protocol_type": "protocol", "partitions_unknown": "unknown"}
    show_table(
        [shown.get(c, c) for c in columns],
        [[row[c] if row[c] != "" else None for c in columns] for row in rows],
        empty=f"{client.none_of('such groups')}: kept consume TOPIC --group NAME makes one",
    )


def is_internal_group(name: str) -> bool:
    """Whether tools of the cluster use it, as names that begin so are for Kafka's own topics."""
    return name.startswith("__")


@group.command(
    epilog=examples("kept group describe readers", "kept group describe readers --members")
)
@click.argument("names", metavar="GROUP …", nargs=-1, required=True, type=GROUP)
@click.option("--members", is_flag=True, help="Show the members instead of the partitions.")
@json_option
@bootstrap_option
def describe(*, names: tuple[str, ...], members: bool, as_json: bool, bootstrap: Bootstrap) -> int:
    """Show members, committed offsets and lag of groups."""
    with open_client(bootstrap) as client:
        return show_each(
            names,
            lambda name: _describe(client, name),
            _show_members if members else _show_partitions,
            as_json,
        )


def _describe(client: Client, name: str) -> dict[str, Any]:
    described, committed = _existing(client, name)
    owners = {tp: m for m in described.members for tp in m.partitions}
    tps = sorted(partitions_of(described, committed))
    ends = client.run(led_ends(client.view, set(tps), SILENT_MS))
    lags = {tp: partition_lag(committed.get(tp), ends.get(tp)) for tp in tps}
    rows = []
    for tp, lag in lags.items():
        member = owners.get(tp)
        rows.append(
            {
                "topic": tp.topic,
                "partition": tp.partition,
                "committed_offset": committed.get(tp),
                "high_watermark": ends.get(tp),
                "lag": lag,
                "member_id": None if member is None else member.member_id,
                "client_id": None if member is None else member.client_id,
                "host": None if member is None else member.host,
            }
        )
    return {
        "group": name,
        "state": described.state,
        "coordinator": client.view.coordinators.get((0, name)),
        "protocol_type": described.protocol_type,
        "protocol": described.protocol,
        **group_lag(lags.values())._asdict(),
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


def _existing(client: Client, name: str) -> tuple[GroupDescription, dict[TopicPartition, int]]:
    """A group and its committed offsets. Raises GroupIdNotFound."""
    described = client.describe_group(name)
    committed = client.committed(name)
    if described.state == DEAD and not committed:
        raise no_group(client, name)
    return described, committed


def _show_head(described: Mapping[str, Any]) -> None:
    unknown, coordinator = described["partitions_unknown"], described["coordinator"]
    lag = "-" if described["lag"] is None else described["lag"]
    more = f" (unknown of {counted(unknown, 'partition')})" if unknown else ""
    write(
        f"Group: {printable_line(described['group'])}\nState: {described['state']}\n"
        f"Coordinator: {'-' if coordinator is None else f'node {coordinator}'}\n"
        f"Protocol: {printable_line(described['protocol'] or '-')}\n"
        f"Members: {len(described['members'])}\nLag: {lag}{more}\n\n"
    )


def _show_partitions(described: Mapping[str, Any]) -> None:
    _show_head(described)
    columns = ("topic", "partition", "committed", "log end", "lag", "member", "host")
    keys = ("topic", "partition", "committed_offset", "high_watermark", "lag", "member_id", "host")
    show_table(columns, [[row[k] for k in keys] for row in described["partitions"]])


def _show_members(described: Mapping[str, Any]) -> None:
    _show_head(described)
    keys = ("member_id", "instance_id", "client_id", "host")
    rows = [
        [
            *(member[k] for k in keys),
            [f"{topic}:{number}" for topic, number in member["partitions"]],
        ]
        for member in described["members"]
    ]
    show_table(("member", "instance", "client id", "host", "partitions"), rows)


@group.command(epilog=examples("kept group delete readers"))
@click.argument("names", metavar="GROUP …", nargs=-1, required=True, type=GROUP)
@bootstrap_option
def delete(*, names: tuple[str, ...], bootstrap: Bootstrap) -> int:
    """Delete groups that have no members, and their offsets."""
    with open_client(bootstrap) as client:

        def delete_group(name: str) -> str:
            try:
                client.delete_group(name)
            except GroupIdNotFound:
                raise no_group(client, name) from None
            return f"deleted group {name}"

        return for_each(names, delete_group)


group.add_command(reset_offsets)
group.add_command(seek)
group.add_command(export_offsets)
group.add_command(delete_group_offsets)
