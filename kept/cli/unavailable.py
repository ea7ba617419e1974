"""Messages about what is unavailable: partitions that nobody leads, while a command waits and
when that was vain, and of nodes that do not answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

from kept.cli.output import echo
from kept.cli.shell import Failure, did_you_mean
from kept.client.bootstrap import Bootstrap
from kept.client.client import Client
from kept.client.core.broker_errors import NoController
from kept.client.core.metadata import TopicMetadata, parse_bootstrap
from kept.client.json_api import (
    PRESENT_S,
    HttpFailed,
    JsonApi,
    each_node,
    listener_address,
    request_any,
)
from kept.cluster.security.acls import ANONYMOUS
from kept.storage.errors import (
    KafkaStorageError,
    KeptError,
    NotLeaderOrFollower,
    OffsetOutOfRange,
    UnknownTopicOrPartition,
)
from kept.storage.types import TopicPartition

ANSWER_S: Final = 10.0
UNKNOWN_NAME: Final = (400, 404)
"""Statuses with which the API answers, among others, a name that there is not."""


def wait_reporter(bootstrap: Bootstrap) -> Callable[[KeptError], None]:
    """What a :class:`kept.client.client.Client` calls when it waits, or goes on elsewhere: a line
    for each new reason.
    """
    reported: set[str] = set()

    def report(why: KeptError) -> None:
        if str(why) not in reported:
            reported.add(str(why))
            more = _controllers(bootstrap) if isinstance(why, NoController) else ""
            trying = "" if isinstance(why, OffsetOutOfRange) else "; still trying"
            echo(f"kept: {why}{more}{trying}", err=True)

    return report


def _controllers(bootstrap: Bootstrap) -> str:
    """What nodes of kept know of their controller, and which of its voters are there."""
    try:
        summary = request_any(bootstrap, lambda api: api.get("cluster"), PRESENT_S)
    except HttpFailed:
        return ""
    if summary["controller_id"] >= 0:
        return f": node {summary['controller_id']} is taken for it"
    at = {
        broker["node_id"]: listener_address(broker["endpoints"], summary["listener"])
        for broker in summary["brokers"]
    }
    silent = [
        str(voter)
        for voter in summary["voters"]
        if voter in at and not _is_there(bootstrap, at[voter])
    ]
    voters = ", ".join(map(str, summary["voters"]))
    away = f", of which {', '.join(silent)} do{'es' * (len(silent) == 1)} not answer"
    return f": none is elected; the voters are nodes {voters}{away if silent else ''}"


def _is_there(bootstrap: Bootstrap, address: str) -> bool:
    (endpoint,) = parse_bootstrap(address)
    return JsonApi(endpoint, security=bootstrap.security).is_there()


def warn_unanswered(nodes: Iterable[int], so: str) -> None:
    """Report on standard error that nodes do not answer, and what follows from that."""
    numbers = sorted(nodes)
    which = ", ".join(map(str, numbers))
    plural = len(numbers) > 1
    echo(f"kept: node{'s' * plural} {which} do{'es' * (not plural)} not answer; {so}", err=True)


class CommandClient(Client):
    """A client whose user typed the names."""

    def none_of(self, things: str) -> str:
        """That a list is empty: on a secured cluster, what the user may not describe is not in it.
        Whom an access token or a certificate names, only the server knows.
        """
        principal = self.security.principal or "this login"
        seen = "" if principal == ANONYMOUS else f" that {principal} may describe"
        return f"there are no {things}{seen}"

    def topic(self, name: str) -> TopicMetadata:
        """One topic. Raises UnknownTopicOrPartition, which names a topic that may be meant."""
        whole, colon, _ = name.partition(":")
        if colon:
            raise UnknownTopicOrPartition(f"no topic {name}: give the whole topic, {whole}")
        try:
            return super().topic(name)
        except UnknownTopicOrPartition:
            topics = self.metadata().topics.values()
            known = [t.name for t in topics if not t.internal or name.startswith("_")]
            near = did_you_mean(name, known)
            raise UnknownTopicOrPartition(
                f"no topic {name}{near or '; kept topic list shows those that exist'}"
            ) from None


def no_partition(topic: str, number: int | None, count: int) -> Failure:
    """That a topic of ``count`` partitions has no such partition."""
    has = "partition 0 only" if count == 1 else f"partitions 0 to {count - 1}"
    return Failure(f"there is no {topic}:{number}: topic {topic} has {has}")


def named_partitions(
    client: Client, targets: Iterable[tuple[str, int | None]]
) -> list[TopicPartition]:
    """The partitions that (topic, partition or None for all) name, each once. Raises
    UnknownTopicOrPartition, Failure.
    """
    tps: dict[TopicPartition, None] = {}
    for topic, number in targets:
        partitions = client.topic(topic).partitions
        if number is not None and number not in partitions:
            raise no_partition(topic, number, len(partitions))
        numbers = sorted(partitions) if number is None else [number]
        tps |= dict.fromkeys(TopicPartition(topic, each) for each in numbers)
    return list(tps)


@contextmanager
def names_explained(
    bootstrap: Bootstrap, targets: Iterable[tuple[str, int | None]]
) -> Iterator[None]:
    """Where kept's own API refuses a request about ``targets``, and one of them does not exist, the
    error is that of :func:`named_partitions`.
    """
    try:
        yield
    except HttpFailed as error:
        if error.status in UNKNOWN_NAME:
            try:
                with open_client(bootstrap) as client:
                    named_partitions(client, targets)
            except (UnknownTopicOrPartition, Failure):
                raise
            except KeptError:
                raise error from None
        raise


def open_client(bootstrap: Bootstrap) -> CommandClient:
    """A client that reports on standard error what it waits for."""
    return CommandClient(
        bootstrap.servers,
        client_id="kept-cli",
        on_wait=wait_reporter(bootstrap),
        security=bootstrap.security,
    )


@contextmanager
def explained(bootstrap: Bootstrap, topic: str) -> Iterator[None]:
    """An error about a partition that nobody leads is raised as a Failure, with what its nodes know
    about it.
    """
    try:
        yield
    except (KafkaStorageError, NotLeaderOrFollower) as error:
        reasons = _reasons(bootstrap, topic, {w.rstrip(":") for w in str(error).split()})
        if not reasons:
            raise
        raise Failure("; ".join([str(error), *reasons])) from error


def _reasons(bootstrap: Bootstrap, topic: str, named: set[str]) -> list[str]:
    """Why those partitions of a topic that are ``named`` are offline; nothing where nobody of kept
    is there to say.
    """
    reasons: dict[str, None] = {}
    try:
        for number, api in each_node(bootstrap, ANSWER_S).items():
            for partition in api.get(f"topics/{topic}", segments=0)["partitions"]:
                concerned = (
                    f"{topic}:{partition['partition']}" in named and number in partition["replicas"]
                )
                if partition["offline"] and concerned:
                    reasons[f"node {number}: {partition['offline']}"] = None
    except HttpFailed:
        pass
    return list(reasons)
