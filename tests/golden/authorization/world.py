"""A broker with the world of :mod:`asked`, whoever asks it, and answers as short text."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import IntEnum
from typing import Any
from uuid import UUID

from kio.schema.errors import ErrorCode

from kept.cluster.security.acls import CLUSTER_NAME
from kept.cluster.security.acls import AclResourceType as Kind
from tests.golden.authorization.asked import (
    ALLOWED,
    CASES,
    MENDED,
    NOWHERE,
    Asked,
    bindings_of,
)
from tests.support.kafka_connection import Connection
from tests.support.request_values import topic_values

ASKER = "User:bob"
PASSWORD = "sesame"
DEADLINE_S = 30.0
METADATA, COMMIT, FIND, HANDSHAKE, VERSIONS, CREATE, DELETE = 3, 8, 10, 17, 18, 19, 20
LIST_OFFSETS, INIT, DESCRIBE_ACLS, CREATE_ACLS, DELETE_ACLS, AUTHENTICATE = 2, 22, 29, 30, 31, 36

KEPT_FIELDS = {
    "name",
    "topic",
    "topic_name",
    "topic_id",
    "group_id",
    "key",
    "transactional_id",
    "resource_name",
    "user",
    "partition_index",
    "is_internal",
}
"""Fields of an answer that tell what it is about."""
SOME = {"configs", "resources", "acls", "brokers", "voters", "config_resources", "credential_infos"}
"""Arrays of which it counts whether anything is in them."""

LEFT_OUT = {"matching_acls", "nodes"}
"""Arrays that depend on what was asked before, or on how many nodes there are."""


def log_in(connection: Connection, user: str, password: str = PASSWORD) -> Connection:
    """Log in by SASL PLAIN."""
    assert not connection.ask(HANDSHAKE, 1, mechanism="PLAIN").error_code
    token = f"\0{user}\0{password}".encode()
    assert not connection.ask(AUTHENTICATE, 2, auth_bytes=token).error_code
    return connection


def answer_text(answer: Any, ids: Mapping[str, UUID]) -> str:
    """What a test compares of an answer: codes, names, authorized operations; arrays are sorted."""
    names = {uuid: name for name, uuid in ids.items()}
    return json.dumps(_plain(answer, names), separators=(",", ":"), default=str)


def _plain(value: Any, names: Mapping[UUID, str]) -> Any:
    if is_dataclass(value):
        shown = {}
        for each in fields(value):
            plain = _field(each.name, getattr(value, each.name), names)
            if plain not in (None, {}, [], ()):
                shown[each.name] = plain
        return shown
    if isinstance(value, UUID):
        return f"id of {names[value]}" if value in names else "no id" if not value.int else "an id"
    if isinstance(value, IntEnum):
        return int(value)
    return value


def _field(name: str, value: Any, names: Mapping[UUID, str]) -> Any:
    if isinstance(value, ErrorCode):
        return int(value)
    if name in KEPT_FIELDS or name.endswith("authorized_operations"):
        return "null" if value is None and name in ("name", "topic_name") else _plain(value, names)
    if isinstance(value, tuple) and value and is_dataclass(value[0]):
        if name in SOME:
            codes = sorted({int(each.error_code) for each in value if hasattr(each, "error_code")})
            return codes if name == "resources" and any(codes) else "some"
        if name in LEFT_OUT:
            return None
        entries = [plain for each in value if (plain := _plain(each, names))]
        return sorted(entries, key=str)  # Kafka's order is that of a hash table
    if is_dataclass(value):
        return _plain(value, names)
    return None


class World:
    """A broker: ``admin`` may do everything, :data:`ASKER` what the case says."""

    def __init__(self, admin: Callable[[], Connection], asker: Callable[[], Connection]) -> None:
        self._admin = admin()
        self._new_asker = asker
        self._asker = asker()
        self.ids: dict[str, UUID] = {"fresh": UUID(int=1), "missing": NOWHERE}
        listed = self._admin.ask(
            VERSIONS, 3, client_software_name="x", client_software_version="1"
        ).api_keys
        self.served = {each.api_key: (each.min_version, each.max_version) for each in listed}
        self.mend()

    def close(self) -> None:
        self._admin.close()
        self._asker.close()

    def mend(self) -> None:
        """Make again what a request took away."""
        new = [topic_values("mine"), topic_values("secret")]
        answered = self._admin.ask(CREATE, 7, topics=new, timeout=30_000, validate_only=False)
        assert {int(topic.error_code) for topic in answered.topics} <= {0, 36}, answered
        made = [topic for topic in answered.topics if not topic.error_code]
        self.ids |= {topic.name: topic.topic_id for topic in made}
        self._until(self._is_led)
        for group in ("mine", "secret"):
            self._until(lambda group=group: self._commit(group))
            self._until(lambda group=group: self._init(group))

    def _is_led(self) -> bool:
        asked = [{"name": name, "topic_id": UUID(int=0)} for name in ("mine", "secret")]
        answered = self._admin.ask(
            METADATA,
            12,
            topics=asked,
            allow_auto_topic_creation=False,
            include_cluster_authorized_operations=False,
            include_topic_authorized_operations=False,
        ).topics
        if not all(
            topic.topic_id == self.ids[topic.name]
            and topic.partitions
            and not topic.error_code
            and not topic.partitions[0].error_code
            for topic in answered
        ):
            return False
        ends = [
            {
                "name": name,
                "partitions": [{"partition_index": 0, "timestamp": -1, "current_leader_epoch": -1}],
            }
            for name in ("mine", "secret")
        ]
        found = self._admin.ask(LIST_OFFSETS, 7, replica_id=-1, isolation_level=0, topics=ends)
        return not any(p.error_code for topic in found.topics for p in topic.partitions)

    def _commit(self, group: str) -> bool:
        topics = [
            {
                "name": name,
                "partitions": [
                    {
                        "partition_index": 0,
                        "committed_offset": 0,
                        "committed_leader_epoch": -1,
                        "committed_metadata": None,
                    }
                ],
            }
            for name in ("mine", "secret")
        ]
        self._admin.ask(FIND, 4, key="", key_type=0, coordinator_keys=[group])
        answered = self._admin.ask(
            COMMIT,
            8,
            group_id=group,
            generation_id_or_member_epoch=-1,
            member_id="",
            group_instance_id=None,
            topics=topics,
        )
        return not any(p.error_code for topic in answered.topics for p in topic.partitions)

    def _init(self, transactional_id: str) -> bool:
        self._admin.ask(FIND, 4, key="", key_type=1, coordinator_keys=[transactional_id])
        return not self._admin.ask(
            INIT,
            4,
            transactional_id=transactional_id,
            transaction_timeout=60_000,
            producer_id=-1,
            producer_epoch=-1,
        ).error_code

    def _until(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, "the broker is not as it should be"
            time.sleep(0.02)

    # Bindings.

    def set(self, case: str) -> None:
        """Delete all bindings, and create those of a case."""
        every = {
            "resource_type_filter": 1,
            "resource_name_filter": None,
            "pattern_type_filter": 1,
            "principal_filter": None,
            "host_filter": None,
            "operation": 1,
            "permission_type": 1,
        }
        self._admin.ask(DELETE_ACLS, 3, filters=[every])
        allowed, denied = bindings_of(case)
        wanted = [
            {
                "resource_type": int(kind),
                "resource_name": name,
                "resource_pattern_type": 3,
                "principal": ASKER,
                "host": "*",
                "operation": int(op),
                "permission_type": permission,
            }
            for permission, bindings in ((3, allowed), (2, denied))
            for kind, op in bindings
            for name in ((CLUSTER_NAME,) if kind is Kind.CLUSTER else ALLOWED)
        ]
        if wanted:
            results = self._admin.ask(CREATE_ACLS, 3, creations=wanted).results
            assert not any(result.error_code for result in results), results
        self._until(lambda: self._count(every) == len(wanted))

    def _count(self, every: Mapping[str, Any]) -> int:
        found = self._admin.ask(DESCRIBE_ACLS, 3, **every).resources
        return sum(len(resource.acls) for resource in found)

    # Asking.

    def answer(self, asked: Asked, version: int) -> str:
        """What is answered to who may do what the bindings say; mended afterwards."""
        try:
            answered = self._asker.ask(asked.api, version, **asked.values(version, self.ids))
        except ConnectionError:
            self._asker.close()
            self._asker = self._new_asker()
            return "closed"
        text = answer_text(answered, self.ids)
        if asked.api in MENDED:
            self.mend()
        return text

    def frame(self, asked: Asked, version: int) -> bytes:
        """The bytes of the answer behind its number."""
        return self._asker.frame_of(asked.api, version, **asked.values(version, self.ids))[4:]


Recorded = dict[str, dict[str, dict[str, str]]]
"""Request -> versions (``3-7``) -> answer -> cases, with ``;`` between them; the answer of most has
``*`` for all that are named nowhere else."""


def fold(answers: Mapping[tuple[str, int], Mapping[str, str]]) -> Recorded:
    """Answers by (request, version) and case, with equal versions and cases put together."""
    runs: dict[str, list[tuple[list[int], dict[str, str]]]] = {}
    for (name, version), by_case in answers.items():
        cases: dict[str, list[str]] = {}
        for case, answer in by_case.items():
            cases.setdefault(answer, []).append(case)
        most = max(cases, key=lambda answer: len(cases[answer]))
        folded = {
            answer: "*" if answer == most else ";".join(cases[answer]) for answer in sorted(cases)
        }
        run = runs.setdefault(name, [])
        if run and run[-1][1] == folded and run[-1][0][-1] == version - 1:
            run[-1][0].append(version)
        else:
            run.append(([version], folded))
    return {
        name: {f"{numbers[0]}-{numbers[-1]}": folded for numbers, folded in run}
        for name, run in runs.items()
    }


def unfold(recorded: Recorded) -> dict[tuple[str, int], dict[str, str]]:
    """The reverse of :func:`fold`."""
    answers: dict[tuple[str, int], dict[str, str]] = {}
    for name, by_versions in recorded.items():
        for numbers, by_answer in by_versions.items():
            first, last = map(int, numbers.split("-"))
            by_case: dict[str, str] = {}
            for answer, cases in by_answer.items():
                chosen = CASES if cases == "*" else cases.split(";")
                by_case = (
                    {**dict.fromkeys(chosen, answer), **by_case}
                    if cases == "*"
                    else {**by_case, **dict.fromkeys(chosen, answer)}
                )
            for version in range(first, last + 1):
                answers[name, version] = {case: by_case[case] for case in CASES}
    return answers
