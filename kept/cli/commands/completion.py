"""``kept completion``: the script that completes commands in a shell."""

from __future__ import annotations

import click

from kept.cli.completion import SHELLS
from kept.cli.shell import COMPLETE_VARIABLE, examples


@click.command(
    epilog=examples(
        'eval "$(kept completion bash)"  # in ~/.bashrc',
        'eval "$(kept completion zsh)"   # in ~/.zshrc, after compinit',
        "kept completion fish > ~/.config/fish/completions/kept.fish",
    )
)
@click.argument("shell", type=click.Choice(list(SHELLS)))
def completion(*, shell: str) -> None:
    """Print the script that completes kept's commands in SHELL.

    It completes commands, options and their values. Names of topics, partitions, groups, users and
    brokers come from the cluster that the command would go to, contexts from kept context.
    """
    root = click.get_current_context().find_root().command
    click.echo(SHELLS[shell](root, {}, "kept", COMPLETE_VARIABLE).source(), nl=False)
