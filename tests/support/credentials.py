"""SCRAM credentials made from passwords."""

from __future__ import annotations

from kept.client.security.scram import salted_password, stored_keys
from kept.cluster.security.credentials import ScramCredential


def credential(
    password: str,
    mechanism: str = "SCRAM-SHA-256",
    salt: bytes = b"some salt that is random",
    iterations: int = 4096,
) -> ScramCredential:
    """What the metadata log holds of a user with this password."""
    salted = salted_password(mechanism, password, salt, iterations)
    return ScramCredential(salt, *stored_keys(mechanism, salted), iterations)
