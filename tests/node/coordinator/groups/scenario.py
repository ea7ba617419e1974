"""A scenario of requests of the group APIs, which any broker can be asked.

The answers of Apache Kafka 4.3 to the scenario are in ``data/kafka-4.3.0-answers.json``. What
differs from run to run is named in order of appearance (member ids) or left out (throttle times,
ports, hosts).
"""

from __future__ import annotations

import datetime
import re
import uuid
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from kio.schema.errors import ErrorCode

from kept.client.admin.groups import encode_subscription
from tests.support.kafka_connection import (
    COMMIT,
    CREATE,
    DELETE_GROUPS,
    DELETE_OFFSETS,
    DESCRIBE,
    FETCH,
    FIND,
    HEARTBEAT,
    JOIN,
    LEAVE,
    LIST,
    METADATA,
    SYNC,
    Connection,
)

LEFT_OUT = {"throttle_time", "host", "port", "error_message"}
MEMBER_ID = re.compile(r"(?:scenario|static-\w+)-[0-9a-f]{8}-[0-9a-f-]{27}")


class Names:
    """Names for what differs from run to run."""

    def __init__(self) -> None:
        self.members: dict[str, str] = {}
        self.topics: dict[uuid.UUID, str] = {}

    def plain(self, value: Any) -> Any:
        """A kio object as JSON."""
        if is_dataclass(value):
            named = {f.name: getattr(value, f.name) for f in fields(value)}
            return {k: self.plain(v) for k, v in named.items() if k not in LEFT_OUT}
        if isinstance(value, tuple | list):
            return sorted((self.plain(v) for v in value), key=repr)
        if isinstance(value, ErrorCode):
            return value.name
        if isinstance(value, uuid.UUID):
            return self.topics.get(value, "unknown")
        if isinstance(value, datetime.timedelta):
            return value.total_seconds()
        if isinstance(value, bytes):
            return value.hex()
        if isinstance(value, str) and len(value) > 200:
            return f"{len(value)} characters"
        if isinstance(value, str):
            return MEMBER_ID.sub(self._member, value)
        return value

    def _member(self, found: re.Match[str]) -> str:
        return self.members.setdefault(found.group(), f"member {len(self.members) + 1}")


class Scenario:
    """Asks a broker everything about groups; each step is (what, answer as JSON)."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self.names = Names()
        self.connection = Connection(bootstrap)
        self.suffix = ""

    def run(self) -> Iterator[tuple[str, Any]]:
        self._topics()
        for part in (
            self.find,
            self.life_in_every_version,
            self.refusals,
            self.two_members,
            self.static_members,
            self.commits_in_every_version,
            self.fetches_in_every_version,
            self.administration,
        ):
            for what, answer in part():
                yield f"{part.__name__}: {what}", self.names.plain(answer)
        self.connection.close()

    def _topics(self) -> None:
        new = {"num_partitions": 2, "replication_factor": 1, "assignments": (), "configs": ()}
        self.ask(
            CREATE,
            7,
            topics=[{"name": n, **new} for n in ("orders", "users")],
            timeout=30_000,
            validate_only=False,
        )
        while True:
            topics = [{"topic_id": None, "name": n} for n in ("orders", "users")]
            found = self.ask(
                METADATA,
                12,
                topics=topics,
                allow_auto_topic_creation=False,
                include_topic_authorized_operations=False,
            )
            if all(t.error_code is ErrorCode.none for t in found.topics):
                break
        self.names.topics = {t.topic_id: t.name for t in found.topics}
        self.ids = {t.name: t.topic_id for t in found.topics}
        answer = None
        while answer is not ErrorCode.none:
            answer = self.ask(FIND, 2, key="any", key_type=0).error_code
        while self.describe("any").groups[0].error_code is not ErrorCode.group_id_not_found:
            pass

    def ask(self, api: int, version: int, **values: Any) -> Any:
        return self.connection.ask(api, version, **values)

    # Requests with their usual fields.

    def joining(self, group: str, member: str = "", **other: Any) -> dict[str, Any]:
        return {
            "group_id": group,
            "session_timeout": 10_000,
            "rebalance_timeout": 20_000,
            "member_id": member,
            "group_instance_id": None,
            "protocol_type": "consumer",
            "protocols": [{"name": "range", "metadata": encode_subscription(["orders"])}],
            "reason": None,
            **other,
        }

    def join(self, version: int, group: str, member: str = "", **other: Any) -> Any:
        return self.ask(JOIN, version, **self.joining(group, member, **other))

    def syncing(self, group: str, member: str, generation: int, **other: Any) -> dict[str, Any]:
        return {
            "group_id": group,
            "generation_id": generation,
            "member_id": member,
            "group_instance_id": None,
            "protocol_type": "consumer",
            "protocol_name": "range",
            "assignments": [],
            **other,
        }

    def sync(self, version: int, group: str, member: str, generation: int, **other: Any) -> Any:
        return self.ask(SYNC, version, **self.syncing(group, member, generation, **other))

    def beat(self, version: int, group: str, member: str, generation: int, **other: Any) -> Any:
        values = {"group_instance_id": None, **other}
        return self.ask(
            HEARTBEAT, version, group_id=group, generation_id=generation, member_id=member, **values
        )

    def leave(self, version: int, group: str, *members: tuple[str, str | None]) -> Any:
        many = [{"member_id": m, "group_instance_id": i, "reason": None} for m, i in members]
        return self.ask(LEAVE, version, group_id=group, member_id=members[0][0], members=many)

    def committing(self, topic: str, *offsets: tuple[int, int], metadata: str | None = "") -> Any:
        return {
            "name": topic,
            "topic_id": self.ids.get(topic, uuid.UUID(int=99)),
            "partitions": [
                {
                    "partition_index": p,
                    "committed_offset": o,
                    "committed_leader_epoch": 0,
                    "committed_metadata": metadata,
                    "commit_timestamp": -1,
                }
                for p, o in offsets
            ],
        }

    def commit(self, version: int, group: str, *topics: Any, **other: Any) -> Any:
        values = {"generation_id_or_member_epoch": -1, "member_id": "", "retention_time": -1}
        return self.ask(
            COMMIT,
            version,
            group_id=group,
            topics=topics,
            **{"group_instance_id": None, **values, **other},
        )

    def fetch(self, version: int, group: str, *topics: tuple[str, tuple[int, ...]] | None) -> Any:
        named = [
            {
                "name": t[0],
                "topic_id": self.ids.get(t[0], uuid.UUID(int=99)),
                "partition_indexes": t[1],
            }
            for t in topics
            if t is not None
        ]
        asked = None if topics == (None,) else named
        one = {"group_id": group, "topics": asked, "member_id": None, "member_epoch": -1}
        if version >= 8:
            return self.ask(FETCH, version, groups=[one], require_stable=False)
        return self.ask(FETCH, version, require_stable=False, **one)

    def describe(self, *groups: str, version: int = 6, operations: bool = False) -> Any:
        return self.ask(DESCRIBE, version, groups=groups, include_authorized_operations=operations)

    def stable(self, group: str, **other: Any) -> str:
        """A group of one member, stable, generation 1; the member's id."""
        member = str(self.join(3, group, **other).member_id)
        assignment = [{"member_id": member, "assignment": b"all"}]
        assert self.sync(4, group, member, 1, assignments=assignment).error_code == 0
        return member

    # Parts.

    def find(self) -> Iterator[tuple[str, Any]]:
        for version in range(4):
            yield f"v{version}", self.ask(FIND, version, key="a", key_type=0)
        for version in range(4, 7):
            yield f"v{version}", self.ask(FIND, version, coordinator_keys=["a", "b"], key_type=0)

    def life_in_every_version(self) -> Iterator[tuple[str, Any]]:
        for version in range(10):
            group = f"life-{version}"
            joined = self.join(version, group)
            yield f"join v{version}", joined
            member = joined.member_id
            if version >= 4:
                joined = self.join(version, group, member)
                yield f"join v{version} again", joined
            other = min(version, 5)
            assignments = [{"member_id": member, "assignment": b"all"}]
            yield (f"sync v{other}", self.sync(other, group, member, 1, assignments=assignments))
            yield f"heartbeat v{min(version, 4)}", self.beat(min(version, 4), group, member, 1)
            yield "described", self.describe(group, version=min(version, 6))
            yield f"leave v{other}", self.leave(other, group, (member, None))
            yield "described", self.describe(group, version=min(version, 6))

    def refusals(self) -> Iterator[tuple[str, Any]]:
        yield "no group id", self.join(9, "")
        yield "short session", self.join(9, "refused", session_timeout=5_999)
        yield "long session", self.join(9, "refused", session_timeout=1_800_001)
        yield "unknown member", self.join(9, "refused", "scenario-nobody")
        yield "sync of nobody", self.sync(5, "refused", "scenario-nobody", 1)
        yield "sync without group", self.sync(5, "", "scenario-nobody", 1)
        yield "sync without protocol", self.sync(5, "refused", "x", 1, protocol_name=None)
        yield "heartbeat of nobody", self.beat(4, "refused", "scenario-nobody", 1)
        yield "heartbeat without group", self.beat(4, "", "scenario-nobody", 1)
        for version in (2, 5):
            yield f"leave v{version}", self.leave(version, "refused", ("scenario-nobody", None))
        yield "leave without group", self.leave(5, "", ("scenario-nobody", None))
        member = self.stable("firm")
        yield "other protocol", self.join(3, "firm", protocols=[{"name": "x", "metadata": b""}])
        yield "other type", self.join(3, "firm", protocol_type="connect")
        yield "static stranger", self.join(9, "firm", member, group_instance_id="static-x")
        yield "old generation", self.sync(5, "firm", member, 0)
        yield "wrong protocol", self.sync(5, "firm", member, 1, protocol_name="x")
        yield "heartbeat of an old generation", self.beat(4, "firm", member, 0)
        yield "stranger leaves", self.leave(5, "firm", ("scenario-nobody", None), ("", "static-x"))
        offset = self.committing("orders", (0, 1))
        yield "simple commit", self.commit(9, "firm", offset)
        yield (
            "commit of an old generation",
            self.commit(9, "firm", offset, member_id=member, generation_id_or_member_epoch=0),
        )
        yield (
            "commit of a stranger",
            self.commit(
                9, "firm", offset, member_id="scenario-nobody", generation_id_or_member_epoch=1
            ),
        )
        for version in (8, 9):
            yield (
                f"commit v{version} to a missing group",
                self.commit(
                    version, "missing", offset, member_id="m", generation_id_or_member_epoch=1
                ),
            )
        yield "leave", self.leave(5, "firm", (member, None))

    def two_members(self) -> Iterator[tuple[str, Any]]:
        other = Connection(self.bootstrap)
        first = self.stable("pair")
        other.send(JOIN, 3, **self.joining("pair"))
        yield "waits", other.is_answered(0.2)
        yield "rebalance", self.beat(4, "pair", first, 1)
        yield "sync while rebalancing", self.sync(5, "pair", first, 1)
        yield "first joins", self.join(9, "pair", first)
        joined = other.receive()
        yield "second joined", joined
        second = joined.member_id
        other.send(SYNC, 5, **self.syncing("pair", second, 2))
        yield "waits", other.is_answered(0.2)
        offset = self.committing("orders", (0, 1))
        yield (
            "commit before the assignment",
            self.commit(9, "pair", offset, member_id=first, generation_id_or_member_epoch=2),
        )
        parts = [{"member_id": m, "assignment": m.encode()[:3]} for m in (first, second)]
        yield "first syncs", self.sync(5, "pair", first, 2, assignments=parts)
        yield "second synced", other.receive()
        yield "described", self.describe("pair")
        yield "second joins again", other.ask(JOIN, 9, **self.joining("pair", second))
        yield "second leaves", self.leave(5, "pair", (second, None))
        yield "rebalance", self.beat(4, "pair", first, 2)
        yield "first joins", self.join(9, "pair", first)
        yield "first syncs without assigning", self.sync(5, "pair", first, 3)
        yield "first leaves", self.leave(1, "pair", (first, None))
        other.close()

    def static_members(self) -> Iterator[tuple[str, Any]]:
        one = {"group_instance_id": "static-one"}
        joined = self.join(9, "fixed", **one)
        yield "joined at once", joined
        old = joined.member_id
        assignments = [{"member_id": old, "assignment": b"all"}]
        yield "synced", self.sync(5, "fixed", old, 1, assignments=assignments, **one)
        again = self.join(9, "fixed", **one)
        yield "back, leading", again
        new = again.member_id
        yield "synced", self.sync(5, "fixed", new, 1, **one)
        yield "fenced heartbeat", self.beat(4, "fixed", old, 1, **one)
        yield "fenced sync", self.sync(5, "fixed", old, 1, **one)
        yield "fenced join", self.join(9, "fixed", old, **one)
        yield (
            "fenced commit",
            self.commit(
                9,
                "fixed",
                self.committing("orders", (0, 1)),
                member_id=old,
                generation_id_or_member_epoch=1,
                **one,
            ),
        )
        yield "fenced leave", self.leave(5, "fixed", (old, "static-one"))
        yield "back with v5", self.join(5, "fixed", **one)
        yield "described", self.describe("fixed")
        yield "removed", self.leave(5, "fixed", ("", "static-one"), ("", "static-one"))
        yield "described", self.describe("fixed")

    def commits_in_every_version(self) -> Iterator[tuple[str, Any]]:
        for version in range(2, 11):
            topics = [
                self.committing("orders", (0, 10 + version), (7, 1), metadata=f"v{version}"),
                self.committing("nowhere", (0, 1)),
                self.committing("users", (1, 20 + version), metadata=None),
            ]
            yield f"v{version}", self.commit(version, "simple", *topics)
            yield f"fetch after v{version}", self.fetch(9, "simple", None)
        long = self.committing("orders", (0, 1), (1, 2), metadata="x" * 4097)
        short = self.committing("users", (0, 3), metadata="é" * 4096)
        yield "long metadata", self.commit(9, "simple", long, short)
        yield "group without a name", self.commit(9, "", self.committing("orders", (0, 5)))
        yield "nothing", self.commit(9, "simple")

    def fetches_in_every_version(self) -> Iterator[tuple[str, Any]]:
        for version in range(1, 11):
            asked = (("orders", (0, 1)), ("users", (0,)), ("nowhere", (0,)))
            yield f"v{version}", self.fetch(version, "simple", *asked)
            yield f"missing group v{version}", self.fetch(version, "missing", *asked)
            if version >= 2:
                yield f"all v{version}", self.fetch(version, "simple", None)
        groups = [
            {"group_id": g, "topics": t, "member_id": None, "member_epoch": -1}
            for g, t in (("simple", None), ("missing", None), ("missing", []))
        ]
        yield "several, stable", self.ask(FETCH, 9, groups=groups, require_stable=True)
        yield "group without a name", self.fetch(9, "", ("orders", (0,)))

    def administration(self) -> Iterator[tuple[str, Any]]:
        member = self.stable("busy")
        offsets = [self.committing("orders", (0, 1)), self.committing("users", (0, 2), (1, 3))]
        yield (
            "commit",
            self.commit(9, "busy", *offsets, member_id=member, generation_id_or_member_epoch=1),
        )
        for version in range(6):
            yield f"list v{version}", self.ask(LIST, version, states_filter=[], types_filter=[])
        for states, types in (
            (["Stable"], []),
            (["stable", "EMPTY"], []),
            (["Dead"], []),
            ([], ["classic"]),
            ([], ["Consumer"]),
            ([], ["nonsense"]),
            (["Stable"], ["CLASSIC"]),
        ):
            what = f"list {states} {types}"
            yield what, self.ask(LIST, 5, states_filter=states, types_filter=types)
        for version in range(7):
            yield f"describe v{version}", self.describe("busy", "missing", version=version)
        yield "describe with operations", self.describe("busy", version=5, operations=True)
        topics = [("orders", (0,)), ("users", (0, 7)), ("nowhere", (0,))]
        delete = [
            {"name": t, "partitions": [{"partition_index": p} for p in ps]} for t, ps in topics
        ]
        for group in ("busy", "simple", "missing", ""):
            yield (
                f"delete offsets of {group!r}",
                self.ask(DELETE_OFFSETS, 0, group_id=group, topics=delete),
            )
            yield f"left in {group!r}", self.fetch(9, group, None)
        for version in range(3):
            groups = ["busy", "simple", "missing"]
            yield f"delete groups v{version}", self.ask(DELETE_GROUPS, version, groups_names=groups)
        yield "gone", self.fetch(9, "simple", None)
        yield "leave", self.leave(5, "busy", (member, None))
        yield "delete", self.ask(DELETE_GROUPS, 2, groups_names=["busy"])
        yield "gone", self.describe("busy")
