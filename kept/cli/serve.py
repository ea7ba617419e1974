"""``kept serve``: one node in the foreground. Imports nothing that a node does not need."""

from __future__ import annotations

import os
import signal

import click

from kept.cli.shell import examples, pairs


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
@click.option("--check", is_flag=True, help="Check settings, addresses and directories, and leave.")
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
    # Before the imports that take long: process 1 of a container ignores TERM without a handler.
    signal.signal(signal.SIGTERM, lambda number, _frame: os._exit(128 + number))
    from kept.node.config import NodeConfig

    config = NodeConfig.load(
        file, pairs("--set", settings), port=port, data_dir=data_dir, node_id=node_id
    )
    if check:
        from kept.node.address_check import check_addresses, check_directories

        check_addresses(config)
        check_directories(config)
        click.echo(f"settings are right{f' in {file}' if file else ''}")
        return
    from kept.node.process import run

    run(config)
