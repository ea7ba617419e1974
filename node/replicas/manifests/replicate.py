"""Pulling manifests from the leaders that are followed, and answering those who follow.

One task for each leader, while there is something to ask: it pulls for all partitions that have
something to say or were told of news, in one call, and has the next one wait for its bodies. Small
bodies come with the answer; others are fetched in chunks, one after the other. What a request that
got no answer asked is asked again later.
"""

from __future__ import annotations

import asyncio
import random
from collections import OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from kept.node.internode import manifest_rpc as calls
from kept.node.internode.rpc_errors import error_of, failure_of
from kept.node.runtime.logging import log
from kept.replication import manifests_events as ev
from kept.replication.follower import NO_LEADER
from kept.replication.manifests_events import ManifestRef
from kept.storage.errors import (
    CorruptMessage,
    DamagedData,
    KeptError,
    NotLeaderOrFollower,
    UnknownTopicId,
)
from kept.storage.records import crc32c
from kept.storage.types import Generation

if TYPE_CHECKING:
    from uuid import UUID

    from kept.compaction.manifest.manifest import Manifest
    from kept.node.internode.peers import Peers
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.replicas.local_replica import LocalReplica
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.runtime import Runtime
    from kept.replication.partition import Partition

CALL_S: Final = 10.0
MAX_PULLS: Final = 500
"""Partitions of one call."""
CHUNK_BYTES: Final = 1 << 20
INLINE_BYTES: Final = 1 << 20
"""Of all bodies in one answer."""
BACKOFF_S: Final = 0.1
BACKOFF_MAX_S: Final = 5.0
REFUSED_S: Final = 1.0
"""A leader that refused a pull is asked again after this, or when it says so."""
KEPT_BYTES: Final = 64 << 20
KEPT_S: Final = 60.0
"""Bodies that are being sent in chunks are kept, so that none is read anew for every chunk: so many
bytes together (one at least), each so long.
"""


def name_of(ref: ManifestRef) -> calls.ManifestName:
    """A manifest's name as it travels."""
    return calls.ManifestName(*ref.generation, ref.end_offset)


def name_or_none(ref: ManifestRef | None) -> calls.ManifestName | None:
    """As :func:`name_of`."""
    return None if ref is None else name_of(ref)


def ref_from(name: calls.ManifestName) -> ManifestRef:
    """What :func:`name_of` made."""
    return ManifestRef(Generation(name.epoch, name.generation), name.end_offset)


def ref_or_none(name: calls.ManifestName | None) -> ManifestRef | None:
    """What :func:`name_or_none` made."""
    return None if name is None else ref_from(name)


def pull_of(topic_id: UUID, partition: int, asked: ev.PullRequest) -> calls.ManifestPull:
    """A request of the core as it travels."""
    return calls.ManifestPull(
        topic_id, partition, asked.leader_epoch, asked.number, name_or_none(asked.held),
        name_or_none(asked.applied), asked.synced, asked.log_end_offset,
        tuple(name_of(ref) for ref in asked.has),
    )  # fmt: skip


def asked_in(request: calls.PullManifestsRequest, pull: calls.ManifestPull) -> ev.PullRequest:
    """What :func:`pull_of` made."""
    return ev.PullRequest(
        request.replica_id, request.broker_epoch, pull.leader_epoch, pull.number,
        ref_or_none(pull.held), ref_or_none(pull.applied), pull.synced, pull.log_end_offset,
        tuple(ref_from(name) for name in pull.has),
    )  # fmt: skip


def hosted_of(table: ReplicaTable, topic_id: UUID, partition: int) -> LocalReplica:
    """A replica here. Raises UnknownTopicId, NotLeaderOrFollower."""
    topic = table.by_id.get(topic_id.bytes)
    if topic is None:
        raise UnknownTopicId(f"no topic with id {topic_id}")
    hosted = topic.partitions.get(partition)
    if hosted is None:
        raise NotLeaderOrFollower(f"{topic.name}-{partition} has no replica on this node")
    return hosted


class ManifestReplicator:
    """What this node asks of its leaders."""

    def __init__(
        self, runtime: Runtime, identity: NodeIdentity, table: ReplicaTable, peers: Peers
    ) -> None:
        self._runtime = runtime
        self._identity = identity
        self._table = table
        self._peers = peers
        self._due: dict[int, dict[LocalReplica, None]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}

    def ask(self, hosted: LocalReplica) -> None:
        """A partition has something to ask of its leader, or to say."""
        leader = hosted.partition.leader_id
        if leader in (NO_LEADER, self._identity.node_id):
            return
        self._due.setdefault(leader, {})[hosted] = None
        if leader not in self._tasks:
            self._tasks[leader] = self._runtime.loop.create_task(self._run(leader))

    async def news(self, request: calls.ManifestNewsRequest) -> calls.ManifestNewsReply:
        """A leader says that it has something."""
        for item in request.news:
            topic = self._table.by_id.get(item.topic_id.bytes)
            hosted = None if topic is None else topic.partitions.get(item.partition)
            if hosted is not None and hosted.partition.leader_id == request.leader_id:
                hosted.manifests.ask()
        return calls.ManifestNewsReply()

    async def stop(self) -> None:
        """Ask for nothing more."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, leader: int) -> None:
        wait_s = BACKOFF_S
        try:
            await asyncio.sleep(0)
            while due := self._due.get(leader):
                batch = list(due)[:MAX_PULLS]
                for hosted in batch:
                    del due[hosted]
                if await self._try(leader, batch):
                    wait_s = BACKOFF_S
                else:
                    await asyncio.sleep(wait_s * random.uniform(0.5, 1.5))
                    wait_s = min(2 * wait_s, BACKOFF_MAX_S)
        finally:
            del self._tasks[leader]
            self._due.pop(leader, None)

    async def _try(self, leader: int, batch: list[LocalReplica]) -> bool:
        """Whether the leader answered; what it did not answer is asked again."""
        asking: dict[LocalReplica, ev.PullRequest] = {}
        for hosted in batch:
            if hosted.partition.leader_id == leader:
                request = hosted.manifests.pull()
                if request is not None:
                    asking[hosted] = request
        if not asking:
            return True
        try:
            await self._exchange(leader, asking)
        except KeptError as error:
            log.debug("manifests not pulled", leader=leader, error=str(error))
            answered = False
        # A bug of ours must not end it: no tombstone would go any more.
        except Exception as error:  # noqa: BLE001
            log.exception("manifests not pulled", error, leader=leader)
            answered = False
        else:
            answered = True
        for hosted, request in asking.items():
            if hosted.manifests.core.in_flight == request:
                hosted.manifests.step(ev.PullFailed(request))
                self.ask(hosted)
        return answered

    async def _exchange(self, leader: int, asking: dict[LocalReplica, ev.PullRequest]) -> None:
        pulls = tuple(
            pull_of(hosted.partition.topic_id, hosted.partition.topic_partition.partition, asked)
            for hosted, asked in asking.items()
        )
        request = calls.PullManifestsRequest(
            self._identity.node_id, self._identity.broker_epoch, pulls
        )
        reply = await self._peers.call(leader, "PullManifests", request, CALL_S)
        for (hosted, asked), answer in zip(asking.items(), reply.answers, strict=True):
            try:
                if answer.failure is not None:
                    raise error_of(answer.failure)
                bodies = await self._bodies(leader, hosted, asked, answer.bodies)
            except KeptError as error:
                self._refused(hosted, asked, error)
                continue
            held, published = ref_or_none(answer.held), ref_or_none(answer.published)
            told = ev.PullResponse(held, published, tuple(bodies))
            hosted.manifests.pulled(asked, told, bodies)

    def _refused(self, hosted: LocalReplica, asked: ev.PullRequest, error: KeptError) -> None:
        """One partition has no answer: ask for it again after a while."""
        manifests = hosted.manifests
        tp = hosted.partition.topic_partition
        say = log.warning if isinstance(error, CorruptMessage | DamagedData) else log.debug
        say("manifest not pulled", topic=tp.topic, partition=tp.partition, error=str(error))
        manifests.step(ev.PullFailed(asked))
        if manifests.core.held is not None or manifests.core.lost:
            self._runtime.loop.call_later(REFUSED_S, manifests.ask)

    async def _bodies(
        self, leader: int, hosted: LocalReplica, asked: ev.PullRequest,
        found: Sequence[calls.ManifestBody],
    ) -> dict[ManifestRef, Manifest]:  # fmt: skip
        """The manifests that came. Raises CorruptMessage, DamagedData, and as a call does."""
        bodies: dict[ManifestRef, Manifest] = {}
        for body in found:
            data = body.data or await self._fetch(leader, hosted, asked, body)
            if len(data) != body.size_bytes or crc32c(data) != body.crc:
                raise CorruptMessage(f"a manifest of {body.size_bytes} bytes came damaged")
            bodies[ref_from(body.name)] = await self._runtime.in_thread(
                _decode, data, body.name, hosted.partition
            )
        return bodies

    async def _fetch(
        self, leader: int, hosted: LocalReplica, asked: ev.PullRequest,
        body: calls.ManifestBody,
    ) -> bytes:  # fmt: skip
        data = bytearray()
        partition = hosted.partition
        while len(data) < body.size_bytes:
            request = calls.ManifestChunkRequest(
                partition.topic_id, partition.topic_partition.partition, asked.leader_epoch,
                body.name, len(data),
            )  # fmt: skip
            chunk = await self._peers.call(leader, "ManifestChunk", request, CALL_S)
            if not chunk.data or crc32c(chunk.data) != chunk.crc:
                raise CorruptMessage(f"{partition}: a piece of a manifest came damaged")
            data += chunk.data
        return bytes(data)


def _decode(data: bytes, name: calls.ManifestName, partition: Partition) -> Manifest:
    """In a thread. Raises DamagedData, CorruptMessage, DirectoryRefused (of a newer kept)."""
    from kept.compaction.manifest import manifest_store as held

    found = held.decode("a manifest that was pulled", data)
    if (*found.generation, found.end_offset) != (name.epoch, name.generation, name.end_offset):
        raise CorruptMessage(f"manifest {found.generation} came for {name}")
    wanted = partition.topic_id, partition.topic_partition.partition
    if (found.topic_id, found.partition) != wanted:
        raise CorruptMessage(
            f"manifest {found.generation} came for {partition}, topic id {wanted[0]}; it is of "
            f"partition {found.partition} of the topic with id {found.topic_id}"
        )
    return found


class PullAnswers:
    """What this node's followers ask of it."""

    def __init__(self, runtime: Runtime, table: ReplicaTable) -> None:
        self._runtime = runtime
        self._table = table
        self._sending: OrderedDict[Any, bytes] = OrderedDict()
        """Bodies that are fetched in chunks, the one last asked for last."""

    async def pull(self, request: calls.PullManifestsRequest) -> calls.PullManifestsReply:
        """Count what a follower says, and answer it."""
        answers: list[calls.ManifestAnswer] = []
        left = INLINE_BYTES
        for pull in request.pulls:
            try:
                hosted = hosted_of(self._table, pull.topic_id, pull.partition)
                found = hosted.manifests.receive_pull(asked_in(request, pull))
                bodies = []
                for ref in found.bodies:
                    data = await self._body(hosted, ref)
                    inline = len(data) <= left
                    left -= len(data) * inline
                    bodies.append(
                        calls.ManifestBody(
                            name_of(ref), len(data), crc32c(data), data if inline else b""
                        )
                    )
            except (KeptError, OSError) as error:
                answers.append(calls.ManifestAnswer(failure_of(error)))
                continue
            answers.append(
                calls.ManifestAnswer(
                    None, name_or_none(found.held), name_or_none(found.published), tuple(bodies)
                )
            )
        return calls.PullManifestsReply(tuple(answers))

    async def chunk(self, request: calls.ManifestChunkRequest) -> calls.ManifestChunkReply:
        """A piece of a body. Raises NotLeaderOrFollower, UnknownTopicId, FileNotFoundError."""
        hosted = hosted_of(self._table, request.topic_id, request.partition)
        partition = hosted.partition
        if not partition.is_leader or partition.leader_epoch != request.leader_epoch:
            raise NotLeaderOrFollower(f"{partition}: not led in epoch {request.leader_epoch}")
        try:
            data = await self._body(hosted, ref_from(request.name))
        except OSError as error:
            raise NotLeaderOrFollower(f"{partition}: {request.name} is gone") from error
        piece = data[request.position : request.position + CHUNK_BYTES]
        return calls.ManifestChunkReply(piece, crc32c(piece))

    async def _body(self, hosted: LocalReplica, ref: ManifestRef) -> bytes:
        """A manifest as it travels. Raises FileNotFoundError, DamagedData, MachineError."""
        key = hosted, ref
        data = self._sending.get(key)
        if data is not None:
            self._sending.move_to_end(key)
            return data
        data = await hosted.manifests.encoded(ref)
        if len(data) > INLINE_BYTES:
            self._sending[key] = data
            while len(self._sending) > 1 and sum(map(len, self._sending.values())) > KEPT_BYTES:
                self._sending.popitem(last=False)
            self._runtime.loop.call_later(KEPT_S, self._sending.pop, key, None)
        return data
