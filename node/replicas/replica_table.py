"""The replicas on this node, by what requests, timers and the cleaner look for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kept.cluster.controller.topics import MAX_TOPIC_NAME_LENGTH
from kept.storage.errors import MachineError, UnknownTopicOrPartition

if TYPE_CHECKING:
    from kept.node.replicas.local_replica import LocalDirectory, LocalReplica, LocalTopic
    from kept.replication.partition import Partition
    from kept.storage.types import TopicPartition


class ReplicaTable:
    """Changed by :class:`~kept.node.replicas.replica_manager.ReplicaManager` alone, on the loop."""

    def __init__(self) -> None:
        self.by_name: dict[bytes, LocalTopic] = {}
        """Every topic of the image, also one without a replica here."""
        self.by_id: dict[bytes, LocalTopic] = {}
        self.partitions: dict[TopicPartition, Partition] = {}
        """The replicas that are open and in a directory that works."""
        self.replicas: dict[TopicPartition, LocalReplica] = {}
        """The same, with what belongs to them."""
        self.directories: list[LocalDirectory] = []
        """The entries of ``log.dirs``."""
        self.failed: dict[TopicPartition, LocalDirectory | None] = {}
        """Replicas that an error took offline, or did not let open, until the node is started
        again, though their directory works: that directory, None where there are several. One that
        did not open is here also while the image has it elsewhere: it may come back."""
        self.reads_in_memory = True
        """The file system can't say whether a read would block (tmpfs): small reads go ahead."""

    def partition(self, tp: TopicPartition) -> Partition:
        """A partition that is served here.

        Raises UnknownTopicOrPartition, NotLeaderOrFollower (no open replica is here),
        KafkaStorageError (its directory is offline).
        """
        partition = self.partitions.get(tp)
        if partition is not None:
            return partition
        topic = self.by_name.get(tp.topic.encode())
        if topic is not None:
            raise topic.not_served_error(tp.partition)
        raise no_topic(tp.topic)

    def is_offline(self, topic: str, partition: int) -> bool:
        """Whether the directory of a replica here failed."""
        local = self.by_name.get(topic.encode())
        return local is not None and partition in local.offline

    def fail(self, tp: TopicPartition, directory: LocalDirectory | None, why: str) -> None:
        """An error took a replica offline, or did not let it open; its directory works."""
        self.by_name[tp.topic.encode()].offline[tp.partition] = why
        self.failed[tp] = directory

    def forget_failed(self, topic: LocalTopic) -> None:
        """A topic is deleted: nothing of it is to come back."""
        for tp in [tp for tp in self.failed if tp.topic == topic.name]:
            del self.failed[tp]

    def directory_failed(self, directory: LocalDirectory) -> list[TopicPartition]:
        """A directory is offline, and that is why what is in it is; which of it was failed."""
        gone = [tp for tp, where in self.failed.items() if where is directory]
        for tp in gone:
            del self.failed[tp]
        return gone

    def directory_of(self, error: MachineError) -> LocalDirectory | None:
        """The directory whose file an error names."""
        for directory in self.directories:
            if error.path == directory.name or error.path.startswith(
                directory.name.rstrip("/") + "/"
            ):
                return directory
        return None


def no_topic(name: str) -> UnknownTopicOrPartition:
    """That there is no topic of this name. A request may name it once and ask for thousands of its
    partitions, which get an error each, so none repeats what no topic can be called.
    """
    if len(name) > MAX_TOPIC_NAME_LENGTH:
        return UnknownTopicOrPartition(
            f"no topic has a name of {len(name)} characters: {MAX_TOPIC_NAME_LENGTH} are the most"
        )
    return UnknownTopicOrPartition(f"no topic {name!r}")
