"""SCRAM credentials made from passwords."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from kept.client.security.scram import salted_password, stored_keys
from kept.cluster.metadata.image import Image
from kept.cluster.security.credentials import ScramCredential, ScramMechanism

DECOYS: Final = ScramCredential(
    b"", b"secret of the cluster" * 3, b"secret of the cluster" * 3, 4096
)
"""What the metadata log holds for users who do not exist."""


def credential(
    password: str,
    mechanism: str = "SCRAM-SHA-256",
    salt: bytes = b"some salt that is random",
    iterations: int = 4096,
) -> ScramCredential:
    """What the metadata log holds of a user with this password."""
    salted = salted_password(mechanism, password, salt, iterations)
    return ScramCredential(salt, *stored_keys(mechanism, salted), iterations)


def image_of(
    users: Mapping[tuple[str, ScramMechanism], ScramCredential],
    decoys: ScramCredential | None = DECOYS,
) -> Image:
    """The metadata of a cluster with these users and nothing else."""
    return Image(credentials=users, decoy_credential=decoys)
