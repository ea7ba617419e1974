"""``kept quota``: how much clients may use, on kept or on Apache Kafka."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeVar

import click

from kept.cli.bootstrap_option import bootstrap_option
from kept.cli.completion import USER as USER_NAME
from kept.cli.output import echo, show_json, show_table, size
from kept.cli.shell import Failure, Group, WholeNumber, decimal_of, examples, json_option
from kept.cli.unavailable import open_client
from kept.client.admin.quotas import DEFAULT, EXACT, Entity, alter_quotas, describe_quotas
from kept.client.bootstrap import Bootstrap
from kept.cluster.security.addresses import canonical_address
from kept.cluster.security.client_quotas import (
    CLIENT_ID,
    CONNECTION_CREATION_RATE,
    CONSUMER_BYTE_RATE,
    CONTROLLER_MUTATION_RATE,
    IP,
    PRODUCER_BYTE_RATE,
    REQUEST_PERCENTAGE,
    USER,
    deciding_entity,
)
from kept.storage.printable import printable_line
from kept.storage.types import MAX_INT32, MAX_INT64

_T = TypeVar("_T")
_RATE: Final = re.compile(r"([0-9]{1,19})\s*(B|KiB|MiB|GiB|KB|MB|GB)?", re.ASCII | re.IGNORECASE)
_UNITS: Final = {
    "": 1,
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
}
_BYTE_RATES: Final = (PRODUCER_BYTE_RATE, CONSUMER_BYTE_RATE)
_OF_CLIENTS: Final = (*_BYTE_RATES, REQUEST_PERCENTAGE, CONTROLLER_MUTATION_RATE)
KEYS: Final = (*_OF_CLIENTS, CONNECTION_CREATION_RATE)
"""All quotas: of users and client ids, and the last one of addresses."""
_OF_ADDRESSES: Final = "a quota of addresses is for no user or client id"
_DEFAULT_WORD: Final = "(default)"


class ByteRate(click.ParamType):  # type: ignore[type-arg]
    """``1048576`` or ``1MiB``, in bytes a second."""

    name = "rate"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; a usage error for any other text."""
        if not isinstance(value, str):
            return value
        given = _RATE.fullmatch(value.strip())
        rate = int(given[1]) * _UNITS[(given[2] or "").lower()] if given is not None else 0
        if not 0 < rate <= MAX_INT64:
            self.fail(
                f"{value!r} is no number of bytes a second, such as 1048576 or 1MiB", param, ctx
            )
        return float(rate)


class Address(click.ParamType):  # type: ignore[type-arg]
    """An IP address."""

    name = "address"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The address as Kafka spells it; a usage error for a name."""
        try:
            return canonical_address(value)
        except ValueError:
            self.fail(f"{value!r} is no address: names are not resolved", param, ctx)


class _Positive(click.ParamType):  # type: ignore[type-arg]
    """A number above 0, such as 200 or 0.5."""

    name = "number"

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The number; a usage error for any other text."""
        number = decimal_of(value) if isinstance(value, str) else float(value)
        if not number:
            self.fail(f"{value!r} is not a number above 0, such as 200 or 0.5", param, ctx)
        return number


_positive = _Positive()


def entity_options(function: Callable[..., _T]) -> Callable[..., _T]:
    """``--user``, ``--client-id``, ``--ip`` and their defaults, as one argument ``entity``."""

    @functools.wraps(function)
    def chosen(
        *args: Any,
        user: str | None,
        user_default: bool,
        client_id: str | None,
        client_id_default: bool,
        ip: str | None,
        ip_default: bool,
        **given: Any,
    ) -> _T:
        names: dict[str, str | None] = {}
        for kind, name, is_default in (
            (USER, user, user_default),
            (CLIENT_ID, client_id, client_id_default),
            (IP, ip, ip_default),
        ):
            if name == "":
                raise click.UsageError(f"--{kind} '' names nobody; for all others --{kind}-default")
            if name is not None and is_default:
                raise click.UsageError(f"--{kind} and --{kind}-default contradict each other")
            if name is not None or is_default:
                names[kind] = name
        if IP in names and len(names) > 1:
            raise click.UsageError(_OF_ADDRESSES)
        return function(*args, entity=tuple(sorted(names.items())), **given)

    for option in reversed(
        (
            click.option("--user", type=USER_NAME, metavar="NAME", help="A user."),
            click.option(
                "--user-default", is_flag=True, help="All users without a quota of their own."
            ),
            click.option("--client-id", metavar="ID", help="A client id."),
            click.option(
                "--client-id-default",
                is_flag=True,
                help="All client ids without a quota of their own.",
            ),
            click.option("--ip", type=Address(), metavar="ADDRESS", help="An address."),
            click.option(
                "--ip-default", is_flag=True, help="All addresses without a quota of their own."
            ),
        )
    ):
        chosen = option(chosen)
    return chosen


@click.group(
    cls=Group,
    epilog=examples(
        "kept quota set --user ada --producer-byte-rate 1MiB",
        "kept quota describe --user ada --client-id reports",
    ),
)
def quota() -> None:
    """Limit how much users, client ids and addresses may use."""


@quota.command(
    "set",
    epilog=examples(
        "kept quota set --user ada --producer-byte-rate 1MiB --consumer-byte-rate 10MiB",
        "kept quota set --user-default --client-id-default --request-percentage 200",
        "kept quota set --ip 10.1.2.3 --connection-creation-rate 5",
    ),
)
@entity_options
@click.option("--producer-byte-rate", type=ByteRate(), help="Bytes a second that are produced.")
@click.option("--consumer-byte-rate", type=ByteRate(), help="Bytes a second that are fetched.")
@click.option(
    "--request-percentage",
    type=_positive,
    help="Time of the broker's threads; 100 is one whole thread.",
)
@click.option(
    "--controller-mutation-rate",
    type=_positive,
    help="Partitions a second that are created or deleted.",
)
@click.option(
    "--connection-creation-rate",
    type=WholeNumber(1, MAX_INT32),
    help="New connections a second, from an address.",
)
@bootstrap_option
def set_quotas(*, entity: Entity, bootstrap: Bootstrap, **given: float | None) -> None:
    """Set quotas of a user, a client id, a client id of a user, or an address.

    Other quotas that it has stay.
    """
    values = {key: float(value) for key, value in given.items() if value is not None}
    if not entity:
        raise click.UsageError("whose? Give --user, --client-id or --ip, or one with -default")
    if not values:
        raise click.UsageError(f"nothing to set: give {_options(_keys_of(entity))}")
    _check_keys(entity, values)
    with open_client(bootstrap) as client:
        client.run(alter_quotas(entity, values))
    echo(f"set for {_words(entity)}: {_listed(values)}")


@quota.command(
    epilog=examples(
        "kept quota delete --user ada",
        "kept quota delete --user ada --client-id reports --quota producer_byte_rate",
    )
)
@entity_options
@click.option(
    "--quota",
    "keys",
    type=click.Choice(KEYS),
    multiple=True,
    metavar="QUOTA",
    help="Only this quota, such as producer_byte_rate.  [default: all that it has]",
)
@bootstrap_option
def delete(*, entity: Entity, keys: tuple[str, ...], bootstrap: Bootstrap) -> None:
    """Delete quotas of exactly that user, client id, client id of a user, or address."""
    if not entity:
        raise click.UsageError("whose? Give --user, --client-id or --ip, or one with -default")
    with open_client(bootstrap) as client:
        has = client.run(describe_quotas(_parts(entity))).get(entity, {})
        missing = [key for key in keys if key not in has]
        if missing or not has:
            what = f"no {missing[0]}" if missing else "no quota"
            raise Failure(f"{_words(entity)} has {what}: kept quota list shows those there are")
        gone = {key: has[key] for key in keys or has}
        client.run(alter_quotas(entity, dict.fromkeys(gone)))
    echo(f"deleted of {_words(entity)}: {_listed(gone)}")


@quota.command(
    "list",
    epilog=examples("kept quota list", "kept quota list --user ada", "kept quota list --json"),
)
@entity_options
@json_option
@bootstrap_option
def list_quotas(*, entity: Entity, as_json: bool, bootstrap: Bootstrap) -> None:
    """List quotas: all, or those that name a user, a client id or an address."""
    with open_client(bootstrap) as client:
        found = client.run(describe_quotas(_parts(entity)))
    ordered = sorted(found.items(), key=lambda entry: _by_name(entry[0]))
    if as_json:
        show_json([{"entity": dict(of), "quotas": quotas} for of, quotas in ordered])
        return
    rows = [
        (*_cells(of), key, _shown(key, value))
        for of, quotas in ordered
        for key, value in sorted(quotas.items())
    ]
    empty = (
        "there are no such quotas: kept quota set --user NAME --producer-byte-rate 1MiB sets one"
    )
    show_table(("user", "client id", "ip", "quota", "value"), rows, empty=empty)


@quota.command(
    epilog=examples(
        "kept quota describe --user ada --client-id reports", "kept quota describe --ip 10.1.2.3"
    )
)
@click.option(
    "--user", type=USER_NAME, metavar="NAME", help="Who is logged in.  [default: ANONYMOUS]"
)
@click.option("--client-id", metavar="ID", help="What the client calls itself.")
@click.option(
    "--ip", type=Address(), metavar="ADDRESS", help="An address, instead of a user and a client id."
)
@json_option
@bootstrap_option
def describe(
    *,
    user: str | None,
    client_id: str | None,
    ip: str | None,
    as_json: bool,
    bootstrap: Bootstrap,
) -> None:
    """Show which quotas count for a client, and whose they are."""
    if ip is not None and not (user is None and client_id is None):
        raise click.UsageError(_OF_ADDRESSES)
    with open_client(bootstrap) as client:
        found = client.run(describe_quotas())
    decides: dict[str, Entity | None]
    if ip is None:
        who, what = "ANONYMOUS" if user is None else user, client_id or ""
        decides = {key: deciding_entity(found, key, who, what) for key in _OF_CLIENTS}
    else:
        key = CONNECTION_CREATION_RATE
        addresses: tuple[Entity, ...] = (((IP, ip),), ((IP, None),))
        decides = {key: next((of for of in addresses if key in found.get(of, {})), None)}
    if as_json:
        show_json(
            [
                {
                    "quota": key,
                    "value": None if of is None else found[of][key],
                    "entity": None if of is None else dict(of),
                }
                for key, of in decides.items()
            ]
        )
        return
    rows = [
        (key, "no limit", None) if of is None else (key, _shown(key, found[of][key]), _words(of))
        for key, of in decides.items()
    ]
    show_table(("quota", "value", "set for"), rows)


def _parts(entity: Entity) -> list[tuple[str, int, str | None]]:
    return [(kind, DEFAULT if name is None else EXACT, name) for kind, name in entity]


def _keys_of(entity: Entity) -> tuple[str, ...]:
    return (CONNECTION_CREATION_RATE,) if IP in dict(entity) else _OF_CLIENTS


def _check_keys(entity: Entity, values: Mapping[str, float]) -> None:
    """A usage error for a quota that there is not for such an entity."""
    keys = _keys_of(entity)
    for key in values:
        if key not in keys:
            whom = "an address" if IP in dict(entity) else "users and client ids"
            raise click.UsageError(f"{_options((key,))} is no quota of {whom}: {_options(keys)}")


def _options(keys: tuple[str, ...]) -> str:
    return ", ".join(f"--{key.replace('_', '-')}" for key in keys)


def _words(entity: Entity) -> str:
    """``user ada, client id (default)``."""
    words = {USER: "user", CLIENT_ID: "client id", IP: "address"}
    cells = zip(words.values(), _cells(entity), strict=True)
    return ", ".join(f"{word} {name}" for word, name in cells if name is not None)


def _cells(entity: Entity) -> tuple[str | None, ...]:
    """The names of user, client id and address; None where the entity has none."""
    names = dict(entity)
    return tuple(
        printable_line(names[kind] or _DEFAULT_WORD) if kind in names else None
        for kind in (USER, CLIENT_ID, IP)
    )


def _by_name(entity: Entity) -> tuple[tuple[bool, str], ...]:
    """Users, then client ids without one, then addresses; each by name, its default last."""
    names = dict(entity)
    return tuple(
        (kind not in names, names.get(kind) or chr(0x10FFFF)) for kind in (USER, CLIENT_ID, IP)
    )


def _listed(values: Mapping[str, float]) -> str:
    return ", ".join(f"{key} {_shown(key, value)}" for key, value in values.items())


def _shown(key: str, value: float) -> str:
    """With its unit: ``1.0 MiB/s``, ``200 %``, ``5/s``."""
    if key in _BYTE_RATES:
        exact = f"{value:.0f}"
        return f"{exact} B/s" if value < 1024 else f"{exact} B/s ({size(value)}/s)"
    return f"{value:g} %" if key == REQUEST_PERCENTAGE else f"{value:g}/s"
