"""``kept serve``: one node in the foreground. Imports nothing that a node does not need."""

from __future__ import annotations

import gc
import os
import signal
from typing import TYPE_CHECKING

import click

from kept.cli.output import echo
from kept.cli.shell import RenamedOption, WholeNumber, examples, pairs

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem


def _settings(
    ctx: click.Context, param: click.Parameter, incomplete: str
) -> list[CompletionItem[str]]:
    """Completes a setting; a node that serves has no use for what does."""
    from kept.cli.completion import BROKER_SETTING

    return BROKER_SETTING.shell_complete(ctx, param, incomplete)


@click.command(
    epilog=examples(
        "kept serve",
        "kept serve --port 9192 --data-dir /var/lib/kept --set log.segment.bytes=104857600",
        "kept serve --config-file kept.yaml --check",
        "kept serve --add-scram 'SCRAM-SHA-512=[name=admin,password-file=/run/secrets/admin]'",
        "kept serve --adopt --node-id 1 --set log.dirs=/var/lib/kafka/data",
    )
)
@click.option(
    "--config-file",
    "-f",
    "file",
    cls=RenamedOption,
    old_name="--config",
    metavar="FILE",
    type=click.Path(),
    help="YAML file of settings, which have Kafka's names.",
)
@click.option(
    "--port",
    metavar="PORT",
    type=WholeNumber(0, 65535),
    help="Serve on localhost:PORT.  [default: 9092]",
)
@click.option(
    "--data-dir",
    metavar="DIR",
    help="Keep data in DIR/log, metadata in DIR/meta.  [default: ./data]",
)
@click.option("--node-id", metavar="N", type=WholeNumber(0), help="Id of this node.  [default: 0]")
@click.option(
    "--set",
    "settings",
    metavar="K=V",
    multiple=True,
    shell_complete=_settings,
    help="A setting; may be repeated.",
)
@click.option(
    "--add-scram",
    metavar="USER",
    multiple=True,
    help="A user that a new cluster begins with; the same on every voter, ignored where a cluster "
    "exists: SCRAM-SHA-512=[name=admin,password-file=/run/secrets/admin]. May be repeated.",
)
@click.option("--check", is_flag=True, help="Check settings, addresses and directories, and exit.")
@click.option(
    "--adopt",
    is_flag=True,
    help="Take over log.dirs from an Apache Kafka 4.x node that was stopped cleanly. This cannot "
    "be undone.",
)
@click.option(
    "--kafka-metadata",
    metavar="DIR",
    help="With --adopt: Kafka's metadata.log.dir, where it is none of log.dirs.",
)
@click.option(
    "--ignore-security",
    is_flag=True,
    help="With --adopt: go on without Kafka's delegation tokens, and though this node would not "
    "ask for Kafka's ACLs or credentials.",
)
def serve(
    *,
    file: str | None,
    port: int | None,
    data_dir: str | None,
    node_id: int | None,
    settings: tuple[str, ...],
    add_scram: tuple[str, ...],
    check: bool,
    adopt: bool,
    kafka_metadata: str | None,
    ignore_security: bool,
) -> None:
    """Run a node, broker and controller; alone it is a whole cluster.

    It prints one line when it is ready. TERM and INT stop it cleanly.
    """
    if (kafka_metadata or ignore_security) and not adopt:
        raise click.UsageError("--kafka-metadata and --ignore-security need --adopt")
    # Before the imports that take long: process 1 of a container ignores TERM without a handler.
    # Whoever starts it there may have blocked TERM, so that one that comes too soon is not lost.
    signal.signal(signal.SIGTERM, lambda number, _frame: os._exit(128 + number))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    gc.disable()  # imports leave no garbage, and looking for it takes 20 ms; process.run enables it
    from kept.node.config.bootstrap_scram import SETTING
    from kept.node.config.node_config import NodeConfig

    given = pairs("--set", settings)
    if add_scram:
        if SETTING in given:
            raise click.UsageError(f"--add-scram and --set {SETTING} say the same: use one")
        given[SETTING] = ";".join(add_scram)
    config = NodeConfig.load(file, given, port=port, data_dir=data_dir, node_id=node_id)

    def adopt_kafka() -> None:
        from kept.node.kafka_import.adopt import adopt as adopt_directories
        from kept.storage.disk import Disk

        adopt_directories(
            config,
            Disk(),
            kafka_metadata=kafka_metadata,
            ignore_security=ignore_security,
            dry=check,
        )

    if check:
        from kept.node.metadata import preflight

        gc.enable()
        warnings = preflight.check(config, adopting=adopt)
        if adopt:
            adopt_kafka()
        for warning in warnings:
            echo(f"warning: {warning}", err=True)
        echo(f"settings are right{f' in {file}' if file else ''}")
        return
    from kept.node.process import run

    if adopt:
        run(config, before=adopt_kafka)
    else:
        run(config)
