"""``kept.bootstrap.scram``: the users that a new cluster begins with (``kept serve --add-scram``).

The grammar is that of Kafka's ``kafka-storage format --add-scram`` (KIP-900)::

    SCRAM-SHA-512=[name=admin,password-file=/run/secrets/admin]

Several of them have ``;`` between them. A user has ``password=`` (or ``password-file=``, ours: the
file's content without its last line end) and perhaps ``iterations=`` and ``salt=`` (base64); or
``saltedpassword=`` with ``salt=``, both base64, and then no password. A value that has ``,``, ``]``
or ``;`` in it stands in quotes, and there a backslash precedes ``"`` and itself. The files are read
when a cluster is formed, and not before.
"""

from __future__ import annotations

import binascii
import re
from base64 import b64decode
from collections.abc import Mapping, Sequence
from typing import Final

from msgspec import Struct

from kept.client.security.plain import MAX_FIELD_BYTES, read_password
from kept.client.security.scram import salted_password, stored_keys
from kept.cluster.controller import scram_changes
from kept.cluster.controller.features import SECURITY
from kept.cluster.metadata.records import FeatureRecord, MetadataRecord, ScramCredentialRecord
from kept.cluster.security.credentials import STORED, ScramCredential, ScramMechanism
from kept.node.runtime.logging import log
from kept.storage.errors import ConfigurationError, KeptError

SETTING: Final = "kept.bootstrap.scram"
FORM: Final = "SCRAM-SHA-512=[name=admin,password-file=/run/secrets/admin]"
ITERATIONS: Final = 8192
"""Where none are given."""
SALT_BYTES: Final = 24
READABLE: Final = "whoever may list processes or read the settings sees it: use password-file="

_VALUE: Final = r'"(?:[^"\\]|\\.)*"|[^,\]";]*'
_FIELD: Final = re.compile(rf"(?P<name>[a-z-]+)=(?P<value>{_VALUE})")
_FIELDS: Final = rf"[a-z-]+=(?:{_VALUE})"
_ENTRY: Final = re.compile(
    rf"\s*(?P<mechanism>[A-Z0-9-]+)=\[(?P<fields>{_FIELDS}(?:,{_FIELDS})*)\]\s*(?:;|\Z)", re.S
)
_NAMES: Final = ("name", "password", "password-file", "iterations", "salt", "saltedpassword")


class NewUser(Struct, frozen=True):
    """A user, and where his password comes from: ``password``, ``password_file``, or
    ``salted_password`` with ``salt``. Its repr hides them.
    """

    name: str
    mechanism: ScramMechanism
    iterations: int
    salt: bytes | None
    password: str | None
    password_file: str | None
    salted_password: bytes | None

    def __repr__(self) -> str:
        return f"NewUser({self.name!r}, {self.mechanism.text}, [hidden])"


def parse_bootstrap_scram(text: str) -> tuple[NewUser, ...]:
    """The users. Raises ValueError, whose message shows no value."""
    users: list[NewUser] = []
    position = 0
    while position < len(text):
        entry = _ENTRY.match(text, position)
        if entry is None:
            raise ValueError(f"user {len(users) + 1} is not written as {FORM}")
        fields: dict[str, str] = {}
        for field in _FIELD.finditer(entry["fields"]):
            if field["name"] in fields or field["name"] not in _NAMES:
                what = "is given twice" if field["name"] in fields else "is not known"
                raise ValueError(f"{field['name']}= {what}; there are {', '.join(_NAMES)}")
            fields[field["name"]] = _unquoted(field["value"])
        users.append(_user(entry["mechanism"], fields))
        position = entry.end()
    names = [(user.name, user.mechanism) for user in users]
    if len(set(names)) < len(names):
        raise ValueError("a user is given twice with one mechanism")
    return tuple(users)


def _unquoted(value: str) -> str:
    return re.sub(r"\\(.)", r"\1", value[1:-1]) if value.startswith('"') else value


def _user(mechanism_text: str, fields: Mapping[str, str]) -> NewUser:
    mechanism = STORED.get(mechanism_text)
    if mechanism is None:
        raise ValueError(f"{mechanism_text} is not one of {', '.join(STORED)}")
    name = fields.get("name", "")
    given = [each for each in ("password", "password-file", "saltedpassword") if fields.get(each)]
    if len(given) != 1:
        raise ValueError(
            f"user {name!r} needs exactly one of password-file=, password= and saltedpassword="
        )
    salt = _decoded("salt", fields)
    if "saltedpassword" in given and salt is None:
        raise ValueError(f"user {name!r}: saltedpassword= needs salt=")
    iterations = fields.get("iterations", str(ITERATIONS))
    if not re.fullmatch("[0-9]{1,9}", iterations):
        raise ValueError(f"user {name!r}: iterations= is not a number")
    try:
        if "password" in given:
            read_password(fields["password"].encode())
        scram_changes.check_user(name, mechanism)
        unsalted = b"?" if salt is None else salt
        scram_changes.check_credential(ScramCredential(unsalted, b"", b"", int(iterations)))
    except (KeptError, ValueError) as error:
        raise ValueError(f"user {name!r}: {error}") from None
    return NewUser(
        name,
        mechanism,
        int(iterations),
        salt,
        fields.get("password"),
        fields.get("password-file"),
        _decoded("saltedpassword", fields),
    )


def _decoded(name: str, fields: Mapping[str, str]) -> bytes | None:
    if name not in fields:
        return None
    try:
        return b64decode(fields[name], validate=True)
    except binascii.Error:
        raise ValueError(f"{name}= is not base64") from None


def founding_records(text: str | None) -> Sequence[MetadataRecord]:
    """What stands beside the id of a new cluster. Blocks: it reads files, and salts passwords for
    some milliseconds each. Raises ConfigurationError for a file that holds no password.
    """
    users = parse_bootstrap_scram(text or "")
    if not users:
        return ()
    return (FeatureRecord(SECURITY, 1), *map(_record, users))


def _record(user: NewUser) -> ScramCredentialRecord:
    from secrets import token_bytes

    text, salt = user.mechanism.text, user.salt or token_bytes(SALT_BYTES)
    salted = user.salted_password
    if salted is None:
        password = user.password
        if user.password_file is not None:
            password = _read_password(user.password_file)
        salted = salted_password(text, password or "", salt, user.iterations)
    credential = ScramCredential(salt, *stored_keys(text, salted), user.iterations)
    return ScramCredentialRecord(user.name, user.mechanism, credential)


def _read_password(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return read_password(file.read(MAX_FIELD_BYTES + 3))
    except OSError as error:
        raise ConfigurationError(f"{SETTING}: password-file={path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigurationError(f"{SETTING}: password-file={path}: {error}") from None


def warn(text: str | None, *, founding: bool) -> None:
    """Say what is not obvious of users that were given: that they are ignored, or can be read."""
    if not text:
        return
    if not founding:
        log.info(f"{SETTING} is ignored", why="the users are those of the cluster, which exists")
    if any(user.password is not None for user in parse_bootstrap_scram(text)):
        log.warning(f"{SETTING} has a password=", why=READABLE)
