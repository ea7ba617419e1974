"""SCRAM credentials of the metadata log, as logins look them up."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import accumulate
from typing import Final, NamedTuple

from kept.client.security.scram import MIN_ITERATIONS
from kept.cluster.metadata.image import CredentialKey, Image
from kept.cluster.metadata.persistent_map import PersistentMap, changed_keys
from kept.cluster.security.credentials import STORED, ScramCredential, ScramMechanism

CredentialsByUser = Mapping[CredentialKey, ScramCredential]
_Item = tuple[CredentialKey, ScramCredential]

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


class _Population:
    """How many users have each shape, by their strongest credentials of some mechanisms."""

    def __init__(self, strongest_first: tuple[ScramMechanism, ...]) -> None:
        self._strongest_first = strongest_first
        self._nobodys = (_Shape(strongest_first[0], MIN_ITERATIONS, _SALT_BYTES),)
        self._credentials: CredentialsByUser = PersistentMap()
        self._counts = Counter[_Shape]()
        self.shapes: tuple[_Shape, ...] = self._nobodys
        """In their order; one if there is no user."""
        self.users: tuple[int, ...] = (1,)
        """How many users have each of ``shapes`` or one before it."""

    def follow(self, credentials: CredentialsByUser) -> None:
        """Count those of ``credentials``; but for the first time it costs what changed."""
        before, self._credentials = self._credentials, credentials
        if credentials is before:
            return
        if before:
            users = {user for user, _ in changed_keys(before, credentials)}
            keys = [(user, mechanism) for user in users for mechanism in self._strongest_first]
            self._counts.subtract(self._shapes(before, _found(before, keys)))
            self._counts.update(self._shapes(credentials, _found(credentials, keys)))
            self._counts = +self._counts  # without those that nobody has any more
        else:
            self._counts.update(self._shapes(credentials, credentials.items()))
        shapes = sorted(self._counts)
        self.shapes = tuple(shapes) or self._nobodys
        self.users = tuple(accumulate(map(self._counts.__getitem__, shapes))) or (1,)

    def _shapes(self, credentials: CredentialsByUser, some: Iterable[_Item]) -> Iterator[_Shape]:
        """Those of ``some`` that are their users' strongest."""
        for (user, mechanism), credential in some:
            if mechanism not in self._strongest_first:
                continue
            stronger = self._strongest_first[: self._strongest_first.index(mechanism)]
            if any((user, other) in credentials for other in stronger):
                continue
            is_kafkas = _KAFKA_SALT.fullmatch(credential.salt) is not None
            salt_bytes = 0 if is_kafkas else len(credential.salt)
            yield _Shape(mechanism, credential.iterations, salt_bytes)


def _found(credentials: CredentialsByUser, keys: Iterable[CredentialKey]) -> Iterator[_Item]:
    for key in keys:
        credential = credentials.get(key)
        if credential is not None:
            yield key, credential


class StoredCredentials:
    """Looks up in ``current()``, which is the image of the moment.

    A user who does not exist is shown a salt and a number of iterations as others have: some name
    gets each number that is in use, as often as users have it. What a name gets is made from the
    image's decoy credential, which is the same on every node and no user's; it changes for few
    names as users come and go. Before there is one, which comes with the first user, each process
    makes up its own.
    """

    def __init__(self, current: Callable[[], Image]) -> None:
        self._current = current
        self._populations: dict[tuple[ScramMechanism, ...], _Population] = {}

    @cached_property
    def _own_secret(self) -> bytes:
        from secrets import token_bytes

        return token_bytes(32)

    def find(self, mechanism: str, user: str) -> ScramCredential | None:
        """What is stored about a user, None if nothing."""
        return self._current().credentials.get((user, STORED[mechanism]))

    def decoy(self, mechanism: str, user: str) -> ScramCredential:
        """What a user who does not exist is shown. No password fits it."""
        return self._decoy(user, (STORED[mechanism],))[1]

    def for_password(
        self, user: str, mechanisms: Collection[str] = tuple(STORED)
    ) -> PasswordCredential:
        """What a password of ``user`` is compared with: his strongest credential of one of
        ``mechanisms``, else a decoy that takes as long.
        """
        strongest_first = tuple(m for m in _STRONGEST_FIRST if m.text in mechanisms)
        credentials = self._current().credentials
        for mechanism in strongest_first:
            credential = credentials.get((user, mechanism))
            if credential is not None:
                return PasswordCredential(mechanism.text, credential, exists=True)
        mechanism, credential = self._decoy(user, strongest_first or _STRONGEST_FIRST)
        return PasswordCredential(mechanism.text, credential, exists=False)

    def _decoy(
        self, user: str, strongest_first: tuple[ScramMechanism, ...]
    ) -> tuple[ScramMechanism, ScramCredential]:
        import hashlib
        import hmac

        image = self._current()
        population = self._populations.get(strongest_first)
        if population is None:
            population = self._populations[strongest_first] = _Population(strongest_first)
        population.follow(image.credentials)
        shared = image.decoy_credential
        secret = self._own_secret if shared is None else shared.server_key
        name, users = user.encode("utf-8", "replace"), population.users
        place = int.from_bytes(hmac.digest(secret, name, "sha512")[:8]) * users[-1] >> 64
        shape = population.shapes[bisect_right(users, place)]
        seen = b"%d %d %d " % shape
        made = hmac.digest(secret, seen + name, "sha512")
        if shape.salt_bytes:
            salt = hashlib.pbkdf2_hmac("sha512", made, b"", 1, shape.salt_bytes)
        else:
            salt = _kafka_salt(int.from_bytes(made) >> 512 - _KAFKA_SALT_BITS)
        return shape.mechanism, ScramCredential(salt, made, made, shape.iterations)


def _kafka_salt(number: int) -> bytes:
    digits = bytearray()
    while number:
        number, digit = divmod(number, 36)
        digits.append(_DIGITS[digit])
    return bytes(reversed(digits))
