"""The login of one connection by SASL: which request goes next, and what its answer means.

KIP-152's frames: SaslHandshake names the mechanism, then SaslAuthenticate carries its messages. A
session that has an end (KIP-368) is renewed by the same requests on the same connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from kept.client.core.broker_errors import AuthenticationFailed, failure
from kept.client.protocol.api_keys import ApiKey
from kept.client.protocol.messages import Values, milliseconds, versions
from kept.client.security.security import SaslClient, Security
from kept.storage.errors import KeptError

UNSUPPORTED_SASL_MECHANISM: Final = 33
ILLEGAL_SASL_STATE: Final = 34
SASL_AUTHENTICATION_FAILED: Final = 58

RENEWED_FROM: Final = 0.85
RENEWED_WITHIN: Final = 0.1
"""A session is renewed after 0.85 to 0.95 of its life, as by Java's clients."""


class HandshakeRequest(NamedTuple):
    """A request that a connection itself needs before others may use it."""

    api_key: ApiKey
    version: int
    values: Values


class Login:
    """One login, or one renewal of a session. ``lifetime_ms``: how long the session lasts, 0 for
    good; known at the end.
    """

    def __init__(self, security: Security, table: Mapping[int, tuple[int, int]]) -> None:
        self.lifetime_ms = 0
        self._security = security
        self._table = table
        self._exchange: SaslClient | None = None

    def begin(self) -> HandshakeRequest:
        """The first request. Raises AuthenticationFailed."""
        # Version 0 of the handshake is followed by messages without a frame.
        if self._version(ApiKey.SASL_HANDSHAKE) < 1 or self._version(ApiKey.SASL_AUTHENTICATE) < 0:
            raise AuthenticationFailed("its broker is too old: it has no SaslAuthenticate")
        values = {"mechanism": self._security.mechanism}
        return HandshakeRequest(ApiKey.SASL_HANDSHAKE, 1, values)

    def handle_response(self, api_key: int, response: Any) -> HandshakeRequest | None:
        """What follows a response: the next request, or None when the login is done. Raises
        AuthenticationFailed.
        """
        code = int(response.error_code)
        if api_key == ApiKey.SASL_HANDSHAKE:
            if code:
                raise self._refused_handshake(code, response.mechanisms)
            return self._authenticate(self._step(None))
        if code:
            said = f": {response.error_message}" if response.error_message else ""
            if code != SASL_AUTHENTICATION_FAILED:
                raise AuthenticationFailed(f"SASL failed with error {code}{said}")
            raise AuthenticationFailed(
                f"{self._security.who} was not believed by SASL {self._security.mechanism}{said}"
            )
        assert self._exchange is not None
        token = None if self._exchange.done else self._step(response.auth_bytes)
        if token is not None:
            return self._authenticate(token)
        if not self._exchange.done:
            raise AuthenticationFailed(
                "the server said yes without proving that it knows the password"
            )
        lifetime = getattr(response, "session_lifetime", None)
        self.lifetime_ms = 0 if lifetime is None else milliseconds(lifetime)
        return None

    def _authenticate(self, token: bytes | None) -> HandshakeRequest:
        version = self._version(ApiKey.SASL_AUTHENTICATE)
        return HandshakeRequest(ApiKey.SASL_AUTHENTICATE, version, {"auth_bytes": token or b""})

    def _step(self, challenge: bytes | None) -> bytes | None:
        try:
            if self._exchange is None:
                self._exchange = self._security.exchange()
            assert self._exchange is not None
            return self._exchange.step(challenge)
        except KeptError as error:
            raise AuthenticationFailed(str(error)) from error

    def _version(self, api_key: ApiKey) -> int:
        lowest, highest = self._table.get(api_key, (0, -1))
        version = min(highest, max(versions(api_key)))
        return version if version >= lowest else -1

    def _refused_handshake(self, code: int, mechanisms: Any) -> AuthenticationFailed:
        if code == UNSUPPORTED_SASL_MECHANISM:
            offered = ", ".join(mechanisms) or "none"
            return AuthenticationFailed(
                f"sasl.mechanism is {self._security.mechanism}; its listener has {offered}"
            )
        if code == ILLEGAL_SASL_STATE:
            bare = self._security.protocol.removeprefix("SASL_")
            return AuthenticationFailed(
                f"its listener wants no login by SASL: security.protocol may be {bare} there"
            )
        return AuthenticationFailed(str(failure(code, "SaslHandshake")))


def renew_at_ms(now_ms: int, lifetime_ms: int, spread: float) -> int | None:
    """When a session that begins now is renewed, None: never. ``spread`` from 0 to 1 keeps clients
    that came together from coming together again.
    """
    if lifetime_ms <= 0:
        return None
    return now_ms + int(lifetime_ms * (RENEWED_FROM + RENEWED_WITHIN * spread))
