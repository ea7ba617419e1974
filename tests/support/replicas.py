"""What the replicas of a node work with, for tests that drive one part of it by hand.

The collaborators are real where they hold state only (settings, identity, tables, counters); those
that would call other nodes or wait write down what they are called for, in ``calls``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

from pyroaring import BitMap

from kept.cluster.metadata.records import PartitionRecord
from kept.compaction.manifest.manifest import Manifest, OutputSegment
from kept.node.config.live_config import LiveConfig
from kept.node.config.node_config import NodeConfig
from kept.node.metadata.node_identity import NodeIdentity
from kept.node.replicas.local_replica import LocalDirectory, LocalReplica
from kept.node.replicas.log_dir_failures import LogDirFailureChannel
from kept.node.replicas.manifests.context import ManifestContext
from kept.node.replicas.replica_table import ReplicaTable
from kept.node.runtime.counters import Counters
from kept.node.runtime.uncompiled_kernels import Kernels
from kept.replication.manifests import ManifestCore
from kept.replication.partition import Partition
from kept.storage.types import Generation
from tests.support.given import Given
from tests.support.logs import TOPIC_ID, open_log
from tests.support.simulated_disk import SimulatedDisk

Calls = list[Any]


def live_config(**settings: str) -> LiveConfig:
    """Settings over the defaults, ``_`` for ``.`` in their names."""
    given = {name.replace("_", "."): value for name, value in settings.items()}
    data_dir = None if "log.dirs" in given else "/nowhere"
    return LiveConfig(NodeConfig.load(None, given, {}, port=9092, data_dir=data_dir))


class Timer:
    """A timer that the test runs by hand."""

    def __init__(self, seconds: float, function: Callable[..., Any], given: tuple[Any, ...]):
        self.seconds = seconds
        self.function = function
        self.given = given
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class ManualLoop:
    """A loop whose timers are kept, in order, and that runs nothing."""

    def __init__(self) -> None:
        self.timers: list[Timer] = []

    def call_later(self, seconds: float, function: Callable[..., Any], *given: Any) -> Timer:
        timer = Timer(seconds, function, given)
        self.timers.append(timer)
        return timer

    @property
    def waits(self) -> list[float]:
        """Seconds of the timers that were not cancelled."""
        return [timer.seconds for timer in self.timers if not timer.cancelled]


class InlineRuntime:
    """A runtime whose threads run at once, and whose clock stands at ``at_ms``.

    ``loop``: the running one, or else a :class:`ManualLoop`.
    """

    def __init__(self, disk: Any = None, at_ms: int = 7) -> None:
        self.disk = disk
        self.at_ms = at_ms
        try:
            self.loop: Any = asyncio.get_running_loop()
        except RuntimeError:
            self.loop = ManualLoop()

    def now_ms(self) -> int:
        return self.at_ms

    async def in_thread(self, function: Callable[..., Any], *given: Any) -> Any:
        return function(*given)


class FixedImage:
    """An image in which every partition has the same record."""

    def __init__(self, record: Any = None) -> None:
        self.record = record

    def partition(self, *_: Any) -> Any:
        return self.record


class FixedMetadata:
    """A metadata log with one image, and a controller that leads."""

    def __init__(self, record: Any = None, leader_id: int | None = None) -> None:
        self.image = FixedImage(record)
        self.leader_id = leader_id


class RecordedPeers:
    """Other nodes, played by one function of the test."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self.call = call


class RecordedScheduler:
    """A cleaner that is told of manifests."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def renew(self, _: Any) -> None:
        self._calls.append(("renew",))

    def generation_applied(self, _: Any) -> None:
        pass


class RecordedReplicator:
    """Pulls that are wanted."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def schedule(self, _: Any) -> None:
        self._calls.append(("pull",))


class RecordedNotifier:
    """Announcements to followers."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def announce(self, _: Any) -> None:
        self._calls.append(("announce",))


class RecordedAlterPartition:
    """Resignations from the ISR."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def resign(self, *_: Any) -> None:
        self._calls.append(("resign",))

    def submit(self, _: Any) -> None:
        pass


class RecordedFetchers:
    """Fetchers that are to look again."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls

    def nudge(self, _: Any) -> None:
        self._calls.append(("nudge",))


def recorded_failures(calls: Calls) -> LogDirFailureChannel:
    """A channel that writes down ("fail",) for a directory that fails."""
    failures = LogDirFailureChannel(ReplicaTable())
    failures.on_failure = lambda *_: calls.append(("fail",))
    return failures


def manifest_context(
    calls: Calls, *, disk: Any = None, record: Any = None, broker_epoch: int = 9, **settings: str
) -> ManifestContext:
    """What the manifests of a replica on node 1 work with; what it calls is in ``calls``."""
    return ManifestContext(
        runtime=cast("Any", InlineRuntime(disk)),
        config=live_config(**settings),
        metadata=cast("Any", FixedMetadata(record)),
        identity=NodeIdentity(1, "cluster", broker_epoch),
        table=ReplicaTable(),
        failures=recorded_failures(calls),
        counters=Counters(),
        kernels=Kernels(),
        fetchers=cast("Any", RecordedFetchers(calls)),
        alter_partition=cast("Any", RecordedAlterPartition(calls)),
        replicator=cast("Any", RecordedReplicator(calls)),
        notifier=cast("Any", RecordedNotifier(calls)),
        scheduler=RecordedScheduler(calls),
        appliers=asyncio.Semaphore(1),
    )


class InlinePool:
    """A directory's threads: what they are given runs at once."""

    async def run(self, work: Callable[..., Any], *given: Any) -> Any:
        return work(*given)


def local_replica(
    *, begins_at: int = 0, end: int = 0, manifests: ManifestCore | None = None
) -> LocalReplica:
    """A replica of t-0 on node 1 with an empty log on a disk of its own, following node 2."""
    disk = SimulatedDisk()
    disk.mkdir("/d")
    log = open_log(disk)
    log.truncate_fully_and_start_at(max(begins_at, end))
    partition = Partition(log, 1, manifests=manifests)
    partition.leader_id = 2
    directory = LocalDirectory(cast("Any", Given(adopted=False)), cast("Any", InlinePool()), "/d")
    return LocalReplica(partition, directory, cast("Any", Given()))


def record(isr: tuple[int, ...] = (1, 2), leader_epoch: int = 3, **more: Any) -> PartitionRecord:
    """What the image says of t-0: node 2 leads it."""
    return PartitionRecord(TOPIC_ID, 0, (1, 2), isr, 2, leader_epoch, 1, **more)


def manifest(generation: Generation, end_offset: int = 200) -> Manifest:
    """One of t-0 in which every other record below its end survives."""
    survivors = BitMap(range(0, end_offset, 2))
    segment = OutputSegment(0, end_offset, survivors, digest=bytes(16))
    return Manifest(TOPIC_ID, 0, generation, 0, 100, end_offset, 0, 0, (segment,))
