"""How Spark reaches a cluster: by which addresses, as whom, and how encrypted.

What Kafka's clients call ``sasl.mechanism`` is the option ``kafka.sasl.mechanism``, as in Spark's
Kafka connector; or ``kept.command.config`` names a file of such properties on every machine. Spark
shows options in its web pages and logs, so that secrets are better in a file.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from kept.client.bootstrap import read_security
from kept.client.security.security import PLAINTEXT, Security
from kept.storage.errors import ConfigurationError, PeerError

if TYPE_CHECKING:
    from kept.client.client import Client

_KAFKA: Final = "kafka."
SECURITY: Final = ("kafka.security.", "kafka.sasl.", "kafka.ssl.")
"""How options of security begin, in lower case."""
COMMAND_CONFIG: Final = "kept.command.config"


class BadOption(PeerError):
    """An option of the data source that cannot be used; the message names it and what would be
    right.
    """


def open_client(bootstrap: str, client_id: str, **given: Any) -> Client:
    """A client, whose module is loaded only now."""
    from kept.client.client import Client

    return Client(bootstrap, client_id, **given)


@dataclass(frozen=True, slots=True)
class Connection:
    """How the cluster is reached; also the key under which a worker keeps its connections."""

    bootstrap: str
    client_id: str = "kept-spark"
    timeout_ms: int = 30_000
    security: Security = PLAINTEXT
    command_config: str = ""
    """A file that each process reads, in place of ``security``."""

    def open(self, *, known: bool = False) -> Client:
        """A client; see :class:`kept.client.client.Client`. Raises BadOption."""
        security = _from_file(self.command_config) if self.command_config else self.security
        return open_client(
            self.bootstrap,
            self.client_id,
            timeout_ms=self.timeout_ms,
            known=known,
            security=security,
        )


def security_of(given: Mapping[str, str], command_config: str) -> Security:
    """What options named as the properties of Kafka's clients say; those of a file are read here to
    find out that they can be, and by each process for itself. Raises BadOption.
    """
    if command_config:
        if given:
            raise BadOption(f"{COMMAND_CONFIG} and {min(given)}: only one can say how to connect")
        _from_file(command_config)
        return PLAINTEXT
    try:
        return Security({name.removeprefix(_KAFKA): value for name, value in given.items()})
    except ConfigurationError as error:
        raise BadOption(f"{_KAFKA}{error}") from None


def _from_file(path: str) -> Security:
    try:
        return read_security(path)
    except ConfigurationError as error:
        raise BadOption(f"{COMMAND_CONFIG}: {error}") from None
