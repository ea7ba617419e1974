"""``--bootstrap``, ``--context``, ``--command-config``: options of all commands about a cluster."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from kept.cli.completion import CONTEXT
from kept.cli.context_file import DEFAULT_BOOTSTRAP, check_bootstrap, cluster_of
from kept.client.bootstrap import Bootstrap, other_readers

_T = TypeVar("_T")


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


def _warn_of_readers(target: Bootstrap) -> None:
    """Warns of a file with secrets that others may read."""
    file = target.command_config
    if file and target.security.has_secrets and (who := other_readers(file)):
        click.echo(f"kept: {file} holds secrets and {who} may read it: chmod 600 it", err=True)


def _check_bootstrap(
    _context: click.Context, _parameter: click.Parameter, given: str | None
) -> str | None:
    if given is not None:
        check_bootstrap("--bootstrap", given)
    return given
