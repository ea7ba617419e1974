"""The security of a cluster on this machine: for ``kept local up --secure`` and ``kept.testing``.

Certificates and passwords are made on the spot and kept in a directory of the owner's, beside a
file for each user that ``--command-config`` takes. ``admin`` is a super user; the others may do
what ACLs allow them, which is nothing at first.
"""

from __future__ import annotations

import os
import secrets
from typing import Final

from kept.client.security.jaas import PLAIN_MODULE, SCRAM_MODULE
from kept.client.security.plain import MECHANISM as PLAIN
from kept.client.security.scram import HASHES
from kept.client.security.security import PROTOCOLS
from kept.node.config.checks import STANDARD_AUTHORIZER
from kept.node.config.local_certificates import MAPPING_RULES, LocalCertificates
from kept.storage.errors import ConfigurationError

ADMIN: Final = "admin"
USERS: Final = (ADMIN, "ada", "bob")
NODE: Final = "kept-node"
"""Whom the certificate of every node names."""
DEFAULT_MECHANISM: Final = "SCRAM-SHA-512"
_PASSWORD_BYTES: Final = 15


class LocalSecurity:
    """A directory with ``ca.pem``, ``NAME.pem``, ``NAME.password`` and ``NAME.properties``; what is
    there already is used again. Clients reach the cluster by ``protocol``.
    """

    def __init__(self, directory: str, protocol: str = "SASL_SSL") -> None:
        if protocol not in PROTOCOLS[1:]:
            raise ConfigurationError(f"security={protocol!r} is none of {', '.join(PROTOCOLS[1:])}")
        self.directory = directory
        self.protocol = protocol
        self.certificates = LocalCertificates(directory)
        os.makedirs(directory, mode=0o700, exist_ok=True)

    @property
    def has_tls(self) -> bool:
        """Whether clients connect by TLS, and so do nodes."""
        return self.protocol.endswith("SSL")

    @property
    def has_sasl(self) -> bool:
        """Whether clients log in by SASL."""
        return self.protocol.startswith("SASL")

    def settings(self, port: int) -> dict[str, str]:
        """Settings of a node whose clients' port is ``port``; none of them is secret."""
        between = "SSL" if self.has_tls else "PLAINTEXT"
        settings = {
            "listeners": f"{self.protocol}://localhost:{port}",
            "listener.security.protocol.map": f"{self.protocol}:{self.protocol},NODE:{between}",
            "authorizer.class.name": STANDARD_AUTHORIZER,
            "super.users": f"User:{ADMIN}",
        }
        if self.has_tls:
            settings |= {
                "super.users": f"User:{ADMIN};User:{NODE}",
                "ssl.keystore.location": self.certificates.path(NODE),
                "ssl.truststore.location": self.certificates.ca_path,
                "ssl.principal.mapping.rules": MAPPING_RULES,
            }
            if not self.has_sasl:
                settings["ssl.client.auth"] = "required"
        if self.has_sasl:
            settings |= {
                "sasl.enabled.mechanisms": ",".join((PLAIN, *HASHES)),
                "kept.sasl.plain.users": "scram",
                "kept.bootstrap.scram": ";".join(
                    f"{mechanism}=[name={user},password-file={self._password_file(user)}]"
                    for user in USERS
                    for mechanism in HASHES
                ),
            }
        return settings

    def password(self, user: str) -> str:
        """What ``user`` logs in by."""
        with open(self._password_file(user), encoding="ascii") as source:
            return source.read().strip()

    def client_properties(
        self, user: str = ADMIN, mechanism: str = DEFAULT_MECHANISM
    ) -> dict[str, str]:
        """The properties of a client of Kafka in Java, and of ours."""
        properties = {"security.protocol": self.protocol}
        if self.has_sasl:
            module = PLAIN_MODULE if mechanism == "PLAIN" else SCRAM_MODULE
            given = f'username="{user}" password="{self.password(user)}"'
            properties["sasl.mechanism"] = mechanism
            properties["sasl.jaas.config"] = f"{module} required {given};"
        if self.has_tls:
            properties["ssl.truststore.type"] = "PEM"
            properties["ssl.truststore.location"] = self.certificates.ca_path
            if not self.has_sasl:
                properties["ssl.keystore.type"] = "PEM"
                properties["ssl.keystore.location"] = self.certificates.path(user)
        return properties

    def command_config(self, user: str = ADMIN, mechanism: str = DEFAULT_MECHANISM) -> str:
        """The path of a file of :meth:`client_properties`, readable by its owner only."""
        name = user if mechanism == DEFAULT_MECHANISM else f"{user}-{mechanism.lower()}"
        path = os.path.join(self.directory, f"{name}.properties")
        properties = self.client_properties(user, mechanism)
        _write(path, "".join(f"{n}={v}\n" for n, v in properties.items()))
        return path

    def _password_file(self, user: str) -> str:
        path = os.path.join(self.directory, f"{user}.password")
        if not os.path.exists(path):
            _write(path, secrets.token_urlsafe(_PASSWORD_BYTES) + "\n")
        return path


def _write(path: str, text: str) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w", encoding="ascii") as target:
        target.write(text)
