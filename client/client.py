"""A blocking client of a cluster that speaks the Kafka protocol: kept or Apache Kafka.

::

    with Client("localhost:9092") as client:
        client.create_topic("users", partitions=3, config={"cleanup.policy": "compact"})
        client.produce("users", [OutRecord(b"alice", b"hello")])
        for record in client.read("users"):
            print(record.key, record.value)

Not thread-safe. Every error names host:port or the partition, and the API.
"""

from __future__ import annotations

import random
import secrets
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Self, TypeVar

from kept import __version__
from kept.client.admin import group_survey
from kept.client.admin import groups as group_operations
from kept.client.admin import topics as topic_operations
from kept.client.admin.group_survey import SurveyedGroup
from kept.client.admin.groups import GroupDescription, GroupListing
from kept.client.admin.topics import BROKER, TOPIC, ConfigEntry, NewTopic
from kept.client.consume import fetch as record_operations
from kept.client.consume import leader_offsets as leader_operations
from kept.client.consume.consumer import ConsumedRecord, Consumer
from kept.client.consume.fetch import Fetched, FetchLimits
from kept.client.consume.leader_offsets import OffsetAt, PartitionState
from kept.client.consume.positions import EARLIEST, LATEST
from kept.client.core.authorization_errors import NotAuthorized
from kept.client.core.broker_errors import failure
from kept.client.core.calls import Anywhere, Call, Route
from kept.client.core.client_core import ClientCore
from kept.client.core.metadata import (
    METADATA_MAX_AGE_S,
    ClusterMetadata,
    TopicMetadata,
    parse_bootstrap,
)
from kept.client.partitioner import partition_for
from kept.client.produce import Outgoing, Produced, ProduceOptions, Unwritten, init_producer_id
from kept.client.produce import produce as produce_batches
from kept.client.protocol.messages import Values
from kept.client.security.security import PLAINTEXT, Security
from kept.client.sockets import Sockets, first_failure
from kept.storage.errors import KeptError, PeerError, RetriableError
from kept.storage.records import build_batch
from kept.storage.types import Codec, IsolationLevel, TopicPartition

_T = TypeVar("_T")

TIMEOUT_MS: Final = 30_000
SILENT_MS: Final = 3_000
"""How long an answer waits for a node that says nothing, where it can do without that node."""


class BadAddress(PeerError):
    """A bootstrap address that is not one."""


class OutRecord(NamedTuple):
    """A record to be written. A None value is a tombstone; a None timestamp is now."""

    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...] = ()
    timestamp: int | None = None
    partition: int | None = None


@dataclass(slots=True)
class IdempotentProducer:
    """A producer id for :meth:`Client.produce`, made by :meth:`Client.init_producer`.

    Retries within one ``produce`` are written once; after an error a second ``produce`` may write
    the records again, since ``id`` is -1 then, and the next ``produce`` gets a new one.
    ``sequences``: the sequence number of the next record, by partition.
    """

    id: int
    epoch: int
    sequences: dict[TopicPartition, int] = field(default_factory=dict)


class Client:
    """A connection to a cluster, by any of its nodes.

    ``timeout_ms`` is how long a request is tried again: through an election, say. ``on_wait`` is
    told why one is, when that takes longer than a moment. ``known``: the cluster was there when it
    was asked last, by another process; so where nobody answers that is waited for from the start.
    ``security``: how connections are encrypted and who logs in.

    Times are milliseconds since 1970. What a broker refuses is raised as the error of Kafka's name
    (``kept.storage.errors``: UnknownTopicOrPartition, NonEmptyGroup...), as NotAuthorized, or, for
    a code that has no class, as BrokerError or RetriableBrokerError. Where nobody answers in time
    that is a ConnectionFailed, NoNodeAnswers or NoResponse; an AuthenticationFailed is raised at
    once.
    """

    def __init__(
        self,
        bootstrap: str,
        client_id: str = "kept",
        *,
        timeout_ms: int = TIMEOUT_MS,
        on_wait: Callable[[KeptError], None] | None = None,
        known: bool = False,
        security: Security = PLAINTEXT,
    ) -> None:
        try:
            endpoints = parse_bootstrap(bootstrap)
        except ValueError as error:
            raise BadAddress(str(error)) from None
        self.bootstrap = bootstrap
        self.timeout_ms = timeout_ms
        software = ("kept", __version__)
        self.core = ClientCore(endpoints, client_id, software, security, random.random())
        self.core.reached = known
        self.on_wait = on_wait
        self._count_at: dict[str, float] = {}
        """By topic that is written to: the time.monotonic() at which its partitions are counted
        again.
        """
        self._sockets = Sockets(self.core, on_wait)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Close all connections."""
        self._sockets.close()

    @property
    def security(self) -> Security:
        """How its connections are secured."""
        return self.core.security

    @property
    def view(self) -> ClusterMetadata:
        """What is known of the cluster."""
        return self.core.view

    # Any request.

    def request(
        self,
        api_key: int,
        values: Values | Callable[[int], Values],
        route: Route | None = None,
        *,
        timeout_ms: int | None = None,
        max_version: int = 32767,
    ) -> Any:
        """Send one request and return kio's response object, errors inside it and all."""
        call = Call(api_key, values, route or Anywhere(), max_version=max_version)
        call.timeout_ms = timeout_ms or self.timeout_ms
        return self.call(call)

    def call(self, call: Call) -> Any:
        """Run one call; its response, or its error raised."""
        return self.calls([call])[0]

    def calls(self, calls: Sequence[Call]) -> list[Any]:
        """Run calls side by side; their responses, or the first error raised. In place of the
        response of one that is optional there may be a RetriableError.
        """
        finished = self._sockets.run(calls)
        error = first_failure(
            call
            for call in finished
            if not (call.call.optional and isinstance(call.error, RetriableError))
        )
        if error is not None:
            raise self.named(error)
        return [call.response if call.error is None else call.error for call in finished]

    def run(self, operation: Generator[list[Call], list[Any], _T]) -> _T:
        """Drive an operation of :mod:`kept.client.admin.topics` and its siblings."""
        try:
            calls = next(operation)
            while True:
                try:
                    responses = self.calls(calls)
                except KeptError as error:
                    calls = operation.throw(error)
                else:
                    calls = operation.send(responses)
        except StopIteration as end:
            result: _T = end.value
            return result
        except NotAuthorized as error:
            if (named := self.named(error)) is error:
                raise
            raise named from error

    def named(self, error: KeptError) -> KeptError:
        """An error that says who may not do something, where it is known who this client is."""
        if isinstance(error, NotAuthorized) and self.security.principal:
            return error.named(self.security.principal)
        return error

    # Topics and settings.

    def metadata(
        self, topics: Sequence[str] | None = None, *, auto_create: bool = False
    ) -> ClusterMetadata:
        """Ask for these topics, or for all; the cluster as it is known then."""
        operation = topic_operations.metadata(self.view, topics, auto_create, self.timeout_ms)
        return self.run(operation)

    def topic(self, name: str) -> TopicMetadata:
        """One topic; an error if there is none."""
        view = self.view.topics.get(name)
        if view is None or view.error_code or not view.partitions:
            view = self.metadata([name]).topics.get(name)
        error = failure(3 if view is None else view.error_code, f"Metadata of {name}")
        if error is not None:
            raise self.named(error)
        assert view is not None
        return view

    def create_topics(self, topics: Sequence[NewTopic], *, validate_only: bool = False) -> None:
        """Create topics and wait for their leaders."""
        self.run(topic_operations.create_topics(self.view, topics, self.timeout_ms, validate_only))

    def create_topic(
        self,
        name: str,
        *,
        partitions: int = -1,
        replication_factor: int = -1,
        config: Mapping[str, str] | None = None,
    ) -> None:
        """Create a topic and wait for its leaders."""
        self.create_topics([NewTopic(name, partitions, replication_factor, config or {})])

    def delete_topics(self, names: Sequence[str]) -> None:
        """Delete topics."""
        self.run(topic_operations.delete_topics(names, self.timeout_ms))
        for name in names:
            self.view.forget_topic(name)

    def create_partitions(self, topic: str, count: int) -> None:
        """Raise the number of partitions to ``count``."""
        self.run(topic_operations.create_partitions(self.view, topic, count, self.timeout_ms))

    def alter_topic(
        self, topic: str, config: Mapping[str, str], delete: Sequence[str] = ()
    ) -> None:
        """Set and delete single settings of a topic."""
        self.run(topic_operations.alter_configs(TOPIC, topic, config, delete, self.timeout_ms))

    def alter_broker(
        self,
        node: str,
        config: Mapping[str, str],
        delete: Sequence[str] = (),
        *,
        validate_only: bool = False,
    ) -> None:
        """Set and delete single settings of a node, or of all with ``""``."""
        self.run(
            topic_operations.alter_configs(
                BROKER, node, config, delete, self.timeout_ms, validate_only=validate_only
            )
        )

    def topic_configs(self, names: Sequence[str]) -> dict[str, list[ConfigEntry]]:
        """All settings of these topics."""
        return self.run(topic_operations.describe_configs(TOPIC, names))

    def broker_configs(self, node: str) -> list[ConfigEntry]:
        """All settings of a node; with ``""`` those that are set for all nodes."""
        return self.run(topic_operations.describe_configs(BROKER, [node]))[node]

    def log_sizes(self, topic: str) -> dict[int, int]:
        """Bytes on disk of each partition's leader."""
        return self.run(topic_operations.log_sizes(self.topic(topic)))

    def partition_states(self, topic: str) -> dict[int, PartitionState]:
        """Where each partition that has a leader stands. Who leads and says nothing for
        ``SILENT_MS`` is not waited for, where there are other nodes.
        """
        alone = len(self.view.nodes) == 1
        patience_ms = self.timeout_ms if alone else min(self.timeout_ms, SILENT_MS)
        return self.run(
            leader_operations.partition_states(self.view, self.topic(topic), patience_ms)
        )

    # Writing.

    def produce(
        self,
        topic: str,
        records: Iterable[OutRecord],
        *,
        acks: int = -1,
        codec: Codec = Codec.NONE,
        producer: IdempotentProducer | None = None,
        auto_create: bool = False,
    ) -> list[Produced]:
        """Write records, one batch a partition, and wait for the acknowledgements.

        Records without a partition go where Java's client would put their key; those without a key
        share one partition that has a leader, drawn anew for each call. A batch that is above
        ``max.message.bytes`` or ``segment.bytes`` is split, and those after it before they are
        sent, until Metadata tells of the topic anew, after five minutes at most; with ``acks=0``
        nobody answers, so that one is lost without an error. Raises
        :class:`kept.client.produce.RecordTooLarge` for a record that is too large alone.

        After another error some records may be written: :func:`kept.client.produce.unwritten` says
        which are not, where that is known. A ``producer`` gets a new id after any, because the
        sequence numbers that the brokers expect of the old one are not known.
        """
        if producer is not None and producer.id < 0:
            producer.id, producer.epoch = self._producer_id()
            producer.sequences.clear()
        try:
            out = self.outgoing(
                topic, records, codec=codec, producer=producer, auto_create=auto_create
            )
            done = self.write(
                topic,
                out,
                ProduceOptions(timeout_ms=self.timeout_ms, acks=acks, auto_create=auto_create),
            )
        except BaseException:
            if producer is not None:
                producer.id = -1
            raise
        if acks == 0:
            try:
                self._sockets.flush(self.timeout_ms)
            except KeptError as error:
                raise error from Unwritten(None)
        return done

    def outgoing(
        self,
        topic: str,
        records: Iterable[OutRecord],
        *,
        codec: Codec = Codec.NONE,
        producer: IdempotentProducer | None = None,
        is_transactional: bool = False,
        auto_create: bool = False,
    ) -> Outgoing:
        """The batches that :meth:`produce` writes. Their records count in the sequences of
        ``producer`` from then on.
        """
        view = self.view.topics.get(topic)
        if view is None or not view.partitions:
            view = self._topic_for_produce(topic, auto_create)
        elif time.monotonic() >= self._count_at.get(topic, 0.0):
            view = self._counted_again(view)
        by_partition: dict[int, list[Any]] = {}
        places: dict[int, list[int]] = {}
        now = time.time_ns() // 1_000_000
        led = [p for p, state in view.partitions.items() if state.leader >= 0]
        sticky = secrets.choice(led or list(view.partitions))
        for place, r in enumerate(records):
            where = r.partition
            if where is None:
                where = partition_for(r.key, len(view.partitions), sticky)
            when = now if r.timestamp is None else r.timestamp
            by_partition.setdefault(where, []).append((when, r.key, r.value, r.headers))
            places.setdefault(where, []).append(place)
        batches = {}
        for where, rows in by_partition.items():
            if producer is None:
                batches[where] = build_batch(rows, codec=codec)
                continue
            tp = TopicPartition(topic, where)
            first = producer.sequences.get(tp, 0)
            producer.sequences[tp] = (first + len(rows)) & 0x7FFFFFFF
            batches[where] = build_batch(
                rows,
                codec=codec,
                producer_id=producer.id,
                producer_epoch=producer.epoch,
                base_sequence=first,
                is_transactional=is_transactional,
            )
        return Outgoing(batches, places)

    def write(self, topic: str, out: Outgoing, options: ProduceOptions) -> list[Produced]:
        """Write what :meth:`outgoing` has made; batches that are too large in parts."""
        return self.run(produce_batches(self.view, topic, out.batches, options, out.places))

    def append(self, topic: str, batches: Mapping[int, bytes]) -> list[Produced]:
        """Append a batch that is ready to each of these partitions, as it is, acknowledged by all
        replicas in sync.
        """
        return self.run(
            produce_batches(self.view, topic, batches, ProduceOptions(timeout_ms=self.timeout_ms))
        )

    def _topic_for_produce(self, topic: str, auto_create: bool) -> TopicMetadata:
        if auto_create and not self.metadata([topic], auto_create=True).topics[topic].partitions:
            self.run(_leaders(self.view, topic, self.timeout_ms))
        self._count_at[topic] = time.monotonic() + METADATA_MAX_AGE_S
        return self.topic(topic)

    def _counted_again(self, view: TopicMetadata) -> TopicMetadata:
        """The topic with the partitions that it has now, since the partition of a key depends on
        their number. The known ``view`` where Metadata shows none: the write says what is wrong.
        """
        self._count_at[view.name] = time.monotonic() + METADATA_MAX_AGE_S
        found = self.metadata([view.name]).topics.get(view.name)
        return found if found is not None and found.partitions else view

    def init_producer(self) -> IdempotentProducer:
        """An idempotent producer for :meth:`produce`."""
        return IdempotentProducer(*self._producer_id())

    def _producer_id(self) -> tuple[int, int]:
        return self.run(init_producer_id(self.timeout_ms))

    # Reading.

    def list_offsets(
        self,
        asked: Mapping[TopicPartition, int],
        isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
    ) -> dict[TopicPartition, OffsetAt]:
        """The offset of each partition for a timestamp, LATEST, EARLIEST or MAX_TIMESTAMP."""
        operation = leader_operations.list_offsets(self.view, asked, isolation, self.timeout_ms)
        return self.run(operation)

    def epoch_ends(self, asked: Mapping[TopicPartition, int]) -> dict[TopicPartition, int]:
        """Where that leader epoch ends in the log of each partition, -1 where it is not known."""
        return self.run(leader_operations.epoch_ends(self.view, asked, self.timeout_ms))

    def bounds(
        self, topic: str, partitions: Iterable[int] | None = None
    ) -> dict[int, tuple[int, int]]:
        """Partition -> (log start offset, high watermark), of all or of some partitions."""
        numbers = self.topic(topic).partitions if partitions is None else partitions
        tps = [TopicPartition(topic, p) for p in sorted(numbers)]
        first = self.list_offsets(dict.fromkeys(tps, EARLIEST))
        last = self.list_offsets(dict.fromkeys(tps, LATEST))
        return {tp.partition: (first[tp].offset, last[tp].offset) for tp in tps}

    def delete_records(
        self, before: Mapping[TopicPartition, int]
    ) -> dict[TopicPartition, int | KeptError]:
        """Delete the records below an offset of each partition; its log start then, or why it was
        refused.
        """
        return self.run(leader_operations.delete_records(self.view, before, self.timeout_ms))

    def fetch(
        self,
        positions: Mapping[TopicPartition, int],
        limits: FetchLimits | None = None,
        silent_ms: int = record_operations.SILENT_MS,
    ) -> list[Fetched]:
        """Batches of these partitions from these offsets on; errors come with their partition. A
        leader that says nothing for ``silent_ms`` after ``max_wait_ms`` is not waited for.
        """
        missing = [
            tp.topic
            for tp in positions
            if tp.topic not in self.view.topics or self.view.leader(tp.topic, tp.partition) is None
        ]
        if missing:
            self.metadata(sorted(set(missing)))
        return self.run(
            record_operations.fetch(self.view, positions, limits or FetchLimits(), silent_ms)
        )

    def fetch_partition(
        self,
        tp: TopicPartition,
        offset: int,
        limits: FetchLimits,
        timeout_ms: int,
        *,
        node: int | None = None,
    ) -> Fetched:
        """Batches of one partition from an offset on, from its leader or the replica on ``node``;
        waits for it so long.
        """
        self.topic(tp.topic)
        return self.run(
            record_operations.fetch_partition(self.view, tp, offset, limits, timeout_ms, node=node)
        )

    def read(
        self,
        topic: str,
        partitions: Sequence[int] | None = None,
        *,
        offset: int = EARLIEST,
        isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
    ) -> Iterator[ConsumedRecord]:
        """Every record from ``offset`` to the end as it is now, partition by partition."""
        chosen = sorted(self.topic(topic).partitions) if partitions is None else partitions
        tps = [TopicPartition(topic, partition) for partition in chosen]
        ends = self.list_offsets(dict.fromkeys(tps, LATEST), isolation)
        for tp in tps:
            consumer = Consumer(self, {tp: offset}, FetchLimits(isolation=isolation))
            for batch in consumer.batches_until({tp: ends[tp].offset}):
                yield from batch

    # Groups.

    def list_groups(self, silent: list[int] | None = None) -> list[GroupListing]:
        """All groups. Given ``silent``, a node that says nothing for ``SILENT_MS`` is put there,
        and not waited for.
        """
        self.metadata([])
        return self.run(group_operations.list_groups(silent, SILENT_MS))

    def survey_groups(self, listings: Sequence[GroupListing]) -> list[SurveyedGroup]:
        """Members, committed offsets and lag of groups; who says nothing for ``SILENT_MS`` is not
        waited for.
        """
        return self.run(group_survey.survey_groups(self.view, listings, SILENT_MS))

    def describe_group(self, group: str) -> GroupDescription:
        """One group; state ``Dead`` when there is none."""
        return self.run(group_operations.describe_group(group))

    def delete_group(self, group: str) -> None:
        """Delete a group without members. Raises NonEmptyGroup, GroupIdNotFound."""
        self.run(group_operations.delete_group(group))

    def committed(
        self, group: str, partitions: Iterable[TopicPartition] | None = None
    ) -> dict[TopicPartition, int]:
        """Committed offsets of a group."""
        return self.run(group_operations.fetch_offsets(group, partitions))

    def commit(
        self,
        group: str,
        offsets: Mapping[TopicPartition, int],
        member_id: str = "",
        generation: int = -1,
    ) -> None:
        """Commit offsets for a group: as a member, or from outside when it has none."""
        self.run(group_operations.commit_offsets(group, offsets, member_id, generation))


def _leaders(
    view: ClusterMetadata, topic: str, timeout_ms: int
) -> topic_operations.Operation[None]:
    """Wait until a topic that is being created has leaders."""
    (response,) = yield [topic_operations.await_topics({topic: 1}, timeout_ms)]
    view.update(response, (topic,))
