"""SCRAM-SHA-256 and -512: the arithmetic, and both sides as exchanges of messages.

Source: RFC 5802 and 7677; where these leave a choice, Kafka 4.3's ``ScramSaslServer``: names and
passwords are UTF-8 as they are (no SASLprep), there is no channel binding, and the server's first
message is followed by exactly one of the client. Stricter than Kafka: the client's last message has
no extensions, ``tokenauth`` (delegation tokens) is refused, and a user who does not exist is led to
the end of the exchange and fails there as a wrong password does.

The server never learns the password: it stores ``StoredKey`` and ``ServerKey``. Who has these may
log in as the user (with one more message from the wire) or pose as a server.

:mod:`hashlib` and what is built on it are imported when somebody logs in: 0.8 MB, which a node
without logins does not need.
"""

from __future__ import annotations

import re
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Callable
from typing import Final, Protocol

from kept.storage.errors import SaslAuthenticationFailed

HASHES: Final = {"SCRAM-SHA-256": "sha256", "SCRAM-SHA-512": "sha512"}
"""The hash function of each mechanism."""
MIN_ITERATIONS: Final = 4096
"""Fewer would let whoever listens guess passwords too fast (RFC 7677): refused by our client."""
MAX_ITERATIONS: Final = 1_000_000
"""Half a second of work. More is refused by our client: a server must not be able to stop it."""
NONCE_BYTES: Final = 24
MAX_MESSAGE_BYTES: Final = 16 * 1024
"""No message of an exchange is longer."""

_PRINTABLE: Final = r"[\x21-\x2b\x2d-\x7e]+"
_NAME: Final = r"(?:[^=,\x00]|=2C|=3D)+"
_CLIENT_FIRST: Final = re.compile(
    rf"(?P<gs2>[ny],(?:a=(?P<authzid>{_NAME}))?,)"
    rf"(?P<bare>n=(?P<user>{_NAME}),r=(?P<nonce>{_PRINTABLE})(?P<more>(?:,[A-Za-z]+=[^,\x00]+)*))"
)
_SERVER_FIRST: Final = re.compile(
    rf"r=(?P<nonce>{_PRINTABLE}),s=(?P<salt>[A-Za-z0-9+/=]+),i=(?P<iterations>[1-9][0-9]{{0,9}})"
    r"(?:,[A-Za-z]=[^,\x00]*)*"
)
_SERVER_FINAL: Final = re.compile(
    r"(?:v=(?P<signature>[A-Za-z0-9+/=]+)|e=(?P<error>[^,]*)).*", re.S
)


class ScramVerifier(Protocol):
    """What a server stores about a user's password."""

    @property
    def salt(self) -> bytes:
        """Random bytes that the password was hashed with."""

    @property
    def stored_key(self) -> bytes:
        """The hash of the key that proves knowledge of the password."""

    @property
    def server_key(self) -> bytes:
        """The key by which the server proves that it knows the user."""

    @property
    def iterations(self) -> int:
        """How often the password was hashed."""


def salted_password(mechanism: str, password: str, salt: bytes, iterations: int) -> bytes:
    """``SaltedPassword``: PBKDF2 of the password, some 2 ms at 4,096 iterations without the GIL."""
    import hashlib

    return hashlib.pbkdf2_hmac(HASHES[mechanism], password.encode(), salt, iterations)


def stored_keys(mechanism: str, salted: bytes) -> tuple[bytes, bytes]:
    """``StoredKey`` and ``ServerKey``: what a server stores of a salted password."""
    import hashlib
    import hmac

    hash_name = HASHES[mechanism]
    client_key = hmac.digest(salted, b"Client Key", hash_name)
    server_key = hmac.digest(salted, b"Server Key", hash_name)
    return hashlib.new(hash_name, client_key).digest(), server_key


def password_matches(mechanism: str, password: str, verifier: ScramVerifier) -> bool:
    """Whether ``password`` is the one that ``verifier`` was made from; the work of a PBKDF2."""
    from hmac import compare_digest

    salted = salted_password(mechanism, password, verifier.salt, verifier.iterations)
    stored_key, _ = stored_keys(mechanism, salted)
    return compare_digest(stored_key, verifier.stored_key)


class ScramClient:
    """The client's side: ``step(None)`` gives its first message, ``step(message)`` what it answers
    to the server's; None when the exchange is ``done``. Raises SaslAuthenticationFailed for a
    server that breaks the protocol, asks for too few or too many iterations, refuses, or does not
    prove that it knows the user.
    """

    def __init__(self, mechanism: str, user: str, password: str, *, nonce: str = "") -> None:
        self.mechanism = mechanism
        self.done = False
        self._hash = HASHES[mechanism]
        self._password = password
        self._nonce = nonce or new_nonce()
        self._bare = f"n={_escaped(user)},r={self._nonce}"
        self._server_signature = b""
        self._steps = 0

    def __repr__(self) -> str:
        return f"<ScramClient {self.mechanism}>"

    def step(self, message: bytes | None) -> bytes | None:
        """See the class."""
        self._steps += 1
        if message is None:
            if self._steps != 1:
                raise SaslAuthenticationFailed("the SCRAM exchange has begun already")
            return f"n,,{self._bare}".encode()
        text = _text(message)
        if self._steps == 2:
            return self._answer_first(text)
        if self._steps != 3:
            raise SaslAuthenticationFailed("the server sent more than the SCRAM exchange has")
        self._check_final(text)
        self.done = True
        return None

    def _answer_first(self, text: str) -> bytes:
        from hmac import digest

        found = _SERVER_FIRST.fullmatch(text)
        if found is None:
            raise SaslAuthenticationFailed("the server's first SCRAM message is malformed")
        nonce = found["nonce"]
        if not nonce.startswith(self._nonce) or nonce == self._nonce:
            raise SaslAuthenticationFailed("the server's SCRAM nonce does not continue ours")
        iterations = int(found["iterations"])
        if not MIN_ITERATIONS <= iterations <= MAX_ITERATIONS:
            raise SaslAuthenticationFailed(
                f"the server asks for {iterations} SCRAM iterations; {MIN_ITERATIONS} to "
                f"{MAX_ITERATIONS} are accepted"
            )
        salt = _decoded(found["salt"])
        salted = salted_password(self.mechanism, self._password, salt, iterations)
        without_proof = f"c={_encoded(b'n,,')},r={nonce}"
        signed = f"{self._bare},{text},{without_proof}".encode()
        stored_key, server_key = stored_keys(self.mechanism, salted)
        client_key = digest(salted, b"Client Key", self._hash)
        proof = _xor(client_key, digest(stored_key, signed, self._hash))
        self._server_signature = digest(server_key, signed, self._hash)
        return f"{without_proof},p={_encoded(proof)}".encode()

    def _check_final(self, text: str) -> None:
        from hmac import compare_digest

        found = _SERVER_FINAL.fullmatch(text)
        if found is None:
            raise SaslAuthenticationFailed("the server's last SCRAM message is malformed")
        if found["error"] is not None:
            raise SaslAuthenticationFailed(f"the server refused: {found['error']!r}")
        if not compare_digest(_decoded(found["signature"]), self._server_signature):
            raise SaslAuthenticationFailed(
                "the server does not prove that it knows this user: it is not the server that was "
                "meant"
            )


class ScramServer:
    """The server's side: ``step(message)`` gives the answer to each of the client's two messages;
    after the second the client is who ``user`` says and the exchange is ``done``.

    ``lookup`` finds what is stored about a user, None for one who does not exist; he is shown what
    ``decoy`` makes for his name, which must be the same each time. It is made for all, so that none
    is told by the time that it takes. Raises SaslAuthenticationFailed.
    """

    def __init__(
        self,
        mechanism: str,
        lookup: Callable[[str], ScramVerifier | None],
        decoy: Callable[[str], ScramVerifier],
        *,
        nonce: str = "",
    ) -> None:
        self.mechanism = mechanism
        self.user = ""
        self.done = False
        self._hash = HASHES[mechanism]
        self._lookup = lookup
        self._decoy = decoy
        self._own_nonce = nonce or new_nonce()
        self._steps = 0
        self._exists = False
        self._verifier: ScramVerifier | None = None
        self._without_proof = ""
        self._signed = ""

    def step(self, message: bytes | None) -> bytes | None:
        """See the class."""
        text = _text(message or b"")
        self._steps += 1
        if self._steps == 1:
            return self._answer_first(text)
        if self._steps != 2 or self._verifier is None:
            raise SaslAuthenticationFailed("the client sent more than the SCRAM exchange has")
        return self._answer_final(text, self._verifier)

    def _answer_first(self, text: str) -> bytes:
        found = _CLIENT_FIRST.fullmatch(text)
        if found is None:
            raise SaslAuthenticationFailed("the client's first SCRAM message is malformed")
        if any(item.startswith("tokenauth=") for item in found["more"].split(",")):
            raise SaslAuthenticationFailed("delegation tokens (tokenauth) are not supported")
        self.user = _unescaped(found["user"])
        if found["authzid"] is not None and _unescaped(found["authzid"]) != self.user:
            raise SaslAuthenticationFailed("the client asks to act as another user")
        stored, decoy = self._lookup(self.user), self._decoy(self.user)  # each takes as long
        self._exists = stored is not None
        self._verifier = verifier = decoy if stored is None else stored
        nonce = found["nonce"] + self._own_nonce
        first = f"r={nonce},s={_encoded(verifier.salt)},i={verifier.iterations}"
        self._without_proof = f"c={_encoded(found['gs2'].encode())},r={nonce}"
        self._signed = f"{found['bare']},{first},{self._without_proof}"
        return first.encode()

    def _answer_final(self, text: str, verifier: ScramVerifier) -> bytes:
        import hashlib
        import hmac

        without_proof, _, proof_text = text.rpartition(",p=")
        if not hmac.compare_digest(without_proof.encode(), self._without_proof.encode()):
            raise SaslAuthenticationFailed(
                "the client's last SCRAM message does not repeat the nonce and the header"
            )
        proof = _decoded(proof_text)
        signed = self._signed.encode()
        signature = hmac.digest(verifier.stored_key, signed, self._hash)
        if len(proof) != len(signature):
            raise SaslAuthenticationFailed("the client's SCRAM proof is of another size")
        stored_key = hashlib.new(self._hash, _xor(proof, signature)).digest()
        if not hmac.compare_digest(stored_key, verifier.stored_key) or not self._exists:
            raise SaslAuthenticationFailed("no such user, or another password")
        self.done = True
        server_signature = hmac.digest(verifier.server_key, signed, self._hash)
        return f"v={_encoded(server_signature)}".encode()


def new_nonce() -> str:
    """Random characters that no exchange had before."""
    from secrets import token_bytes

    return _encoded(token_bytes(NONCE_BYTES))


def _text(message: bytes) -> str:
    if len(message) > MAX_MESSAGE_BYTES:
        raise SaslAuthenticationFailed(f"a SCRAM message of {len(message)} bytes")
    try:
        return message.decode()
    except UnicodeDecodeError:
        raise SaslAuthenticationFailed("a SCRAM message that is not UTF-8") from None


def _escaped(name: str) -> str:
    return name.replace("=", "=3D").replace(",", "=2C")


def _unescaped(name: str) -> str:
    return name.replace("=2C", ",").replace("=3D", "=")


def _encoded(value: bytes) -> str:
    return b64encode(value).decode()


def _decoded(text: str) -> bytes:
    try:
        return b64decode(text.encode(), validate=True)
    except Base64Error:
        raise SaslAuthenticationFailed("a SCRAM message with malformed base64") from None


def _xor(left: bytes, right: bytes) -> bytes:
    size = len(left)
    return (int.from_bytes(left, "big") ^ int.from_bytes(right, "big")).to_bytes(size, "big")
