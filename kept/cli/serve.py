"""``kept serve``: one node in the foreground. Imports nothing that a node does not need."""

from __future__ import annotations

import os

import click

from kept.cli.shell import Failure, examples, pairs

_PORT_SETS = ("listeners",)
_DATA_DIR_SETS = ("log.dirs", "metadata.log.dir")


@click.command(
    epilog=examples(
        "kept serve",
        "kept serve --port 9192 --data-dir /var/lib/kept --set log.segment.bytes=104857600",
        "kept serve --config kept.yaml --check",
    )
)
@click.option("--config", "file", metavar="FILE", help="YAML file of settings, named as Kafka's.")
@click.option(
    "--port",
    metavar="PORT",
    type=click.IntRange(0, 65535),
    help="Serve on localhost:PORT.  [default: 9092]",
)
@click.option(
    "--data-dir",
    metavar="DIR",
    help="Keep data in DIR/log, metadata in DIR/meta.  [default: ./data]",
)
@click.option("--node-id", metavar="N", type=click.IntRange(0), help="This node.  [default: 0]")
@click.option(
    "--set", "settings", metavar="K=V", multiple=True, help="One setting; may be repeated."
)
@click.option("--check", is_flag=True, help="Check the settings and leave.")
def serve(
    *,
    file: str | None,
    port: int | None,
    data_dir: str | None,
    node_id: int | None,
    settings: tuple[str, ...],
    check: bool,
) -> None:
    """Run a node: broker and controller, alone a whole cluster of one.

    It prints one line when it is ready. TERM and INT stop it cleanly.
    """
    overrides = pairs("--set", settings)
    given = set(overrides) | _already_set(file, port is not None or data_dir is not None)
    if port is not None:
        _refuse_both("--port", _PORT_SETS, given)
        overrides["listeners"] = f"PLAINTEXT://localhost:{port}"
    if data_dir is not None:
        _refuse_both("--data-dir", _DATA_DIR_SETS, given)
        overrides["log.dirs"] = os.path.join(data_dir, "log")
        overrides["metadata.log.dir"] = os.path.join(data_dir, "meta")
    if node_id is not None:
        if overrides.get("node.id", str(node_id)) != str(node_id):
            raise click.UsageError("--node-id and --set node.id contradict each other")
        overrides["node.id"] = str(node_id)
    from kept.node.config import NodeConfig

    config = NodeConfig.load(file, overrides)
    if check:
        click.echo(f"settings are right{f' in {file}' if file else ''}")
        return
    from kept.node.server import run

    run(config)


def _already_set(file: str | None, needed: bool) -> set[str]:
    """Names that the file and the environment set; read only when a flag could contradict them."""
    if not needed:
        return set()
    names = {
        name
        for name in (*_PORT_SETS, *_DATA_DIR_SETS)
        if "KEPT_" + name.upper().replace(".", "_") in os.environ
    }
    if file is not None:
        import yaml

        try:
            with open(file, encoding="utf-8") as source:
                names |= _flat(yaml.safe_load(source))
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise Failure(f"{file}: {error}") from error
    return names


def _flat(tree: object, prefix: str = "") -> set[str]:
    """Dotted names of every leaf of a YAML document."""
    if not isinstance(tree, dict):
        return {prefix.rstrip(".")} if prefix else set()
    names: set[str] = set()
    for key, value in tree.items():
        names |= _flat(value, f"{prefix}{key}.")
    return names


def _refuse_both(flag: str, names: tuple[str, ...], given: set[str]) -> None:
    both = [name for name in names if name in given]
    if both:
        raise click.UsageError(f"{flag} and {both[0]} are both given; use one of them")
