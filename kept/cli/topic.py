"""``kept topic``: create, list, describe, alter and delete topics, on kept or on Apache Kafka."""

from __future__ import annotations

from typing import Any

import click

from kept.cli.output import echo, moment, show_json, show_rows, show_table, size, write
from kept.cli.shell import (
    Failure,
    Group,
    WholeNumber,
    bootstrap_option,
    examples,
    json_option,
    pairs,
)
from kept.cli.unavailable import open_client, warn_unanswered
from kept.client.bootstrap import Bootstrap
from kept.client.client import Client
from kept.client.core.broker_errors import ConnectionFailed, NoResponse
from kept.client.json_api import PRESENT_S, HttpFailed, JsonApi
from kept.storage.errors import TopicAlreadyExists
from kept.storage.printable import printable_line


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
@click.argument("name")
@click.option(
    "--partitions", type=WholeNumber(1), help="Number of partitions.  [default: num.partitions]"
)
@click.option(
    "--replication-factor",
    type=WholeNumber(1),
    help="Replicas of each partition.  [default: default.replication.factor]",
)
@click.option("--config", "config", metavar="K=V", multiple=True, help="A topic setting.")
@click.option("--if-not-exists", is_flag=True, help="Do nothing if the topic exists.")
@bootstrap_option
def create(
    *,
    name: str,
    partitions: int | None,
    replication_factor: int | None,
    config: tuple[str, ...],
    if_not_exists: bool,
    bootstrap: Bootstrap,
) -> None:
    """Create topic NAME."""
    with open_client(bootstrap) as client:
        try:
            client.create_topic(
                name,
                partitions=partitions or -1,
                replication_factor=replication_factor or -1,
                config=pairs("--config", config),
            )
        except TopicAlreadyExists:
            if not if_not_exists:
                raise
            echo(f"topic {name} exists")
            return
        count = len(client.topic(name).partitions)
    echo(f"created topic {name} with {count} partition{'s'[: count != 1]}")


@topic.command("list", epilog=examples("kept topic list", "kept topic list --internal --json"))
@click.option(
    "--internal", is_flag=True, help="Also list internal topics such as __consumer_offsets."
)
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
    show_rows(("name", "partitions", "replicas"), rows, as_json)


@topic.command(epilog=examples("kept topic describe users", "kept topic describe users --all"))
@click.argument("name")
@click.option("--all", "all_settings", is_flag=True, help="Also show settings at their default.")
@json_option
@bootstrap_option
def describe(*, name: str, all_settings: bool, as_json: bool, bootstrap: Bootstrap) -> None:
    """Show topic NAME: settings, and where each partition stands."""
    with open_client(bootstrap) as client:
        described = _describe(client, name, all_settings)
    if as_json:
        show_json(described)
    else:
        _show(described)


def _describe(client: Client, name: str, all_settings: bool) -> dict[str, Any]:
    known = client.topic(name)
    standings = client.standings(name)
    leaders = {number: p.leader for number, p in known.partitions.items()}
    silent: set[int] = set()
    for number, standing in standings.items():
        if isinstance(standing.unknown, NoResponse | ConnectionFailed):
            silent.add(leaders[number])
        elif standing.unknown is not None:
            echo(f"kept: {standing.unknown}", err=True)
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
        start, end, size, _ = standings.get(number, (None, None, None, None))
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


def _compaction(
    client: Client, name: str, leaders: dict[int, int]
) -> dict[int, dict[str, Any]]:  # fmt: skip
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
            row += [p.get("dirty_ratio"), moment(p.get("last_compaction_ms")) or "never", due]
        rows.append(row)
    show_table(columns, rows)


@topic.command(
    epilog=examples(
        "kept topic alter users --config min.cleanable.dirty.ratio=0.1",
        "kept topic alter users --delete-config segment.ms --partitions 6",
    )
)
@click.argument("name")
@click.option("--config", "config", metavar="K=V", multiple=True, help="Set a topic setting.")
@click.option(
    "--delete-config", metavar="K", multiple=True, help="Reset a topic setting to its default."
)
@click.option("--partitions", type=WholeNumber(1), help="Raise the number of partitions.")
@bootstrap_option
def alter(
    *,
    name: str,
    config: tuple[str, ...],
    delete_config: tuple[str, ...],
    partitions: int | None,
    bootstrap: Bootstrap,
) -> None:
    """Change settings of topic NAME, or give it more partitions."""
    changes = pairs("--config", config)
    if not changes and not delete_config and partitions is None:
        raise click.UsageError("nothing to alter: give --config, --delete-config or --partitions")
    both = set(changes) & set(delete_config)
    if both:
        raise click.UsageError(f"{sorted(both)[0]} is both set and deleted")
    with open_client(bootstrap) as client:
        known = client.topic(name)
        if delete_config:
            _refuse_unknown(delete_config, [c.name for c in client.topic_configs([name])[name]])
        if changes or delete_config:
            client.alter_topic(name, changes, delete_config)
        if partitions is not None:
            has = len(known.partitions)
            if partitions == has and not changes and not delete_config:
                raise Failure(f"topic {name} has {has} partitions already")
            if partitions != has:
                client.create_partitions(name, partitions)
    echo(f"altered topic {name}")


def _refuse_unknown(names: tuple[str, ...], known: list[str]) -> None:
    """A misspelt name is an error here: deleting it is none for the broker, and does nothing."""
    from difflib import get_close_matches

    for name in names:
        if name not in known:
            near = get_close_matches(name, known, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise Failure(f"--delete-config {name}: there is no such topic setting{hint}")


@topic.command(epilog=examples("kept topic delete users"))
@click.argument("names", metavar="NAME …", nargs=-1, required=True)
@bootstrap_option
def delete(*, names: tuple[str, ...], bootstrap: Bootstrap) -> None:
    """Delete topics with all their records."""
    with open_client(bootstrap) as client:
        client.delete_topics(names)
    for name in names:
        echo(f"deleted topic {name}")
