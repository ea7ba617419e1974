"""A node of Apache Kafka with a listener of each security protocol, and what its clients are given.

Users ``admin``, ``ada`` and ``bob`` log in by PLAIN, SCRAM-SHA-256 and -512; certificates are of
this machine's own making, and a client's principal is the name that its certificate was issued for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from kept.client.security.jaas import PLAIN_MODULE, SCRAM_MODULE
from kept.node.config.local_certificates import MAPPING_RULES, LocalCertificates
from kept.testing.ports import free_port
from tests.tools import kafka_dist

USERS: Final = ("admin", "ada", "bob")
MECHANISMS: Final = ("PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512")
PROTOCOLS: Final = ("PLAINTEXT", "SSL", "SASL_PLAINTEXT", "SASL_SSL")


def password(user: str) -> str:
    """A password that would be found wherever it leaked."""
    return f"secret-of-{user}"


def client_properties(
    certificates: LocalCertificates, protocol: str, mechanism: str = "", user: str = "ada"
) -> dict[str, str]:
    """What a client in Java is given; a certificate of its own under SSL."""
    properties = {"security.protocol": protocol}
    if protocol.startswith("SASL"):
        module = PLAIN_MODULE if mechanism == "PLAIN" else SCRAM_MODULE
        properties["sasl.mechanism"] = mechanism
        properties["sasl.jaas.config"] = (
            f'{module} required username="{user}" password="{password(user)}";'
        )
    if protocol.endswith("SSL"):
        properties["ssl.truststore.type"] = "PEM"
        properties["ssl.truststore.location"] = certificates.ca_path
    if protocol == "SSL":
        properties["ssl.keystore.type"] = "PEM"
        properties["ssl.keystore.location"] = certificates.path(user)
    return properties


class SecuredKafka:
    """Apache Kafka; ``bootstrap[protocol]`` says where its listeners are."""

    def __init__(self, directory: Path, **properties: object) -> None:
        self.certificates = LocalCertificates(str(directory / "certificates"))
        port = free_port(above=[1])
        ports = {name: port if name == "PLAINTEXT" else free_port() for name in PROTOCOLS}
        self.bootstrap = {name: f"localhost:{number}" for name, number in ports.items()}
        where = ",".join(f"{name}://{address}" for name, address in self.bootstrap.items())
        users = "".join(f' user_{u}="{password(u)}"' for u in USERS)
        settings: dict[str, object] = {
            "listeners": f"{where},CONTROLLER://127.0.0.1:{port + 1}",
            "advertised.listeners": where,
            "listener.security.protocol.map": ",".join(f"{name}:{name}" for name in PROTOCOLS)
            + ",CONTROLLER:PLAINTEXT",
            "sasl.enabled.mechanisms": ",".join(MECHANISMS),
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": self.certificates.path("localhost"),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": self.certificates.ca_path,
            "ssl.principal.mapping.rules": MAPPING_RULES,
            "listener.name.ssl.ssl.client.auth": "required",
        }
        for name in ("sasl_plaintext", "sasl_ssl"):
            for mechanism in MECHANISMS:
                module, given = (
                    (PLAIN_MODULE, users) if mechanism == "PLAIN" else (SCRAM_MODULE, "")
                )
                setting = f"listener.name.{name}.{mechanism.lower()}.sasl.jaas.config"
                settings[setting] = f"{module} required{given};"
        scram = [
            f"{mechanism}=[name={user},password={password(user)}]"
            for mechanism in MECHANISMS[1:]
            for user in USERS
        ]
        self._broker = kafka_dist.Broker(directory, port, scram=scram, **(settings | properties))

    def __enter__(self) -> SecuredKafka:
        self._broker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._broker.stop()
