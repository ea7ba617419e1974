"""A node of ours answers as Apache Kafka 4.3 did, but for what is listed here with its reason."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping

import pytest

from kept.node.kafka.api import APIS, BEFORE_LOGIN
from kept.testing import Cluster
from kept.testing.ports import free_port
from tests.golden.authorization import asked as table
from tests.golden.authorization.asked import ASKED, CASES, Asked
from tests.golden.authorization.record import GOLDEN, PLAIN
from tests.golden.authorization.world import PASSWORD, World, log_in, unfold
from tests.support.kafka_connection import Connection

RECORDED = unfold(json.loads(GOLDEN.read_text()))
Answers = dict[tuple[str, int, str], str]
"""By request, version and case."""

OTHERWISE: Mapping[str, str] = {
    "AddRaftVoter": "the voters of the recorded node are static, ours are not",
    "RemoveRaftVoter": "the voters of the recorded node are static, ours are not",
    "DescribeConfigs": "groups have no settings here",
    "DescribeUserScramCredentials": "Kafka puts a user without a name into its refusal",
}
"""Requests of which what is allowed is answered otherwise, and why; what is not allowed must be
refused alike."""
ONLY_HERE = {
    "Fetch of a replica": "replicas fetch on the listener between nodes, and nobody does elsewhere"
}
"""Requests that are refused to everybody, and why."""
OTHER_REFUSAL = {
    "Produce with a transactional id": "here topics are looked at first, in Kafka the id"
}
"""Requests that are refused here as there, with another of several codes, and why."""
BY_ID = {(0, 13), *((1, version) for version in range(13, 19)), (3, 12), (3, 13), (8, 10), (9, 10)}
"""APIs and versions that name topics by id: as in Kafka, an id that no topic has is told."""
TELLS_ITS_OWN = {"Metadata of ids", "DeleteTopics of ids"}
REFUSALS = (29, 30, 31, 53)


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    port = free_port(above=[1])
    settings: Mapping[str, object] = {
        "listeners": f"PLAINTEXT://127.0.0.1:{port},OUT://127.0.0.1:{port + 1}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,OUT:SASL_PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.out.plain.sasl.jaas.config": f'{PLAIN} user_bob="{PASSWORD}";',
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
        "auto.create.topics.enable": "false",
        "kept.audit": "off",
    }
    with Cluster(**settings):
        address = f"127.0.0.1:{port}"
        world = World(
            lambda: Connection(address),
            lambda: log_in(Connection(f"127.0.0.1:{port + 1}"), "bob"),
        )
        yield world
        world.close()


def test_every_version_of_every_api_that_is_served_is_recorded() -> None:
    """But for the three that come before a login."""
    recorded: dict[int, set[int]] = {}
    of_name = {asked.name: asked.api for asked in ASKED}
    for name, version in RECORDED:
        recorded.setdefault(of_name[name], set()).add(version)
    lacking = {}
    for served in APIS:
        lowest = max(served.min_version, served.refused_below)
        wanted = {*range(lowest, served.max_version + 1)}
        if served.key not in BEFORE_LOGIN and (left := wanted - recorded.get(served.key, set())):
            lacking[served.name] = left
    assert not lacking
    assert all(by_case.keys() == {*CASES} for by_case in RECORDED.values())


def _versions(asked: Asked, world: World) -> list[int]:
    served = asked.asked_in(world.served)
    return [version for version in served if (asked.name, version) in RECORDED]


def differences(world: World, cases: Iterable[str], *, newest: bool) -> Answers:
    """What is answered otherwise than recorded."""
    found: Answers = {}
    for case in cases:
        world.set(case)
        for asked in ASKED:
            versions = _versions(asked, world)
            for version in versions[-1:] if newest else versions:
                answer = world.answer(asked, version)
                if answer != RECORDED[asked.name, version][case]:
                    found[asked.name, version, case] = answer
    return found


def test_the_newest_versions_with_no_binding_and_with_all(world: World) -> None:
    _check(differences(world, ("nothing", "all"), newest=True))


def test_the_newest_versions_with_each_denial_that_matters(world: World) -> None:
    """Beside an ALLOW of everything: so a request that asks for less than Kafka's is found; one of
    the cluster that either of two rights allows, where Describe alone is allowed.
    """
    found: Answers = {}
    for case in CASES:
        if not (case.startswith("-") or case == "+cluster describe"):
            continue
        world.set(case)
        for asked in ASKED:
            for version in _versions(asked, world)[-1:]:
                recorded = RECORDED[asked.name, version]
                if recorded[case] == recorded["all"]:
                    continue
                answer = world.answer(asked, version)
                if answer != recorded[case]:
                    found[asked.name, version, case] = answer
    _check_explained(found)


def test_topics_that_are_not_there_are_answered_as_those_of_others(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Byte by byte, but for the name: ``secret`` is there, ``absent`` is not."""
    world.set("nothing")
    monkeypatch.setitem(world.ids, "absent", table.NOWHERE)
    compared = {}
    for asked in ASKED:
        versions = [v for v in _versions(asked, world) if (asked.api, v) not in BY_ID]
        if not versions or asked.name in TELLS_ITS_OWN:
            continue
        frames = compared[asked.name] = set()
        for name in ("secret", "absent"):
            monkeypatch.setattr(table, "NAMES", (name,))
            frames.add(world.frame(asked, versions[-1]).replace(b"secret", b"absent"))
    assert len(compared) > 50
    assert not {name: frames for name, frames in compared.items() if len(frames) > 1}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_version_with_every_case(world: World) -> None:
    _check(differences(world, CASES, newest=False))


def _refusals(answer: str) -> list[str]:
    """The codes of what was refused."""
    return [code for code in re.findall(r'"error_code":(\d+)', answer) if int(code) in REFUSALS]


def _check(found: Answers) -> None:
    _check_explained(found)
    listed = OTHERWISE.keys() | ONLY_HERE.keys() | OTHER_REFUSAL.keys()
    assert {name for name, _, _ in found} == listed, "what does not differ is not listed"


def _check_explained(found: Answers) -> None:
    def is_explained(name: str, version: int, case: str, answer: str) -> bool:
        if name in ONLY_HERE:
            return set(re.findall(r'"error_code":(\d+)', answer)) <= {"0", "29"}
        if name in OTHER_REFUSAL:
            return '"error_code":0' not in answer
        expected = RECORDED[name, version][case]
        return name in OTHERWISE and set(_refusals(answer)) == set(_refusals(expected))

    lines = [
        f"{name} v{version} {case}:\n  kept  {answer}\n  Kafka {RECORDED[name, version][case]}"
        for (name, version, case), answer in found.items()
        if not is_explained(name, version, case, answer)
    ]
    assert not lines, "\n".join(lines)
