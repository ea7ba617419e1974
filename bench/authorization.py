"""What ACLs cost: a decision among 100,000 bindings, and Produce of 1 KiB with 10,000 of them.

The difference is below what two runs of one node differ by, so nodes take turns, many times, and
each turn is compared with its neighbour: the median of these ratios is told with the interval that
it is in by 95 % of drawings from them.

That interval is wider than two percent. So what the ACLs are for a request is measured apart, too:
on a connection that has produced before it is one look at what its session may write
(``tests/node/security/test_cost_of_acls.py`` counts that nothing else is called), and that look's
time by the request's is the most that they can add to it.
"""

from __future__ import annotations

import random
import statistics
import time

import brokers
import frames
import single
from brokers import Broker
from harness import Bench

from kept.client.admin.acls import Acl, create_acls
from kept.client.client import Client
from kept.cluster.security.acl_index import AclIndex
from kept.cluster.security.acls import (
    AclBinding,
    AclOperation,
    AclPermission,
    AclResourceType,
    PatternType,
)
from kept.node.security.authorizer import StandardAuthorizer
from kept.node.security.session import Session
from kept.storage.types import Codec

GUARDED = {
    "authorizer_class_name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
    "super_users": "User:admin",
    "allow_everyone_if_no_acl_found": "true",
}
ACLS = 10_000
AT_ONCE = 1000
BINDINGS = 100_000
QUESTIONS = 20_000
ROUNDS = 31
DRAWN = 2000
TOPIC = "produced"
LOOKS = 10_000
LOOK_ROUNDS = 200


def authorization(bench: Bench) -> None:
    """Two nodes in turn: one without an authorizer, one whose client needs an ACL to write."""
    decide(bench)
    with brokers.kept() as open_node, brokers.kept(**GUARDED) as guarded:
        for node in (open_node, guarded):
            single.create(node, TOPIC)
        allow(guarded)
        data = frames.batch(1024, 1000, Codec.NONE, int(time.time() * 1000))
        frame = frames.produce(TOPIC, data)
        count = max(20_000, int(100_000 * bench.scale))
        for node in (open_node, guarded):
            _cost(bench, node, frame, count)  # what is measured runs on warm code
        costs: dict[str, list[float]] = {open_node.bootstrap: [], guarded.bootstrap: []}
        for number in range(ROUNDS):
            for node in (open_node, guarded) if number % 2 else (guarded, open_node):
                costs[node.bootstrap].append(_cost(bench, node, frame, count))
        for node, name in ((open_node, "no authorizer"), (guarded, f"{ACLS} ACLs")):
            median = statistics.median(costs[node.bootstrap])
            bench.add("authorization", f"produce 1 KiB, {name}", "kept", "us/request", median)
        look_us = look()
        bench.add("authorization", "a look at what may be written", "kept", "us", look_us)
        share = look_us / statistics.median(costs[open_node.bootstrap])
        bench.add("authorization", "that look, of produce 1 KiB", "kept", "ratio", share)
        both = zip(costs[guarded.bootstrap], costs[open_node.bootstrap], strict=True)
        ratios = [one / other for one, other in both]
        low, high = interval(ratios)
        name = f"produce 1 KiB, {ACLS} ACLs to none"
        for of, value in (("", statistics.median(ratios)), (", from", low), (", to", high)):
            bench.add("authorization", f"{name}{of}", "kept", "ratio", value)


def look() -> float:
    """Microseconds of processor time that a look takes at what a session with an authorizer may
    write: the least of many short rounds, each less an empty one.
    """
    session, name = Session(authorizer=StandardAuthorizer(AclIndex, ())), TOPIC.encode()
    session.writable.add(name)
    each = []
    for _ in range(LOOK_ROUNDS):
        turns = range(LOOKS)
        started = time.process_time()
        for _ in turns:
            pass
        empty = time.process_time() - started
        started = time.process_time()
        for _ in turns:
            if name not in session.writable:
                raise AssertionError
        each.append((time.process_time() - started - empty) / LOOKS)
    return min(each) * 1e6


def interval(values: list[float]) -> tuple[float, float]:
    """In which the median is, by 95 % of drawings from the values (bootstrap)."""
    draw = random.Random(1)
    medians = sorted(statistics.median(draw.choices(values, k=len(values))) for _ in range(DRAWN))
    return medians[DRAWN // 40], medians[-DRAWN // 40]


def _cost(bench: Bench, node: Broker, frame: bytes, count: int) -> float:
    before = node.cpu_seconds()
    got = bench.run_load("send", node.port, frame, 1, 8, count)
    return (node.cpu_seconds() - before) / got["requests"] * 1e6


def allow(node: Broker) -> None:
    """Let whoever comes write the topic, and others what there is not."""
    others = [
        Acl(
            int(AclResourceType.TOPIC),
            f"team-{number % 300}.{number}",
            int(PatternType.PREFIXED if number % 3 else PatternType.LITERAL),
            f"User:app-{number % 500}",
            "*",
            int(AclOperation.READ),
            int(AclPermission.ALLOW),
        )
        for number in range(ACLS - 1)
    ]
    written = Acl(
        int(AclResourceType.TOPIC),
        TOPIC,
        int(PatternType.LITERAL),
        "User:ANONYMOUS",
        "*",
        int(AclOperation.WRITE),
        int(AclPermission.ALLOW),
    )
    acls = [written, *others]
    with Client(node.bootstrap) as client:
        for first in range(0, len(acls), AT_ONCE):
            client.run(create_acls(acls[first : first + AT_ONCE]))


def decide(bench: Bench) -> None:
    """One decision: 2,000 principals with some twenty lengths of prefixes each."""
    draw = random.Random(1)
    topic = AclResourceType.TOPIC
    bindings: set[AclBinding] = set()
    while len(bindings) < BINDINGS:
        is_prefix = draw.random() < 0.4
        name = f"team-{draw.randrange(300)}."
        bindings.add(
            AclBinding(
                topic,
                name + ("x" * draw.randrange(30) if is_prefix else f"{draw.randrange(2000)}"),
                PatternType.PREFIXED if is_prefix else PatternType.LITERAL,
                f"User:app-{draw.randrange(2000)}",
                draw.choice(("*", "*", f"10.0.0.{draw.randrange(9)}")),
                draw.choice((AclOperation.READ, AclOperation.WRITE, AclOperation.ALTER)),
                AclPermission.DENY if draw.random() < 0.02 else AclPermission.ALLOW,
            )
        )
    kept = sorted(bindings)
    started = time.process_time()
    index = AclIndex().with_changes(kept)
    built = time.process_time() - started
    asked = [(draw.choice(kept).principal, draw.choice(kept).name) for _ in range(QUESTIONS)]
    started = time.process_time()
    for principal, name in asked:
        index.decide(principal, "10.0.0.3", AclOperation.READ, topic, name)
    each = (time.process_time() - started) / QUESTIONS
    bench.add("authorization", f"a decision, {BINDINGS} ACLs", "kept", "us", each * 1e6)
    bench.add("authorization", f"indexing {BINDINGS} ACLs", "kept", "s", built)
