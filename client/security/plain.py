"""SASL PLAIN (RFC 4616): one message that holds a name and a password, as they are."""

from __future__ import annotations

from typing import Final

from msgspec import Struct

from kept.storage.errors import SaslAuthenticationFailed

MECHANISM: Final = "PLAIN"
MAX_FIELD_BYTES: Final = 255
"""Of a user's name and of a password (RFC 4616)."""


def read_password(line: bytes) -> str:
    """A password as a line of a file has it, with or without the end of the line. Raises ValueError
    for one with which nobody could log in by PLAIN.
    """
    line = line.removesuffix(b"\n").removesuffix(b"\r")
    if not 0 < len(line) <= MAX_FIELD_BYTES or b"\0" in line or b"\n" in line:
        raise ValueError(f"a password is a line of 1 to {MAX_FIELD_BYTES} bytes without NUL")
    try:
        return line.decode()
    except UnicodeDecodeError:
        raise ValueError("a password is UTF-8 text") from None


class PlainLogin(Struct, frozen=True):
    """Who a client says it is, and the password that is to show it. Its repr hides the password."""

    user: str
    password: str

    def __repr__(self) -> str:
        return f"PlainLogin({self.user!r}, [hidden])"


class PlainClient:
    """The client's side: ``step(None)`` gives its only message; the server's answer is empty."""

    def __init__(self, user: str, password: str) -> None:
        self.done = False
        for what, value in (("user", user), ("password", password)):
            if not value or "\0" in value or len(value.encode()) > MAX_FIELD_BYTES:
                raise SaslAuthenticationFailed(
                    f"the {what} for SASL PLAIN must have 1 to {MAX_FIELD_BYTES} bytes and no NUL"
                )
        self._message = f"\0{user}\0{password}".encode()

    def step(self, message: bytes | None) -> bytes | None:
        """See the class. Raises SaslAuthenticationFailed for a server that sends something."""
        if message is None:
            return self._message
        if message:
            raise SaslAuthenticationFailed("the server answered SASL PLAIN with a message")
        self.done = True
        return None


def parse_plain(message: bytes) -> PlainLogin:
    """What a client's message says. Raises SaslAuthenticationFailed for one that does not have
    exactly three fields, an empty user or password, one above :data:`MAX_FIELD_BYTES`, or another
    user to act as.
    """
    fields = message.split(b"\0")
    if len(fields) != 3:
        raise SaslAuthenticationFailed(f"a SASL PLAIN message of {len(fields)} fields, not 3")
    authzid, user, password = fields
    if not 0 < len(user) <= MAX_FIELD_BYTES or not 0 < len(password) <= MAX_FIELD_BYTES:
        raise SaslAuthenticationFailed(
            f"a SASL PLAIN user or password that has not 1 to {MAX_FIELD_BYTES} bytes"
        )
    if authzid not in (b"", user):
        raise SaslAuthenticationFailed("the client asks to act as another user")
    try:
        return PlainLogin(user.decode(), password.decode())
    except UnicodeDecodeError:
        raise SaslAuthenticationFailed("a SASL PLAIN message that is not UTF-8") from None
