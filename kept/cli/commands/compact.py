"""``kept compact``: see, start and explain compaction, through the JSON API of kept itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Final, TypeVar

import click

from kept.cli.bootstrap_option import bootstrap_option
from kept.cli.compaction_plan import known, place_of, show_dry_run, show_key, show_plans
from kept.cli.completion import PLACE, TOPIC
from kept.cli.output import (
    counted,
    echo,
    moment,
    percent,
    progress,
    show_json,
    show_table,
    show_tree,
    size,
    write,
)
from kept.cli.shell import (
    Failure,
    Group,
    WholeNumber,
    examples,
    for_each,
    internal_option,
    json_option,
)
from kept.cli.topic_partition import PartitionCommand, TopicPartitionArgument, topic_and_partition
from kept.cli.unavailable import names_explained, no_partition, warn_unanswered
from kept.client.admin import replica_digests
from kept.client.admin.replica_digests import Verdict
from kept.client.bootstrap import Bootstrap
from kept.client.json_api import HttpFailed, JsonApi, each_node, nodes_away, request_any
from kept.cluster.controller.topics import INTERNAL_TOPICS
from kept.storage.printable import printable_line

_F = TypeVar("_F", bound=Callable[..., Any])
TIMEOUT_S: Final = 30.0
SHOWN_KEYS: Final = 5
WAIT_S: Final = 3600.0
"""How long an answer may take that a pass or a dry run has to be waited for."""
NOTHING_TO_RETRY: Final = 400
"""Status of the answer of a leader on which nothing fails."""


def _targets() -> Callable[[_F], _F]:
    """Topics and partitions, as text: what :func:`for_each` names."""
    return click.argument(
        "targets",
        metavar="TOPIC[:PARTITION] …",
        nargs=-1,
        required=True,
        callback=_check_targets,
        type=PLACE,
    )


def _check_targets(
    _context: click.Context, _parameter: click.Parameter, given: tuple[str, ...]
) -> tuple[str, ...]:
    for target in given:
        topic_and_partition(target)
    return tuple(dict.fromkeys(given))


def _each_once(
    _context: click.Context, _parameter: click.Parameter, given: tuple[str, ...]
) -> tuple[str, ...]:
    return tuple(dict.fromkeys(given))


_topics_argument = click.argument(
    "topics", metavar="[TOPIC …]", nargs=-1, type=TOPIC, callback=_each_once
)


def _explained(bootstrap: Bootstrap, target: str) -> AbstractContextManager[None]:
    return names_explained(bootstrap, [topic_and_partition(target)])


@click.group(cls=Group, epilog=examples("kept compact status", "kept compact now users --wait"))
def compact() -> None:
    """See, start and explain compaction."""


@compact.command(epilog=examples("kept compact status", "kept compact status users --json"))
@_topics_argument
@internal_option("Also show internal topics such as __consumer_offsets.")
@json_option
@bootstrap_option
def status(*, topics: tuple[str, ...], internal: bool, as_json: bool, bootstrap: Bootstrap) -> int:
    """Show how far each partition is compacted, and why a pass is due or not."""
    partitions: list[dict[str, Any]] = []
    failed = 0
    if topics:
        nodes = _present(each_node(bootstrap, TIMEOUT_S))

        def add(topic: str) -> None:
            with names_explained(bootstrap, [(topic, None)]):
                partitions.extend(_status(nodes, topic))

        failed = for_each(topics, add)
    else:
        found = _status(_present(each_node(bootstrap, TIMEOUT_S)), None)
        partitions += [p for p in found if internal or p["topic"] not in INTERNAL_TOPICS]
    if as_json:
        show_json({"partitions": partitions})
    else:
        _show_status(partitions, named=bool(topics))
    return failed


def _show_status(partitions: list[dict[str, Any]], *, named: bool) -> None:
    """A line a partition; then the replicas that are behind or fail, or all of topics that were
    ``named``.
    """
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
            percent(p["dirty_ratio"]),
            size(p["clean_bytes"]),
            size(p["dirty_bytes"]),
            f"{p['first_dirty_offset']}..{p['cleanable_end_offset']}",
            p.get("tombstones_pending"),
            p["generation"],
            moment(p["last_compaction_ms"]) or "never",
            p["reason"],
        )
        for p in partitions
    ]
    empty = (
        "no topic is compacted: kept topic create NAME --config cleanup.policy=compact makes one"
    )
    shown = (*columns, "generation", "last compaction", "why")
    show_table(shown, rows, empty="" if named else empty)
    progress_of = [
        (
            *(p["topic"], p["partition"], r["replica"], r["held"], r["applied"], p["published"]),
            r["reason"],
        )
        for p in partitions
        for r in p["replicas"]
        if named or r["behind"] or r["reason"] or r["replica"] in p["awaits"]
    ]
    if progress_of:
        echo()
        names = ("topic", "partition", "replica", "holds", "applied", "published", "why not")
        show_table(names, progress_of)


@compact.command(epilog=examples("kept compact now users --wait", "kept compact now users:0 ids"))
@_targets()
@click.option("--wait", is_flag=True, help="Wait until it is done.")
@json_option
@bootstrap_option
def now(*, targets: tuple[str, ...], wait: bool, as_json: bool, bootstrap: Bootstrap) -> int:
    """Compact topics or partitions, whatever their dirty ratio."""
    found: list[dict[str, Any]] = []

    def compact_now(target: str) -> None:
        topic, partition = topic_and_partition(target)
        body: dict[str, Any] = {"topic": topic, "wait": wait}
        if partition is not None:
            body["partition"] = partition
        with progress(f"compacting {target}", None), _explained(bootstrap, target):
            answer = request_any(bootstrap, lambda api: api.post("compaction/now", body), WAIT_S)
        found.extend(answer["partitions" if wait else "started"])

    status = for_each(targets, compact_now)
    if as_json:
        show_json({"partitions" if wait else "started": found})
    elif wait:
        _show_passes(found)
    else:
        for entry in found:
            echo(f"compacting {place_of(entry)}")
    failed = {place_of(p): str(p["error"]) for p in found if "error" in p}

    def refuse(place: str) -> None:
        raise Failure(failed[place] if len(failed) > 1 else f"{place}: {failed[place]}")

    return max(status, for_each(list(failed), refuse))


@compact.command(
    epilog=examples("kept compact explain users", "kept compact explain users:0 --key a")
)
@_targets()
@click.option(
    "--key", metavar="K", help="Show the records of this key, and what a pass would do to each."
)
@click.option("--verbose", is_flag=True, help="Show all that is known, segment by segment.")
@json_option
@bootstrap_option
def explain(
    *,
    targets: tuple[str, ...],
    key: str | None,
    verbose: bool,
    as_json: bool,
    bootstrap: Bootstrap,
) -> int:
    """Explain what a pass would do now, without doing it."""
    entries: list[dict[str, Any]] = []

    def explain_target(target: str) -> None:
        topic, partition = topic_and_partition(target)
        with _explained(bootstrap, target):
            answer = request_any(
                bootstrap,
                lambda api: api.get(
                    "compaction/explain", topic=topic, partition=partition, key=key
                ),
                WAIT_S,
            )
        entries.extend(answer["partitions"])

    status = for_each(targets, explain_target)
    if as_json:
        show_json({"partitions": entries})
    elif verbose:
        for entry in entries:
            show_dry_run(entry)
    elif key is not None:
        show_key(entries)
    else:
        show_plans(entries)
    return status


@compact.command(
    "why-missing",
    cls=PartitionCommand,
    epilog=examples("kept compact why-missing users:0 42 --key alice"),
)
@click.argument("place", metavar="TOPIC:PARTITION", type=TopicPartitionArgument(whole_topic=False))
@click.argument("offset", type=WholeNumber(0))
@click.option("--key", metavar="K", help="Also show the latest record of this key.")
@json_option
@bootstrap_option
def why_missing(
    *, place: tuple[str, int], offset: int, key: str | None, as_json: bool, bootstrap: Bootstrap
) -> None:
    """Explain why there is no record at an offset."""
    topic, partition = place
    with names_explained(bootstrap, [place]):
        answer = request_any(
            bootstrap,
            lambda api: api.get(
                "compaction/why-missing", topic=topic, partition=partition, offset=offset, key=key
            ),
            WAIT_S,
        )
    reports = _lost(bootstrap, topic=topic, partition=partition, offset=offset)
    lost_here = [
        {
            "node": report["node"],
            "leader_epoch": report["leader_epoch"],
            "keys": [r for r in report["records"] if r["offset"] == offset],
        }
        for report in reports
    ]
    if lost_here:
        answer["lost_in_another_epoch"] = lost_here
    if as_json:
        show_json(answer)
        return
    told = ("topic", "partition", "offset", "explanation", "winner", "fate", "reason", "generation")
    write(f"{topic}:{partition} offset {offset}: {printable_line(answer['explanation'])}\n")
    show_tree(known({name: value for name, value in answer.items() if name not in told}))
    if key is None:
        return
    if winner := answer.get("winner"):
        write("latest record of the key:\n")
        show_tree(known(winner), 1)
    else:
        write("latest record of the key: there is none\n")


@compact.command(epilog=examples("kept compact lost", "kept compact lost users --json"))
@_topics_argument
@json_option
@bootstrap_option
def lost(*, topics: tuple[str, ...], as_json: bool, bootstrap: Bootstrap) -> int:
    """Show acknowledged records that replicas had to truncate.

    That happens after an unclean election, or when a whole ISR lost power.
    Offsets below "committed" were acknowledged; the others may have been.
    """
    reports: list[dict[str, Any]] = []
    failed = 0
    if topics:

        def add(topic: str) -> None:
            with names_explained(bootstrap, [(topic, None)]):
                reports.extend(_lost(bootstrap, topic=topic))

        failed = for_each(topics, add)
    else:
        reports += _lost(bootstrap)
    away = nodes_away(bootstrap)
    for node in away:
        echo(f"node {node} does not answer: what it truncated is not shown", err=True)
    if as_json:
        show_json({"reports": reports, "away": away})
        return failed
    rows = [
        (
            moment(report.get("at_ms")),
            report.get("topic"),
            report.get("partition"),
            report.get("node"),
            report.get("leader_epoch"),
            f"{report['first_offset']}..{report['end_offset']}"
            if "first_offset" in report
            else None,
            report.get("committed_to"),
            _keys(report["records"]),
            report["incomplete"],
        )
        for report in reports
    ]
    columns = (
        "cut at",
        "topic",
        "partition",
        "node",
        "leader epoch",
        "offsets",
        "committed",
        "keys",
        "note",
    )
    empty = "" if away or failed else "no replica had to truncate acknowledged records"
    show_table(columns, rows, empty=empty)
    return failed


def _keys(records: list[dict[str, Any]]) -> str:
    """The first few distinct keys."""
    keys = list(dict.fromkeys(r.get("key", r.get("key_base64", "(no key)")) for r in records))
    more = f" and {len(keys) - SHOWN_KEYS} more" if len(keys) > SHOWN_KEYS else ""
    return ", ".join(keys[:SHOWN_KEYS]) + more


def _lost(bootstrap: Bootstrap, **asked: object) -> list[dict[str, Any]]:
    """The reports of all nodes that take part; a node without the topic's replica has none."""
    reports: list[dict[str, Any]] = []
    for api in each_node(bootstrap, TIMEOUT_S).values():
        reports += api.get("compaction/lost", **asked)["reports"]
    return sorted(reports, key=lambda one: one.get("at_ms", 0))


@compact.command(epilog=examples("kept compact retry users:0"))
@click.argument(
    "targets",
    metavar="TOPIC:PARTITION …",
    nargs=-1,
    required=True,
    type=TopicPartitionArgument(whole_topic=False),
)
@json_option
@bootstrap_option
def retry(*, targets: tuple[tuple[str, int], ...], as_json: bool, bootstrap: Bootstrap) -> int:
    """Retry partitions that could not be compacted, on each replica where they fail."""
    places = {f"{topic}:{partition}": (topic, partition) for topic, partition in targets}
    answers: list[dict[str, Any]] = []

    def retry_partition(place: str) -> str | None:
        with names_explained(bootstrap, [places[place]]):
            answer, tried, gone = _retry(bootstrap, *places[place])
        answers.append({**answer, "replicas": tried})
        where = f" on node {', '.join(map(str, tried))}" if tried else ""
        told = f"trying {place} again{where}" if tried or not gone else None
        if gone:
            if told and not as_json:
                echo(told)
            raise Failure(f"{place} also fails on others: {'; '.join(gone)}")
        return None if as_json else told

    try:
        status = for_each(list(places), retry_partition)
    finally:
        if as_json and answers:
            show_json(answers[0] if len(places) == 1 else answers)
    return status


def _retry(
    bootstrap: Bootstrap, topic: str, partition: int
) -> tuple[dict[str, Any], list[int], list[str]]:
    """The answer of the leader, the others that try it again, and those that were not reached."""
    body = {"topic": topic, "partition": partition}
    nodes = each_node(bootstrap, TIMEOUT_S)
    stands = _status(_present(nodes), topic)
    standing = [p for p in stands if p["partition"] == partition]
    fails_on = [r["replica"] for p in standing for r in p["replicas"] if r["reason"]]
    answer = {**body, "retrying": True}
    try:
        answer = request_any(bootstrap, lambda api: api.post("compaction/retry", body), TIMEOUT_S)
    except HttpFailed as error:
        if not fails_on or error.status != NOTHING_TO_RETRY:
            raise
    tried, gone = [], []
    for node in fails_on:
        try:
            nodes[node].post("compaction/retry", body, node=node)
        except HttpFailed as error:
            gone.append(f"node {node} was not reached ({error})")
        else:
            tried.append(node)
    return answer, tried, gone


@compact.command(epilog=examples("kept compact verify users", "kept compact verify users:0"))
@_targets()
@click.option(
    "--patience",
    type=WholeNumber(0),
    default=60,
    show_default=True,
    metavar="SECONDS",
    help="How long to wait for replicas that are being compacted.",
)
@json_option
@bootstrap_option
def verify(*, targets: tuple[str, ...], patience: int, as_json: bool, bootstrap: Bootstrap) -> int:
    """Check that all replicas have the same records on disk, by digests of their files."""
    from dataclasses import asdict

    verdicts: list[Verdict] = []

    def compare(target: str) -> None:
        with _explained(bootstrap, target):
            verdicts.extend(_verdicts(bootstrap, *topic_and_partition(target), patience))

    status = for_each(targets, compare)
    if as_json:
        show_json({"partitions": [asdict(verdict) for verdict in verdicts]})
    else:
        _show_verdicts(verdicts)
    unequal = sum(verdict.equal is False for verdict in verdicts)
    open_ = sum(verdict.equal is None for verdict in verdicts)
    if unequal or open_:
        verb = "differs" if unequal == 1 else "differ"
        raise Failure(f"{counted(unequal, 'partition')} {verb}, {open_} could not be compared")
    return status


def _verdicts(
    bootstrap: Bootstrap, topic: str, partition: int | None, patience_s: float
) -> list[Verdict]:
    nodes = each_node(bootstrap, WAIT_S)
    partitions = next(iter(nodes.values())).get(f"topics/{topic}")["partitions"]
    wanted = [p for p in partitions if partition in (None, p["partition"])]
    if not wanted:
        raise no_partition(topic, partition, len(partitions))
    return [
        replica_digests.verify(
            topic,
            pair["partition"],
            {n: nodes[n] for n in pair["replicas"] if n in nodes},
            tuple(n for n in pair["replicas"] if n not in nodes),
            patience_s,
        )
        for pair in wanted
    ]


def _show_verdicts(verdicts: list[Verdict]) -> None:
    words = {True: "equal", False: "DIFFERENT", None: "not compared"}
    rows = [
        (
            verdict.topic,
            verdict.partition,
            words[verdict.equal],
            verdict.generation,
            f"{verdict.start_offset}..{verdict.covered_end}" if verdict.equal is not None else None,
            f"{verdict.covered_end}..{verdict.end_offset}" if verdict.equal is not None else None,
            ",".join(map(str, verdict.replicas)),
            verdict.why
            or (f"away: {','.join(map(str, verdict.absent))}" if verdict.absent else None),
        )
        for verdict in verdicts
    ]
    columns = ("topic", "partition", "replicas are", "generation", "compacted", "tail", "nodes")
    show_table((*columns, "note"), rows)
    for verdict in verdicts:
        for difference in verdict.differences:
            where = f"{difference.base_offset}..{difference.end_offset}"
            first = "" if difference.offset is None else f", first at offset {difference.offset}"
            echo(f"\n{verdict.topic}:{verdict.partition} {where}{first}")
            for node, has in sorted(difference.replicas.items()):
                echo(f"  node {node}: {has}")


def _show_passes(partitions: list[dict[str, Any]]) -> None:
    """What each pass did, a line a partition."""
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


def _present(nodes: Mapping[int, JsonApi]) -> dict[int, JsonApi]:
    """Those of several nodes that answer; the others are named on standard error."""
    there = {n: api for n, api in nodes.items() if len(nodes) == 1 or api.is_there()}
    if len(there) < len(nodes):
        silent = sorted(nodes.keys() - there.keys())
        warn_unanswered(silent, "partitions that it leads are shown as other nodes know them")
    return there


def _status(nodes: Mapping[int, JsonApi], topic: str | None) -> list[dict[str, Any]]:
    """Where each partition stands, as its leader says; as another node does where none leads.

    Of its other ``replicas`` each says itself what fails there: ``reason``.
    """
    by_partition: dict[tuple[str, int], dict[str, Any]] = {}
    fails: dict[tuple[str, int, int], str] = {}
    failed: HttpFailed | None = None
    for api in nodes.values():
        try:
            partitions = api.get("compaction", topic=topic)["partitions"]
        except HttpFailed as error:
            failed = error  # it may be one that just died, or that has no replica
            continue
        for partition in partitions:
            where = partition["topic"], partition["partition"]
            if partition["state"] == "uncleanable":
                fails[*where, partition["node"]] = partition["reason"]
            if partition["leads"] or where not in by_partition:
                by_partition[where] = partition
    if not by_partition and failed is not None:
        raise failed
    for where, partition in by_partition.items():
        for replica in partition["replicas"]:
            replica["reason"] = fails.get((*where, replica["replica"]))
    return [partition for _, partition in sorted(by_partition.items())]
