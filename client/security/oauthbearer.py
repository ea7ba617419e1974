"""SASL OAUTHBEARER (RFC 7628): one message that holds an access token.

A server that does not believe the token answers with an error in JSON; the client acknowledges that
with one byte, and is refused then. Key-value pairs besides ``auth`` (KIP-342) are taken when they
are well-formed, and mean nothing here. Source: ``OAuthBearerSaslServer`` and
``OAuthBearerClientInitialResponse`` of Kafka 4.3.
"""

from __future__ import annotations

import re
from typing import Final

from msgspec import Struct

from kept.storage.errors import SaslAuthenticationFailed

MECHANISM: Final = "OAUTHBEARER"
MAX_TOKEN_BYTES: Final = 16 * 1024
"""Longer tokens are refused before anything of them is read."""
MAX_MESSAGE_BYTES: Final = 2 * MAX_TOKEN_BYTES
"""With the pairs besides the token."""
INVALID_TOKEN: Final = b'{"status":"invalid_token"}'
"""The server's answer to a token that it does not believe, whatever is wrong with it."""
ACKNOWLEDGEMENT: Final = b"\x01"
"""The client's answer to that."""

_HEADER: Final = re.compile(rb"[ny],(?:a=(?P<authzid>[^,\x00]*))?,")
_PAIR: Final = re.compile(rb"(?P<name>[A-Za-z]+)=(?P<value>[\x21-\x7e \t\r\n]+)")
_BEARER: Final = re.compile(rb"bearer +(?P<token>[A-Za-z0-9._~+/\-]+=*)", re.IGNORECASE)


class BearerMessage(Struct, frozen=True):
    """A client's token, and whom it asks to act as (``""``: as whom the token names). Its repr
    hides the token.
    """

    token: str
    authzid: str

    def __repr__(self) -> str:
        return f"BearerMessage([{len(self.token)} characters], {self.authzid!r})"


def parse_bearer_message(message: bytes) -> BearerMessage:
    """What a client's message says. Raises SaslAuthenticationFailed for one that is too long or
    malformed, or has not exactly one token.
    """
    if len(message) > MAX_MESSAGE_BYTES:
        raise SaslAuthenticationFailed(f"an OAUTHBEARER message of {len(message)} bytes")
    header, _, rest = message.partition(b"\x01")
    start = _HEADER.fullmatch(header)
    if start is None or not rest.endswith(b"\x01\x01"):
        raise SaslAuthenticationFailed("a malformed OAUTHBEARER message")
    pairs = [_PAIR.fullmatch(pair) for pair in rest[:-2].split(b"\x01")]
    given = [pair["value"] for pair in pairs if pair is not None and pair["name"] == b"auth"]
    if None in pairs or len(given) != 1:
        raise SaslAuthenticationFailed("an OAUTHBEARER message that has not one auth")
    try:
        authzid = (start["authzid"] or b"").decode().replace("=2C", ",").replace("=3D", "=")
    except UnicodeDecodeError:
        raise SaslAuthenticationFailed("an OAUTHBEARER message that is not UTF-8") from None
    return BearerMessage(parse_bearer(given[0]), authzid)


def parse_bearer(credentials: bytes) -> str:
    """The token in ``Bearer TOKEN`` (RFC 6750). Raises SaslAuthenticationFailed."""
    match = _BEARER.fullmatch(credentials)
    if match is None:
        raise SaslAuthenticationFailed("no Bearer token")
    if len(match["token"]) > MAX_TOKEN_BYTES:
        raise SaslAuthenticationFailed(f"a token of {len(match['token'])} bytes")
    return match["token"].decode("ascii")


class OAuthBearerClient:
    """The client's side: ``step(None)`` gives the message with the token; the server's answer to a
    good one is empty.
    """

    def __init__(self, token: str) -> None:
        """Raises SaslAuthenticationFailed for a token that cannot be sent."""
        self.done = False
        self._refused = False
        self._token = parse_bearer(f"Bearer {token}".encode())

    def step(self, message: bytes | None) -> bytes | None:
        """See the class. An error of the server is acknowledged, and raised only if it says then
        that all is well.
        """
        if message is None:
            return f"n,,\x01auth=Bearer {self._token}\x01\x01".encode("ascii")
        if message:
            self._refused = True
            return ACKNOWLEDGEMENT
        if self._refused:
            raise SaslAuthenticationFailed("the server did not believe the token, and said yes")
        self.done = True
        return None
