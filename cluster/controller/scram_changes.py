"""Decisions on SCRAM credentials: what may be stored, removed and described. Pure functions.

Rules as in ``ScramControlManager`` of Kafka 4.3: a request that alters a user twice alters nothing
of his, whatever the mechanisms. Clients send the salted password, and of it only the keys are
stored, which the caller makes. Ours: user names consist of characters that print, and have at most
as many bytes as a login by PLAIN may send (RFC 4616).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Final

from msgspec import Struct

from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import (
    MetadataRecord,
    RemoveScramCredentialRecord,
    ScramCredentialRecord,
)
from kept.cluster.security.credentials import NOBODY, STORED, ScramCredential, ScramMechanism
from kept.steps import Steps
from kept.storage.errors import (
    DuplicateResource,
    KeptError,
    ResourceNotFound,
    UnacceptableCredential,
    UnsupportedSaslMechanism,
)

MIN_ITERATIONS: Final = 4096
"""Fewer would let whoever has the keys guess passwords too fast (RFC 7677)."""
MAX_ITERATIONS: Final = 16_384
MAX_USER_BYTES: Final = 255
MAX_SALT_BYTES: Final = 1024
"""Kafka's tools make salts of 26 bytes, and each login is shown them."""
SECRET_BYTES: Final = 64


class Upsertion(Struct, frozen=True):
    """A user's new credential, by the number of its mechanism; None: nothing to make keys of."""

    user: str
    mechanism: int
    credential: ScramCredential | None


class Deletion(Struct, frozen=True):
    """A credential that is to go."""

    user: str
    mechanism: int


class Alterations(Struct, frozen=True):
    """``errors`` says of each user of a request, in its order, why he stays as he was, or None."""

    errors: Mapping[str, KeptError | None]
    records: Sequence[MetadataRecord]


def alter_credentials(image: Image, changes: Iterable[Deletion | Upsertion]) -> Steps[Alterations]:
    """What becomes of each user. The first thing that is wrong with him is what he is told."""
    errors: dict[str, KeptError | None] = {}
    records: dict[str, MetadataRecord] = {}
    for change in changes:
        yield
        user = change.user
        try:
            if user in records:
                del records[user]
                raise DuplicateResource(
                    "A user credential cannot be altered twice in the same request"
                )
            if user not in errors:
                records[user] = _record(image, change)
                errors[user] = None
        except KeptError as error:
            errors[user] = error.without_frames()
    return Alterations(errors, tuple(records.values()))


def _record(image: Image, change: Deletion | Upsertion) -> MetadataRecord:
    mechanism = check_user(change.user, change.mechanism)
    if isinstance(change, Upsertion):
        credential = check_credential(change.credential)
        return ScramCredentialRecord(change.user, mechanism, credential)
    if (change.user, mechanism) not in image.credentials:
        raise ResourceNotFound("Attempt to delete a user credential that does not exist")
    return RemoveScramCredentialRecord(change.user, mechanism)


def check_user(user: str, mechanism: int) -> ScramMechanism:
    """The mechanism by its number. Raises UnacceptableCredential for a name that no user may have,
    UnsupportedSaslMechanism.
    """
    if not user:
        raise UnacceptableCredential("Username must not be empty")
    if len(user.encode()) > MAX_USER_BYTES:
        raise UnacceptableCredential(f"Username must not exceed {MAX_USER_BYTES} bytes")
    if not user.isprintable():
        raise UnacceptableCredential("Username must consist of characters that print")
    if mechanism not in STORED.values():
        raise UnsupportedSaslMechanism("Unknown SCRAM mechanism")
    return ScramMechanism(mechanism)


def check_credential(credential: ScramCredential | None) -> ScramCredential:
    """The credential. Raises UnacceptableCredential for one that must not be stored."""
    if credential is None:
        raise UnacceptableCredential("The salted password must not be empty")
    if credential.iterations < MIN_ITERATIONS:
        raise UnacceptableCredential("Too few iterations")
    if credential.iterations > MAX_ITERATIONS:
        raise UnacceptableCredential("Too many iterations")
    if not 0 < len(credential.salt) <= MAX_SALT_BYTES:
        raise UnacceptableCredential(f"The salt must have 1 to {MAX_SALT_BYTES} bytes")
    return credential


def with_decoys(
    image: Image, records: Sequence[MetadataRecord], random: Callable[[int], bytes]
) -> Sequence[MetadataRecord]:
    """``records``, and the credential that decoys are made of if users are there or come with them,
    and it is not. It never changes. ``random`` gives so many bytes.
    """
    users = image.credentials or any(isinstance(each, ScramCredentialRecord) for each in records)
    if not users or image.decoy_credential is not None:
        return records
    secret = random(SECRET_BYTES)
    credential = ScramCredential(b"", secret, secret, MIN_ITERATIONS)
    return [*records, ScramCredentialRecord(NOBODY, ScramMechanism.SCRAM_SHA_512, credential)]


Described = Sequence[tuple[ScramMechanism, int]]
"""Mechanism and iterations of each credential of a user."""


def describe_credentials(
    image: Image, users: Sequence[str] = ()
) -> Steps[Mapping[str, Described | KeptError]]:
    """What is known of users, without their secrets; of all, sorted, where none is named."""
    if not users:
        everybody: dict[str, list[tuple[ScramMechanism, int]]] = {}
        for user, mechanism in sorted(image.credentials):
            yield
            iterations = image.credentials[user, mechanism].iterations
            everybody.setdefault(user, []).append((mechanism, iterations))
        return everybody
    described: dict[str, Described | KeptError] = {}
    for user, count in Counter(users).items():
        yield
        known = [
            (mechanism, image.credentials[user, mechanism].iterations)
            for mechanism in STORED.values()
            if (user, mechanism) in image.credentials
        ]
        if count > 1:
            described[user] = DuplicateResource(
                f"Cannot describe SCRAM credentials for the same user twice in a single request: "
                f"{user}"
            )
        elif known:
            described[user] = known
        else:
            described[user] = ResourceNotFound(
                f"Attempt to describe a user credential that does not exist: {user}"
            )
    return described
