"""A blocking client without a cluster: topics and offsets are given, nothing connects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from kio.static.constants import EntityType

from kept.client.admin.topics import ConfigEntry
from kept.client.client import Client, IdempotentProducer
from kept.client.consume.leader_offsets import OffsetAt
from kept.client.consume.positions import EARLIEST
from kept.client.core.metadata import ClusterMetadata, PartitionMetadata, TopicMetadata
from kept.client.produce import Produced
from kept.client.protocol.messages import build, message_type
from kept.storage.types import IsolationLevel, TopicPartition


class FakeClient(Client):
    """``topics`` are names and partition counts; each log goes from ``start`` to ``end``.

    ``sent`` are the topics of what was appended.
    """

    def __init__(
        self,
        topics: Mapping[str, int] | None = None,
        *,
        start: int = 0,
        end: int = 0,
        settings: Iterable[tuple[str, str | None]] = (),
    ) -> None:
        super().__init__("fake:1")
        self.start, self.end = start, end
        self.settings = [ConfigEntry(*one, "topic", False, False, None) for one in settings]
        self.sent: list[str] = []
        for name, count in (topics or {}).items():
            known = {p: PartitionMetadata(p, 0, 0, (0,), (0,)) for p in range(count)}
            self.view.topics[name] = TopicMetadata(name, None, False, known)

    def metadata(
        self, topics: Sequence[str] | None = None, *, auto_create: bool = False
    ) -> ClusterMetadata:
        del topics, auto_create
        return self.view

    def list_offsets(
        self,
        asked: Mapping[TopicPartition, int],
        isolation: IsolationLevel = IsolationLevel.READ_UNCOMMITTED,
    ) -> dict[TopicPartition, OffsetAt]:
        del isolation
        start, end = OffsetAt(self.start, -1, -1), OffsetAt(self.end, -1, -1)
        return {tp: start if at == EARLIEST else end for tp, at in asked.items()}

    def topic_configs(self, names: Sequence[str]) -> dict[str, list[ConfigEntry]]:
        return dict.fromkeys(names, self.settings)

    def init_producer(self) -> IdempotentProducer:
        return IdempotentProducer(1, 0)

    def append(self, topic: str, batches: Mapping[int, bytes]) -> list[Produced]:
        self.sent.append(topic)
        return [Produced(partition, 0) for partition in batches]


def response(api_key: int, version: int, **values: Any) -> Any:
    """A response as kio has it."""
    return build(message_type(api_key, version, EntityType.response), values)
