"""``kept transaction``: transactional ids and hanging transactions, on kept or on Apache Kafka."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

import click

from kept.cli.bootstrap_option import bootstrap_option
from kept.cli.completion import TOPIC, TRANSACTIONAL_ID, states_option
from kept.cli.output import counted, echo, moment, show_json, show_table, write
from kept.cli.shell import (
    Failure,
    Group,
    WholeNumber,
    did_you_mean,
    examples,
    for_each,
    json_option,
    show_each,
)
from kept.cli.topic_partition import PartitionCommand, TopicPartitionArgument
from kept.cli.unavailable import named_partitions, open_client, warn_unanswered
from kept.client.admin import transactions
from kept.client.admin.transactions import TransactionDescription
from kept.client.bootstrap import Bootstrap
from kept.client.client import SILENT_MS, Client
from kept.client.produce import init_producer_id
from kept.storage.errors import TransactionalIdNotFound
from kept.storage.printable import printable_line
from kept.storage.types import TopicPartition

OLDER_THAN_S = 1200
"""``transaction.max.timeout.ms`` and five minutes, by default."""


@click.group(cls=Group, epilog=examples("kept transaction list --state Ongoing"))
def transaction() -> None:
    """Show, fence and abort transactions."""


_ids_argument = click.argument(
    "ids", metavar="ID …", nargs=-1, required=True, type=TRANSACTIONAL_ID
)


@transaction.command("list", epilog=examples("kept transaction list --state Ongoing"))
@states_option(transactions.STATES, "Only ids in this state, such as Ongoing.")
@json_option
@bootstrap_option
def list_transactions(*, states: tuple[str, ...], as_json: bool, bootstrap: Bootstrap) -> None:
    """List transactional ids."""
    silent: list[int] = []
    with open_client(bootstrap) as client:
        listed = client.run(transactions.list_transactions(silent, SILENT_MS, states=states))
    if silent:
        warn_unanswered(silent, "ids coordinated there are not listed")
    rows = [asdict(transaction) for transaction in listed]
    if as_json:
        show_json(rows)
    else:
        columns = ("transactional_id", "coordinator", "producer_id", "state")
        show_table(
            ("transactional id", "coordinator", "producer id", "state"),
            [[row[c] for c in columns] for row in rows],
            empty=f"{client.none_of('such ids')}: kept produce --transactional-id ID makes one",
        )


@transaction.command(epilog=examples("kept transaction describe payments"))
@_ids_argument
@json_option
@bootstrap_option
def describe(*, ids: tuple[str, ...], as_json: bool, bootstrap: Bootstrap) -> int:
    """Show the state, producer and partitions of transactional IDs."""
    with open_client(bootstrap) as client:

        def describe_id(transactional_id: str) -> dict[str, Any]:
            found = _existing(client, transactional_id)
            row = asdict(found)
            row["partitions"] = [{"topic": t, "partition": p} for t, p in found.partitions]
            return row

        return show_each(ids, describe_id, _show, as_json)


def _show(row: dict[str, Any]) -> None:
    began = _ago(row["started_ms"]) if row["started_ms"] >= 0 else "-"
    write(
        f"Transactional id: {printable_line(row['transactional_id'])}\nState: {row['state']}\n"
        f"Producer: {row['producer_id']} epoch {row['producer_epoch']}\n"
        f"Timeout: {row['timeout_ms']} ms\nBegan: {began}\n"
    )
    partitions = ", ".join(f"{each['topic']}:{each['partition']}" for each in row["partitions"])
    write(f"Partitions: {partitions or '-'}\n")


def _existing(client: Client, transactional_id: str) -> TransactionDescription:
    """A transactional id; where there is none, an error that names one which may be meant."""
    try:
        return client.run(transactions.describe_transaction(transactional_id))
    except TransactionalIdNotFound as error:
        listed = client.run(transactions.list_transactions([], SILENT_MS))
        near = did_you_mean(transactional_id, [each.transactional_id for each in listed])
        raise TransactionalIdNotFound(
            f"no transactional id {transactional_id}"
            f"{near or '; kept transaction list shows those that exist'}"
        ) from error


@transaction.command(epilog=examples("kept transaction hanging --topic orders"))
@click.option("--topic", "topics", type=TOPIC, multiple=True, help="Only partitions of this topic.")
@click.option(
    "--older-than",
    type=WholeNumber(0),
    default=OLDER_THAN_S,
    show_default=True,
    metavar="SECONDS",
    help="Transactions whose last batch is older than this.",
)
@json_option
@bootstrap_option
def hanging(
    *, topics: tuple[str, ...], older_than: int, as_json: bool, bootstrap: Bootstrap
) -> None:
    """List hanging transactions: open in a partition, and no coordinator will end them."""
    silent: list[int] = []
    with open_client(bootstrap) as client:
        for name in topics:
            client.topic(name)
        view = client.metadata(list(topics) or None)
        partitions = [
            TopicPartition(name, number)
            for name, topic in sorted(view.topics.items())
            for number in sorted(topic.partitions)
            if not topics or name in topics
        ]
        before_ms = round(time.time() * 1000) - 1000 * older_than
        opened = client.run(
            transactions.hanging_transactions(partitions, before_ms, silent, SILENT_MS)
        )
    if silent:
        numbers = ", ".join(map(str, sorted(silent)))
        raise Failure(
            f"{counted(len(silent), 'node')} of the cluster ({numbers}) did not answer and may "
            "coordinate open transactions, so none can be called hanging"
        )
    rows = [asdict(transaction) for transaction in opened]
    if as_json:
        show_json(rows)
        return
    columns = ("topic", "partition", "start_offset", "producer_id", "producer_epoch")
    show_table(
        ("topic", "partition", "start offset", "producer id", "epoch", "last batch"),
        [[*(row[c] for c in columns), _ago(row["last_timestamp_ms"])] for row in rows],
        empty="no transaction hangs",
    )


def _ago(timestamp_ms: int) -> str:
    """A time, and how long ago that is."""
    return f"{moment(timestamp_ms)} ({max(0.0, time.time() - timestamp_ms / 1000):.0f} s ago)"


@transaction.command(
    cls=PartitionCommand,
    epilog=examples("kept transaction abort orders:3 --start-offset 1200"),
)
@click.argument("place", metavar="TOPIC:PARTITION", type=TopicPartitionArgument(whole_topic=False))
@click.option(
    "--start-offset",
    type=WholeNumber(0),
    required=True,
    help="First offset of the transaction, as kept transaction hanging shows it.",
)
@bootstrap_option
def abort(*, place: tuple[str, int], start_offset: int, bootstrap: Bootstrap) -> None:
    """Abort a hanging transaction in a partition, without its coordinator."""
    with open_client(bootstrap) as client:
        (tp,) = named_partitions(client, [place])
        opened = client.run(transactions.abort_transaction(tp, start_offset))
    echo(f"aborted the transaction of producer {opened.producer_id} in {tp.place}")


@transaction.command(epilog=examples("kept transaction fence payments"))
@_ids_argument
@bootstrap_option
def fence(*, ids: tuple[str, ...], bootstrap: Bootstrap) -> int:
    """Fence the producers of transactional IDs: their transactions are aborted, and they must stop.

    Each ID gets a new epoch; a producer with an older one is refused.
    """
    with open_client(bootstrap) as client:

        def fence_id(transactional_id: str) -> str:
            _existing(client, transactional_id)
            producer_id, epoch = client.run(init_producer_id(client.timeout_ms, transactional_id))
            newest = f"producer {producer_id} epoch {epoch} is the newest"
            return f"fenced {printable_line(transactional_id)}: {newest}"

        return for_each(ids, fence_id)
