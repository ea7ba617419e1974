"""What every command shares: lazy groups, common options, exit status, errors of one line.

Exit status: 0 done (also when the reader of our output has enough, as in ``kept consume | head``),
1 it failed, 2 wrong usage, 130 interrupted by Ctrl-C.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kept.storage.errors import KeptError
from kept.storage.printable import printable_line
from kept.storage.types import decimal_number

if TYPE_CHECKING:
    from kept.client.bootstrap import Bootstrap

INTERRUPTED: Final = 130
SUMMARY_COLUMNS: Final = 200
"""Longer than any summary of a command: the formatter wraps, it does not cut."""
DEFAULT_BOOTSTRAP: Final = "localhost:9092"
NO_NODE: Final = "; no node is there: `kept serve` starts one, --bootstrap names another"

_T = TypeVar("_T")
_Function = TypeVar("_Function", bound=Callable[..., Any])


class WholeNumber(click.IntRange):
    """click's, in ASCII digits only: ``int`` takes those of all scripts, and underscores."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; a usage error for any other text."""
        if isinstance(value, str) and not (value.isascii() and "_" not in value):
            self.fail(f"{value!r} is not a valid integer range.", param, ctx)
        return super().convert(value, param, ctx)


class Group(click.Group):
    """A group that lists its commands in the order of their declaration, none cut short."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names in the order in which they were declared."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands in the help: the whole first sentence of each."""
        rows = [(name, self.summary(ctx, name)) for name in self.list_commands(ctx)]
        if rows:
            with formatter.section("Commands"):
                formatter.write_dl(rows)

    def summary(self, ctx: click.Context, name: str) -> str:
        """One line about a command."""
        command = self.get_command(ctx, name)
        return "" if command is None else command.get_short_help_str(limit=SUMMARY_COLUMNS)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """As click's, with the nearest name when there is no such command."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            from difflib import get_close_matches

            near = get_close_matches(args[0], self.list_commands(ctx), n=1) if args else []
            if near and near[0] not in error.message:
                text = f"{error.message.rstrip('.')}. Did you mean {near[0]!r}?"
                raise click.UsageError(text, ctx) from error
            raise


class LazyGroup(Group):
    """A group whose commands are imported when they are run.

    ``commands_at`` maps a command's name to (``module:attribute``, one line of help), so that
    listing the commands imports none of them.
    """

    def __init__(
        self, *args: Any, commands_at: Mapping[str, tuple[str, str]] | None = None, **kwargs: Any
    ) -> None:
        super().__init__(*args, **kwargs)
        self.commands_at = dict(commands_at or {})

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names in the order in which they were declared."""
        return list(self.commands_at)

    def get_command(
        self,
        ctx: click.Context,  # noqa: ARG002
        cmd_name: str,
    ) -> click.Command | None:
        """The command of that name, imported now."""
        if cmd_name not in self.commands_at:
            return None
        module, _, attribute = self.commands_at[cmd_name][0].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def summary(self, ctx: click.Context, name: str) -> str:  # noqa: ARG002
        """One line about a command, without importing it."""
        return self.commands_at[name][1]


def examples(*lines: str) -> str:
    """An epilog that shows ``lines`` as they would be typed."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def bootstrap_option(function: Callable[..., _T]) -> Callable[..., _T]:
    """``--bootstrap`` and ``--command-config``, from ``$KEPT_BOOTSTRAP`` and
    ``$KEPT_COMMAND_CONFIG`` when they are set; both as one argument ``bootstrap``.
    """

    @functools.wraps(function)
    def reached(*args: Any, bootstrap: str, command_config: str | None, **given: Any) -> _T:
        return function(*args, bootstrap=_reached(bootstrap, command_config), **given)

    option = click.option(
        "--command-config",
        metavar="FILE",
        envvar="KEPT_COMMAND_CONFIG",
        show_envvar=True,
        help="How to connect, as properties of a Kafka client: security.protocol, sasl.*, ssl.*.",
    )
    return option(_bootstrap_option(reached))


def _reached(servers: str, command_config: str | None) -> Bootstrap:
    """Warns of a file with secrets that others may read."""
    from kept.client.bootstrap import Bootstrap, read_security, who_else_reads

    if not command_config:
        return Bootstrap(servers)
    security = read_security(command_config)
    if security.has_secrets and (who := who_else_reads(command_config)):
        click.echo(
            f"kept: {command_config} holds secrets and {who} may read it: chmod 600 it", err=True
        )
    return Bootstrap(servers, security, command_config)


def _bootstrap_option(function: _Function) -> _Function:
    return click.option(
        "--bootstrap",
        metavar="HOST:PORT[,…]",
        envvar="KEPT_BOOTSTRAP",
        default=DEFAULT_BOOTSTRAP,
        show_default=True,
        show_envvar=True,
        help="Where the cluster is.",
        callback=_check_bootstrap,
    )(function)


def _check_bootstrap(_context: click.Context, _parameter: click.Parameter, given: str) -> str:
    from kept.client.core.metadata import parse_bootstrap

    try:
        parse_bootstrap(given)
    except ValueError as error:
        raise click.UsageError(f"--bootstrap: {error}") from None
    return given


def json_option(function: _Function) -> _Function:
    """``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


class Failure(KeptError):
    """A command failed; the message says what to do."""


def pairs(name: str, given: Sequence[str]) -> dict[str, str]:
    """``K=V`` arguments as a dict; a UsageError names the one that is not."""
    out: dict[str, str] = {}
    for pair in given:
        key, equals, value = pair.partition("=")
        if not equals or not key.strip():
            raise click.UsageError(f"{name} {pair!r} is not KEY=VALUE")
        if key.strip() in out:
            raise click.UsageError(f"{name} {key.strip()} is given twice")
        out[key.strip()] = value.strip()
    return out


def run(arguments: list[str]) -> int:
    """Run ``kept`` with ``arguments`` and return its exit status. Never raises on purpose."""
    from kept.cli.root import kept

    try:
        # Not kept.main(): that one has its own ideas about Ctrl-C and closed pipes.
        with kept.make_context("kept", arguments) as context:
            status = kept.invoke(context)
        sys.stdout.flush()
    except click.UsageError as error:
        error.show()
        return 2
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except (KeyboardInterrupt, click.Abort):
        return INTERRUPTED
    except BrokenPipeError:
        _forget_stdout()
        return 0
    except click.ClickException as error:
        return _fail(error.format_message())
    except (KeptError, OSError) as error:
        if os.environ.get("KEPT_TRACEBACK"):
            raise
        message = str(error)
        return _fail(message + NO_NODE if message.endswith("connection refused") else message)
    return status if isinstance(status, int) else 0


def _fail(message: str) -> int:
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _forget_stdout()
    print(f"kept: {printable_line(' '.join(message.split()))}", file=sys.stderr)
    return 1


def _forget_stdout() -> None:
    """Keep the interpreter's flush at exit from failing on the closed pipe once more."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)


def topic_and_partition(text: str) -> tuple[str, int | None]:
    """What ``TOPIC`` or ``TOPIC:P`` names; a usage error for any other text."""
    topic, colon, number = text.partition(":")
    partition = decimal_number(number)
    if not topic or (colon and partition is None):
        raise click.UsageError(f"{text!r} is neither TOPIC nor TOPIC:PARTITION")
    return topic, partition
