"""``kept user``: who may log in by SASL SCRAM, on kept or on Apache Kafka.

A password comes from a prompt, a file or standard input, never from an argument: every process of
the machine may read those.
"""

from __future__ import annotations

import sys
from typing import BinaryIO

import click

from kept.cli.bootstrap_option import bootstrap_option
from kept.cli.completion import USER
from kept.cli.output import echo, show_json, show_table
from kept.cli.shell import (
    Failure,
    Group,
    WholeNumber,
    did_you_mean,
    examples,
    for_each,
    json_option,
)
from kept.cli.unavailable import open_client
from kept.client.admin import users
from kept.client.bootstrap import Bootstrap
from kept.client.client import Client
from kept.client.security.plain import read_password
from kept.storage.printable import printable_line

MECHANISM = "SCRAM-SHA-512"
ITERATIONS = 8192
MAX_LINE_BYTES = 4096

password_option = click.option(
    "--password-file",
    type=click.File("rb"),
    metavar="FILE",
    help="File whose first line is the password; - is standard input.  [default: a prompt]",
)
iterations_option = click.option(
    "--iterations",
    type=WholeNumber(4096, 16_384),
    default=ITERATIONS,
    show_default=True,
    help="How often the password is hashed: 4096 to 16384.",
)


@click.group(cls=Group, epilog=examples("kept user add ada --password-file ada.password"))
def user() -> None:
    """Add, list and delete users who log in by SCRAM."""


@user.command(epilog=examples("kept user add ada", "pass ada | kept user add ada"))
@click.argument("name")
@click.option(
    "--mechanism",
    type=click.Choice(sorted(users.MECHANISMS)),
    default=MECHANISM,
    show_default=True,
    help="How the user logs in.",
)
@iterations_option
@password_option
@bootstrap_option
def add(
    *,
    name: str,
    mechanism: str,
    iterations: int,
    password_file: BinaryIO | None,
    bootstrap: Bootstrap,
) -> None:
    """Add user NAME with a password, or another mechanism to a user who exists."""
    with open_client(bootstrap) as client:
        if mechanism in _mechanisms(client, name):
            raise Failure(
                f"user {printable_line(name)} has a password for {mechanism}: kept user passwd "
                "changes it"
            )
        password = _read_password(name, password_file)
        client.run(users.set_password(name, mechanism, password, iterations))
    echo(f"added user {printable_line(name)} with {mechanism}")


@user.command(epilog=examples("kept user passwd ada --password-file ada.password"))
@click.argument("name", type=USER)
@iterations_option
@password_option
@bootstrap_option
def passwd(
    *,
    name: str,
    iterations: int,
    password_file: BinaryIO | None,
    bootstrap: Bootstrap,
) -> None:
    """Change the password of user NAME, for all mechanisms that the user has.

    Clients that are connected stay connected.
    """
    with open_client(bootstrap) as client:
        mechanisms = _existing(client, name)
        password = _read_password(name, password_file)
        for mechanism in mechanisms:
            client.run(users.set_password(name, mechanism, password, iterations))
    echo(f"changed the password of {printable_line(name)} for {', '.join(mechanisms)}")


@user.command(epilog=examples("kept user delete ada", "kept user delete ada bob"))
@click.argument("names", metavar="NAME …", nargs=-1, required=True, type=USER)
@click.option(
    "--mechanism",
    type=click.Choice(sorted(users.MECHANISMS)),
    help="Only the password for this mechanism.  [default: all]",
)
@bootstrap_option
def delete(*, names: tuple[str, ...], mechanism: str | None, bootstrap: Bootstrap) -> int:
    """Delete users: they cannot log in any more, and kept closes their connections."""
    with open_client(bootstrap) as client:

        def delete_user(name: str) -> str:
            mechanisms = [mechanism] if mechanism else _existing(client, name)
            for each in mechanisms:
                client.run(users.delete_password(name, each))
            return f"deleted the password of {printable_line(name)} for {', '.join(mechanisms)}"

        return for_each(names, delete_user)


@user.command("list", epilog=examples("kept user list"))
@json_option
@bootstrap_option
def list_users(*, as_json: bool, bootstrap: Bootstrap) -> None:
    """List users and their mechanisms."""
    with open_client(bootstrap) as client:
        listed = client.run(users.describe_users())
    rows = [(one.user, one.mechanism, one.iterations) for one in sorted(listed, key=_by_name)]
    if as_json:
        columns = ("user", "mechanism", "iterations")
        show_json([dict(zip(columns, row, strict=True)) for row in rows])
    else:
        empty = "there are no users yet: kept user add NAME makes one"
        show_table(("user", "mechanism", "iterations"), rows, empty=empty)


def _by_name(credential: users.UserCredential) -> tuple[str, str]:
    return credential.user, credential.mechanism


def _mechanisms(client: Client, name: str) -> list[str]:
    return sorted(one.mechanism for one in client.run(users.describe_users((name,))))


def _existing(client: Client, name: str) -> list[str]:
    mechanisms = _mechanisms(client, name)
    if not mechanisms:
        known = {credential.user for credential in client.run(users.describe_users())}
        near = did_you_mean(name, known) or "; kept user list shows those that exist"
        raise Failure(f"no user {printable_line(name)}{near}")
    return mechanisms


def _read_password(name: str, file: BinaryIO | None) -> str:
    if file is None and sys.stdin.isatty():
        what = f"Password of {printable_line(name)}"
        prompted: str = click.prompt(what, hide_input=True, confirmation_prompt=True, err=True)
        line = prompted.encode("utf-8", "surrogateescape")
    else:
        line = (file or sys.stdin.buffer).readline(MAX_LINE_BYTES)
    try:
        return read_password(line)
    except ValueError as error:
        raise Failure(str(error)) from None
