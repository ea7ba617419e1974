"""Clients of the stage ``security``: administrators, others who may change things or may not, and a
judge of what nodes decide.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any, Final

from kio.static.constants import EntityType

from kept.client.protocol import messages as protocol
from kept.cluster.security.acls import (
    CLUSTER_NAME,
    AclBinding,
    AclOperation,
    AclPermission,
    AclResourceType,
    PatternType,
)
from kept.cluster.security.credentials import ScramMechanism
from kept.node.kafka.api import RequestContext
from kept.node.security.session import Session
from kept.storage.errors import KeptError
from tests.sim.nodes_clients import Client
from tests.sim.security_checks import Key
from tests.sim.world import Violation

if TYPE_CHECKING:
    from kept.node.node import Node
    from tests.sim.nodes_machine import Machine
    from tests.sim.security_history import SecurityHistory

DONE: Final = {0, 91}
"""Done, or there was nothing to delete."""
NOT_NOW: Final = 35
"""Not every node has said yet that it reads such records."""
ASKED_S: Final = 20.0
"""Longer than a request is sent on."""
MECHANISMS: Final = (ScramMechanism.SCRAM_SHA_256, ScramMechanism.SCRAM_SHA_512)
CREATE_ACLS, DELETE_ACLS, DESCRIBE_ACLS, ALTER_USERS, ALTER_QUOTAS = 30, 31, 29, 51, 49


def may_alter(principal: str) -> AclBinding:
    """The right to change what the whole cluster has."""
    literal, alter = PatternType.LITERAL, AclOperation.ALTER
    return AclBinding(
        AclResourceType.CLUSTER, CLUSTER_NAME, literal, principal, "*", alter, AclPermission.ALLOW
    )


class Administrator:
    """Changes one thing at a time, which nobody else changes. What it had no answer about it never
    looks at again: its request may still be on its way.
    """

    def __init__(self, history: SecurityHistory, number: int) -> None:
        self.history = history
        self.client = Client(history)
        self.principal = f"User:p{number}"
        self.acknowledged_s = -1.0
        self._number = number
        self._made = 0
        self._there: list[Key] = []

    async def run(self) -> None:
        """Until the history ends its clients."""
        history, random = self.history, self.history.random
        while history.running:
            await asyncio.sleep(random.uniform(0, 0.3))
            if len(self._there) > random.randint(0, 8):
                key = self._there.pop(random.randrange(len(self._there)))
                value = None
            else:
                key, value = self._new()
            await self._change(key, value)
        self.client.close()

    def _new(self) -> tuple[Key, Any]:
        """Something that was never there."""
        random = self.history.random
        self._made += 1
        kind = random.choice(("acl", "acl", "cluster", "scram", *self.history.more_kinds))
        if kind == "cluster":
            return ("acl", may_alter(f"User:q{self._number}-{self._made}")), True
        if kind == "scram":
            salt = b"%d of %d" % (self._made, self._number)
            return ("scram", f"u{self._number}-{self._made}", random.choice(MECHANISMS)), salt
        if kind == "quota":
            entity = (("client-id", f"c{self._made}"), ("user", f"u{self._number}"))
            return ("quota", entity, "producer_byte_rate"), float(random.randint(1, 1 << 20))
        binding = AclBinding(
            AclResourceType.TOPIC,
            f"t{self._number}-{self._made}",
            random.choice((PatternType.PREFIXED, PatternType.LITERAL)),
            self.principal,
            "*",
            random.choice((AclOperation.READ, AclOperation.DESCRIBE, AclOperation.ALL)),
            random.choice((AclPermission.ALLOW, AclPermission.ALLOW, AclPermission.DENY)),
        )
        return ("acl", binding), True

    async def _change(self, key: Key, value: Any) -> None:
        history = self.history
        history.security.begins(key)
        api, version, values, code_of = _request(key, value)
        somebody = history.random.choice(history.machines)
        try:
            code = code_of(await self.client.call(somebody, api, version, values))
        except KeptError:
            history.world.counts["changes without an answer"] += 1
            return
        if code == NOT_NOW:
            history.world.counts["changes that came too soon"] += 1
        elif code not in DONE:
            history.world.counts[f"changes refused: {code}"] += 1
        else:
            history.note(
                "admin", "acknowledged", key[0], value is not None, history.security.newest
            )
            history.security.acknowledged(key, value)
            history.world.counts[f"changes acknowledged: {key[0]}"] += 1
            self.acknowledged_s = history.loop.time()
            if value is not None:
                self._there.append(key)

    async def verify(self) -> None:
        """What was acknowledged is told. Raises Violation, KeptError."""
        anything: dict[str, Any] = {
            "resource_type_filter": 1,
            "resource_name_filter": None,
            "pattern_type_filter": 1,
            "principal_filter": self.principal,
            "host_filter": None,
            "operation": 1,
            "permission_type": 1,
        }
        somebody = self.history.random.choice(self.history.machines)
        reply = await self.client.call(somebody, DESCRIBE_ACLS, 3, anything)
        if int(reply.error_code):
            raise KeptError(f"DescribeAcls: {reply.error_code}")
        told = {
            (resource.resource_name, acl.operation, acl.permission_type)
            for resource in reply.resources
            for acl in resource.acls
        }
        for key, value in self.history.security.expected.items():
            if key[0] == "acl" and key[1].principal == self.principal:
                binding = key[1]
                one = (binding.name, binding.operation, binding.permission)
                if (one in told) != (value is not None):
                    raise Violation("security-lost", f"{binding} is told: {one in told}")


def _request(key: Key, value: Any) -> tuple[int, int, dict[str, Any], Callable[[Any], int]]:
    """(API, version, request, where the error code is in its response)."""
    match key:
        case ("acl", binding) if value:
            creation = {
                "resource_type": binding.resource_type,
                "resource_name": binding.name,
                "resource_pattern_type": binding.pattern,
                "principal": binding.principal,
                "host": binding.host,
                "operation": binding.operation,
                "permission_type": binding.permission,
            }
            return CREATE_ACLS, 3, {"creations": [creation]}, lambda r: int(r.results[0].error_code)
        case ("acl", binding):
            wanted = {
                "resource_type_filter": binding.resource_type,
                "resource_name_filter": binding.name,
                "pattern_type_filter": binding.pattern,
                "principal_filter": binding.principal,
                "host_filter": binding.host,
                "operation": binding.operation,
                "permission_type": binding.permission,
            }
            values = {"filters": [wanted]}
            return DELETE_ACLS, 3, values, lambda r: int(r.filter_results[0].error_code)
        case ("scram", user, mechanism):
            who = {"name": user, "mechanism": mechanism}
            made = {**who, "iterations": 4096, "salt": value, "salted_password": b"salted"}
            values = {
                "deletions": [] if value is not None else [who],
                "upsertions": [] if value is None else [made],
            }
            return ALTER_USERS, 0, values, lambda r: int(r.results[0].error_code)
        case (_, entity, name):
            values = {
                "entries": [
                    {
                        "entity": [{"entity_type": t, "entity_name": n} for t, n in entity],
                        "ops": [{"key": name, "value": value or 0.0, "remove": value is None}],
                    }
                ],
                "validate_only": False,
            }
            return ALTER_QUOTAS, 1, values, lambda r: int(r.entries[0].error_code)
        case _:
            raise AssertionError(key)


class Judge:
    """Compares what nodes decide with the bindings that they have."""

    def __init__(self, history: SecurityHistory) -> None:
        self.history = history

    async def run(self) -> None:
        """Until the history ends its clients."""
        history = self.history
        while history.running:
            await asyncio.sleep(0.2)
            for machine in history.machines:
                starting = machine.starting
                if machine.node is None or starting is None or not machine.ready:
                    continue
                if starting.exception() is not None:
                    continue
                parts = machine.node.parts
                for administrator in history.administrators:
                    history.security.decided(
                        f"n{machine.node_id}",
                        parts.metadata.image,
                        parts.authorizer,
                        administrator.principal,
                    )


class Petitioner:
    """Sets a password of its own at any node, as somebody who may do so, or may no more."""

    def __init__(self, history: SecurityHistory) -> None:
        self.history = history

    async def run(self) -> None:
        """Until the history ends its clients."""
        history = self.history
        while history.running:
            await asyncio.sleep(history.random.uniform(0, 0.4))
            known = [
                key
                for key in history.security.expected
                if key[0] == "acl" and key[1].resource_type is AclResourceType.CLUSTER
            ]
            machine = history.random.choice(history.machines)
            if known and machine.ready and machine.node is not None and machine.process is not None:
                await self._ask(machine, history.random.choice(known))

    async def _ask(self, machine: Machine, key: Key) -> None:
        """Whoever succeeds had the right all the time."""
        history = self.history
        pinned, node = history.security.pinned(key), machine.node
        if node is None or machine.process is None:
            return
        principal = key[1].principal

        async def ask() -> Any:
            return await _as_principal(node, principal)

        asking = history.loop.spawn(machine.process, ask)
        await asyncio.wait([asking], timeout=ASKED_S)
        if not asking.done() or asking.exception() is not None:
            history.world.counts["petitions without an answer"] += 1
            return
        code = asking.result()
        history.note("petitioner", principal, code, pinned)
        allowed = pinned is not None and pinned[1] is not None
        history.world.counts[f"petitions told {code}, allowed: {allowed}"] += 1
        if code == 0 and not allowed and history.security.pinned(key) == pinned:
            raise Violation(
                "security-decision", f"{principal} changed a password at n{machine.node_id}"
            )


async def _as_principal(node: Node, principal: str) -> int:
    """The code that a client which has logged in at a node is told."""
    parts = node.parts
    session = Session(principal, "10.0.9.9", parts.listeners[0].name, authorizer=parts.authorizer)
    name = f"of {principal}"
    made = {"name": name, "mechanism": 1, "iterations": 4096, "salt": b"s", "salted_password": b"p"}
    cls = protocol.message_type(ALTER_USERS, 0, EntityType.request)
    request = protocol.build(cls, {"deletions": (), "upsertions": [made]})
    body = protocol.encode(request)
    context = RequestContext(ALTER_USERS, 0, "sim", session)
    answer: Any = parts.handlers.handle(context, memoryview(body), request)
    while not isinstance(answer, dict | bytes):
        if isinstance(answer, Generator):
            answer = await parts.runtime.slices.finish(answer)
        else:
            answer = await answer
    response = protocol.message_type(ALTER_USERS, 0, EntityType.response)
    if isinstance(answer, dict):
        return int(answer["results"][0]["error_code"])
    return int(protocol.decode(response, answer)[0].results[0].error_code)
