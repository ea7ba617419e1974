"""``kept cluster``: nodes, the controller's quorum, leaders and replicas."""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import click

from kept.cli.bootstrap_option import bootstrap_option
from kept.cli.completion import PLACE, BrokerId, broker_list
from kept.cli.output import counted, echo, progress, show_json, show_rows, show_table, write
from kept.cli.shell import Failure, Group, WholeNumber, examples, json_option
from kept.cli.topic_partition import topic_and_partition
from kept.cli.unavailable import named_partitions, open_client
from kept.client.admin import cluster as operations
from kept.client.admin import reassignment_plan
from kept.client.admin.cluster import ClusterDescription, Outcome, Reassignment
from kept.client.admin.reassignment_plan import Plan
from kept.client.bootstrap import Bootstrap
from kept.client.client import Client
from kept.client.core.metadata import Endpoint, TopicMetadata
from kept.client.json_api import PRESENT_S, HttpFailed, JsonApi, request_any
from kept.kernels import FALLBACKS
from kept.storage.types import TopicPartition, decimal_number

LISTED: Final = 20
"""Partitions in trouble that ``status`` names; ``--json`` names all."""
ASKED_AT_ONCE: Final = 8
"""Nodes that ``status`` requests reports from at the same time."""
WAIT_POLL_S: Final = 0.5
RATES: Final = ("leader.replication.throttled.rate", "follower.replication.throttled.rate")
THROTTLED: Final = (
    "leader.replication.throttled.replicas",
    "follower.replication.throttled.replicas",
)


@click.group(
    cls=Group, epilog=examples("kept cluster status", "kept cluster drain 2 --leaders --wait")
)
def cluster() -> None:
    """Show the cluster; move leaders and replicas, change voters."""


@cluster.command(epilog=examples("kept cluster status", "kept cluster status --check --json"))
@click.option(
    "--check", is_flag=True, help="Fail when a node is fenced or a partition lacks replicas."
)
@json_option
@bootstrap_option
def status(*, check: bool, as_json: bool, bootstrap: Bootstrap) -> None:
    """Show the nodes, the controller, and partitions that lack a leader or a replica."""
    with open_client(bootstrap) as client:
        cluster_status = _status(client)
    unknown = cluster_status["quorum_unknown"]
    why = [] if unknown is None else [f"no controller answers ({unknown})"]
    if why and not check:
        echo(f"kept: {why[0]}; the rest is what the nodes knew before", err=True)
    if as_json:
        show_json(cluster_status)
    else:
        _show(cluster_status)
    partitions = cluster_status["partitions"]
    troubles = {
        "fenced node": sum(node["fenced"] is True for node in cluster_status["nodes"]),
        "under-replicated partition": len(partitions["under_replicated"]),
        "offline partition": len(partitions["offline"]),
    }
    why += [counted(count, what) for what, count in troubles.items() if count]
    if check and why:
        raise Failure(", ".join(why))


def _status(client: Client) -> dict[str, Any]:
    topics = client.metadata().topics  # first: a node answers in order, and may await a controller
    described = client.run(operations.describe_cluster())
    replicas, leaders = reassignment_plan.counts(topics.values())
    internal = [topic for topic in topics.values() if topic.internal]
    internal_replicas, internal_leaders = reassignment_plan.counts(internal)
    under, offline = reassignment_plan.find_unhealthy(topics)
    reports = _node_reports(client)
    brokers = [broker for summary, _ in reports.values() for broker in summary["brokers"]]
    epochs = {broker["node_id"]: broker["epoch"] for broker in brokers}
    quorum = described.quorum
    nodes = []
    members = {member.node_id: member for member in described.members}
    voters = {replica.node_id for replica in quorum.voters} if quorum else set()
    observers = {replica.node_id for replica in quorum.observers} if quorum else set()
    for number in sorted(members.keys() | voters | observers):
        member = members.get(number)
        summary, cleaner = reports.get(number, ({}, {}))
        roles = ["broker"] * (member is not None) + ["controller"] * (number in voters)
        nodes.append(
            {
                "node_id": number,
                "roles": roles,
                "is_controller": number == described.controller_id,
                "quorum": _part(number, described.controller_id, voters, observers),
                "address": None if member is None else f"{member.host}:{member.port}",
                "rack": None if member is None else member.rack,
                "fenced": None if member is None else member.fenced,
                "epoch": epochs.get(number),
                "uncompiled_kernels": cleaner.get("uncompiled_kernels"),
                "stray_logs": summary.get("stray_logs"),
                "left_closed": summary.get("left_closed"),
                "offline_replicas": summary.get("offline_replicas"),
                "metadata_lag": None if quorum is None else quorum.lag(number),
                "replicas": replicas.get(number, 0),
                "leaders": leaders.get(number, 0),
                "internal_replicas": internal_replicas.get(number, 0),
                "internal_leaders": internal_leaders.get(number, 0),
            }
        )
    return {
        "cluster_id": described.cluster_id,
        "controller_id": described.controller_id,
        "term": None if quorum is None else quorum.term,
        "metadata_end_offset": None if quorum is None else quorum.high_watermark,
        "voters": None if quorum is None else sorted(voters),
        "observers": None if quorum is None else sorted(observers),
        "quorum_unknown": None if described.unknown is None else str(described.unknown),
        "nodes": nodes,
        "partitions": {
            "total": sum(len(topic.partitions) for topic in topics.values()),
            "internal": sum(len(topic.partitions) for topic in internal),
            "under_replicated": [_state_of(tp, topics) for tp in under],
            "offline": [_state_of(tp, topics) for tp in offline],
        },
    }


def _part(number: int, leader: int, voters: set[int], observers: set[int]) -> str | None:
    """What a node is in the metadata's quorum."""
    if number in observers:
        return "observer, the disk it voted with is lost" if number in voters else "observer"
    if number in voters:
        return "leader" if number == leader else "voter"
    return None


def _node_reports(client: Client) -> dict[int, tuple[dict[str, Any], dict[str, Any]]]:
    """The reports of the nodes of kept that answer: their view of the cluster, their cleaner."""

    def report(endpoint: Endpoint) -> tuple[dict[str, Any], dict[str, Any]] | None:
        api = JsonApi(endpoint, PRESENT_S, client.security)
        try:
            return api.get("cluster"), api.get("cleaner")
        except HttpFailed:  # not there, or Apache Kafka
            return None

    nodes = dict(client.view.nodes)
    with ThreadPoolExecutor(ASKED_AT_ONCE) as pool:
        reports = zip(nodes, pool.map(report, nodes.values()), strict=True)
        return {node_id: answer for node_id, answer in reports if answer is not None}


def _state_of(tp: TopicPartition, topics: dict[str, TopicMetadata]) -> dict[str, Any]:
    view = topics[tp.topic].partitions[tp.partition]
    return {
        "topic": tp.topic,
        "partition": tp.partition,
        "leader": view.leader if view.leader >= 0 else None,
        "replicas": list(view.replicas),
        "isr": list(view.isr),
    }


def _show(cluster_status: dict[str, Any]) -> None:
    controller = cluster_status["controller_id"]
    term = "" if cluster_status["term"] is None else f", term {cluster_status['term']}"
    write(f"Cluster: {cluster_status['cluster_id']}\n")
    write(f"Controller: {'none' if controller < 0 else f'node {controller}'}{term}\n\n")
    rows = [
        (
            node["node_id"],
            node["roles"],
            "fenced" if node["fenced"] else "active" if node["address"] else None,
            node["address"],
            node["rack"],
            node["epoch"],
            node["quorum"],
            node["metadata_lag"],
            node["leaders"] - node["internal_leaders"],
            node["replicas"] - node["internal_replicas"],
            node["internal_replicas"],
        )
        for node in cluster_status["nodes"]
    ]
    columns = ("node", "roles", "state", "address", "rack", "epoch", "quorum", "metadata lag")
    show_table((*columns, "leaders", "replicas", "internal"), rows)
    for node in cluster_status["nodes"]:
        if node["uncompiled_kernels"]:
            slow = ", ".join(node["uncompiled_kernels"])
            write(f"\nNode {node['node_id']} is slow: kernels that are not compiled: {slow}\n")
            if not set(node["uncompiled_kernels"]) <= set(FALLBACKS):
                write("  some of them have no substitute in Python: this node compacts no log\n")
        _show_listed(f"Node {node['node_id']} set logs aside", node["stray_logs"])
        _show_listed(
            f"Node {node['node_id']} left replicas closed: too few open files are allowed",
            node["left_closed"],
        )
        _show_listed(
            f"Node {node['node_id']} has replicas offline until it is started again (see its log)",
            node["offline_replicas"],
        )
    partitions = cluster_status["partitions"]
    internal = partitions["internal"]  # lists without --internal have the others alone
    apart = f" and {internal} internal" if internal else ""
    write(f"\nPartitions: {partitions['total'] - internal}{apart}\n")
    for what in ("offline", "under_replicated"):
        troubled = partitions[what]
        write(f"{what.replace('_', '-').capitalize()}: {len(troubled)}\n")
        for partition in troubled[:LISTED]:
            place = f"{partition['topic']}:{partition['partition']}"
            write(f"  {place}: replicas {partition['replicas']}, in sync {partition['isr']}\n")
        if len(troubled) > LISTED:
            write(f"  and {len(troubled) - LISTED} more\n")


def _show_listed(what: str, names: list[str] | None) -> None:
    """Some of the names, where there are any."""
    if names:
        more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
        write(f"\n{what}: {', '.join(names[:LISTED])}{more}\n")


@cluster.group(
    cls=Group, epilog=examples("kept cluster voter add 2", "kept cluster voter remove 2")
)
def voter() -> None:
    """Add and remove voters of the metadata quorum; a majority of them must be alive."""


@voter.command(
    epilog=examples(
        "kept cluster voter add 2", "kept cluster voter add 5 --address controller-5:10092"
    )
)
@click.argument("number", metavar="NODE", type=BrokerId())
@click.option(
    "--address",
    metavar="HOST:PORT",
    help="Address of its listener for nodes; needed if NODE is no broker and never voted.",
)
@json_option
@bootstrap_option
def add(*, number: int, address: str | None, as_json: bool, bootstrap: Bootstrap) -> None:
    """Make NODE a voter. It must already run as an observer: a new node, or an empty disk."""
    body: dict[str, Any] = {"node_id": number}
    if address is not None:
        body["address"] = address
    _change_voters("add", body, as_json, bootstrap)


@voter.command(epilog=examples("kept cluster voter remove 2"))
@click.argument("number", metavar="NODE", type=BrokerId())
@json_option
@bootstrap_option
def remove(*, number: int, as_json: bool, bootstrap: Bootstrap) -> None:
    """Remove NODE from the voters. It goes on as an observer."""
    _change_voters("remove", {"node_id": number}, as_json, bootstrap)


def _change_voters(what: str, body: dict[str, Any], as_json: bool, bootstrap: Bootstrap) -> None:
    changed = request_any(bootstrap, lambda api: api.post(f"voters/{what}", body))
    if as_json:
        show_json(changed)
    else:
        write(f"the voters are {', '.join(map(str, changed['voters']))}\n")


@cluster.command(
    epilog=examples("kept cluster elect users:0", "kept cluster elect users:0 --unclean")
)
@click.argument("targets", metavar="[TOPIC[:PARTITION] …]", nargs=-1, type=PLACE)
@click.option("--all", "everything", is_flag=True, help="Elect for all partitions that need it.")
@click.option(
    "--unclean",
    is_flag=True,
    help="Let any living replica lead, even if acknowledged records are lost.",
)
@json_option
@bootstrap_option
def elect(
    *,
    targets: tuple[str, ...],
    everything: bool,
    unclean: bool,
    as_json: bool,
    bootstrap: Bootstrap,
) -> None:
    """Make the preferred replica the leader; with --unclean any replica that is alive."""
    if bool(targets) == everything:
        raise click.UsageError("name partitions or give --all")
    with open_client(bootstrap) as client:
        kind = operations.UNCLEAN if unclean else operations.PREFERRED
        tps = None if everything else _partitions(client, targets)
        outcomes = client.run(operations.elect_leaders(kind, tps, client.timeout_ms))
        names = sorted({one.topic_partition.topic for one in outcomes})
        topics = client.metadata(names).topics if names else {}
        leaders = {
            one.topic_partition: topics[one.topic_partition.topic]
            .partitions[one.topic_partition.partition]
            .leader
            for one in outcomes
            if one.topic_partition.topic in topics
            and one.topic_partition.partition in topics[one.topic_partition.topic].partitions
        }
    rows = [_outcome(one) | {"leader": leaders.get(one.topic_partition)} for one in outcomes]
    _report(rows, outcomes, as_json, lambda one: f"node {one['leader']} leads")


def _outcome(outcome: Outcome) -> dict[str, Any]:
    return {
        "topic": outcome.topic_partition.topic,
        "partition": outcome.topic_partition.partition,
        "changed": outcome.error is None and outcome.needed,
        "error": None if outcome.error is None else str(outcome.error),
    }


def _report(
    rows: list[dict[str, Any]], outcomes: Sequence[Outcome], as_json: bool, done: Any
) -> None:
    """Print what became of each partition; a Failure when one was refused."""
    if as_json:
        show_json(rows)
    else:
        for row in rows:
            if row["error"] and len(rows) == 1:
                continue  # it is the command's
            result = row["error"] or (done(row) if row["changed"] else "nothing to do")
            write(f"{row['topic']}:{row['partition']}: {result}\n")
        if not rows:
            write("nothing to do\n")
    failed = [outcome.error for outcome in outcomes if outcome.error is not None]
    if failed:
        more = f" (and {len(failed) - 1} more)" if len(failed) > 1 else ""
        raise Failure(f"{failed[0]}{more}")


@cluster.command(
    epilog=examples(
        "kept cluster reassign users:0 --to 1,2,3",
        "kept cluster reassign users orders --to 1,2,3,4 --throttle 10000000 --wait",
        "kept cluster reassign --status",
        "kept cluster reassign users --cancel",
    )
)
@click.argument("targets", metavar="[TOPIC[:PARTITION] …]", nargs=-1, type=PLACE)
@click.option(
    "--to",
    "nodes",
    metavar="N,N …",
    shell_complete=broker_list,
    help="For TOPIC:PARTITION its new replicas, the preferred leader first; for TOPIC the nodes "
    "that its replicas are spread over, as many for each partition as before.",
)
@click.option(
    "--throttle",
    type=WholeNumber(0),
    metavar="B/s",
    help="Limit the traffic of moves on each node, in bytes a second; 0 is no limit.",
)
@click.option("--status", "show", is_flag=True, help="Show moves that are under way; the default.")
@click.option(
    "--cancel", is_flag=True, help="Cancel moves that are under way; without TOPIC all of them."
)
@click.option(
    "--wait", is_flag=True, help="Wait until everything is moved, then remove the throttle."
)
@json_option
@bootstrap_option
def reassign(
    *,
    targets: tuple[str, ...],
    nodes: str | None,
    throttle: int | None,
    show: bool,
    cancel: bool,
    wait: bool,
    as_json: bool,
    bootstrap: Bootstrap,
) -> None:
    """Move replicas to other nodes; show or cancel moves that are under way."""
    if sum((nodes is not None, show, cancel)) > 1:
        raise click.UsageError("--to, --status and --cancel exclude each other")
    if nodes is not None and not targets:
        raise click.UsageError("--to needs a topic or a partition to move")
    if wait and nodes is None:
        raise click.UsageError("--wait needs --to")
    if cancel and throttle is not None:
        raise click.UsageError("--cancel and --throttle exclude each other")
    chosen = None if nodes is None else _nodes(nodes)
    with open_client(bootstrap) as client:
        if cancel:
            moving = client.run(operations.list_reassignments(client.timeout_ms))
            wanted = set(_partitions(client, targets)) if targets else set(moving)
            stop = {tp: None for tp in moving if tp in wanted}
            outcomes = _reassign(client, stop) if stop else []
            _report([_outcome(o) for o in outcomes], outcomes, as_json, lambda _: "cancelled")
            return
        if chosen is None:
            tps = _partitions(client, targets)
            if throttle is not None:
                _throttle(client, throttle, {tp.topic for tp in tps})
            moving = client.run(operations.list_reassignments(client.timeout_ms))
            _show_moves({tp: moving[tp] for tp in tps or moving if tp in moving}, as_json)
            return
        plan = _planned(client, targets, chosen)
        _move(client, plan, throttle, wait, as_json)


def _planned(client: Client, targets: Sequence[str], nodes: tuple[int, ...]) -> Plan:
    plan: Plan = {}
    for target in targets:
        topic, number = topic_and_partition(target)
        view = client.topic(topic)
        if number is None:
            plan |= reassignment_plan.spread(view, nodes)
            continue
        (tp,) = named_partitions(client, [(topic, number)])
        if view.partitions[number].replicas != nodes:
            plan[tp] = nodes
    return plan


def _move(
    client: Client, plan: Plan, throttle: int | None, wait: bool, as_json: bool
) -> list[Outcome]:
    """Begin a plan, and with ``wait`` see it through."""
    if throttle is not None:
        _throttle(client, throttle, {tp.topic for tp in plan})
    outcomes = _reassign(client, dict(plan)) if plan else []
    rows = [_outcome(o) | {"replicas": list(plan[o.topic_partition])} for o in outcomes]
    _report(rows, outcomes, as_json, lambda one: f"moves to {one['replicas']}")
    if wait:
        _await_moves(client, set(plan))
        if throttle:
            _throttle(client, 0, {tp.topic for tp in plan})
    return outcomes


def _reassign(client: Client, plan: dict[TopicPartition, Any]) -> list[Outcome]:
    return client.run(operations.reassign(plan, client.timeout_ms))


def _await_moves(client: Client, moved: set[TopicPartition]) -> None:
    with progress("moving", len(moved)) as advance:
        while True:
            moving = client.run(operations.list_reassignments(client.timeout_ms))
            left = len(moved & moving.keys())
            advance(len(moved) - left)
            if not left:
                return
            time.sleep(WAIT_POLL_S)


def _throttle(client: Client, rate: int, topics: set[str]) -> None:
    """Limit the traffic of replicas that move, on each node; 0 lifts the limit."""
    for member in client.run(operations.describe_cluster()).members:
        rates = dict.fromkeys(RATES, str(rate)) if rate else {}
        client.alter_broker(str(member.node_id), rates, () if rate else RATES)
    for topic in sorted(topics):
        client.alter_topic(
            topic, dict.fromkeys(THROTTLED, "*") if rate else {}, () if rate else THROTTLED
        )


def _show_moves(moving: dict[TopicPartition, Reassignment], as_json: bool) -> None:
    rows = [
        {
            "topic": tp.topic,
            "partition": tp.partition,
            "target": list(move.target),
            "adding": list(move.adding),
            "removing": list(move.removing),
        }
        for tp, move in sorted(moving.items())
    ]
    if not rows and not as_json:
        write("nothing is being moved\n")
    else:
        show_rows(("topic", "partition", "target", "adding", "removing"), rows, as_json)


@cluster.command(
    epilog=examples("kept cluster drain 3 4 --wait", "kept cluster drain 2 --leaders --wait")
)
@click.argument("numbers", metavar="NODE …", type=BrokerId(), nargs=-1, required=True)
@click.option("--leaders", is_flag=True, help="Move leadership only; replicas stay where they are.")
@click.option(
    "--throttle",
    type=WholeNumber(0),
    metavar="B/s",
    help="Limit the traffic of moves on each node, in bytes a second; 0 is no limit.",
)
@click.option("--wait", is_flag=True, help="Wait until everything is moved.")
@json_option
@bootstrap_option
def drain(
    *,
    numbers: tuple[int, ...],
    leaders: bool,
    throttle: int | None,
    wait: bool,
    as_json: bool,
    bootstrap: Bootstrap,
) -> None:
    """Move all replicas away from each NODE, so that it can be removed.

    They go to nodes that are not named. With --leaders only leadership moves.
    """
    with open_client(bootstrap) as client:
        described = client.run(operations.describe_cluster())
        for number in numbers:
            if number not in {member.node_id for member in described.members}:
                raise Failure(f"there is no node {number}; nodes: {_names(described)}")
        topics = client.metadata().topics
        if not leaders:
            plan = reassignment_plan.away_from(numbers, topics.values(), described.members)
            _move(client, plan, throttle, wait, as_json)
            return
        plan = reassignment_plan.leaders_away_from(numbers, topics.values())
        _move(client, plan, throttle, True, as_json)
        led = [tp for tp in plan if topics[tp.topic].partitions[tp.partition].leader in numbers]
        if led:
            outcomes = client.run(
                operations.elect_leaders(operations.PREFERRED, led, client.timeout_ms)
            )
            failed = [outcome.error for outcome in outcomes if outcome.error is not None]
            if failed:
                keep = "keeps its leader" if len(failed) == 1 else "keep their leader"
                raise Failure(f"{failed[0]} ({counted(len(failed), 'partition')} {keep})")


@cluster.command(epilog=examples("kept cluster unregister 2"))
@click.argument("number", metavar="NODE", type=BrokerId())
@bootstrap_option
def unregister(*, number: int, bootstrap: Bootstrap) -> None:
    """Remove NODE from the cluster: it was drained and stopped, and will not come back."""
    with open_client(bootstrap) as client:
        described = client.run(operations.describe_cluster())
        if described.unknown is not None:
            raise Failure(f"no controller answers: {described.unknown}")
        quorum = described.quorum
        if quorum is not None and number in {replica.node_id for replica in quorum.voters}:
            raise Failure(f"node {number} votes: kept cluster voter remove {number}")
        replicas, _ = reassignment_plan.counts(client.metadata().topics.values())
        if held := replicas.get(number, 0):
            raise Failure(
                f"node {number} has {counted(held, 'replica')}: kept cluster drain {number} --wait"
            )
        client.run(operations.unregister(number))
    write(f"node {number} is unregistered\n")


def _names(described: ClusterDescription) -> str:
    return ", ".join(str(member.node_id) for member in described.members) or "none"


def _nodes(text: str) -> tuple[int, ...]:
    """``1,2,3``."""
    parts = [part.strip() for part in text.split(",")]
    numbers = tuple(number for part in parts if (number := decimal_number(part)) is not None)
    if len(numbers) != len(parts):
        raise click.UsageError(f"--to {text!r} is not a list of node ids such as 1,2,3")
    if len(set(numbers)) != len(numbers):
        raise click.UsageError(f"--to {text} names a node twice")
    return numbers


def _partitions(client: Client, targets: Sequence[str]) -> list[TopicPartition]:
    """Every partition that TOPIC or TOPIC:P names."""
    return named_partitions(client, [topic_and_partition(target) for target in targets])
