"""The metadata log on this node: the Raft member on the loop, its disk in a thread, the acting.

Three things happen in turn. The member takes ticks, messages and proposals; what that asks of the
disk is one job at a time in a thread of its own; then messages leave, and committed entries move
the image. Entries are *acted on* after that, one by one, in order, by the task of
:meth:`MetadataLog.act`: ``acted_index`` is what the node has become, ``image`` what it
is to be (rule 35).

A lone voter commits with its own fsync; nothing ticks then, and no peer is imported.
"""

from __future__ import annotations

import asyncio
import errno
import os
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from heapq import heappop, heappush
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

from kept.cluster.metadata.metadata_files import DiskWork
from kept.cluster.metadata.metadata_node import SNAPSHOT_AFTER_BYTES, MetadataNode
from kept.cluster.metadata.snapshot import check_install
from kept.cluster.metadata.voters import Voter
from kept.cluster.metadata.wal import WAL_NAME
from kept.cluster.raft.messages import InstallSnapshot
from kept.cluster.raft.ready import RaftSettings, Role
from kept.node.metadata import directory_ids
from kept.node.runtime.executors import warn_while_it_hangs
from kept.node.runtime.logging import bugs, log
from kept.node.runtime.time_slices import SlicedTask, TimeSlices
from kept.storage.errors import (
    KeptError,
    MachineError,
    NotController,
    ResourceExhausted,
    is_bug,
)

if TYPE_CHECKING:
    from kept.cluster.metadata.image import Delta, Image
    from kept.cluster.metadata.metadata_node import Outcome
    from kept.cluster.metadata.records import MetadataRecord
    from kept.cluster.raft.messages import Message
    from kept.node.runtime.counters import Counters
    from kept.steps import Steps
    from kept.storage.disk import Disk

TICK_S: Final = 0.05
REMEMBER_S: Final = 5.0
"""So much later at most is what was applied remembered (``kept.cluster.metadata.replica_history``),
as high watermarks are by default."""
NOISE_INTERVAL_S: Final = 10.0
"""At most one line about refused messages in this time."""
ACT_TOGETHER: Final = 64
"""Entries that are acted on before others have their turn on the loop."""

EXHAUSTED_RETRY_S: Final = 0.5
"""What could not be written for want of a descriptor is tried again after this."""

Actor = Callable[["Image", "Delta"], Awaitable[None]]


class MetadataLog:
    """Gives this node's Raft member time, messages and its disk, and acts on committed entries.
    Made and used on the node's loop.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, counters: Counters) -> None:
        self._loop = loop
        self._counters = counters
        self.raft_node: MetadataNode
        self.send: Callable[[Message], None] = _ignore
        self.probe: Callable[[int], None] = _ignore
        """Look whether a node's process is there; :meth:`peer_down` if not."""
        self.on_failure: Callable[[str], None] = _ignore
        self.on_applied: Callable[[], None] = _nothing
        """The image, or the role of this node, has moved."""
        self.acted_index = 0
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="metadata")
        self._slices = TimeSlices(loop)
        self._working = False
        self._closed = False
        self._to_act: deque[tuple[Image, Delta]] = deque()
        self._new = asyncio.Event()
        self._actor: Actor | None = None
        self._acting: asyncio.Task[None] | None = None
        self._applied: list[tuple[int, int, asyncio.Future[None]]] = []
        self._acted: list[tuple[int, int, asyncio.Future[None]]] = []
        self._count = 0
        self._barriers: dict[object, asyncio.Future[int]] = {}
        self._proposed: dict[int, asyncio.Future[None]] = {}
        self._ticker: asyncio.TimerHandle | None = None
        self._remembering: asyncio.TimerHandle | None = None
        self._snapshot_error: str | None = None
        self._quiet_until = 0.0
        self._path = ""

    # Life.

    def open(
        self,
        path: str,
        disk: Disk,
        *,
        node_id: int,
        directory_id: UUID,
        voters: tuple[Voter, ...],
        observer: bool,
        settings: RaftSettings,
        snapshot_after_bytes: int = SNAPSHOT_AFTER_BYTES,
        found_with: Callable[[], Sequence[MetadataRecord]] = tuple,
    ) -> None:
        """Open the member. Blocks. Raises as :meth:`MetadataNode.open`."""
        self._path = path
        self.raft_node = MetadataNode.open(
            path,
            disk,
            node_id=node_id,
            directory_id=directory_id,
            voters=voters,
            observer=observer,
            random=_random,
            raft=settings,
            snapshot_after_bytes=snapshot_after_bytes,
            cluster_id=directory_ids.cluster_of(disk, path),
            found_with=found_with,
        )
        self.acted_index = self.image.index
        if (cut := self.raft_node.cut_at_start) is not None:
            log.warning(
                "end of the metadata log cut",
                path=f"{path}/{WAL_NAME}",
                what=cut,
                why="an append was interrupted, before it was acknowledged; or it is damaged",
            )

    def propose_now(self, records: Sequence[MetadataRecord]) -> int:
        """A lone voter's proposal before the loop serves. Blocks. Raises as :meth:`propose`."""
        index = self.raft_node.propose(records)
        while (work := self.raft_node.work()) is not None:
            work.run()
            self._publish(work, self.raft_node.done(work))
        return index

    def start_ticking(self) -> None:
        """Time passes for the member."""
        self._ticker = self._loop.call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        if self._closed:
            return
        self._ticker = self._loop.call_later(TICK_S, self._tick)
        self._step(self.raft_node.tick)

    async def close(self) -> None:
        """Stop; what was proposed and not committed has an unknown outcome."""
        self._closed = True
        if self._ticker is not None:
            self._ticker.cancel()
        if self._acting is not None:
            self._acting.cancel()
            await asyncio.gather(self._acting, return_exceptions=True)
        while self._working:
            await asyncio.sleep(0.001)
        if self._remembering is not None:
            self._remembering.cancel()
            await asyncio.gather(*self._remember(), return_exceptions=True)
        waiting: list[asyncio.Future[Any]] = [*self._proposed.values(), *self._barriers.values()]
        waiting += [entry[2] for entry in (*self._applied, *self._acted)]
        for future in waiting:
            if not future.done():
                future.cancel()
        self._pool.shutdown()

    # What it is.

    @property
    def image(self) -> Image:
        """The metadata as committed, as far as this node knows."""
        return self.raft_node.image

    @property
    def leads(self) -> bool:
        """This node is the active controller and may decide."""
        return self.raft_node.controller_ready

    @property
    def leader_id(self) -> int | None:
        """The active controller; None while none is known."""
        return self.raft_node.leader_id

    # What moves it.

    def receive(self, message: Message) -> None:
        """A message of a peer. A snapshot is read before it may replace anything: in the thread,
        for it may be large.
        """
        if self._closed:
            return
        if isinstance(message, InstallSnapshot):
            job = self._loop.run_in_executor(self._pool, check_install, message)
            job.add_done_callback(partial(self._snapshot_checked, message))
            return
        self._step(partial(self.raft_node.receive, message))

    def _snapshot_checked(self, message: InstallSnapshot, job: asyncio.Future[str]) -> None:
        wrong = job.result()
        if wrong:
            self._log_refused([(message.sender, f"InstallSnapshot refused: {wrong}")])
        elif not self._closed:
            self._step(partial(self.raft_node.receive, message))

    def _log_refused(self, refused: Iterable[tuple[int, str]]) -> None:
        for sender, why in refused:
            if self._loop.time() >= self._quiet_until:
                self._quiet_until = self._loop.time() + NOISE_INTERVAL_S
                log.warning("metadata message refused", peer=sender, reason=why)

    def peer_down(self, node_id: int) -> None:
        """There is evidence that a node's process is gone."""
        if not self._closed:
            self._step(partial(self.raft_node.peer_down, node_id))

    def _step(self, event: Callable[[], None]) -> None:
        """Give the member an event, then do what follows."""
        try:
            event()
        except Exception as error:  # noqa: BLE001
            self._fail_for_good(error)
            return
        self.pump()

    async def propose(self, records: Sequence[MetadataRecord]) -> int:
        """Make records true: done when they are committed and in the image here.

        Raises InvariantViolation when they contradict the image; NotController when this node does
        not lead, or lost its leadership meanwhile: then nobody knows what becomes of them.
        """
        index = await self._slices.finish(self._propose(records))
        return await self._committed(index)

    def _propose(self, records: Sequence[MetadataRecord]) -> Steps[int]:
        """Propose in slices; the entry may be committed before the caller runs again."""
        index = yield from self.raft_node.propose_in_steps(records)
        self._proposed[index] = self._loop.create_future()
        return index

    async def change_voters(self, voters: tuple[Voter, ...]) -> int:
        """Let one voter join or leave; done when that is committed. Raises as :meth:`propose`, and
        InvalidRequest with what would be right.
        """
        index = self.raft_node.change_voters(voters)
        self._proposed[index] = self._loop.create_future()
        return await self._committed(index)

    async def _committed(self, index: int) -> int:
        future = self._proposed[index]
        self.pump()
        try:
            await future
        finally:
            self._proposed.pop(index, None)
        return index

    async def read_barrier(self) -> int:
        """The index that a current reader must have seen. Raises NotController when not leading."""
        token = object()
        self.raft_node.read_barrier(token)
        future: asyncio.Future[int] = self._loop.create_future()
        self._barriers[token] = future
        self.pump()
        return await future

    def pump(self) -> None:
        """Do what the member has to do: the disk's part in the thread, then the rest."""
        try:
            self._pump()
        except Exception as error:  # noqa: BLE001
            self._fail_for_good(error)

    def _pump(self) -> None:
        node = self.raft_node
        while not self._closed:
            self._send(node.drain_messages())
            for node_id in node.drain_probes():
                try:
                    self.probe(node_id)
                except Exception as error:  # noqa: BLE001 - of the transport: as in _send
                    bugs.report("peer not probed", error, peer=node_id)
            if refused := node.drain_refused():
                self._log_refused(refused)
            if node.refusal is not None:
                self._closed = True
                self.on_failure(node.refusal)
                return
            if self._working:
                return
            work = node.work()
            if work is None:
                return
            if work.blocks:
                self._working = True
                self._run(work)
                return
            work.run()
            self._done(work)

    def _send(self, messages: Iterable[Message]) -> None:
        """Give messages to the transport. One that it fails at is lost, as on the network: the
        member is as it was.
        """
        for message in messages:
            try:
                self.send(message)
            except Exception as error:  # noqa: BLE001
                kind = type(message).__name__
                bugs.report("metadata message not sent", error, peer=message.to, kind=kind)

    def _run(self, work: DiskWork) -> None:
        job = self._loop.run_in_executor(self._pool, work.run)
        warn_while_it_hangs(self._loop, job, self._path, self._counters)
        job.add_done_callback(partial(self._work_finished, work))

    def _work_finished(self, work: DiskWork, job: asyncio.Future[Any]) -> None:
        error = job.exception()
        if isinstance(error, ResourceExhausted) and not self._closed:
            log.warning("the metadata log waits for open files or memory", error=str(error))
            self._loop.call_later(EXHAUSTED_RETRY_S, self._run, work)
            return
        self._working = False
        if error is not None:
            self._failed(error)
            return
        self._done(work)
        self.pump()

    def _failed(self, error: BaseException) -> None:
        """The disk takes nothing: another voter leads from now on, and this node ends.

        What was promised may not be on disk after a failed fsync, and nobody knows what a full disk
        takes next; so nothing is tried again here. The others need no time-out to go on.
        """
        if is_bug(error):
            log.exception("the metadata log failed", error)
        self.raft_node.disk_failed()
        self._send(self.raft_node.drain_messages())
        self.on_failure(f"the metadata log failed: {error}")
        for future in self._proposed.values():
            if not future.done():
                future.set_exception(error)

    def _log_snapshot_error(self) -> None:
        why = self.raft_node.last_snapshot_error
        if why is not None and why != self._snapshot_error:
            log.warning("snapshot of the metadata not written", error=why)
        self._snapshot_error = why

    def _done(self, work: DiskWork) -> None:
        """Apply what is committed, large entries in slices: the work is not over before that."""
        try:
            result = self._slices.run(self.raft_node.done_in_steps(work))
        except Exception as error:  # noqa: BLE001
            self._fail_for_good(error)
            return
        if not isinstance(result, SlicedTask):
            self._publish(work, result)
            return
        self._working = True
        result.add_done_callback(partial(self._sliced_apply_finished, work))

    def _sliced_apply_finished(self, work: DiskWork, result: asyncio.Future[Outcome]) -> None:
        self._working = False
        error = result.exception()
        if error is not None:
            self._fail_for_good(error)
        else:
            self._publish(work, result.result())
            self.pump()

    def _fail_for_good(self, error: BaseException) -> None:
        """The log contradicts itself, or a bug of ours left the member half changed: nothing that
        it says or applies after that can be relied on. This node ends, the others go on.
        """
        if self._closed:
            return
        self._closed = True
        if is_bug(error):
            log.exception("the metadata log failed", error)
        why = error if isinstance(error, KeptError) else repr(error)
        self.on_failure(f"the metadata log failed: {why}")

    def _publish(self, work: DiskWork, outcome: Outcome) -> None:
        if work.snapshot is not None:
            self._log_snapshot_error()
        self._send(outcome.messages)
        for index in outcome.lost_proposals:
            self._refuse(index, "leadership was lost before the decision held")
        for image, delta, _ in outcome.applied:
            self._to_act.append((image, delta))
        if outcome.applied:
            self._remember_soon()
            self._new.set()
            _wake(self._applied, self.image.index)
            for index in [index for index in self._proposed if index <= self.image.index]:
                _resolve(self._proposed[index])
        if outcome.role_changed and self.raft_node.role is not Role.LEADER:
            for index in tuple(self._proposed):
                self._refuse(index, "leadership was lost; nobody knows yet whether it held")
        for token, index in outcome.reads:
            barrier = self._barriers.pop(token, None)
            if barrier is not None and not barrier.done():
                barrier.set_result(index)
        for token in outcome.lost_reads:
            barrier = self._barriers.pop(token, None)
            if barrier is not None and not barrier.done():
                barrier.set_exception(NotController("this node leads no more"))
        if outcome.applied or outcome.role_changed:
            try:
                self.on_applied()
            except Exception as error:  # noqa: BLE001 - of whoever follows: the log itself goes on
                bugs.report("following the metadata failed", error)

    # Remembering.

    def _remember_soon(self) -> None:
        if self._remembering is None and not self._closed:
            self._remembering = self._loop.call_later(REMEMBER_S, self._remember)

    def _remember(self) -> list[asyncio.Future[None]]:
        """Make durable what was applied; the job of it, where there is one."""
        self._remembering = None
        write = self.raft_node.remember_applied()
        if write is None:
            return []
        job = self._loop.run_in_executor(self._pool, write.run)
        job.add_done_callback(self._remembered)
        return [job]

    def _remembered(self, job: asyncio.Future[None]) -> None:
        error = job.exception()
        if isinstance(error, ResourceExhausted) or (
            isinstance(error, MachineError) and error.cause.errno == errno.ENOSPC
        ):
            log.warning("what was applied is not remembered", error=str(error))
        elif error is not None and not self._closed:
            self._failed(error)

    def _refuse(self, index: int, why: str) -> None:
        future = self._proposed.get(index)
        if future is not None and not future.done():
            leader_id = self.leader_id
            future.set_exception(NotController(why, -1 if leader_id is None else leader_id))

    # Acting.

    def begin(self) -> Image:
        """The image that the node starts from: what is applied after it is to be acted on."""
        self._to_act.clear()
        self._mark_acted(self.image.index)
        return self.image

    def act(self, actor: Actor) -> None:
        """From now on, act on what was applied since :meth:`begin`, in order."""
        self._actor = actor
        self._acting = self._loop.create_task(self._act())

    async def _act(self) -> None:
        assert self._actor is not None
        while True:
            for _ in range(ACT_TOGETHER):
                if not self._to_act:
                    break
                image, delta = self._to_act.popleft()
                try:
                    await self._actor(image, delta)
                # A bug of ours: the next entries are still acted on.
                except Exception as error:  # noqa: BLE001
                    log.exception("acting on the metadata failed", error, index=image.index)
                self._mark_acted(image.index)
            if self._to_act:
                await asyncio.sleep(0)
                continue
            self._new.clear()
            await self._new.wait()

    def _mark_acted(self, index: int) -> None:
        self.acted_index = index
        _wake(self._acted, index)

    async def applied(self, index: int) -> None:
        """Wait until the image here has come as far as ``index``."""
        if self.image.index < index:
            await self._wait(self._applied, index)

    async def acted(self, index: int) -> None:
        """Wait until this node has acted on the entries up to ``index``."""
        if self._actor is not None and self.acted_index < index:
            await self._wait(self._acted, index)

    async def _wait(self, heap: list[tuple[int, int, asyncio.Future[None]]], index: int) -> None:
        self._count += 1
        future: asyncio.Future[None] = self._loop.create_future()
        heappush(heap, (index, self._count, future))
        await future


def _wake(heap: list[tuple[int, int, asyncio.Future[None]]], index: int) -> None:
    while heap and heap[0][0] <= index:
        _resolve(heappop(heap)[2])


def _resolve(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)


def _random(n: int) -> int:
    """A number in 0..n-1 for election timeouts."""
    return int.from_bytes(os.urandom(4), "big") % n


def _ignore(_: Any) -> None:
    pass


def _nothing() -> None:
    pass
