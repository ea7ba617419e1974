"""``kept context``: names for clusters, so that a command needs no addresses."""

from __future__ import annotations

import os

import click

from kept.cli.completion import CONTEXT
from kept.cli.context_file import (
    Context,
    Contexts,
    Target,
    check_bootstrap,
    path_of,
    read_contexts,
    resolve,
    write_contexts,
)
from kept.cli.output import echo, show_json, show_table, write
from kept.cli.shell import Group, examples, for_each, json_option


@click.group(
    cls=Group,
    epilog=examples(
        "kept context add staging --bootstrap kept-0.staging:9092 --command-config ada.properties",
        "kept context use staging",
        "kept topic list --context production",
    ),
)
def context() -> None:
    """Name clusters, and choose the one that commands go to.

    A command goes to --bootstrap or --context, else to $KEPT_BOOTSTRAP, else to $KEPT_CONTEXT,
    else to the current context, else to localhost:9092.
    """


@context.command("list", epilog=examples("kept context list", "kept context list --json"))
@json_option
def list_contexts(*, as_json: bool) -> None:
    """List all contexts; the current one has a star."""
    contexts = read_contexts(path_of(os.environ))
    rows = [
        {
            "name": name,
            "current": name == contexts.current,
            "bootstrap": known.bootstrap,
            "command_config": known.command_config or None,
        }
        for name, known in sorted(contexts.contexts.items())
    ]
    if as_json:
        show_json(rows)
        return
    show_table(
        ("", "name", "bootstrap", "command config"),
        [
            ("*" if row["current"] else "", row["name"], row["bootstrap"], row["command_config"])
            for row in rows
        ],
        empty="there are no contexts yet: kept context add NAME --bootstrap HOST:PORT makes one",
    )


@context.command(epilog=examples("kept context show", "kept context show staging --json"))
@click.argument("name", required=False, type=CONTEXT)
@json_option
def show(*, name: str | None, as_json: bool) -> None:
    """Show where commands go and what decides that; with NAME, that context."""
    if name is None:
        target = resolve(None, None, None, os.environ)
    else:
        known = read_contexts(path_of(os.environ)).named(name)
        target = Target(known.bootstrap, known.command_config, name, "NAME")
    shown = {
        "context": target.context,
        "bootstrap": target.bootstrap,
        "command_config": target.command_config or None,
        "decided_by": target.source,
    }
    if as_json:
        show_json(shown)
        return
    for label, value in shown.items():
        write(f"{label.replace('_', ' ').capitalize()}: {'-' if value is None else value}\n")


@context.command(
    epilog=examples(
        "kept context add local --bootstrap localhost:9092",
        "kept context add staging --bootstrap a:9092,b:9092 --command-config ada.properties",
    )
)
@click.argument("name")
@click.option("--bootstrap", metavar="HOST:PORT[,…]", required=True, help="Where the cluster is.")
@click.option(
    "--command-config",
    metavar="FILE",
    type=click.Path(exists=True, dir_okay=False),
    help="How to connect, as properties of a Kafka client.",
)
def add(*, name: str, bootstrap: str, command_config: str | None) -> None:
    """Add context NAME, or replace it. The first one becomes the current one."""
    if not name or not name.isprintable() or any(c.isspace() for c in name):
        raise click.UsageError(f"{name!r} is no name of a context: give one without spaces")
    check_bootstrap("--bootstrap", bootstrap)
    if command_config is not None:
        from kept.client.bootstrap import read_security

        read_security(command_config)
    path = path_of(os.environ)
    before = read_contexts(path)
    known = Context(bootstrap, os.path.abspath(command_config) if command_config else "")
    current = before.current if before.current in before.contexts else name
    write_contexts(path, Contexts(current, {**before.contexts, name: known}))
    done = "replaced" if name in before.contexts else "added"
    echo(f"{done} context {name}{', which is the current one' if current == name else ''}")


@context.command(epilog=examples("kept context use staging"))
@click.argument("name", type=CONTEXT)
def use(*, name: str) -> None:
    """Make NAME the current context."""
    path = path_of(os.environ)
    before = read_contexts(path)
    known = before.named(name)
    write_contexts(path, Contexts(name, before.contexts))
    echo(f"commands go to {name}, at {known.bootstrap}")
    for variable in ("KEPT_BOOTSTRAP", "KEPT_CONTEXT"):
        if os.environ.get(variable):
            echo(f"kept: ${variable} is set: commands go there instead", err=True)


@context.command(epilog=examples("kept context remove staging"))
@click.argument("names", metavar="NAME …", nargs=-1, required=True, type=CONTEXT)
def remove(*, names: tuple[str, ...]) -> int:
    """Remove contexts; the clusters stay as they are."""
    path = path_of(os.environ)

    def remove_context(name: str) -> str:
        before = read_contexts(path)
        before.named(name)
        left = {other: known for other, known in before.contexts.items() if other != name}
        current = before.current if before.current in left else None
        write_contexts(path, Contexts(current, left))
        gone = before.current == name
        return f"removed context {name}{'; there is no current one now' if gone else ''}"

    return for_each(names, remove_context)
