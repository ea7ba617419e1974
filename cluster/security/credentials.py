"""SCRAM credentials as the metadata log stores them (RFC 5802, RFC 7677)."""

from __future__ import annotations

from enum import IntEnum
from typing import Final

from msgspec import Struct


class ScramMechanism(IntEnum):
    """Kafka's numbers of the mechanisms that have stored credentials."""

    UNKNOWN = 0
    SCRAM_SHA_256 = 1
    SCRAM_SHA_512 = 2

    @property
    def text(self) -> str:
        """Its name in SASL: ``SCRAM-SHA-256``."""
        return self.name.replace("_", "-")


STORED: Final = {mechanism.text: mechanism for mechanism in ScramMechanism if mechanism.value}
"""The mechanisms that have stored credentials, by their names in SASL."""
NOBODY: Final = ""
"""No user has this name. Its credential is what decoys are made of, and no login can use it."""


class ScramCredential(Struct, frozen=True):
    """What proves that a client knows a password, without the password. Neither repr nor an error
    shows its keys: who has them may log in as the user, or answer as a server.
    """

    salt: bytes
    stored_key: bytes
    server_key: bytes
    iterations: int

    def __repr__(self) -> str:
        return f"ScramCredential(iterations={self.iterations}, [hidden])"
