"""The tree of kept's commands, for tests that hold for all of them."""

from __future__ import annotations

import click


def walk(
    command: click.Command, path: tuple[str, ...] = ()
) -> dict[tuple[str, ...], click.Command]:
    """By path, a command with everything below it; hidden ones too."""
    found = {path: command}
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            child = command.get_command(context, name)
            assert child is not None
            found |= walk(child, (*path, name))
    return found


def leaves(root: click.Command) -> dict[str, click.Command]:
    """The commands that do something, by what is typed: ``topic list``."""
    return {
        " ".join(path): command
        for path, command in walk(root).items()
        if not isinstance(command, click.Group)
    }
