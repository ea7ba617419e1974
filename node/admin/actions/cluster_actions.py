"""What operators change by the console: topics, records, committed offsets, settings of brokers.

Each action sends the Kafka request that does it to this node, in the name of whoever wants it: so
it is checked, authorized, forwarded to the controller and recorded in the audit log as those of any
client. Nothing is judged here. What the request is refused for is the ``error`` of the result.
Records and committed offsets go to their leader and coordinator, which may be other nodes: the
rights to them are asked before (``kept.node.http.route_access``).
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from msgspec import Struct

from kept.client.admin.groups import commit_offsets, describe_group, fetch_offsets
from kept.client.admin.topics import (
    BROKER,
    TOPIC,
    NewTopic,
    alter_configs,
    create_partitions_call,
    create_topics_call,
    delete_topics,
    describe_configs,
)
from kept.client.consume.positions import EARLIEST, LATEST
from kept.client.core.calls import Anywhere
from kept.client.partitioner import partition_for
from kept.node.admin.actions.command_lines import CommandLines, moment
from kept.node.admin.records.partition_offsets import LeaderOffsets, offsets_from_leaders
from kept.node.admin.records.partition_records import NewRecord, append
from kept.node.security.client_usage import ClientUsage
from kept.node.security.session import Session
from kept.storage.errors import (
    InvalidRequest,
    KeptError,
    NonEmptyGroup,
    NotLeaderOrFollower,
    ThrottlingQuotaExceeded,
    UnknownTopicOrPartition,
)
from kept.storage.types import TopicPartition

if TYPE_CHECKING:
    from collections.abc import Iterator

    from kept.node.admin.cluster_client import ClusterClient
    from kept.node.admin.topic_lookup import TopicLookup
    from kept.node.metadata.metadata_log import MetadataLog
    from kept.node.runtime.runtime import Runtime

ACTION_S: Final = 15.0
"""How long an action may take."""
DESCRIBE_S: Final = 5.0
"""How long a broker is waited for that is to say its settings."""
ACTION_MS: Final = int(1000 * ACTION_S)
WITHOUT_MEMBERS: Final = ("Empty", "Dead")
"""States of a group whose offsets may be set."""


class Caller(Struct, frozen=True):
    """Who wants an action, and at which address (HOST:PORT): command lines name it."""

    session: Session
    bootstrap: str
    usage: ClientUsage

    @property
    def command_lines(self) -> CommandLines:
        """Command lines that reach the same cluster."""
        return CommandLines(self.bootstrap)


class ActionResult(Struct, frozen=True):
    """What became of an action, and the ``command`` line that does the same."""

    done: bool
    error: str | None
    command: str


class ProduceResult(Struct, frozen=True):
    """Where a record went; None where it was not appended."""

    done: bool
    error: str | None
    command: str
    partition: int | None
    offset: int | None
    timestamp: int | None


class OffsetReset(Struct, frozen=True):
    """The committed offset of a partition, before and after."""

    topic: str
    partition: int
    before: int | None
    after: int


class ResetResult(Struct, frozen=True):
    """What was committed, or with ``dry_run`` would be."""

    done: bool
    error: str | None
    command: str
    dry_run: bool
    partitions: list[OffsetReset]


class BrokerSetting(Struct, frozen=True):
    """A setting as DescribeConfigs says it."""

    name: str
    value: str | None
    source: str
    read_only: bool
    sensitive: bool
    documentation: str | None


class BrokerConfig(Struct, frozen=True):
    """The settings of a broker, by name."""

    broker: int
    settings: list[BrokerSetting]


class ResetTarget(Struct, frozen=True):
    """Where offsets are set to: ``to`` earliest or latest, an ``offset`` that is moved into what
    the log has, or the first record of ``timestamp`` (milliseconds) or later.
    """

    to: str | None = None
    offset: int | None = None
    timestamp: int | None = None

    def check(self) -> None:
        """Raises InvalidRequest unless one of them is given."""
        given = [self.to, self.offset, self.timestamp]
        if sum(one is not None for one in given) != 1:
            raise InvalidRequest("one of to, offset and timestamp is needed")
        if self.to not in (None, "earliest", "latest"):
            raise InvalidRequest(f"to is earliest or latest, not {self.to}")

    @property
    def argument(self) -> str:
        """As the command line has it."""
        if self.timestamp is not None:
            return moment(self.timestamp)
        return str(self.offset if self.to is None else self.to)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterActions:
    """Changes topics, records, committed offsets and settings for operators. ``new_client`` gives a
    client of a session.
    """

    runtime: Runtime
    metadata: MetadataLog
    lookup: TopicLookup
    new_client: Callable[[Session | None], ClusterClient]
    sticky: itertools.count[int] = field(default_factory=itertools.count)

    async def create_topic(
        self,
        caller: Caller,
        topic: str,
        *,
        partitions: int | None,
        replication_factor: int | None,
        config: Mapping[str, str],
        validate_only: bool,
    ) -> ActionResult:
        """Create a topic, or see whether it would be. Raises ThrottlingQuotaExceeded."""
        new = NewTopic(topic, partitions or -1, replication_factor or -1, config)
        with self._client(caller) as client:
            error = await _error_of(
                client.call(create_topics_call([new], ACTION_MS, validate_only))
            )
        command = caller.command_lines.create_topic(topic, partitions, replication_factor, config)
        return ActionResult(error is None and not validate_only, error, command)

    async def alter_topic(
        self,
        caller: Caller,
        topic: str,
        *,
        partitions: int | None,
        changes: Mapping[str, str],
        delete: Sequence[str],
    ) -> ActionResult:
        """Change settings of a topic, then its number of partitions. Raises InvalidRequest,
        ThrottlingQuotaExceeded.
        """
        if partitions is None and not changes and not delete:
            raise InvalidRequest("nothing is to be changed: give partitions, set or delete")
        error = None
        with self._client(caller) as client:
            if changes or delete:
                operation = alter_configs(TOPIC, topic, changes, delete, ACTION_MS)
                error = await _error_of(client.run(operation, patience_s=ACTION_S))
            if error is None and partitions is not None:
                call = create_partitions_call(topic, partitions, ACTION_MS)
                try:
                    error = await _error_of(client.call(call))
                except ThrottlingQuotaExceeded as throttled:
                    if not (changes or delete):
                        raise
                    error = throttled.client_message
                if error is not None and (changes or delete):
                    error = f"the settings are changed, the partitions are not: {error}"
        command = caller.command_lines.alter_topic(topic, partitions, changes, delete)
        return ActionResult(error is None, error, command)

    async def delete_topic(self, caller: Caller, topic: str) -> ActionResult:
        """Delete a topic with its records. Raises ThrottlingQuotaExceeded."""
        with self._client(caller) as client:
            operation = delete_topics([topic], ACTION_MS)
            error = await _error_of(client.run(operation, patience_s=ACTION_S))
        return ActionResult(error is None, error, caller.command_lines.delete_topic(topic))

    # Records.

    async def produce(
        self,
        caller: Caller,
        topic: str,
        record: NewRecord,
        *,
        partition: int | None,
        stamped: bool,
    ) -> ProduceResult:
        """Append a record; done when every replica in sync has it. ``stamped``: its timestamp was
        given. Raises InvalidRequest for a tombstone without a key.
        """
        if record.key is None and record.value is None:
            raise InvalidRequest("value is missing: a tombstone needs a key")
        command = caller.command_lines.produce(topic, partition, record, timestamp=stamped)
        try:
            count = len(self.lookup.topic(topic).partitions)
            if partition is None:
                partition = partition_for(record.key, count, next(self.sticky))
            tp = self.lookup.partition(topic, partition)
            with self._client(caller) as client:
                appended = await append(client, tp, record, ACTION_S, caller.usage)
        except KeptError as error:
            return ProduceResult(False, error.client_message, command, None, None, None)
        return ProduceResult(True, None, command, partition, appended.offset, appended.timestamp)

    # Committed offsets.

    async def reset_offsets(
        self,
        caller: Caller,
        group: str,
        topic: str,
        *,
        partition: int | None,
        target: ResetTarget,
        dry_run: bool,
    ) -> ResetResult:
        """Set committed offsets of a group without members, all or none of them. Raises
        InvalidRequest; NonEmptyGroup where it has members.
        """
        target.check()
        command = caller.command_lines.reset_offsets(
            group, topic, partition, target.argument, dry_run
        )
        rows: list[OffsetReset] = []
        try:
            numbers = range(len(self.lookup.topic(topic).partitions))
            chosen = numbers if partition is None else [partition]
            tps = [self.lookup.partition(topic, number) for number in chosen]
            with self._client(caller) as client:
                described = await client.run(describe_group(group), patience_s=ACTION_S)
                if described.state not in WITHOUT_MEMBERS:
                    raise NonEmptyGroup(f"group {group} is {described.state}: stop its members")
                before = await client.run(fetch_offsets(group, tps), patience_s=ACTION_S)
                after = await self._targets(client, tps, target)
                rows = [OffsetReset(*tp, before.get(tp), offset) for tp, offset in after.items()]
                if not dry_run:
                    await client.run(commit_offsets(group, after), patience_s=ACTION_S)
        except KeptError as error:
            return ResetResult(False, error.client_message, command, dry_run, rows)
        return ResetResult(not dry_run, None, command, dry_run, rows)

    async def _targets(
        self, client: ClusterClient, tps: Sequence[TopicPartition], target: ResetTarget
    ) -> dict[TopicPartition, int]:
        """The offset of each partition. Raises NotLeaderOrFollower where a leader does not say."""
        first = await self._offsets(client, tps, EARLIEST)
        last = await self._offsets(client, tps, LATEST)
        if target.timestamp is not None:
            at = await self._offsets(client, tps, target.timestamp)
            return {tp: at[tp] if at[tp] >= 0 else last[tp] for tp in tps}
        if target.offset is not None:
            return {tp: min(max(target.offset, first[tp]), last[tp]) for tp in tps}
        return first if target.to == "earliest" else last

    async def _offsets(
        self, client: ClusterClient, tps: Sequence[TopicPartition], when: int
    ) -> dict[TopicPartition, int]:
        image = self.metadata.image
        found: LeaderOffsets = await offsets_from_leaders(client, image, dict.fromkeys(tps, when))
        for tp in tps:
            if tp not in found.offsets:
                why = next(iter(found.errors.values()), "it has no leader now")
                raise NotLeaderOrFollower(f"the offsets of {tp.place} are not known: {why}")
        return found.offsets

    # Brokers.

    async def broker_config(self, caller: Caller, broker: int) -> BrokerConfig:
        """The settings of a broker. Raises UnknownTopicOrPartition for one that there is not, and
        what the way to it raises.
        """
        self._check_broker(broker)
        with self._client(caller) as client:
            operation = describe_configs(BROKER, [str(broker)], documentation=True)
            described = await client.run(operation, patience_s=DESCRIBE_S, retry=False)
        entries = sorted(described[str(broker)], key=lambda entry: entry.name)
        settings = [BrokerSetting(*entry) for entry in entries]
        return BrokerConfig(broker, settings)

    async def alter_broker(
        self,
        caller: Caller,
        broker: int | None,
        *,
        changes: Mapping[str, str],
        delete: Sequence[str],
    ) -> ActionResult:
        """Change settings of a broker, or of all of them. Raises InvalidRequest,
        UnknownTopicOrPartition.
        """
        if not changes and not delete:
            raise InvalidRequest("nothing is to be changed: give set or delete")
        if broker is not None:
            self._check_broker(broker)
        name = "" if broker is None else str(broker)
        with self._client(caller) as client:
            operation = alter_configs(BROKER, name, changes, delete, ACTION_MS, route=Anywhere())
            error = await _error_of(client.run(operation, patience_s=ACTION_S))
        command = caller.command_lines.alter_broker(broker, changes, delete)
        return ActionResult(error is None, error, command)

    def _check_broker(self, broker: int) -> None:
        brokers = sorted(self.metadata.image.brokers) or [self.lookup.node_id]
        if broker not in brokers:
            there = ", ".join(map(str, brokers))
            raise UnknownTopicOrPartition(f"there is no broker {broker}; brokers: {there}")

    @contextmanager
    def _client(self, caller: Caller) -> Iterator[ClusterClient]:
        client = self.new_client(caller.session)
        try:
            yield client
        finally:
            client.close()


async def _error_of(work: Awaitable[object]) -> str | None:
    """Why a request was refused; None: it was done. Raises ThrottlingQuotaExceeded."""
    try:
        await work
    except ThrottlingQuotaExceeded:
        raise
    except KeptError as error:
        return error.client_message
    return None
