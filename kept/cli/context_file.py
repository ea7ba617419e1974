"""Contexts: names of clusters in ``$XDG_CONFIG_HOME/kept/contexts.yaml``, and which cluster a
command goes to.

::

    current: staging
    contexts:
      staging:
        bootstrap: kept-0.staging:9092,kept-1.staging:9092
        command-config: /home/ada/.config/kept/staging.properties
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

import click
import msgspec

from kept.cli.shell import Failure, did_you_mean

if TYPE_CHECKING:
    from kept.client.bootstrap import Bootstrap

DEFAULT_BOOTSTRAP: Final = "localhost:9092"

BOOTSTRAP_VARIABLE: Final = "KEPT_BOOTSTRAP"
CONTEXT_VARIABLE: Final = "KEPT_CONTEXT"
COMMAND_CONFIG_VARIABLE: Final = "KEPT_COMMAND_CONFIG"


class Context(
    msgspec.Struct,
    frozen=True,
    rename={"command_config": "command-config"},
    forbid_unknown_fields=True,
    omit_defaults=True,
):
    """How one cluster is reached: ``host:port[,…]`` and, unless empty, the path of a file with the
    properties of a Kafka client.
    """

    bootstrap: str
    command_config: str = ""


class Contexts(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole file: contexts by name, and the one that commands use unless told otherwise."""

    current: str | None = None
    contexts: dict[str, Context] = {}

    def named(self, name: str) -> Context:
        """The context of that name; a Failure that says which there are."""
        context = self.contexts.get(name)
        if context is None:
            known = ", ".join(sorted(self.contexts))
            if not known:
                raise Failure(
                    f"there is no context {name}: none is defined; kept context add makes one"
                )
            near = did_you_mean(name, self.contexts)
            raise Failure(f"there is no context {name}{near or f'; contexts: {known}'}")
        return context


class Target(msgspec.Struct, frozen=True):
    """The cluster a command goes to, by which context if any, and what decided that."""

    bootstrap: str
    command_config: str
    context: str | None
    source: str


def path_of(environ: Mapping[str, str]) -> str:
    """Where the file is, whether it exists or not."""
    base = environ.get("XDG_CONFIG_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".config")
    return os.path.join(base, "kept", "contexts.yaml")


def read_contexts(path: str) -> Contexts:
    """What the file at ``path`` says; nothing where there is none. A Failure names what is wrong
    in it, except that its current context may be none of those it has.
    """
    try:
        with open(path, encoding="utf-8") as source:
            text = source.read()
    except FileNotFoundError:
        return Contexts()
    except UnicodeDecodeError as error:
        raise Failure(f"{path} is not UTF-8 text: {error}") from error
    import yaml

    try:
        tree = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise Failure(f"{path} is not YAML: {error}") from error
    except RecursionError:
        raise Failure(f"{path} is nested too deeply") from None
    try:
        return msgspec.convert({} if tree is None else tree, Contexts)
    except (msgspec.ValidationError, RecursionError) as error:
        raise Failure(f"{path}: {error}") from error


def write_contexts(path: str, contexts: Contexts) -> None:
    """Replace the file at ``path`` as a whole; who interrupts it leaves the old one."""
    import yaml

    os.makedirs(os.path.dirname(path), mode=0o700, exist_ok=True)
    unfinished = f"{path}.{os.getpid()}.new"
    try:
        with open(unfinished, "x", encoding="utf-8") as file:
            yaml.safe_dump(msgspec.to_builtins(contexts), file, sort_keys=False, allow_unicode=True)
        os.replace(unfinished, path)
    finally:
        if os.path.exists(unfinished):
            os.unlink(unfinished)


def resolve(
    bootstrap: str | None,
    context: str | None,
    command_config: str | None,
    environ: Mapping[str, str],
) -> Target:
    """Where a command goes: ``--bootstrap`` or ``--context``, else ``$KEPT_BOOTSTRAP``, else
    ``$KEPT_CONTEXT``, else the current context, else localhost:9092.

    A context's ``command-config`` goes with it and only ``--command-config`` replaces it;
    ``$KEPT_COMMAND_CONFIG`` is for what names none. A UsageError says that an option is empty: an
    unset variable of a script must not let the command go elsewhere. Raises Failure for a context
    that cannot be read.
    """
    for option, given in (("--context", context), ("--command-config", command_config)):
        if given == "":
            raise click.UsageError(f"{option} is empty")
    config = command_config or environ.get(COMMAND_CONFIG_VARIABLE, "")
    if bootstrap is not None:
        return Target(bootstrap, config, None, "--bootstrap")
    servers = environ.get(BOOTSTRAP_VARIABLE, "")
    if context is None and servers:
        check_bootstrap(f"${BOOTSTRAP_VARIABLE}", servers)
        return Target(servers, config, None, f"${BOOTSTRAP_VARIABLE}")
    path = path_of(environ)
    contexts = read_contexts(path)
    from_environment = environ.get(CONTEXT_VARIABLE) or None
    name = context or from_environment or contexts.current
    if name is None:
        return Target(DEFAULT_BOOTSTRAP, config, None, "default")
    if context:
        source = "--context"
    else:
        source = f"${CONTEXT_VARIABLE}" if from_environment else f"current of {path}"
    try:
        chosen = contexts.named(name)
    except Failure as error:
        raise Failure(f"{source}: {error}") from None
    check_bootstrap(f"{path}: {name}: bootstrap", chosen.bootstrap)
    return Target(chosen.bootstrap, command_config or chosen.command_config or config, name, source)


def cluster_of(bootstrap: str | None, context: str | None, command_config: str | None) -> Bootstrap:
    """The cluster that these options, the environment and the current context name."""
    # `kept serve` completes names of settings, and loads nothing of a client.
    from kept.client.bootstrap import Bootstrap, read_security

    if bootstrap is not None and context is not None:
        raise click.UsageError("--bootstrap and --context contradict each other")
    target = resolve(bootstrap, context, command_config, os.environ)
    if not target.command_config:
        return Bootstrap(target.bootstrap)
    security = read_security(target.command_config)
    return Bootstrap(target.bootstrap, security, target.command_config)


def check_bootstrap(what: str, given: str) -> None:
    """A usage error, which begins with ``what``, unless ``given`` is a list of addresses."""
    from kept.client.core.metadata import parse_bootstrap

    try:
        parse_bootstrap(given)
    except ValueError as error:
        raise click.UsageError(f"{what}: {error}") from None
