"""``kept compact``: see, start and explain compaction, through the JSON API of kept itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kept.cli.shell import Failure, Group, bootstrap_option, examples, json_option

if TYPE_CHECKING:
    from kept.client.http import JsonApi

_T = TypeVar("_T")

TIMEOUT_S: Final = 30.0
WAIT_S: Final = 3600.0
"""How long ``compact now --wait`` waits for an answer."""


@click.group(cls=Group, epilog=examples("kept compact status", "kept compact now users --wait"))
def compact() -> None:
    """See, start and explain compaction."""


@compact.command(epilog=examples("kept compact status", "kept compact status users --json"))
@click.argument("topic", required=False)
@json_option
@bootstrap_option
def status(*, topic: str | None, as_json: bool, bootstrap: str) -> None:
    """Show where each compacted partition stands."""
    from kept.cli.output import moment, show_json, show_table, size

    answer = _ask(bootstrap, lambda api: api.get("compaction", topic=topic))
    if as_json:
        show_json(answer)
        return
    columns = (
        "topic",
        "partition",
        "state",
        "dirty ratio",
        "clean",
        "dirty",
        "cleanable",
        "tombstones",
    )
    rows = [
        (
            p["topic"],
            p["partition"],
            p["state"],
            p["dirty_ratio"],
            size(p["clean_bytes"]),
            size(p["dirty_bytes"]),
            f"{p['first_dirty_offset']}..{p['cleanable_end_offset']}",
            p.get("tombstones_pending"),
            p["generation"],
            moment(p["last_compaction_ms"]) or "never",
            p["reason"],
        )
        for p in answer["partitions"]
    ]
    show_table((*columns, "generation", "last compaction", "why"), rows)


@compact.command(epilog=examples("kept compact now users --wait", "kept compact now users:0"))
@click.argument("target", metavar="TOPIC[:P]")
@click.option("--wait", is_flag=True, help="Until it is done.")
@json_option
@bootstrap_option
def now(*, target: str, wait: bool, as_json: bool, bootstrap: str) -> None:
    """Compact a topic or one partition, whatever its dirty ratio."""
    from kept.cli.output import progress, show_json

    topic, partition = _target(target)
    body = {"topic": topic, "wait": wait}
    if partition is not None:
        body["partition"] = partition
    with progress(f"compacting {target}", None):
        answer = _ask(bootstrap, lambda api: api.post("compaction/now", body), timeout_s=WAIT_S)
    if as_json:
        show_json(answer)
    elif wait:
        _show_passes(answer["partitions"])
    else:
        for one in answer["started"]:
            click.echo(f"compacting {one['topic']}-{one['partition']}")
    failed = [p for p in answer.get("partitions", ()) if "error" in p]
    if failed:
        first = failed[0]
        raise Failure(f"{first['topic']}-{first['partition']}: {first['error']}")


@compact.command(
    epilog=examples("kept compact explain users", "kept compact explain users:0 --key a")
)
@click.argument("target", metavar="TOPIC[:P]")
@click.option("--key", help="The life of this key.")
@json_option
@bootstrap_option
def explain(*, target: str, key: str | None, as_json: bool, bootstrap: str) -> None:
    """Say what a pass would do now, without doing it."""
    from kept.cli.output import show_json

    topic, partition = _target(target)
    answer = _ask(
        bootstrap,
        lambda api: api.get("compaction/explain", topic=topic, partition=partition, key=key),
        timeout_s=WAIT_S,
    )
    if as_json:
        show_json(answer)
    else:
        for one in answer["partitions"]:
            _show_dry_run(one)


@compact.command("why-missing", epilog=examples("kept compact why-missing users 0 42 --key alice"))
@click.argument("topic")
@click.argument("partition", type=click.IntRange(0))
@click.argument("offset", type=click.IntRange(0))
@click.option("--key", help="Say also which record of this key is the present one.")
@json_option
@bootstrap_option
def why_missing(
    *, topic: str, partition: int, offset: int, key: str | None, as_json: bool, bootstrap: str
) -> None:
    """Say why there is no record at an offset."""
    from kept.cli.output import show_json, show_tree

    answer = _ask(
        bootstrap,
        lambda api: api.get(
            "compaction/why-missing", topic=topic, partition=partition, offset=offset, key=key
        ),
        timeout_s=WAIT_S,
    )
    if as_json:
        show_json(answer)
    else:
        show_tree(answer)


@compact.command(epilog=examples("kept compact retry users:0"))
@click.argument("target", metavar="TOPIC:P")
@json_option
@bootstrap_option
def retry(*, target: str, as_json: bool, bootstrap: str) -> None:
    """Try a partition again that could not be compacted."""
    from kept.cli.output import show_json

    topic, partition = _target(target)
    if partition is None:
        raise click.UsageError(f"{target!r} names no partition; write {target}:0")
    body = {"topic": topic, "partition": partition}
    answer = _ask(bootstrap, lambda api: api.post("compaction/retry", body))
    if as_json:
        show_json(answer)
    else:
        click.echo(f"trying {topic}-{partition} again")


def _show_passes(partitions: list[dict[str, Any]]) -> None:
    """What each pass did, a line a partition."""
    from kept.cli.output import show_table, size

    rows = []
    for p in partitions:
        done = bool(p.get("done"))
        removed = p.get("removed") or {}
        why = ", ".join(f"{count} {reason.replace('_', ' ')}" for reason, count in removed.items())
        rows.append(
            (
                p["topic"],
                p["partition"],
                "yes" if done else "no",
                p.get("identity"),
                p.get("records_removed"),
                f"{size(p['bytes_before'])} to {size(p['bytes_after'])}" if done else None,
                why if done else p.get("error") or p.get("reason"),
            )
        )
    columns = ("topic", "partition", "done", "generation", "removed", "rewritten", "why")
    show_table(columns, rows)


def _show_dry_run(partition: dict[str, Any]) -> None:
    """What a pass would do, without what says nothing; a key's records as a table."""
    from kept.cli.output import moment, show_table, show_tree, write

    key, tombstones = partition.get("key"), partition.get("tombstones")
    apart = ("key", "tombstones")
    show_tree(_known({name: value for name, value in partition.items() if name not in apart}))
    if tombstones:
        write("\n")
        waiting = [
            (
                one["tombstones"],
                f"{one['first_offset']}..{one['last_offset']}",
                moment(one["removable_at_ms"]),
            )
            for one in tombstones
        ]
        show_table(("tombstones", "offsets", "removable from"), waiting)
    if key:
        write("\n")
        rows = [
            (
                one["offset"],
                moment(one["timestamp"]),
                "tombstone" if one["is_tombstone"] else f"{one['value_bytes']} B",
                one["fate"],
                moment(one.get("removable_at_ms")),
            )
            for one in key
        ]
        show_table(("offset", "timestamp", "value", "fate", "removable from"), rows)
    elif key is not None:
        write("no record of this key here\n")
    write("\n")


def _known(value: dict[str, Any]) -> dict[str, Any]:
    """Without the members that are unset, at every depth."""
    return {
        name: _known(member) if isinstance(member, dict) else member
        for name, member in value.items()
        if member is not None
    }


def _target(text: str) -> tuple[str, int | None]:
    """TOPIC or TOPIC:P."""
    topic, colon, number = text.partition(":")
    if not topic or (colon and not (number.isascii() and number.isdecimal())):
        raise click.UsageError(f"{text!r} is neither TOPIC nor TOPIC:PARTITION")
    return topic, int(number) if colon else None


def _ask(bootstrap: str, request: Callable[[JsonApi], _T], timeout_s: float = TIMEOUT_S) -> _T:
    from kept.client.http import ask_any

    return ask_any(bootstrap, request, timeout_s)
