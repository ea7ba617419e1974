"""SCRAM credentials of the metadata log, as logins look them up."""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from itertools import accumulate
from typing import Final, NamedTuple

from kept.client.security.scram import MIN_ITERATIONS
from kept.cluster.security.credentials import STORED, ScramCredential, ScramMechanism

CredentialsByUser = Mapping[tuple[str, ScramMechanism], ScramCredential]

_STRONGEST_FIRST = (ScramMechanism.SCRAM_SHA_512, ScramMechanism.SCRAM_SHA_256)
_SALT_BYTES: Final = 24
_KAFKA_SALT_BITS: Final = 130
"""A salt of Apache Kafka's tools is a number of so many bits, in digits and small letters."""
_KAFKA_SALT: Final = re.compile(rb"[1-9a-z][0-9a-z]{20,25}")
_DIGITS: Final = b"0123456789abcdefghijklmnopqrstuvwxyz"


class PasswordCredential(NamedTuple):
    """What a password is compared with, and by which mechanism; ``exists``: it is a user's."""

    mechanism: str
    credential: ScramCredential
    exists: bool


class _Shape(NamedTuple):
    """What a stranger sees of a credential; a salt of 0 bytes is made as Kafka's tools do."""

    mechanism: ScramMechanism
    iterations: int
    salt_bytes: int


class _Population(NamedTuple):
    """What decoys are made of: a secret, and the shapes, in their order, with how many users have
    each or one before it.
    """

    secret: bytes
    shapes: tuple[_Shape, ...]
    users: tuple[int, ...]


class StoredCredentials:
    """Looks up in ``current()``, which is the image's mapping of the moment.

    A user who does not exist is shown a salt and a number of iterations as others have: some name
    gets each number that is in use, as often as users have it. What a name gets is made from a
    stored credential, which is secret and the same on every node. It changes with that one, and for
    few names as users come and go.
    """

    def __init__(self, current: Callable[[], CredentialsByUser]) -> None:
        self._current = current
        self._populations_of: CredentialsByUser | None = None
        self._populations: dict[tuple[ScramMechanism, ...], _Population] = {}
        self._nobody = secrets.token_bytes(32)

    def find(self, mechanism: str, user: str) -> ScramCredential | None:
        """What is stored about a user, None if nothing."""
        return self._current().get((user, STORED[mechanism]))

    def decoy(self, mechanism: str, user: str) -> ScramCredential:
        """What a user who does not exist is shown. No password fits it."""
        return self._decoy(user, (STORED[mechanism],))[1]

    def for_password(
        self, user: str, mechanisms: Collection[str] = tuple(STORED)
    ) -> PasswordCredential:
        """What a password of ``user`` is compared with: his strongest credential of one of
        ``mechanisms``, else a decoy that takes as long.
        """
        current = self._current()
        strongest_first = tuple(m for m in _STRONGEST_FIRST if m.text in mechanisms)
        for mechanism in strongest_first:
            credential = current.get((user, mechanism))
            if credential is not None:
                return PasswordCredential(mechanism.text, credential, exists=True)
        mechanism, credential = self._decoy(user, strongest_first or _STRONGEST_FIRST)
        return PasswordCredential(mechanism.text, credential, exists=False)

    def _decoy(
        self, user: str, strongest_first: tuple[ScramMechanism, ...]
    ) -> tuple[ScramMechanism, ScramCredential]:
        secret, shapes, users = self._population(strongest_first)
        name = user.encode("utf-8", "replace")
        place = int.from_bytes(hmac.digest(secret, name, "sha512")[:8]) * users[-1] >> 64
        shape = shapes[bisect_right(users, place)]
        seen = b"%d %d %d " % shape
        made = hmac.digest(secret, seen + name, "sha512")
        if shape.salt_bytes:
            salt = hashlib.pbkdf2_hmac("sha512", made, b"", 1, shape.salt_bytes)
        else:
            salt = _kafka_salt(int.from_bytes(made) >> 512 - _KAFKA_SALT_BITS)
        return shape.mechanism, ScramCredential(salt, made, made, shape.iterations)

    def _population(self, strongest_first: tuple[ScramMechanism, ...]) -> _Population:
        """Of the users' strongest credentials. The secret is of the one with the smallest salt,
        which another seldom replaces; of equal salts the smallest key, as the order of the mapping
        is not that of other nodes.
        """
        current = self._current()
        if self._populations_of is not current:
            self._populations_of = current
            self._populations.clear()
        population = self._populations.get(strongest_first)
        if population is None:
            population = self._count(current, strongest_first)
            self._populations[strongest_first] = population
        return population

    def _count(
        self, current: CredentialsByUser, strongest_first: tuple[ScramMechanism, ...]
    ) -> _Population:
        shapes = Counter[_Shape]()
        smallest: tuple[bytes, bytes] | None = None
        for (user, mechanism), credential in current.items():
            if mechanism not in strongest_first:
                continue
            stronger = strongest_first[: strongest_first.index(mechanism)]
            if any((user, other) in current for other in stronger):
                continue
            is_kafkas = _KAFKA_SALT.fullmatch(credential.salt) is not None
            salt_bytes = 0 if is_kafkas else len(credential.salt)
            shapes[_Shape(mechanism, credential.iterations, salt_bytes)] += 1
            secret_of = credential.salt, credential.server_key
            if smallest is None or secret_of < smallest:
                smallest = secret_of
        secret = self._nobody if smallest is None else smallest[1]
        if not shapes:
            shapes[_Shape(strongest_first[0], MIN_ITERATIONS, _SALT_BYTES)] = 1
        ordered = tuple(sorted(shapes))
        return _Population(secret, ordered, tuple(accumulate(map(shapes.__getitem__, ordered))))


def _kafka_salt(number: int) -> bytes:
    digits = bytearray()
    while number:
        number, digit = divmod(number, 36)
        digits.append(_DIGITS[digit])
    return bytes(reversed(digits))
