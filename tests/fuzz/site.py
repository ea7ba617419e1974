"""The node that is attacked: in this process, with a listener of each protocol, and one for nodes.
It is the only voter of its cluster.

``User:ANONYMOUS`` (PLAINTEXT, SSL) and ``User:eve`` (SASL, HTTP Basic) have nearly all rights on
what is named ``fuzz…``, so that damaged requests reach the handlers, and none beyond; the steady
connections are ``User:admin``'s.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Awaitable
from pathlib import Path
from typing import Any, Final, TypeVar
from uuid import UUID

import uvloop

from kept.client.security.jaas import PLAIN_MODULE
from kept.cluster.metadata.records import AclRecord, ScramCredentialRecord
from kept.cluster.security.acls import (
    AclBinding,
    AclOperation,
    AclPermission,
    AclResourceType,
    PatternType,
)
from kept.cluster.security.credentials import ScramMechanism
from kept.node.config.checks import STANDARD_AUTHORIZER
from kept.testing.ports import free_port
from tests.node.conftest import Lone
from tests.support.certificates import Authority
from tests.support.credentials import credential
from tests.support.token_issuer import Issuer

T = TypeVar("T")

FUZZ: Final = "fuzz"
STEADY: Final = "steady"
EVE: Final = "eve"
ADMIN: Final = "admin"
PASSWORD: Final = "pencil"
PLAINTEXT, SSL, SASL, SASL_SSL = range(4)
"""Where in the node's list the listener of a protocol is."""
PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")
LOOPBACK: Final = ("127.0.0.1", "::1", "localhost")
_RIGHTS: Final = {
    AclResourceType.TOPIC: ("READ", "WRITE", "DELETE", "DESCRIBE_CONFIGS", "ALTER_CONFIGS"),
    AclResourceType.GROUP: ("READ", "DELETE"),
    AclResourceType.TRANSACTIONAL_ID: ("WRITE",),
}
_ON_THE_CLUSTER: Final = ("DESCRIBE", "IDEMPOTENT_WRITE", "DESCRIBE_CONFIGS")


class ThisMachineOnly(uvloop.Loop):
    """A loop that reaches no other machine: damage may say that a node is anywhere."""

    async def create_connection(
        self, factory: Any, host: Any = None, port: Any = None, **more: Any
    ) -> Any:
        """As the loop's, to this machine."""
        if host is not None and host not in LOOPBACK:
            raise OSError(errno.ENETUNREACH, f"{host} is not this machine")
        return await super().create_connection(factory, host, port, **more)

    async def getaddrinfo(self, host: Any, port: Any, **more: Any) -> Any:
        """As the loop's, of this machine's names."""
        if host not in LOOPBACK:
            raise socket.gaierror(socket.EAI_NONAME, f"{host} is not this machine")
        return await super().getaddrinfo(host, port, **more)


class Site:
    """Starts the node; ``close`` stops it."""

    def __init__(self, directory: Path) -> None:
        authority = Authority(directory)
        self.ca_path = authority.ca
        self.keys_pem = Path(authority.issue("node", "localhost", "127.0.0.1")).read_bytes()
        self.issuer = Issuer()
        self._runner = asyncio.Runner(loop_factory=ThisMachineOnly)
        self.node_port = free_port()
        users = f'user_{EVE}="{PASSWORD}" user_{ADMIN}="{PASSWORD}"'
        self.lone = Lone(
            self._runner,
            str(directory / "data"),
            **{
                "listeners": ",".join(
                    [
                        *(f"{name}://127.0.0.1:0" for name in PROTOCOLS),
                        f"NODE://127.0.0.1:{self.node_port}",
                    ]
                ),
                "controller.quorum.voters": f"0@127.0.0.1:{self.node_port}",
                "ssl.keystore.location": str(directory / "node.pem"),
                "ssl.truststore.location": authority.ca,
                "ssl.client.auth": "requested",
                "sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-256,OAUTHBEARER",
                "sasl.oauthbearer.jwks.endpoint.url": self.issuer.write(directory / "keys.json"),
                "plain.sasl.jaas.config": f"{PLAIN_MODULE} required {users};",
                "connection.failed.authentication.delay.ms": "0",
                "authorizer.class.name": STANDARD_AUTHORIZER,
                "super.users": f"User:{ADMIN}",
                "kept.silent.ms": "3000",
                "kept.http.idle.ms": "600000",
                "kept.audit": "off",
                "kept.console.actions": "true",
                "auto.create.topics.enable": "false",
                "max.connections.per.ip": "1000",
                "transactional.id.expiration.ms": "60000",
            },
        )
        self.parts = self.lone.node.parts
        self.ports = [listener.port for listener in self.parts.listeners]
        records: list[Any] = [
            ScramCredentialRecord(EVE, ScramMechanism.SCRAM_SHA_256, credential(PASSWORD))
        ]
        records += [
            AclRecord(UUID(int=number), binding) for number, binding in enumerate(_bindings(), 1)
        ]
        self.run(self.parts.metadata.propose(records))
        self.run(self.create_topics())

    async def create_topics(self) -> None:
        """Those that are not there (any more)."""
        for name in (FUZZ, STEADY):
            if self.parts.metadata.image.topics.get(name) is None:
                await self.lone.created(name)

    def run(self, work: Awaitable[T]) -> T:
        """Run on the node's loop."""
        result: T = self.lone.run(work)
        return result

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The node's."""
        return self._runner.get_loop()

    def close(self) -> None:
        """Stop the node."""
        self.lone.stop()
        self._runner.close()


def _bindings() -> list[AclBinding]:
    def binding(kind: AclResourceType, name: str, who: str, operation: str) -> AclBinding:
        pattern = PatternType.LITERAL if kind is AclResourceType.CLUSTER else PatternType.PREFIXED
        return AclBinding(
            kind, name, pattern, who, "*", AclOperation[operation], AclPermission.ALLOW
        )

    made = []
    for who in ("User:ANONYMOUS", f"User:{EVE}"):
        for kind, operations in _RIGHTS.items():
            made += [binding(kind, FUZZ, who, operation) for operation in operations]
        made += [
            binding(AclResourceType.CLUSTER, "kafka-cluster", who, operation)
            for operation in _ON_THE_CLUSTER
        ]
    return made
