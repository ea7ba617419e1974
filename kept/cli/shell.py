"""What every command shares: lazy groups, common options, exit status, errors of one line.

Exit status: 0 done (also when the reader of our output has enough, as in ``kept consume | head``),
1 it failed, 2 wrong usage, 130 interrupted by Ctrl-C, 143 by TERM.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import signal
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from kept.storage.errors import KeptError, NoNode
from kept.storage.printable import printable_line
from kept.storage.types import decimal_number

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

    from kept.client.bootstrap import Bootstrap

INTERRUPTED: Final = 130
TERMINATED: Final = 128 + signal.SIGTERM
SUMMARY_COLUMNS: Final = 200
"""Longer than any summary of a command: the formatter wraps, it does not cut."""
DEFAULT_BOOTSTRAP: Final = "localhost:9092"
NO_NODE: Final = "; no node is there: `kept serve` starts one, --bootstrap names another"

COMPLETE_VARIABLE: Final = "_KEPT_COMPLETE"
"""Set by a shell's completion script (:mod:`kept.cli.completion`)."""

_T = TypeVar("_T")
_Function = TypeVar("_Function", bound=Callable[..., Any])


class WholeNumber(click.IntRange):
    """click's, in ASCII digits only: ``int`` takes those of all scripts, and underscores."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The number; a usage error for any other text."""
        if isinstance(value, str) and not (value.isascii() and "_" not in value):
            self.fail(f"{value!r} is not a valid integer range.", param, ctx)
        return super().convert(value, param, ctx)


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
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise click.UsageError(f"No such command {name!r}.{hint}", ctx)
        return super().resolve_command(ctx, args)

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
    """An epilog that shows ``lines`` as they would be typed."""
    return "\b\nExample:\n" + "\n".join(f"  {line}" for line in lines)


def bootstrap_option(function: Callable[..., _T]) -> Callable[..., _T]:
    """``--bootstrap``, ``--context`` and ``--command-config``: where the cluster is and how to
    connect, as one argument ``bootstrap`` (:func:`kept.cli.context_file.resolve`).
    """

    @functools.wraps(function)
    def reached(
        *args: Any,
        bootstrap: str | None,
        context: str | None,
        command_config: str | None,
        **given: Any,
    ) -> _T:
        target = cluster_of(bootstrap, context, command_config)
        _warn_of_readers(target)
        return function(*args, bootstrap=target, **given)

    for option in reversed(_bootstrap_options()):
        reached = option(reached)
    return reached


def _bootstrap_options() -> tuple[Callable[[Any], Any], ...]:
    from kept.cli.completion import CONTEXT

    return (
        click.option(
            "--bootstrap",
            metavar="HOST:PORT[,…]",
            help="Where the cluster is.  [env var: KEPT_BOOTSTRAP; default: that of the context, "
            f"else {DEFAULT_BOOTSTRAP}]",
            callback=_check_bootstrap,
        ),
        click.option(
            "--context",
            type=CONTEXT,
            metavar="NAME",
            help="A cluster of kept context.  [env var: KEPT_CONTEXT; default: the current one]",
        ),
        click.option(
            "--command-config",
            metavar="FILE",
            type=click.Path(),
            help="How to connect, as properties of a Kafka client: security.protocol, sasl.*, "
            "ssl.*.  [env var: KEPT_COMMAND_CONFIG]",
        ),
    )


def cluster_of(bootstrap: str | None, context: str | None, command_config: str | None) -> Bootstrap:
    """The cluster that these options, the environment and the current context name."""
    from kept.cli.context_file import resolve
    from kept.client.bootstrap import Bootstrap, read_security

    if bootstrap is not None and context is not None:
        raise click.UsageError("--bootstrap and --context contradict each other")
    target = resolve(bootstrap, context, command_config, os.environ)
    if not target.command_config:
        return Bootstrap(target.bootstrap)
    security = read_security(target.command_config)
    return Bootstrap(target.bootstrap, security, target.command_config)


def _warn_of_readers(target: Bootstrap) -> None:
    """Warns of a file with secrets that others may read."""
    from kept.client.bootstrap import who_else_reads

    file = target.command_config
    if file and target.security.has_secrets and (who := who_else_reads(file)):
        click.echo(f"kept: {file} holds secrets and {who} may read it: chmod 600 it", err=True)


def _check_bootstrap(
    _context: click.Context, _parameter: click.Parameter, given: str | None
) -> str | None:
    if given is not None:
        check_bootstrap("--bootstrap", given)
    return given


def check_bootstrap(what: str, given: str) -> None:
    """A usage error, which begins with ``what``, unless ``given`` is a list of addresses."""
    from kept.client.core.metadata import parse_bootstrap

    try:
        parse_bootstrap(given)
    except ValueError as error:
        raise click.UsageError(f"{what}: {error}") from None


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
    """Run ``action`` for each name, also after one that failed; the exit status of the command.

    Prints what each returns, and ``kept: NAME: reason`` to standard error for each that raises a
    KeptError; 1 if any did, else 0. Nobody to connect to ends it: that is the same for all.
    """
    from kept.cli.output import echo

    failed = 0
    for position, name in enumerate(names):
        try:
            done = action(name)
        except KeptError as error:
            reason = _reason(error)
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
    from kept.cli.output import show_json, write

    described: list[_T] = []

    def action(name: str) -> None:
        description = describe(name)
        if not as_json:
            if described:
                write("\n")
            show(description)
        described.append(description)

    status = for_each(tuple(dict.fromkeys(names)), action)
    if as_json:
        show_json(described[0] if len(names) == 1 else described)
    return status


def run(arguments: list[str]) -> int:
    """Run ``kept`` with ``arguments`` and return its exit status. Never raises on purpose."""
    if sys.stdout is None and arguments[:1] != ["serve"]:
        return _fail("standard output is closed")
    termination = _Termination()
    if arguments[:1] != ["serve"]:  # a node has a handler of its own
        termination.begin()
    try:
        status = _run(arguments)
    finally:
        termination.end()
    return TERMINATED if termination.came else status


class _Termination:
    """TERM ends a command as Ctrl-C does: it leaves its group, aborts its transaction, says how far
    it came. Another TERM, as ``timeout`` sends, does not disturb it in that.
    """

    def __init__(self) -> None:
        self.came = False
        self._before: Any = None

    def begin(self) -> None:
        """Take TERM from now on, also where who started the command has blocked it."""
        self._before = signal.signal(signal.SIGTERM, self._handle)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def end(self) -> None:
        """Leave TERM to what had it before, unless it came: what is left is to exit."""
        if self._before is not None and not self.came:
            signal.signal(signal.SIGTERM, self._before)

    def _handle(self, _number: int, _frame: object) -> None:
        if not self.came:
            self.came = True
            raise KeyboardInterrupt


def _run(arguments: list[str]) -> int:
    from kept.cli.root import kept

    if COMPLETE_VARIABLE in os.environ:
        from kept.cli.completion import complete

        return complete(kept, os.environ[COMPLETE_VARIABLE])
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
        return _fail(_reason(error))
    return status if isinstance(status, int) else 0


def _reason(error: Exception) -> str:
    """What an error says, on one line, and what to do when no node is there."""
    message = " ".join(str(error).split())
    return message + NO_NODE if isinstance(error, NoNode) else message


def _fail(message: str) -> int:
    try:
        if sys.stdout is not None:
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


class TopicPartitionArgument(click.ParamType):  # type: ignore[type-arg]
    """``TOPIC:PARTITION`` as (topic, partition); unless ``whole_topic`` is False, ``TOPIC`` alone
    as (topic, None).
    """

    name = "topic:partition"

    def __init__(self, *, whole_topic: bool = True) -> None:
        self.whole_topic = whole_topic

    def convert(
        self, value: Any, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, int | None]:
        """(topic, partition); a usage error for any other text."""
        if not isinstance(value, str):
            topic, partition = value
            return topic, partition
        topic, partition = topic_and_partition(value)
        if partition is None and not self.whole_topic:
            self.fail(f"{value!r} names no partition: give TOPIC:PARTITION", param, ctx)
        return topic, partition

    def shell_complete(
        self,
        ctx: click.Context,
        param: click.Parameter,
        incomplete: str,
    ) -> list[CompletionItem[str]]:
        """Topics, and behind a colon the partitions of that topic."""
        from kept.cli.completion import topics_and_partitions

        return topics_and_partitions(ctx, param, incomplete, whole_topic=self.whole_topic)


class PartitionCommand(click.Command):
    """A command whose ``TOPIC:PARTITION`` may also be given as ``TOPIC PARTITION``, as it was
    before there was one syntax.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click's; where that fails, once more with the old syntax made the new one."""
        try:
            return super().parse_args(ctx, list(args))
        except click.UsageError:
            for at, (topic, number) in enumerate(itertools.pairwise(args)):
                is_topic = not topic.startswith("-") and ":" not in topic and not topic.isdigit()
                if is_topic and decimal_number(number) is not None:
                    joined = [*args[:at], f"{topic}:{number}", *args[at + 2 :]]
                    with contextlib.suppress(click.UsageError):
                        return super().parse_args(ctx, joined)
            raise
