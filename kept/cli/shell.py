"""What every command shares: lazy groups, common options, several names, errors of one line."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kept.cli.output import echo, show_json, write
from kept.storage.errors import KeptError, NoNode
from kept.storage.printable import printable_line

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

SUMMARY_COLUMNS: Final = 200
"""Longer than any summary of a command: the formatter wraps, it does not cut."""
EXAMPLE_COLUMNS: Final = 76
"""What help has for the lines of an example, which it indents, in a terminal of 80 columns."""
CONTINUED: Final = "    "
NO_NODE: Final = "; no node is there: `kept serve` starts one, --bootstrap names another"

COMPLETE_VARIABLE: Final = "_KEPT_COMPLETE"
"""Set by a shell's completion script (:mod:`kept.cli.completion`)."""

_INTEGER: Final = re.compile(r"\s*[+-]?[0-9]{1,20}\s*", re.ASCII)
_DECIMAL: Final = re.compile(r"\s*[0-9]{1,18}(\.[0-9]{1,18})?\s*", re.ASCII)
_T = TypeVar("_T")
_Function = TypeVar("_Function", bound=Callable[..., Any])


class WholeNumber(click.ParamType):  # type: ignore[type-arg]
    """A number of at least ``least`` and, if it is given, at most ``most``, in ASCII digits:
    ``int`` takes those of all scripts, and underscores.
    """

    name = "number"

    def __init__(self, least: int, most: int | None = None) -> None:
        self.least = least
        self.most = most

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number; a usage error for any other text."""
        if isinstance(value, int):
            return value
        if not _INTEGER.fullmatch(value):
            self.fail(f"{value!r} is not a whole number", param, ctx)
        number = int(value)
        if number < self.least or (self.most is not None and number > self.most):
            above = (
                f"at least {self.least}" if self.most is None else f"{self.least} to {self.most}"
            )
            self.fail(f"{value} is not in the range: {above}", param, ctx)
        return number


def decimal_of(text: str) -> float | None:
    """A number such as 200 or 0.5, None for any other text: ``float`` takes nan and inf, too."""
    return float(text) if _DECIMAL.fullmatch(text) else None


class Seconds(click.ParamType):  # type: ignore[type-arg]
    """A time of at least ``least`` and at most ``most`` seconds, such as 2 or 0.5."""

    name = "seconds"

    def __init__(self, least: float, most: float) -> None:
        self.least = least
        self.most = most

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> float:
        """The seconds; a usage error for any other text."""
        seconds = decimal_of(value) if isinstance(value, str) else float(value)
        if seconds is None or not self.least <= seconds <= self.most:
            self.fail(f"{value!r} is not {self.least:g} to {self.most:g} seconds", param, ctx)
        return seconds


class RenamedOption(click.Option):
    """An option that also goes by ``old_name``, which no help and no completion shows."""

    def __init__(self, *args: Any, old_name: str, **attributes: Any) -> None:
        super().__init__(*args, **attributes)
        self.old_name = old_name

    def add_to_parser(self, parser: Any, ctx: click.Context) -> None:
        """As click's, with the old name."""
        names = self.opts
        self.opts = [*names, self.old_name]
        try:
            super().add_to_parser(parser, ctx)
        finally:
            self.opts = names


class Group(click.Group):
    """A group that lists its commands in the order of their declaration, none cut short."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        """Names in the order in which they were declared."""
        return list(self.commands)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """The list of commands in the help: the whole first sentence of each."""
        rows = [
            (name, self.summary(ctx, name))
            for name in self.list_commands(ctx)
            if not self.is_hidden(ctx, name)
        ]
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
        name = args[0]
        if self.get_command(ctx, name) is None and not name.startswith("-"):
            if ctx.resilient_parsing:
                return None, None, args[1:]
            from difflib import get_close_matches

            near = get_close_matches(name, self.list_commands(ctx), n=1)
            near = near or self._commands_below(ctx, name)
            hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
            raise click.UsageError(f"No such command {name!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

    def _commands_below(self, ctx: click.Context, name: str) -> list[str]:
        """The commands called ``name`` in groups of this one: ``local up`` for ``up``."""
        groups = [(each, self.get_command(ctx, each)) for each in self.list_commands(ctx)]
        return [
            f"{each} {name}"
            for each, group in groups
            if isinstance(group, Group) and name in group.list_commands(ctx)
        ]

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem[str]]:
        """Commands, and after a dash options; no command is imported for it."""
        from click.shell_completion import CompletionItem

        found = [
            CompletionItem(name, help=self.summary(ctx, name))
            for name in self.list_commands(ctx)
            if name.startswith(incomplete) and not self.is_hidden(ctx, name)
        ]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def is_hidden(self, ctx: click.Context, name: str) -> bool:
        """Whether a command is an old spelling, which no list shows."""
        command = self.get_command(ctx, name)
        return command is None or command.hidden


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

    def is_hidden(self, ctx: click.Context, name: str) -> bool:  # noqa: ARG002
        """No: this list has no old spellings."""
        return False

    def summary(self, ctx: click.Context, name: str) -> str:  # noqa: ARG002
        """One line about a command, without importing it."""
        return self.commands_at[name][1]


def examples(*lines: str) -> str:
    """An epilog that shows ``lines`` as they would be typed; long ones in several, with a ``\\``
    where each goes on.
    """
    return "\b\nExample:\n" + "\n".join(f"  {part}" for line in lines for part in _parts(line))


def _parts(line: str) -> list[str]:
    """A command line in lines that a terminal of 80 columns shows whole, broken before an option
    where it can.
    """
    parts = []
    while len(line) > EXAMPLE_COLUMNS:
        found = range(len(CONTINUED) + 1, EXAMPLE_COLUMNS - 1)
        blanks = [at for at in found if line[at] == " " and not _quoted(line[:at])]
        at = max([at for at in blanks if line[at + 1 :].startswith(("--", "| "))] or blanks)
        parts.append(f"{line[:at]} \\")
        line = CONTINUED + line[at + 1 :]
    return [*parts, line]


def _quoted(begin: str) -> bool:
    """Whether a command line that begins so is within quotes."""
    return begin.count("'") % 2 == 1 or begin.count('"') % 2 == 1


def json_option(function: _Function) -> _Function:
    """``--json``."""
    return click.option("--json", "as_json", is_flag=True, help="Print JSON.")(function)


def internal_option(text: str) -> Callable[[_Function], _Function]:
    """``--internal``, with its help."""
    return click.option("--internal", is_flag=True, help=text)


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


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """``; did you mean users?`` where a known name is near, else nothing."""
    from difflib import get_close_matches

    near = get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def for_each(names: Sequence[str], action: Callable[[str], str | None]) -> int:
    """Run ``action`` for each name once, also after one that failed; the exit status of the
    command.

    Prints what each returns, and ``kept: NAME: reason`` to standard error for each that raises a
    KeptError; 1 if any did, else 0. Nobody to connect to ends it with a Failure: that is the same
    for all.
    """
    names = tuple(dict.fromkeys(names))
    failed = 0
    for position, name in enumerate(names):
        try:
            done = action(name)
        except KeptError as error:
            reason = reason_of(error)
            left = names[position + 1 :]
            if isinstance(error, NoNode) and left:
                raise Failure(f"{reason} (not tried: {', '.join(left)})") from error
            if len(names) == 1:
                raise
            sys.stdout.flush()
            echo(f"kept: {printable_line(f'{name}: {reason}')}", err=True)
            failed += 1
        else:
            if done is not None:
                echo(done)
    return int(failed > 0)


def show_each(
    names: Sequence[str],
    describe: Callable[[str], _T],
    show: Callable[[_T], None],
    as_json: bool,
) -> int:
    """Describe each name and show it, with an empty line between two; the exit status of the
    command. As JSON: of one name its description, of several the list of those there are.
    """
    described: list[_T] = []

    def action(name: str) -> None:
        description = describe(name)
        if not as_json:
            if described:
                write("\n")
            show(description)
        described.append(description)

    status = for_each(names, action)
    if as_json:
        show_json(described[0] if len(names) == 1 else described)
    return status


def reason_of(error: Exception) -> str:
    """What an error says, on one line, and what to do when no node is there."""
    message = " ".join(str(error).split())
    return message + NO_NODE if isinstance(error, NoNode) else message
