"""Users with SCRAM credentials: operations without I/O (see :mod:`kept.client.admin.topics`).

The password stays here: what is sent is its salted hash, of which the cluster stores the keys.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Any, Final

from msgspec import Struct

from kept.client.admin.topics import Operation
from kept.client.core.broker_errors import failure
from kept.client.core.calls import Anywhere, Call
from kept.client.protocol.api_keys import ApiKey
from kept.client.security.scram import salted_password
from kept.storage.errors import KeptError

MECHANISMS: Final = {"SCRAM-SHA-256": 1, "SCRAM-SHA-512": 2}
"""Kafka's numbers of the mechanisms."""
SALT_BYTES: Final = 24
_NO_USER: Final = 91


class UserCredential(Struct, frozen=True):
    """That a user has a password for one mechanism."""

    user: str
    mechanism: str
    iterations: int


def describe_users(users: Sequence[str] = ()) -> Operation[list[UserCredential]]:
    """Credentials of ``users``, of everybody where none is named; a user without any has none."""
    call = Call(
        ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS,
        {"users": [{"name": user} for user in users] or None},
        Anywhere(),
        check=_check_described,
    )
    (response,) = yield [call]
    names = {number: name for name, number in MECHANISMS.items()}
    return [
        UserCredential(result.user, names.get(int(info.mechanism), "?"), info.iterations)
        for result in response.results
        for info in result.credential_infos
    ]


def set_password(user: str, mechanism: str, password: str, iterations: int) -> Operation[None]:
    """Give ``user`` a password for one mechanism, instead of the one that he may have."""
    salt = secrets.token_bytes(SALT_BYTES)
    upsertion = {
        "name": user,
        "mechanism": MECHANISMS[mechanism],
        "iterations": iterations,
        "salt": salt,
        "salted_password": salted_password(mechanism, password, salt, iterations),
    }
    yield [_alter(user, {"deletions": (), "upsertions": [upsertion]})]


def delete_password(user: str, mechanism: str) -> Operation[None]:
    """Take a user's credential of one mechanism away. Raises BrokerError where he has none."""
    deletion = {"name": user, "mechanism": MECHANISMS[mechanism]}
    yield [_alter(user, {"deletions": [deletion], "upsertions": ()})]


def _alter(user: str, values: dict[str, Any]) -> Call:
    return Call(
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
        values,
        Anywhere(),
        what=f"AlterUserScramCredentials of {user}",
        check=lambda response: _check_altered(user, response),
    )


def _check_altered(user: str, response: Any) -> KeptError | None:
    for result in response.results:
        error = failure(int(result.error_code), f"user {user}", result.error_message)
        if error is not None:
            return error
    return None


def _check_described(response: Any) -> KeptError | None:
    what = "DescribeUserScramCredentials"
    error = failure(int(response.error_code), what, response.error_message)
    for result in response.results:
        if error is None and int(result.error_code) != _NO_USER:
            error = failure(int(result.error_code), what, result.error_message)
    return error
