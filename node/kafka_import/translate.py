"""Kafka's metadata records become kept's: a pure machine that is fed the one and gives the other.

It holds what Kafka's log says so far. :meth:`Translation.add` takes the records of one batch;
:meth:`Translation.step` gives the records of kept that the batch comes to. Every node that is
adopted translates its own copy of the log, and what they make must be equal entry by entry, so the
outcome depends on the records and their order alone: no settings of this node, no clock, no chance.

What differs:

- a change of a partition is written as its whole new state;
- a partition whose ISR is empty has its eligible leaders (KIP-966) for an ISR: they hold all that
  was committed, and kept has no such list beside the ISR;
- of brokers the address is left out: each registers anew, at another one;
- a topic's settings that kept does not know, settings of anything but topics and brokers, feature
  levels and delegation tokens are left out; :class:`NotTranslated` counts them.

ACLs, SCRAM credentials and client quotas say the same in both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Final
from uuid import UUID

from kept.cluster.metadata import records as ours
from kept.cluster.metadata.records import MetadataRecord, ResourceType
from kept.cluster.security.client_quotas import (
    Alteration,
    QuotaEntity,
    check_alteration,
    describe_entity,
)
from kept.node.config.definitions import BROKER_SETTINGS, TOPIC_SETTINGS
from kept.node.kafka_import import kafka_records
from kept.node.kafka_import.kafka_records import KafkaRecord
from kept.storage.errors import CorruptMessage, InvalidConfig, InvalidRequest

_RESOURCES: Final = {2: "topic", 4: "broker", 8: "broker logger", 16: "client metrics", 32: "group"}
_WITHOUT_SECRETS: Final = frozenset({2, 16, 32})
"""Resources none of whose settings is a password in Kafka."""
_KNOWN_SETTINGS: Final = {
    int(ResourceType.TOPIC): TOPIC_SETTINGS,
    int(ResourceType.BROKER): BROKER_SETTINGS,
}
METADATA_VERSION: Final = "metadata.version"
NEWEST_METADATA_VERSION: Final = 30
"""4.3-IV0."""


@dataclass(slots=True)
class NotTranslated:
    """What Kafka's metadata hold that kept does not serve."""

    tokens: set[str] = field(default_factory=set)
    """Ids of delegation tokens."""
    settings: dict[tuple[int, str, str], str] = field(default_factory=dict)
    """(resource type, name, setting) -> value."""
    features: dict[str, int] = field(default_factory=dict)

    def described(self) -> Iterator[str]:
        """A line for each sort of thing that is not taken over. What is not known of a broker's
        settings may be a password, such as of a listener's key store or JAAS: they are named only.
        """
        if self.tokens:
            yield f"{len(self.tokens)} delegation tokens"
        for (of, name, setting), value in sorted(self.settings.items()):
            shown = value if of in _WITHOUT_SECRETS else "[hidden]"
            yield f"{_RESOURCES.get(of, 'resource')} {name or '(all)'}: {setting}={shown}"


@dataclass(slots=True)
class _Touched:
    """What changed since the last step."""

    topics_gone: list[UUID] = field(default_factory=list)
    partitions: set[tuple[UUID, int]] = field(default_factory=set)
    brokers: set[int] = field(default_factory=set)
    settings: dict[tuple[int, str, str], None] = field(default_factory=dict)
    security: list[kafka_records.Security] = field(default_factory=list)


class Translation:
    """Translates Kafka's metadata records to kept's."""

    def __init__(self) -> None:
        self.left = NotTranslated()
        self.topics: dict[UUID, str] = {}
        self.partitions: dict[tuple[UUID, int], kafka_records.Partition] = {}
        self.brokers: dict[int, kafka_records.RegisterBroker] = {}
        self.settings: dict[tuple[int, str, str], str] = {}
        self.quotas: dict[tuple[QuotaEntity, str], float] = {}
        self.next_producer_id = 0
        self._touched = _Touched()
        self._emitted_topics: dict[UUID, int] = {}  # how many partitions of it were given out
        self._emitted_brokers: dict[int, int] = {}  # its epoch
        self._emitted_producer_id = 0
        self._transaction: list[KafkaRecord] | None = None

    # Kafka's side.

    def add(self, records: Iterable[KafkaRecord]) -> None:
        """Apply the records of a batch; those of an open transaction wait for its end.

        Raises CorruptMessage where they contradict what came before.
        """
        for record in records:
            if isinstance(record, kafka_records.Transaction):
                held = self._transaction or ()
                self._transaction = [] if record.what == "begin" else None
                if record.what == "end":
                    for inner in held:
                        self._add(inner)
            elif self._transaction is not None:
                self._transaction.append(record)
            else:
                self._add(record)

    def _add(self, record: KafkaRecord) -> None:
        match record:
            case kafka_records.Topic(name, topic_id):
                self.topics[topic_id] = name
            case kafka_records.RemoveTopic(topic_id):
                self._remove_topic(topic_id)
            case kafka_records.Partition():
                self._partition(record)
            case kafka_records.ChangePartition():
                self._partition(self._changed(record))
            case kafka_records.ClearElr(topic):
                self._clear_elr(topic)
            case kafka_records.RegisterBroker():
                self.brokers[record.broker_id] = record
                self._touched.brokers.add(record.broker_id)
            case kafka_records.ChangeBroker():
                self._change_broker(record)
            case kafka_records.UnregisterBroker(broker_id):
                self.brokers.pop(broker_id, None)
                self._touched.brokers.add(broker_id)
            case kafka_records.Config():
                self._config(record)
            case kafka_records.ProducerIds(next_producer_id):
                self.next_producer_id = max(self.next_producer_id, next_producer_id)
            case kafka_records.Feature(name, level):
                self.left.features[name] = level
            case kafka_records.Token(token_id, removed):
                (self.left.tokens.discard if removed else self.left.tokens.add)(token_id)
            case ours.ClientQuotaRecord(entity, key, value):
                if value is None:
                    self.quotas.pop((entity, key), None)
                else:
                    self.quotas[entity, key] = value
                self._touched.security.append(record)
            case (
                ours.AclRecord()
                | ours.RemoveAclRecord()
                | ours.ScramCredentialRecord()
                | ours.RemoveScramCredentialRecord()
            ):
                self._touched.security.append(record)

    def _remove_topic(self, topic_id: UUID) -> None:
        name = self.topics.pop(topic_id, None)
        if name is None:
            raise CorruptMessage(f"topic {topic_id} is removed and does not exist")
        gone = [key for key in self.partitions if key[0] == topic_id]
        for key in gone:
            del self.partitions[key]
        self._touched.partitions.difference_update(gone)
        for known in (self.settings, self.left.settings):
            for setting in [s for s in known if s[:2] == (int(ResourceType.TOPIC), name)]:
                del known[setting]
                self._touched.settings.pop(setting, None)
        if topic_id in self._emitted_topics:
            self._touched.topics_gone.append(topic_id)

    def _partition(self, record: kafka_records.Partition) -> None:
        key = record.topic_id, record.partition
        if record.topic_id not in self.topics:
            raise CorruptMessage(f"partition {record.partition} of no topic ({record.topic_id})")
        self.partitions[key] = record
        self._touched.partitions.add(key)

    def _changed(self, change: kafka_records.ChangePartition) -> kafka_records.Partition:
        before = self.partitions.get((change.topic_id, change.partition))
        if before is None:
            raise CorruptMessage(
                f"partition {change.partition} of {change.topic_id} changes and does not exist"
            )
        changed = {name: value for name, value in asdict(change).items() if value is not None}
        return replace(
            before,
            **changed,
            leader_epoch=before.leader_epoch + (change.leader is not None),
            partition_epoch=before.partition_epoch + 1,
        )

    def _clear_elr(self, topic: str) -> None:
        for key, known in self.partitions.items():
            if known.elr and (not topic or self.topics[key[0]] == topic):
                self.partitions[key] = replace(known, elr=())

    def _change_broker(self, change: kafka_records.ChangeBroker) -> None:
        known = self.brokers.get(change.broker_id)
        if known is None or known.broker_epoch != change.broker_epoch:
            raise CorruptMessage(f"broker {change.broker_id} changes and is not registered so")
        fenced = known.fenced if change.fenced is None else change.fenced
        shutting_down = change.in_controlled_shutdown or known.in_controlled_shutdown
        self.brokers[change.broker_id] = replace(
            known,
            fenced=fenced,
            in_controlled_shutdown=shutting_down,
            log_dirs=change.log_dirs or known.log_dirs,
        )
        self._touched.brokers.add(change.broker_id)

    def _config(self, record: kafka_records.Config) -> None:
        key = record.resource_type, record.resource_name, record.name
        known = record.name in _KNOWN_SETTINGS.get(record.resource_type, ())
        target = self.settings if known else self.left.settings
        if record.value is None:
            target.pop(key, None)
        else:
            target[key] = record.value
        if known:
            self._touched.settings[key] = None

    # kept's side.

    def step(self) -> list[MetadataRecord]:
        """What became true since the last step, as records that apply in this order."""
        touched, self._touched = self._touched, _Touched()
        records: list[MetadataRecord] = []
        for topic_id in touched.topics_gone:
            del self._emitted_topics[topic_id]
            records.append(ours.RemoveTopicRecord(topic_id))
        for broker_id in sorted(touched.brokers):
            records += self._broker(broker_id)
        records += self._topics_and_partitions(touched)
        for kind, name, setting in touched.settings:
            value = self.settings.get((kind, name, setting))
            records.append(ours.ConfigRecord(kind, name, setting, value))
        records += touched.security
        if self.next_producer_id > self._emitted_producer_id:
            self._emitted_producer_id = self.next_producer_id
            records.append(ours.ProducerIdsRecord(-1, -1, self.next_producer_id))
        return records

    def _broker(self, broker_id: int) -> Iterator[MetadataRecord]:
        known, emitted = self.brokers.get(broker_id), self._emitted_brokers.get(broker_id)
        if known is None:
            if emitted is not None:
                del self._emitted_brokers[broker_id]
                yield ours.UnregisterBrokerRecord(broker_id, emitted)
            return
        epoch = known.broker_epoch
        if emitted != epoch:
            self._emitted_brokers[broker_id] = epoch
            yield ours.BrokerRecord(
                broker_id, epoch, known.incarnation, (), known.rack, known.fenced, known.log_dirs
            )
        if emitted == epoch or known.in_controlled_shutdown:
            yield ours.BrokerChangeRecord(
                broker_id, epoch, known.fenced, known.in_controlled_shutdown
            )

    def _topics_and_partitions(self, touched: _Touched) -> Iterator[MetadataRecord]:
        """New topics in Kafka's order, each with its partitions in theirs: one that would leave a
        gap waits for the ones before it."""
        for topic_id, name in self.topics.items():
            if topic_id not in self._emitted_topics:
                self._emitted_topics[topic_id] = 0
                yield ours.TopicRecord(name, topic_id)
        order = {topic_id: n for n, topic_id in enumerate(self.topics)}
        for key in sorted(touched.partitions, key=lambda key: (order[key[0]], key[1])):
            topic_id, number = key
            emitted = self._emitted_topics[topic_id]
            if number > emitted:
                self._touched.partitions.add(key)
                continue
            self._emitted_topics[topic_id] = max(emitted, number + 1)
            yield self._translated(self.partitions[key])

    def _translated(self, known: kafka_records.Partition) -> ours.PartitionRecord:
        return ours.PartitionRecord(
            known.topic_id,
            known.partition,
            known.replicas,
            known.isr or tuple(replica for replica in known.replicas if replica in known.elr),
            known.leader,
            known.leader_epoch,
            known.partition_epoch,
            unclean=known.recovering,
            adding=known.adding,
            removing=known.removing,
        )

    # The end.

    def problems(self) -> Iterator[str]:
        """What kept could not keep true, if it went on from here."""
        version = self.left.features.get(METADATA_VERSION, 0)
        if version > NEWEST_METADATA_VERSION:
            yield (
                f"{METADATA_VERSION} is {version}, newer than that of Apache Kafka 4.3 "
                f"({NEWEST_METADATA_VERSION}): use a newer kept"
            )
        for (topic_id, number), known in sorted(self.partitions.items()):
            if not known.isr and not known.elr:
                yield (
                    f"{self.topics[topic_id]}:{number} has no replica that is in sync: elect its "
                    "leader in Apache Kafka first"
                )
        for (kind, name, setting), value in sorted(self.settings.items()):
            if setting == "remote.storage.enable" and value == "true":
                yield f"topic {name} is in remote storage (remote.storage.enable), which kept lacks"
                continue
            try:
                _KNOWN_SETTINGS[kind][setting].parse(value)
            except InvalidConfig as error:
                yield f"{name or 'all brokers'}: {error}; change it in Apache Kafka first"
        for (entity, key), quota in sorted(self.quotas.items(), key=str):
            try:
                check_alteration(Alteration(entity, ((key, quota),)))
            except InvalidRequest as error:
                what = f"client quota {key} of {describe_entity(entity)}"
                yield f"{what}: {error}; change it in Apache Kafka first"
