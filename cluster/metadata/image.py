"""The cluster as the metadata log describes it: one immutable value, and the step to the next one.

An :class:`Image` is a snapshot plus all records applied since. A node acts on the image only, never
on a side channel. :meth:`Image.apply` takes the records of one entry, all or nothing, and returns
the next image with a :class:`Delta` that names what changed; the old image stays valid for whoever
holds it.

Cost: maps share what an entry does not touch (:mod:`kept.cluster.metadata.persistent_map`), so that
one partition record among 100,000 topics, or in a topic of 10,000 partitions, costs some 50
microseconds, and an entry that creates a topic of 10,000 partitions copies nothing 10,000 times.
Indexes are derived, never recorded: ``hosted`` (which replicas a broker has) and ``pending`` (the
partitions that await a decision), so that fencing one broker of 300 looks at its partitions only;
and ``acl_index``.

Shape after ``org.apache.kafka.image``. Ours: one entry is one step, so ``index`` counts entries.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final
from uuid import UUID

from msgspec import Struct, field
from msgspec.structs import replace

from kept.cluster.metadata.persistent_map import Draft, PersistentMap
from kept.cluster.metadata.records import (
    NO_LEADER,
    RECORDS_PER_STEP,
    AclRecord,
    BrokerChangeRecord,
    BrokerRecord,
    ClientQuotaRecord,
    ClusterRecord,
    ConfigRecord,
    Endpoint,
    FeatureRecord,
    MetadataRecord,
    NoOpRecord,
    PartitionRecord,
    ProducerIdsRecord,
    RemoveAclRecord,
    RemoveScramCredentialRecord,
    RemoveTopicRecord,
    ResourceType,
    ScramCredentialRecord,
    TopicRecord,
    UnregisterBrokerRecord,
    VotersRecord,
)
from kept.cluster.metadata.voters import Voter
from kept.cluster.security.acl_index import AclIndex
from kept.cluster.security.acls import AclBinding
from kept.cluster.security.client_quotas import QuotaEntity
from kept.cluster.security.credentials import NOBODY, ScramCredential, ScramMechanism
from kept.steps import Steps, run_to_end
from kept.storage.errors import InvariantViolation
from kept.storage.types import TopicPartition

ResourceKey = tuple[int, str]
"""(:class:`ResourceType`, name): what settings belong to. A broker's name is its id in decimal;
``""`` stands for all brokers."""
CredentialKey = tuple[str, ScramMechanism]
"""(user, mechanism): a user has one credential of each."""

ACLS_PER_STEP: Final = 256
"""Bindings that are indexed at a time, some 10 us each: a step copies what a principal has."""

_NO_CONFIGS: Final[Mapping[str, str]] = {}
_NOTHING_HOSTED: Final[PersistentMap[UUID, tuple[int, ...]]] = PersistentMap()


class BrokerImage(Struct, frozen=True):
    """A registered broker. It takes part when it is neither fenced nor shutting down."""

    broker_id: int
    broker_epoch: int
    incarnation: UUID
    endpoints: tuple[Endpoint, ...]
    rack: str | None
    fenced: bool
    in_controlled_shutdown: bool = False
    directories: tuple[UUID, ...] = ()

    @property
    def active(self) -> bool:
        """It may lead and be in an ISR."""
        return not (self.fenced or self.in_controlled_shutdown)

    def endpoint(self, listener_name: str) -> Endpoint | None:
        """Where the broker is reached by that listener."""
        return next((e for e in self.endpoints if e.name == listener_name), None)


class TopicImage(Struct, frozen=True):
    """A topic. ``partitions[i]`` is the last record of partition i."""

    name: str
    topic_id: UUID
    partitions: tuple[PartitionRecord, ...] = ()


class PartitionChange(Struct, frozen=True):
    """A partition was created (``before`` None) or has a new state."""

    topic_partition: TopicPartition
    before: PartitionRecord | None
    after: PartitionRecord


class Delta(Struct, frozen=True):
    """What one entry, or several in a row, changed.

    A topic that is deleted and created anew under its name appears in both lists, with both ids;
    one that is created and deleted within the delta in neither. ``partitions`` holds each partition
    of ``topics_created`` and each changed one of the others, once. ``acls`` are the ids of bindings
    that came or went.
    """

    topics_created: tuple[TopicImage, ...] = ()
    topics_deleted: tuple[TopicImage, ...] = ()
    partitions: tuple[PartitionChange, ...] = ()
    configs: frozenset[ResourceKey] = frozenset()
    brokers: frozenset[int] = frozenset()
    features: frozenset[str] = frozenset()
    voters: bool = False
    acls: frozenset[UUID] = frozenset()
    credentials: frozenset[CredentialKey] = frozenset()
    quotas: frozenset[QuotaEntity] = frozenset()


class Image(Struct, frozen=True):
    """The metadata after entry ``index`` (0: nothing yet).

    Its mappings are shared between images and must not be changed. ``next_producer_id`` is the
    first that nobody was given.
    """

    index: int = 0
    cluster_id: str | None = None
    topics: Mapping[str, TopicImage] = field(default_factory=PersistentMap)
    topics_by_id: Mapping[UUID, TopicImage] = field(default_factory=PersistentMap)
    colliding: Mapping[str, str] = field(default_factory=PersistentMap)
    configs: Mapping[ResourceKey, Mapping[str, str]] = field(default_factory=PersistentMap)
    brokers: Mapping[int, BrokerImage] = field(default_factory=dict)
    features: Mapping[str, int] = field(default_factory=dict)
    next_producer_id: int = 0
    hosted: Mapping[int, PersistentMap[UUID, tuple[int, ...]]] = field(
        default_factory=PersistentMap
    )
    """Broker -> topic id -> the partitions of which it has a replica, in no order."""
    pending: Mapping[tuple[UUID, int], None] = field(default_factory=PersistentMap)
    """(topic id, partition) of what has no leader, has an ELR or is being reassigned."""
    recovering: Mapping[tuple[UUID, int], None] = field(default_factory=PersistentMap)
    """Those of ``pending`` that wait for an election by length (rule 33)."""
    voters: tuple[Voter, ...] = ()
    acls: Mapping[UUID, AclBinding] = field(default_factory=PersistentMap)
    acl_index: AclIndex = field(default_factory=AclIndex)
    """The bindings of ``acls`` as decisions want them."""
    credentials: Mapping[CredentialKey, ScramCredential] = field(default_factory=PersistentMap)
    decoy_credential: ScramCredential | None = None
    """Nobody's, since no user has an empty name. Of its server key every node makes what a user who
    does not exist is shown.
    """
    quotas: Mapping[QuotaEntity, Mapping[str, float]] = field(default_factory=dict)

    def topic(self, key: str | UUID) -> TopicImage | None:
        """A topic by name or by id."""
        return self.topics.get(key) if isinstance(key, str) else self.topics_by_id.get(key)

    def partition(self, topic: str | UUID, partition: int) -> PartitionRecord | None:
        """A partition's state; None when topic or partition do not exist."""
        image = self.topic(topic)
        if image is None or not 0 <= partition < len(image.partitions):
            return None
        return image.partitions[partition]

    def config(self, resource_type: int, name: str) -> Mapping[str, str]:
        """The settings given explicitly to a topic or broker."""
        return self.configs.get((resource_type, name), _NO_CONFIGS)

    def apply(self, records: Iterable[MetadataRecord]) -> tuple[Image, Delta]:
        """The image after one more entry, and what it changed.

        Raises InvariantViolation when a record contradicts the image (a partition of a topic that
        does not exist): such an entry must never be written.
        """
        return run_to_end(self.apply_in_steps(records))

    def apply_in_steps(self, records: Iterable[MetadataRecord]) -> Steps[tuple[Image, Delta]]:
        """:meth:`apply` for entries of many records: yields after every few."""
        step = _Step(self)
        for number, record in enumerate(records):
            if number % RECORDS_PER_STEP == RECORDS_PER_STEP - 1:
                yield
            step.add(record)
        return (yield from step.finish())

    def records(self) -> Iterator[MetadataRecord]:
        """The shortest list of records that makes this image out of nothing (but its index)."""
        if self.cluster_id is not None:
            yield ClusterRecord(self.cluster_id)
        if self.voters:
            yield VotersRecord(self.voters)
        for name in sorted(self.features):
            yield FeatureRecord(name, self.features[name])
        for broker_id in sorted(self.brokers):
            b = self.brokers[broker_id]
            yield BrokerRecord(
                b.broker_id,
                b.broker_epoch,
                b.incarnation,
                b.endpoints,
                b.rack,
                b.fenced,
                b.directories,
            )
            if b.in_controlled_shutdown:
                yield BrokerChangeRecord(b.broker_id, b.broker_epoch, b.fenced, True)
        for name in sorted(self.topics):
            topic = self.topics[name]
            yield TopicRecord(name, topic.topic_id)
            yield from topic.partitions
        for resource_type, resource_name in sorted(self.configs):
            values = self.configs[resource_type, resource_name]
            for name in sorted(values):
                yield ConfigRecord(resource_type, resource_name, name, values[name])
        if self.decoy_credential is not None:
            yield ScramCredentialRecord(NOBODY, ScramMechanism.SCRAM_SHA_512, self.decoy_credential)
        for user, mechanism in sorted(self.credentials):
            yield ScramCredentialRecord(user, mechanism, self.credentials[user, mechanism])
        for acl_id in sorted(self.acls):
            yield AclRecord(acl_id, self.acls[acl_id])
        for entity in sorted(self.quotas, key=_sortable):
            for name, value in sorted(self.quotas[entity].items()):
                yield ClientQuotaRecord(entity, name, value)
        if self.next_producer_id:
            yield ProducerIdsRecord(-1, -1, self.next_producer_id)


def is_pending(state: PartitionRecord) -> bool:
    """The partition awaits a decision: see ``Image.pending``."""
    return bool(state.leader == NO_LEADER or state.elr or state.adding or state.removing)


def _recovering(state: PartitionRecord) -> bool:
    return state.recovering


def _sortable(entity: QuotaEntity) -> list[tuple[str, bool, str]]:
    """The default (None) after the names."""
    return [(kind, name is None, name or "") for kind, name in entity]


def unify(name: str) -> str:
    """A topic's name as metrics spell it: two names that agree here collide."""
    return name.replace(".", "_")


_KEYED: Final = ("configs", "brokers", "features", "acls", "credentials", "quotas")
"""The maps of which a delta names the keys that were touched."""


class _Step:
    """One entry being applied: the maps it touched, as copies, and the open topics."""

    __slots__ = ("_before", "_changes", "_gone", "_open", "_owned", "_touched", "_values")

    def __init__(self, image: Image) -> None:
        self._before = image
        self._values: dict[str, Any] = {"index": image.index + 1}
        self._owned: dict[str, Any] = {}
        self._open: dict[UUID, tuple[str, list[PartitionRecord]]] = {}
        self._changes: dict[tuple[UUID, int], PartitionRecord | None] = {}
        self._gone: list[TopicImage] = []
        self._touched: dict[str, set[Any]] = {name: set() for name in _KEYED}

    def _own(self, name: str) -> Any:
        """The map of the next image, to be changed: a draft, or a copy of a small one."""
        mine = self._owned.get(name)
        if mine is None:
            before = getattr(self._before, name)
            mine = before.edit() if isinstance(before, PersistentMap) else dict(before)
            self._owned[name] = mine
        return mine

    def _map(self, name: str) -> Mapping[Any, Any]:
        owned = name in self._owned
        mapping: Mapping[Any, Any] = self._owned[name] if owned else getattr(self._before, name)
        return mapping

    def add(self, record: MetadataRecord) -> None:
        match record:
            case PartitionRecord():
                self._partition(record)
            case TopicRecord():
                self._topic(record)
            case ConfigRecord():
                self._config(record)
            case RemoveTopicRecord():
                self._remove_topic(record.topic_id)
            case BrokerRecord():
                self._broker(record)
            case BrokerChangeRecord():
                self._change_broker(record)
            case UnregisterBrokerRecord():
                self._registered(record.broker_id, record.broker_epoch)
                del self._own("brokers")[record.broker_id]
                self._touched["brokers"].add(record.broker_id)
            case ProducerIdsRecord():
                self._producer_ids(record)
            case AclRecord() | RemoveAclRecord():
                self._acl(record)
            case ScramCredentialRecord() | RemoveScramCredentialRecord():
                self._credential(record)
            case ClientQuotaRecord():
                self._quota(record)
            case FeatureRecord():
                self._feature(record)
            case ClusterRecord():
                self._cluster(record)
            case VotersRecord():
                self._values["voters"] = record.voters
            case NoOpRecord():
                pass

    def _topic(self, record: TopicRecord) -> None:
        if record.name in self._map("topics") or record.topic_id in self._map("topics_by_id"):
            raise InvariantViolation(f"topic {record.name} ({record.topic_id}) exists")
        topic = TopicImage(record.name, record.topic_id)
        self._own("topics")[record.name] = topic
        self._own("topics_by_id")[record.topic_id] = topic
        self._open[record.topic_id] = (record.name, [])
        if "." in record.name or "_" in record.name:
            self._own("colliding")[unify(record.name)] = record.name

    def _opened(self, topic_id: UUID) -> tuple[str, list[PartitionRecord]]:
        opened = self._open.get(topic_id)
        if opened is None:
            topic: TopicImage | None = self._map("topics_by_id").get(topic_id)
            if topic is None:
                raise InvariantViolation(f"no topic has id {topic_id}")
            opened = self._open[topic_id] = (topic.name, list(topic.partitions))
        return opened

    def _partition(self, record: PartitionRecord) -> None:
        name, partitions = self._opened(record.topic_id)
        number = record.partition
        if number == len(partitions):
            before = None
            partitions.append(record)
        elif 0 <= number < len(partitions):
            before = partitions[number]
            if record.partition_epoch <= before.partition_epoch:
                raise InvariantViolation(
                    f"{name}-{number}: partition epoch {record.partition_epoch} "
                    f"after {before.partition_epoch}"
                )
            partitions[number] = record
        else:
            raise InvariantViolation(f"partition {number} of {name}: {len(partitions)} is next")
        self._changes.setdefault((record.topic_id, number), before)

    def _remove_topic(self, topic_id: UUID) -> None:
        name, _ = self._opened(topic_id)
        del self._open[topic_id]
        before = self._before.topics_by_id.get(topic_id)
        if before is not None:
            self._gone.append(before)
        del self._own("topics")[name]
        del self._own("topics_by_id")[topic_id]
        if self._map("colliding").get(unify(name)) == name:
            del self._own("colliding")[unify(name)]
        if (ResourceType.TOPIC, name) in self._map("configs"):
            del self._own("configs")[ResourceType.TOPIC, name]
            self._touched["configs"].add((int(ResourceType.TOPIC), name))

    def _config(self, record: ConfigRecord) -> None:
        key = (record.resource_type, record.resource_name)
        configs = self._own("configs")
        values = dict(configs.get(key, _NO_CONFIGS))
        if record.value is None:
            values.pop(record.name, None)
        else:
            values[record.name] = record.value
        if values:
            configs[key] = values
        else:
            configs.pop(key, None)
        self._touched["configs"].add(key)

    def _broker(self, record: BrokerRecord) -> None:
        known: BrokerImage | None = self._map("brokers").get(record.broker_id)
        if known is not None and known.broker_epoch >= record.broker_epoch:
            raise InvariantViolation(
                f"broker {record.broker_id}: epoch {record.broker_epoch} after {known.broker_epoch}"
            )
        self._own("brokers")[record.broker_id] = BrokerImage(
            record.broker_id,
            record.broker_epoch,
            record.incarnation,
            record.endpoints,
            record.rack,
            record.fenced,
            directories=record.directories,
        )
        self._touched["brokers"].add(record.broker_id)

    def _registered(self, broker_id: int, broker_epoch: int) -> BrokerImage:
        broker: BrokerImage | None = self._map("brokers").get(broker_id)
        if broker is None or broker.broker_epoch != broker_epoch:
            raise InvariantViolation(f"no broker {broker_id} with epoch {broker_epoch}")
        return broker

    def _change_broker(self, record: BrokerChangeRecord) -> None:
        broker = self._registered(record.broker_id, record.broker_epoch)
        self._own("brokers")[record.broker_id] = replace(
            broker, fenced=record.fenced, in_controlled_shutdown=record.in_controlled_shutdown
        )
        self._touched["brokers"].add(record.broker_id)

    def _producer_ids(self, record: ProducerIdsRecord) -> None:
        known = self._values.get("next_producer_id", self._before.next_producer_id)
        if record.next_producer_id <= known:
            raise InvariantViolation(f"producer ids below {known} were given away already")
        self._values["next_producer_id"] = record.next_producer_id

    def _feature(self, record: FeatureRecord) -> None:
        if record.level:
            self._own("features")[record.name] = record.level
        else:
            self._own("features").pop(record.name, None)
        self._touched["features"].add(record.name)

    def _acl(self, record: AclRecord | RemoveAclRecord) -> None:
        acls, acl_id = self._own("acls"), record.acl_id
        if isinstance(record, AclRecord) == (acl_id in acls):
            raise InvariantViolation(f"ACL {acl_id}: {'exists' if acl_id in acls else 'no such'}")
        if isinstance(record, AclRecord):
            acls[acl_id] = record.binding
        else:
            del acls[acl_id]
        self._touched["acls"].add(acl_id)

    def _credential(self, record: ScramCredentialRecord | RemoveScramCredentialRecord) -> None:
        if record.user == NOBODY and isinstance(record, ScramCredentialRecord):
            self._values["decoy_credential"] = record.credential
            return
        credentials, key = self._own("credentials"), (record.user, record.mechanism)
        if isinstance(record, ScramCredentialRecord):
            credentials[key] = record.credential
        elif key in credentials:
            del credentials[key]
        else:
            raise InvariantViolation(f"user {key[0]!r} has no credential of {key[1].text}")
        self._touched["credentials"].add(key)

    def _quota(self, record: ClientQuotaRecord) -> None:
        quotas = self._own("quotas")
        values = {**quotas.get(record.entity, {}), record.key: record.value}
        if record.value is None:
            del values[record.key]
        if values:
            quotas[record.entity] = values
        else:
            quotas.pop(record.entity, None)
        self._touched["quotas"].add(record.entity)

    def _cluster(self, record: ClusterRecord) -> None:
        known = self._values.get("cluster_id", self._before.cluster_id)
        if known not in (None, record.cluster_id):
            raise InvariantViolation(f"cluster {known} cannot become {record.cluster_id}")
        self._values["cluster_id"] = record.cluster_id

    def finish(self) -> Steps[tuple[Image, Delta]]:
        """Close the open topics, build indexes, image and delta."""
        for topic_id, (name, partitions) in self._open.items():
            topic = TopicImage(name, topic_id, tuple(partitions))
            self._own("topics")[name] = topic
            self._own("topics_by_id")[topic_id] = topic
            yield
        if self._changes or self._gone:
            yield from self._index()
        if self._touched["acls"]:
            yield from self._index_acls()
        finished: dict[str, Any] = {
            name: mine.finish() if isinstance(mine, Draft) else mine
            for name, mine in self._owned.items()
        }
        image = replace(self._before, **self._values, **finished)
        return image, (yield from self._delta(image))

    def _index(self) -> Steps[None]:
        """Bring ``hosted`` and ``pending`` up to date with what changed."""
        came: dict[tuple[int, UUID], list[int]] = {}
        went: dict[tuple[int, UUID], set[int]] = {}
        for position, ((topic_id, number), before) in enumerate(self._changes.items()):
            if position % RECORDS_PER_STEP == RECORDS_PER_STEP - 1:
                yield
            if topic_id not in self._open:
                continue
            after = self._open[topic_id][1][number]
            if before is None:
                for broker_id in dict.fromkeys(after.replicas):
                    came.setdefault((broker_id, topic_id), []).append(number)
            elif before.replicas != after.replicas:
                for broker_id in set(after.replicas).difference(before.replicas):
                    came.setdefault((broker_id, topic_id), []).append(number)
                for broker_id in set(before.replicas).difference(after.replicas):
                    went.setdefault((broker_id, topic_id), set()).add(number)
            if before is not None or is_pending(after):  # what is recovering is pending
                self._watch(before, after)
        for topic in self._gone:
            for state in topic.partitions:
                for broker_id in state.replicas:
                    went.setdefault((broker_id, topic.topic_id), set()).add(state.partition)
                self._watch(state, None)
                if state.partition % RECORDS_PER_STEP == 0:
                    yield
        if came or went:
            yield from self._rehost(came, went)

    def _index_acls(self) -> Steps[None]:
        """Bring ``acl_index`` up to date, a part of the bindings at a time."""
        index, before, after = self._before.acl_index, self._before.acls, self._owned["acls"]
        touched = sorted(self._touched["acls"])
        for first in range(0, len(touched), ACLS_PER_STEP):
            part = touched[first : first + ACLS_PER_STEP]
            index = index.with_changes(
                added=[after[acl_id] for acl_id in part if acl_id in after],
                removed=[before[acl_id] for acl_id in part if acl_id in before],
            )
            yield
        self._values["acl_index"] = index

    def _watch(self, before: PartitionRecord | None, after: PartitionRecord | None) -> None:
        for index, belongs in (("pending", is_pending), ("recovering", _recovering)):
            if after is not None and belongs(after):
                self._own(index)[after.key] = None
            elif before is not None and belongs(before):
                del self._own(index)[before.key]

    def _rehost(
        self, came: Mapping[tuple[int, UUID], list[int]], went: Mapping[tuple[int, UUID], set[int]]
    ) -> Steps[None]:
        drafts: dict[int, Draft[UUID, tuple[int, ...]]] = {}
        for broker_id, topic_id in dict.fromkeys((*came, *went)):
            draft = drafts.get(broker_id)
            if draft is None:
                known = self._before.hosted.get(broker_id, _NOTHING_HOSTED)
                draft = drafts[broker_id] = known.edit()
            left = went.get((broker_id, topic_id), ())
            numbers = [n for n in draft.get(topic_id, ()) if n not in left]
            numbers += came.get((broker_id, topic_id), ())
            if numbers:
                draft[topic_id] = tuple(numbers)
            else:
                del draft[topic_id]
            yield
        hosted = self._own("hosted")
        for broker_id, draft in drafts.items():
            if len(draft):
                hosted[broker_id] = draft.finish()
            else:
                del hosted[broker_id]

    def _delta(self, image: Image) -> Steps[Delta]:
        old, new = self._before.topics_by_id, image.topics_by_id
        created: list[TopicImage] = []
        for topic_id in self._open:
            if topic_id not in old:
                created.append(new[topic_id])
                yield
        changes: list[PartitionChange] = []
        for position, ((topic_id, number), before) in enumerate(self._changes.items()):
            opened = self._open.get(topic_id)
            if opened is not None:
                topic_partition = TopicPartition(opened[0], number)
                changes.append(PartitionChange(topic_partition, before, opened[1][number]))
            if position % RECORDS_PER_STEP == 0:
                yield
        touched: dict[str, Any] = {name: frozenset(keys) for name, keys in self._touched.items()}
        return Delta(tuple(created), tuple(self._gone), tuple(changes), **touched)


class ImageApplied(Struct, frozen=True):
    """An event of every core that follows the metadata: the image moved on."""

    image: Image
