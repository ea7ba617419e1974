"""The root command ``kept`` and the list of its commands."""

from __future__ import annotations

import click

import kept as package
from kept.cli.shell import LazyGroup, examples

COMMANDS = {
    "serve": ("kept.cli.commands.serve:serve", "Run a node."),
    "local": ("kept.cli.commands.local:local", "Run nodes on this machine, in the background."),
    "topic": ("kept.cli.commands.topic:topic", "Create, list, describe, alter and delete topics."),
    "produce": ("kept.cli.commands.produce:produce", "Write lines from standard input to a topic."),
    "consume": ("kept.cli.commands.consume:consume", "Print the records of a topic."),
    "group": ("kept.cli.commands.group:group", "List, describe, reset and delete consumer groups."),
    "transaction": (
        "kept.cli.commands.transaction:transaction",
        "Show, fence and abort transactions.",
    ),
    "user": ("kept.cli.commands.user:user", "Add, list and delete users who log in by SCRAM."),
    "acl": ("kept.cli.commands.acl:acl", "Say who may do what: add, list, delete and check ACLs."),
    "quota": (
        "kept.cli.commands.quota:quota",
        "Limit how much users, client ids and addresses may use.",
    ),
    "broker": ("kept.cli.commands.broker:broker", "Show and change the settings of brokers."),
    "compact": ("kept.cli.commands.compact:compact", "See, start and explain compaction."),
    "cluster": (
        "kept.cli.commands.cluster:cluster",
        "Show the cluster; move leaders and replicas, change voters.",
    ),
    "top": (
        "kept.cli.commands.top:top",
        "Show what moves now: nodes, topics and groups with their rates.",
    ),
    "spark": (
        "kept.cli.commands.spark:spark",
        "Read topics with Spark: tables, analyses, audits, exports.",
    ),
    "context": (
        "kept.cli.commands.context:context",
        "Name clusters, and choose where commands go.",
    ),
    "completion": (
        "kept.cli.commands.completion:completion",
        "Print the script that completes commands in a shell.",
    ),
    "log": ("kept.cli.commands.log:log", "Inspect files of a data directory, offline."),
}


@click.group(
    cls=LazyGroup,
    commands_at=COMMANDS,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog=examples(
        "kept serve &",
        "kept topic create users --config cleanup.policy=compact",
        "echo 'alice:hello' | kept produce users --key-separator :",
        "kept consume users --table",
    ),
)
@click.version_option(package.__version__, prog_name="kept", message="%(prog)s %(version)s")
def kept() -> None:
    """A commit log that speaks Kafka and keeps the latest record of every key."""
