"""SCRAM credentials of the metadata log, as logins look them up."""

from __future__ import annotations

import hmac
import secrets
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from kept.client.security.scram import MIN_ITERATIONS
from kept.cluster.security.credentials import STORED, ScramCredential, ScramMechanism

CredentialsByUser = Mapping[tuple[str, ScramMechanism], ScramCredential]

_STRONGEST_FIRST = (ScramMechanism.SCRAM_SHA_512, ScramMechanism.SCRAM_SHA_256)
_RANDOM = ScramCredential(secrets.token_bytes(24), b"", secrets.token_bytes(32), MIN_ITERATIONS)


class PasswordCredential(NamedTuple):
    """What a password is compared with, and by which mechanism; ``exists``: it is a user's."""

    mechanism: str
    credential: ScramCredential
    exists: bool


class StoredCredentials:
    """Looks up in ``current()``, which is the image's mapping of the moment.

    A user who does not exist is shown a salt and a number of iterations that look like those of
    another: they are made from his name and a stored credential, which is secret and the same on
    every node. So they do not change as long as that one does not.
    """

    def __init__(self, current: Callable[[], CredentialsByUser]) -> None:
        self._current = current
        self._patterns_of: CredentialsByUser | None = None
        self._patterns: dict[ScramMechanism, ScramCredential] = {}

    def find(self, mechanism: str, user: str) -> ScramCredential | None:
        """What is stored about a user, None if nothing."""
        return self._current().get((user, STORED[mechanism]))

    def decoy(self, mechanism: str, user: str) -> ScramCredential:
        """What a user who does not exist is shown. No password fits it."""
        pattern = self._find_patterns().get(STORED[mechanism], _RANDOM)
        made = hmac.digest(pattern.server_key, user.encode("utf-8", "replace"), "sha512")
        return ScramCredential(made[: len(pattern.salt)], made, made, pattern.iterations)

    def for_password(
        self, user: str, mechanisms: Collection[str] = tuple(STORED)
    ) -> PasswordCredential:
        """What a password of ``user`` is compared with: his strongest credential of one of
        ``mechanisms``, else a decoy that takes as long.
        """
        current = self._current()
        strongest_first = [m for m in _STRONGEST_FIRST if m.text in mechanisms]
        for mechanism in strongest_first:
            credential = current.get((user, mechanism))
            if credential is not None:
                return PasswordCredential(mechanism.text, credential, exists=True)
        patterns = self._find_patterns()
        like = next((m for m in strongest_first if m in patterns), _STRONGEST_FIRST[0])
        return PasswordCredential(like.text, self.decoy(like.text, user), exists=False)

    def _find_patterns(self) -> dict[ScramMechanism, ScramCredential]:
        """One credential for each mechanism, by whose measures decoys are made: that of the
        smallest salt, which another seldom replaces.
        """
        current = self._current()
        if self._patterns_of is not current:
            self._patterns_of = current
            patterns: dict[ScramMechanism, ScramCredential] = {}
            for (_, mechanism), credential in current.items():
                other = patterns.get(mechanism)
                if other is None or credential.salt < other.salt:
                    patterns[mechanism] = credential
            self._patterns = patterns
        return self._patterns
