"""``kept broker``: the settings of brokers, on kept or on Apache Kafka."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Final, TypeVar

import click
from click.shell_completion import CompletionItem

from kept.cli.bootstrap_option import bootstrap_option
from kept.cli.completion import (
    BROKER_SETTING,
    BROKER_SETTING_NAME,
    brokers_of_cluster,
    given_values,
)
from kept.cli.output import echo, show_json, show_table
from kept.cli.shell import Failure, Group, did_you_mean, examples, for_each, json_option, pairs
from kept.cli.unavailable import open_client, warn_unanswered
from kept.client.admin.cluster import describe_members
from kept.client.admin.topics import ConfigEntry
from kept.client.bootstrap import Bootstrap
from kept.client.client import Client
from kept.storage.types import decimal_number

DEFAULT: Final = "default"
"""What stands for all brokers in place of a broker's id."""
_LISTENER: Final = "listener.name."
"""Settings of one listener begin so; DescribeConfigs lists only those that are set."""
_F = TypeVar("_F", bound=Callable[..., Any])
HIDDEN: Final = "(hidden)"


class Target(click.ParamType):  # type: ignore[type-arg]
    """A broker's id, or ``default`` for all that have no value of their own."""

    name = "broker"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """The id without leading zeros, or ``default``; a usage error for any other text."""
        if value == DEFAULT:
            return DEFAULT
        number = decimal_number(value)
        if number is None:
            self.fail(f"{value!r} is neither the id of a broker nor {DEFAULT!r}", param, ctx)
        return str(number)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem[str]]:
        """Ids of brokers and ``default``, without those that the command has already."""
        taken = given_values(ctx, param)
        items = [CompletionItem(DEFAULT, help="all that have no value of their own")]
        items = [item for item in items if item.value.startswith(incomplete)]
        items += brokers_of_cluster(ctx, incomplete)
        return [item for item in items if item.value not in taken]


def _targets(required: bool) -> Callable[[_F], _F]:
    metavar = "BROKER|default …"
    return click.argument(
        "targets",
        metavar=metavar if required else f"[{metavar}]",
        type=Target(),
        nargs=-1,
        required=required,
    )


@click.group(cls=Group, epilog=examples("kept broker config describe 0"))
def broker() -> None:
    """Show and change the settings of brokers."""


@broker.group(
    cls=Group,
    epilog=examples(
        "kept broker config describe",
        "kept broker config set default --config log.cleaner.threads=2",
    ),
)
def config() -> None:
    """Show and change settings: of one broker, or the defaults of all brokers."""


@config.command(
    epilog=examples(
        "kept broker config describe",
        "kept broker config describe 0 1 --name 'log.cleaner.*' --all",
    )
)
@_targets(required=False)
@click.option("--all", "everything", is_flag=True, help="Also show settings at their default.")
@click.option(
    "--name",
    "patterns",
    metavar="NAME",
    multiple=True,
    type=BROKER_SETTING_NAME,
    help="Only this setting; * stands for any text. May be repeated.",
)
@json_option
@bootstrap_option
def describe(
    *,
    targets: tuple[str, ...],
    everything: bool,
    patterns: tuple[str, ...],
    as_json: bool,
    bootstrap: Bootstrap,
) -> int:
    """Show settings of brokers, and the defaults of all brokers.

    Without BROKER those of all. A dynamic setting changes at once; any other one needs a change of
    the broker's file and a restart.
    """
    entries: dict[str, list[ConfigEntry]] = {}
    with open_client(bootstrap) as client:
        brokers, away = _brokers(client)
        _check_brokers(targets, brokers, away)

        def read(target: str) -> None:
            entries[target] = client.broker_configs(_resource(target))

        status = for_each(targets or (DEFAULT, *brokers), read)
    if away and not targets:
        warn_unanswered(away, "its settings are not shown")
    _check_patterns(patterns, entries)
    rows = [
        {
            "broker": target,
            "name": entry.name,
            "value": entry.value,
            "source": entry.source,
            "dynamic": not entry.read_only,
            "sensitive": entry.sensitive,
        }
        for target, its in entries.items()
        for entry in sorted(its)
        if (everything or patterns or entry.source != "default")
        and (not patterns or any(fnmatchcase(entry.name, pattern) for pattern in patterns))
    ]
    if as_json:
        show_json(rows)
        return status
    columns = ("broker", "name", "value", "source", "dynamic")
    show_table(
        columns,
        [
            [HIDDEN if c == "value" and row["sensitive"] else row[c] for c in columns]
            for row in rows
        ],
        empty="" if status else "no such setting is set: --all also shows those at their default",
    )
    return status


@config.command(
    "set",
    epilog=examples(
        "kept broker config set default --config log.cleaner.threads=2",
        "kept broker config set 0 1 --config max.connections=500 --dry-run",
    ),
)
@_targets(required=True)
@click.option(
    "--config",
    "given",
    metavar="K=V",
    multiple=True,
    required=True,
    type=BROKER_SETTING,
    help="A setting and its value; may be repeated.",
)
@click.option("--dry-run", is_flag=True, help="Only check whether it would be accepted.")
@bootstrap_option
def set_config(
    *, targets: tuple[str, ...], given: tuple[str, ...], dry_run: bool, bootstrap: Bootstrap
) -> int:
    """Set settings of brokers; "default" stands for all that have no value of their own.

    Everything is checked before anything is changed.
    """
    changes = pairs("--config", given)
    return _alter(bootstrap, targets, changes, (), dry_run)


@config.command(epilog=examples("kept broker config delete 0 default --name log.cleaner.threads"))
@_targets(required=True)
@click.option(
    "--name",
    "names",
    metavar="NAME",
    multiple=True,
    required=True,
    type=BROKER_SETTING_NAME,
    help="A setting; may be repeated.",
)
@click.option("--dry-run", is_flag=True, help="Only check whether it would be accepted.")
@bootstrap_option
def delete(
    *, targets: tuple[str, ...], names: tuple[str, ...], dry_run: bool, bootstrap: Bootstrap
) -> int:
    """Delete settings of brokers, so that the next value counts.

    That is the default of all brokers, else what the broker's file says, else the built-in default.
    """
    return _alter(bootstrap, targets, {}, names, dry_run)


def _alter(
    bootstrap: Bootstrap,
    targets: Iterable[str],
    changes: Mapping[str, str],
    delete: Sequence[str],
    dry_run: bool,
) -> int:
    """Set and delete settings of all targets, or of none when one is refused."""
    done = [f"{name}={value}" for name, value in changes.items()]
    done += [f"{name} deleted" for name in delete]
    by_words = {
        "all brokers" if target == DEFAULT else f"broker {target}": target for target in targets
    }
    with open_client(bootstrap) as client:
        brokers, away = _brokers(client)
        _check_brokers(by_words.values(), brokers, away)
        _check_names([*changes, *delete], client.broker_configs(brokers[0]))

        def alter(words: str, *, validate_only: bool) -> str:
            target = _resource(by_words[words])
            client.alter_broker(target, changes, delete, validate_only=validate_only)
            return f"{words}: {', '.join(done)}{' (dry run)' * validate_only}"

        def check(words: str) -> str | None:
            accepted = alter(words, validate_only=True)
            return accepted if dry_run else None

        if for_each(list(by_words), check):
            if not dry_run:
                echo("kept: no broker was changed", err=True)
            return 1
        if dry_run:
            return 0
        return for_each(list(by_words), lambda words: alter(words, validate_only=False))


def _resource(target: str) -> str:
    return "" if target == DEFAULT else target


def _brokers(client: Client) -> tuple[list[str], list[int]]:
    """The ids of the brokers that take part, and of those that are fenced."""
    _, members = client.run(describe_members())
    there = [str(member.node_id) for member in members if not member.fenced]
    return there, [member.node_id for member in members if member.fenced]


def _check_brokers(targets: Iterable[str], brokers: Sequence[str], away: Sequence[int]) -> None:
    for target in targets:
        if target in map(str, away):
            raise Failure(f"broker {target} is fenced: it does not answer")
        if target not in (DEFAULT, *brokers):
            raise Failure(f"there is no broker {target}; brokers: {', '.join(brokers)}")


def _check_names(names: Iterable[str], entries: Iterable[ConfigEntry]) -> None:
    """A Failure for a setting that there is not; Apache Kafka takes any name, and does nothing."""
    known = [entry.name for entry in entries]
    for name in names:
        if name not in known and not name.startswith(_LISTENER):
            raise Failure(f"there is no broker setting {name}{did_you_mean(name, known)}")


def _check_patterns(patterns: Iterable[str], entries: Mapping[str, Sequence[ConfigEntry]]) -> None:
    """A Failure for a name without ``*`` that no broker has."""
    if not any(target != DEFAULT for target in entries):
        return  # of the common default there is only what is set
    known = {entry.name for its in entries.values() for entry in its}
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in known):
            raise Failure(f"there is no broker setting {pattern}{did_you_mean(pattern, known)}")
