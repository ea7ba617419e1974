"""Access tokens of clients, checked by the keys of the listener that they came in by.

Listeners whose settings are the same share what they fetch. PyJWT and cryptography are loaded only
where a listener enables OAUTHBEARER.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from kept.node.config.sasl import sasl_settings
from kept.storage.errors import SaslAuthenticationFailed

if TYPE_CHECKING:
    from kept.node.config.node_config import NodeConfig
    from kept.node.config.sasl import TokenSettings
    from kept.node.runtime.runtime import Runtime
    from kept.node.security.oauth.key_source import KeySource
    from kept.node.security.oauth.token_verifier import AcceptedToken


def token_settings(config: NodeConfig) -> dict[str, TokenSettings]:
    """Those of each listener that enables OAUTHBEARER, by its name."""
    found = {}
    for listener in config.listeners:
        tokens = sasl_settings(config, listener.name).tokens
        if tokens is not None:
            found[listener.name] = tokens
    return found


class TokenChecks:
    """Checks access tokens by the keys of the listener that they came in by. Made and used on the
    node's loop.
    """

    def __init__(self, runtime: Runtime, settings: Mapping[str, TokenSettings]) -> None:
        """``settings`` by listener. Raises ConfigurationError for what cannot be used."""
        self._of_listener: dict[str, KeySource] = {}
        if settings:
            from kept.node.security.oauth.key_source import KeySource

            sources: dict[TokenSettings, KeySource] = {}
            for name, one in settings.items():
                if one not in sources:
                    sources[one] = KeySource(runtime, one)
                self._of_listener[name] = sources[one]

    def start(self) -> None:
        """Fetch keys from now on."""
        for source in set(self._of_listener.values()):
            source.start()

    def stop(self) -> None:
        """Fetch no more."""
        for source in set(self._of_listener.values()):
            source.stop()

    async def verify(self, listener: str, token: str) -> AcceptedToken:
        """Whom a token of a client of ``listener`` names, and until when. Raises
        SaslAuthenticationFailed, whose message is for the log.
        """
        source = self._of_listener.get(listener)
        if source is None:
            raise SaslAuthenticationFailed("the listener takes no access tokens")
        return await source.verify(token)

    # Metrics.

    def ages(self) -> Iterator[tuple[tuple[str], float]]:
        """Seconds since each listener's keys were got, by listener; none where they never were."""
        for name, source in self._of_listener.items():
            if not math.isinf(source.age_s):
                yield (name,), round(source.age_s, 1)

    def failures(self) -> Iterator[tuple[tuple[str], int]]:
        """1 for each listener whose keys could not be got the last time."""
        for name, source in self._of_listener.items():
            yield (name,), int(source.failed)
