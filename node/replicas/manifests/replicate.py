"""Pulling manifests from leaders, and serving the pulls of followers.

While pulls are due one task for each leader sends them, those of many partitions in one call. Small
bodies come with the response; larger ones are fetched in chunks, one after the other, before the
next call. A pull that failed is made again later.
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
from kept.storage.errors import (
    CorruptMessage,
    DamagedData,
    KeptError,
    NotLeaderOrFollower,
    UnknownTopicId,
    is_bug,
)
from kept.storage.records import crc32c

if TYPE_CHECKING:
    from uuid import UUID

    from kept.compaction.manifest.manifest import Manifest
    from kept.node.internode.peers import Peers
    from kept.node.metadata.node_identity import NodeIdentity
    from kept.node.replicas.local_replica import LocalReplica
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.runtime import Runtime
    from kept.replication.manifests_events import ManifestRef
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
"""A pull that the leader refused is made again after this, or at its news; and one of a replica
that lacks a record, until its log is cut there.
"""
KEPT_BYTES: Final = 64 << 20
KEPT_S: Final = 60.0
"""Bodies that travel in chunks are cached, so that none is read anew for every chunk: so many bytes
together (one at least), each so long.
"""


def pull_message(topic_id: UUID, partition: int, request: ev.PullRequest) -> calls.ManifestPull:
    """A request of the core as it travels."""
    return calls.ManifestPull(
        topic_id,
        partition,
        request.leader_epoch,
        request.number,
        request.held,
        request.applied,
        request.synced,
        request.log_end_offset,
        request.has,
        request.complete,
    )


def pull_request(message: calls.PullManifestsRequest, pull: calls.ManifestPull) -> ev.PullRequest:
    """What :func:`pull_message` made."""
    return ev.PullRequest(
        message.replica_id,
        message.broker_epoch,
        pull.leader_epoch,
        pull.number,
        pull.held,
        pull.applied,
        pull.synced,
        pull.log_end_offset,
        pull.has,
        pull.complete,
    )


def hosted_of(table: ReplicaTable, topic_id: UUID, partition: int) -> LocalReplica:
    """A replica here. Raises UnknownTopicId, NotLeaderOrFollower."""
    topic = table.by_id.get(topic_id.bytes)
    if topic is None:
        raise UnknownTopicId(f"no topic with id {topic_id}")
    hosted = topic.partitions.get(partition)
    if hosted is None:
        raise NotLeaderOrFollower(f"{topic.name}:{partition} has no replica on this node")
    return hosted


class ManifestReplicator:
    """Pulls from the leaders of this node's followers."""

    def __init__(
        self, runtime: Runtime, identity: NodeIdentity, table: ReplicaTable, peers: Peers
    ) -> None:
        self._runtime = runtime
        self._identity = identity
        self._table = table
        self._peers = peers
        self._due: dict[int, dict[LocalReplica, None]] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._later: set[LocalReplica] = set()

    def schedule(self, hosted: LocalReplica) -> None:
        """Pull for a partition soon, from its leader."""
        leader = hosted.partition.leader_id
        if leader in (NO_LEADER, self._identity.node_id):
            return
        self._due.setdefault(leader, {})[hosted] = None
        if leader not in self._tasks:
            self._tasks[leader] = self._runtime.loop.create_task(self._run(leader))

    def _schedule_later(self, hosted: LocalReplica) -> None:
        if hosted not in self._later:
            self._later.add(hosted)
            self._runtime.loop.call_later(REFUSED_S, self._schedule_again, hosted)

    def _schedule_again(self, hosted: LocalReplica) -> None:
        self._later.discard(hosted)
        hosted.manifests.schedule_pull()

    async def receive_news(self, request: calls.ManifestNewsRequest) -> calls.ManifestNewsReply:
        """A leader has something to be pulled."""
        for item in request.news:
            topic = self._table.by_id.get(item.topic_id.bytes)
            hosted = None if topic is None else topic.partitions.get(item.partition)
            if hosted is not None and hosted.partition.leader_id == request.leader_id:
                hosted.manifests.schedule_pull()
        return calls.ManifestNewsReply()

    async def stop(self) -> None:
        """Pull nothing more."""
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
                if await self._pull(leader, batch):
                    wait_s = BACKOFF_S
                else:
                    await asyncio.sleep(wait_s * random.uniform(0.5, 1.5))
                    wait_s = min(2 * wait_s, BACKOFF_MAX_S)
        finally:
            del self._tasks[leader]
            self._due.pop(leader, None)

    async def _pull(self, leader: int, batch: list[LocalReplica]) -> bool:
        """Whether the leader responded; if not, the pulls are made again."""
        requests: dict[LocalReplica, ev.PullRequest] = {}
        for hosted in batch:
            if hosted.partition.leader_id == leader:
                request = hosted.manifests.start_pull()
                if request is not None:
                    requests[hosted] = request
        if not requests:
            return True
        try:
            await self._exchange(leader, requests)
        # A bug of ours must not end it: no tombstone would go any more.
        except Exception as error:  # noqa: BLE001
            if is_bug(error):
                log.exception("manifests not pulled", error, leader=leader)
            else:
                log.debug("manifests not pulled", leader=leader, error=str(error))
            responded = False
        else:
            responded = True
        for hosted, request in requests.items():
            if hosted.partition.core.manifests.in_flight == request:
                self._end(hosted, request)
                self.schedule(hosted)
        return responded

    @staticmethod
    def _end(hosted: LocalReplica, request: ev.PullRequest) -> None:
        """A pull came to nothing. What one replica meets there is its own: the others of the leader
        are pulled for all the same.
        """
        try:
            hosted.manifests.step(ev.PullFailed(request))
        except Exception as error:  # noqa: BLE001
            tp = hosted.partition.topic_partition
            log.exception("manifest pull not ended", error, topic=tp.topic, partition=tp.partition)

    async def _exchange(self, leader: int, requests: dict[LocalReplica, ev.PullRequest]) -> None:
        pulls = tuple(
            pull_message(
                hosted.partition.topic_id, hosted.partition.topic_partition.partition, request
            )
            for hosted, request in requests.items()
        )
        message = calls.PullManifestsRequest(
            self._identity.node_id, self._identity.broker_epoch, pulls
        )
        reply = await self._peers.call(leader, "PullManifests", message, CALL_S)
        for (hosted, request), answer in zip(requests.items(), reply.answers, strict=True):
            try:
                if answer.failure is not None:
                    raise error_of(answer.failure)
                bodies = await self._bodies(leader, hosted, request, answer.bodies)
                response = ev.PullResponse(
                    answer.held,
                    answer.published,
                    tuple(bodies),
                    answer.complete,
                    answer.outside_isr,
                )
                hosted.manifests.receive_pull_response(request, response, bodies)
            # A bug of ours at one partition must not lose the answers of the others.
            except Exception as error:  # noqa: BLE001
                self._refused(hosted, request, error)
                continue
            if hosted.partition.core.manifests.missing is not None:
                self._schedule_later(hosted)

    def _refused(self, hosted: LocalReplica, request: ev.PullRequest, error: Exception) -> None:
        """The pull of one partition failed: make it again after a while."""
        core = hosted.partition.core.manifests
        tp = hosted.partition.topic_partition
        if is_bug(error):
            log.exception("manifest not pulled", error, topic=tp.topic, partition=tp.partition)
        else:
            write = log.warning if isinstance(error, CorruptMessage | DamagedData) else log.debug
            write("manifest not pulled", topic=tp.topic, partition=tp.partition, error=str(error))
        if core.in_flight == request:
            self._end(hosted, request)
        if core.held is not None or core.lost:
            self._schedule_later(hosted)

    async def _bodies(
        self,
        leader: int,
        hosted: LocalReplica,
        request: ev.PullRequest,
        messages: Sequence[calls.ManifestBody],
    ) -> dict[ManifestRef, Manifest]:
        """The manifests that came. Raises CorruptMessage, DamagedData, and as a call does."""
        bodies: dict[ManifestRef, Manifest] = {}
        for body in messages:
            data = body.data or await self._fetch(leader, hosted, request, body)
            if len(data) != body.size_bytes or crc32c(data) != body.crc:
                raise CorruptMessage(f"a manifest of {body.size_bytes} bytes came damaged")
            bodies[body.name] = await self._runtime.in_thread(
                _decode, data, body.name, hosted.partition
            )
        return bodies

    async def _fetch(
        self, leader: int, hosted: LocalReplica, pull: ev.PullRequest, body: calls.ManifestBody
    ) -> bytes:
        data = bytearray()
        partition = hosted.partition
        while len(data) < body.size_bytes:
            request = calls.ManifestChunkRequest(
                partition.topic_id,
                partition.topic_partition.partition,
                pull.leader_epoch,
                body.name,
                len(data),
            )
            chunk = await self._peers.call(leader, "ManifestChunk", request, CALL_S)
            if not chunk.data or crc32c(chunk.data) != chunk.crc:
                raise CorruptMessage(
                    f"{partition.topic_partition.place}: a piece of a manifest came damaged"
                )
            data += chunk.data
        return bytes(data)


def _decode(data: bytes, ref: ManifestRef, partition: Partition) -> Manifest:
    """In a thread. Raises DamagedData, CorruptMessage, DirectoryRefused (of a newer kept)."""
    from kept.compaction.manifest import manifest_store as held

    decoded = held.decode("a manifest that was pulled", data)
    if (decoded.generation, decoded.end_offset) != (ref.generation, ref.end_offset):
        raise CorruptMessage(f"manifest {decoded.generation} came for {ref}")
    wanted = partition.topic_id, partition.topic_partition.partition
    if (decoded.topic_id, decoded.partition) != wanted:
        raise CorruptMessage(
            f"manifest {decoded.generation} came for {partition.topic_partition.place}, topic id "
            f"{wanted[0]}; it is of partition {decoded.partition} of the topic with id "
            f"{decoded.topic_id}"
        )
    return decoded


class PullServer:
    """Serves the pulls of followers."""

    def __init__(self, runtime: Runtime, table: ReplicaTable) -> None:
        self._runtime = runtime
        self._table = table
        self._sending: OrderedDict[Any, bytes] = OrderedDict()
        """Bodies that are fetched in chunks, the last used last."""

    async def pull(self, request: calls.PullManifestsRequest) -> calls.PullManifestsReply:
        """Count what a follower acknowledges, and respond."""
        answers: list[calls.ManifestAnswer] = []
        left = INLINE_BYTES
        for pull in request.pulls:
            try:
                hosted = hosted_of(self._table, pull.topic_id, pull.partition)
                response = hosted.manifests.receive_pull(pull_request(request, pull))
                bodies = []
                for ref in response.bodies:
                    data = await self._body(hosted, ref)
                    inline = len(data) <= left
                    left -= len(data) * inline
                    bodies.append(
                        calls.ManifestBody(ref, len(data), crc32c(data), data if inline else b"")
                    )
            except (KeptError, OSError) as error:
                if is_bug(error):
                    log.exception("manifests not given", error, topic_id=pull.topic_id)
                answers.append(calls.ManifestAnswer(failure_of(error)))
                continue
            answers.append(
                calls.ManifestAnswer(
                    None,
                    response.held,
                    response.published,
                    tuple(bodies),
                    response.complete,
                    response.outside_isr,
                )
            )
        return calls.PullManifestsReply(tuple(answers))

    async def chunk(self, request: calls.ManifestChunkRequest) -> calls.ManifestChunkReply:
        """A piece of a body. Raises NotLeaderOrFollower, UnknownTopicId, FileNotFoundError."""
        hosted = hosted_of(self._table, request.topic_id, request.partition)
        partition = hosted.partition
        place = partition.topic_partition.place
        if not partition.is_leader or partition.leader_epoch != request.leader_epoch:
            raise NotLeaderOrFollower(f"{place}: not led in epoch {request.leader_epoch}")
        try:
            data = await self._body(hosted, request.name)
        except OSError as error:
            raise NotLeaderOrFollower(f"{place}: {request.name} is gone") from error
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
