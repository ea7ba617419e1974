"""The state machine of one partition of ``__consumer_offsets``: all its groups and their offsets.

A :class:`~..common.core.ShardCore`; :attr:`GroupCore.next_deadline_ms` says when to call
:meth:`GroupCore.tick` next. ``now_ms`` everywhere is a clock that never jumps, so that no session
ends because somebody set the time; what goes into records is the wall clock, which the shell keeps
as :attr:`GroupCore.wall_offset_ms`.

Duties of the shell, in this order: carry out effects as they come; an AppendRecords that
fails is followed at once by AppendRejected, one that is staged by AppendStaged, before any other
event; appends commit in their order.

Kafka keeps a snapshot per log offset; we keep two offset stores, appended and committed, which
change when an append is staged and when it is committed, and undo what else one that failed had
changed. A group that was created shows in lists when its first record is committed; one that was
deleted is gone as soon as its tombstone is appended.

What a transaction commits is kept apart until its end: the marker makes offsets of it, or forgets
it. Until the marker is committed, such an offset is unstable.

Source: Kafka's ``GroupCoordinatorShard``, ``OffsetMetadataManager``.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from kept.node.coordinator.common.events import (
    AppendCommitted,
    AppendRecords,
    AppendRejected,
    AppendStaged,
    AppendTimedOut,
    EndMarker,
    Response,
    TransactionalProducer,
)
from kept.node.coordinator.common.timers import Timers
from kept.node.coordinator.groups import events as ev
from kept.node.coordinator.groups.events import NO_ERROR, Effect, Event, NoteGroup
from kept.node.coordinator.groups.group import CLASSIC_GROUP_TYPE, DEAD_STATE, STABLE, Group
from kept.node.coordinator.groups.join_group import GroupMembership
from kept.node.coordinator.groups.memory_limit import GroupMemory, GroupTable, records_bytes
from kept.node.coordinator.groups.offset_cleanup import (
    ExpirySweep,
    GroupsDeletion,
    Sweep,
    TopicsSweep,
)
from kept.node.coordinator.groups.offset_requests import OffsetRequests
from kept.node.coordinator.groups.offsets import OffsetStore, OpenTransactions, StoredOffset
from kept.node.coordinator.groups.pending_append import (
    Assignment,
    DeferredResponse,
    GroupCreation,
    PendingAppend,
    Sequel,
    StaticMemberReplacement,
    SweepSlice,
)
from kept.node.coordinator.groups.records import (
    GroupMetadataKey,
    GroupMetadataValue,
    GroupRecord,
    OffsetCommitKey,
    OffsetCommitValue,
)
from kept.node.coordinator.groups.timers import (
    ExpireOffsets,
    JoinDeadline,
    SessionExpiry,
    SweepTopics,
    SyncDeadline,
    Timer,
)
from kept.steps import Steps
from kept.storage.errors import InvariantViolation

EXPIRY_KEY: Final = ("expire-offsets",)
SWEEP_TOPICS_KEY: Final = ("sweep-topics",)
RETRY_MS: Final = 30_000
"""Until offsets of deleted topics are tried again that could not be deleted."""


class GroupCore:
    """The groups of one partition; ``memory`` counts those of other partitions, too."""

    def __init__(self, settings: ev.GroupSettings, memory: GroupMemory | None = None) -> None:
        self.settings = settings
        self.memory = GroupMemory(settings.groups_max_bytes) if memory is None else memory
        self.now_ms = 0
        """When the present event happens."""
        self.restarted_ms = -1
        """Timeouts of members that began before this begin here."""
        self.wall_offset_ms = 0
        self._hold_nothing()
        self.timers: Timers[Timer] = Timers()
        self.pending: dict[int, PendingAppend] = {}
        self._undecided: dict[int, set[OffsetCommitKey]] = {}
        """Offsets that open transactions committed, by the append that ends or voids those."""
        self._deferred: list[DeferredResponse] = []
        self._sweeps: list[Sweep] = []
        """Those that have not ended; of these the ready ones wait for SweepOn, the others for their
        append."""
        self._ready_sweeps: deque[Sweep] = deque()
        self._gone_topics: dict[str, set[UUID]] = {}
        """Deleted topics that no sweep has begun with."""
        self._retried_topics: dict[str, set[UUID]] = {}
        """Those that a sweep left offsets of, until SweepTopics."""
        self._given_up: tuple[GroupTable | OffsetStore | OpenTransactions, ...] = ()
        self._last_append = 0
        self._effects: list[Effect] = []
        self.membership = GroupMembership(self)
        self._offsets = OffsetRequests(self)

    # Loading.

    def replay(self, record: GroupRecord, record_offset: int, producer_id: int = -1) -> None:
        """Apply one record of the log; ``producer_id`` if it is part of a transaction."""
        key, value = record.key, record.value
        if isinstance(key, GroupMetadataKey):
            self.groups.pop(key.group, None)
            if isinstance(value, GroupMetadataValue):
                self.groups[key.group] = Group.from_record(key.group, value)
            return
        if not isinstance(value, OffsetCommitValue):
            self.appended.put(key, None)
            self.committed.put(key, None)
            self.transactions.forget(key)
            return
        if key.group not in self.groups:
            self.groups[key.group] = Group(key.group, is_durable=True)
        stored = StoredOffset(value, record_offset)
        if producer_id == -1:
            self.appended.put(key, stored)
            self.committed.put(key, stored)
        else:
            self.transactions.add(producer_id, key, stored)

    def end_transaction(self, producer_id: int, *, is_commit: bool) -> None:
        """Apply a marker of the log: the end of a producer's transaction."""
        offsets = self.transactions.end(producer_id)
        if is_commit:
            self.appended.put_later(offsets)
            self.committed.put_later(offsets)

    def loaded(self, now_ms: int) -> Steps[tuple[Effect, ...]]:
        """All records are replayed: sessions of the members begin."""
        self.now_ms = now_ms
        for group in self.groups.values():
            yield from self.membership.loaded(group)
        self._schedule_expiry()
        return self._drain_effects()

    def restart_timeouts(self, now_ms: int) -> tuple[Effect, ...]:
        """This process did not run for a while: timeouts of members begin anew. There may be a
        hundred thousand: each is set again when its old time has come.
        """
        self.now_ms = self.restarted_ms = now_ms
        return ()

    def unload(self) -> tuple[Effect, ...]:
        """Another node leads the partition now: whoever waits gets NOT_COORDINATOR."""
        error = ErrorCode.not_coordinator
        for pending in self.pending.values():
            if isinstance(pending.sequel, Response) and not pending.is_over:
                self._respond_failed(pending.sequel, error)
            self.memory.count_records(-pending.size_bytes)
        for deferred in self._deferred:
            self._respond_failed(deferred, error)
        for sweep in self._sweeps:
            sweep.failed(error)
        for group in self.groups.values():
            self.membership.unload(group, error)
        self._sweeps.clear()
        self._ready_sweeps.clear()
        self.pending.clear()
        self._undecided.clear()
        self._deferred.clear()
        self._given_up = self.groups, self.appended, self.committed, self.transactions
        self._hold_nothing()
        return self._drain_effects()

    def _hold_nothing(self) -> None:
        self.groups, self.transactions = GroupTable(self.memory), OpenTransactions(self.memory)
        self.appended, self.committed = OffsetStore(self.memory), OffsetStore(self.memory)

    def release(self) -> Steps[None]:
        """See :meth:`.core.ShardCore.release`."""
        given_up, self._given_up = self._given_up, ()
        yield from self.timers.release()
        for table in given_up:
            yield from table.release()

    # Events.

    def step(self, event: Event, now_ms: int) -> tuple[Effect, ...]:
        """Handle an event; the effects, in the order in which to carry them out."""
        self.now_ms = now_ms
        match event:
            case ev.Join() | ev.CommitOffsets() | ev.FetchOffsets() if self.is_being_deleted(
                event.group
            ):
                self._refuse(event, ErrorCode.coordinator_load_in_progress)
            case ev.Join():
                self.membership.join(event)
            case ev.JoinAbandoned():
                self.membership.join_abandoned(event)
            case ev.Sync():
                self.membership.sync(event)
            case ev.Heartbeat():
                self.membership.heartbeat(event)
            case ev.Leave():
                self.membership.leave(event)
            case ev.CommitOffsets():
                self._offsets.commit(event)
            case ev.FetchOffsets():
                self._fetch(event)
            case ev.WriteTxnMarker():
                result = ev.WriteTxnMarkerResult()
                self.append((), Response(event.request, result), marker=event.marker)
            case ev.DeleteOffsets():
                self._offsets.delete(event)
            case ev.DeleteGroups():
                deletion = GroupsDeletion(self, event)
                self._sweeps.append(deletion)
                self._sweep(deletion)
            case ev.TopicsDeleted():
                for topic, topic_id in event.topics:
                    self._gone_topics.setdefault(topic, set()).add(topic_id)
                self._sweep_topics()
            case ev.SweepOn():
                self._sweep_on()
            case AppendStaged():
                self._append_staged(event)
            case AppendCommitted():
                self._append_committed(event)
            case AppendRejected():
                self._append_rejected(event)
            case AppendTimedOut():
                self._append_timed_out(event)
        return self._drain_effects()

    def tick(self, now_ms: int) -> tuple[Effect, ...]:
        """Fire one timer that is due: a large group takes 20 ms, and many sessions end at once."""
        self.now_ms = now_ms
        match self.timers.pop_due(now_ms):
            case SessionExpiry() as timer:
                self.membership.session_expired(timer)
            case JoinDeadline() as timer:
                self.membership.join_deadline(timer)
            case SyncDeadline() as timer:
                self.membership.sync_deadline(timer)
            case ExpireOffsets():
                self._schedule_expiry()
                if not any(isinstance(sweep, ExpirySweep) for sweep in self._sweeps):
                    self._start(ExpirySweep(self))
            case SweepTopics():
                for topic, topic_ids in self._retried_topics.items():
                    self._gone_topics.setdefault(topic, set()).update(topic_ids)
                self._retried_topics = {}
                self._sweep_topics()
        return self._drain_effects()

    @property
    def next_deadline_ms(self) -> int | None:
        """When to call :meth:`tick` next."""
        return self.timers.next_deadline_ms

    # Queries of what is committed.

    def list_groups(
        self, states: Collection[str] = (), types: Collection[str] = ()
    ) -> Iterator[ev.ListedGroup]:
        """Groups in one of the states and of one of the types, both in lower case; none given: of
        all. Those that there are when the first is taken.
        """
        if types and CLASSIC_GROUP_TYPE not in types:
            return
        for g in tuple(self.groups.values()):
            if g.is_durable and (not states or g.state.value.lower() in states):
                state, kind = g.state.value, g.protocol_type or ""
                yield ev.ListedGroup(g.group_id, kind, state, CLASSIC_GROUP_TYPE)

    def committed_of(self, group_id: str) -> Mapping[str, Mapping[int, StoredOffset]]:
        """Topic to partition to offset of a group; one that does not exist has none."""
        group = self.groups.get(group_id)
        exists = group is not None and group.is_durable
        return self.committed.of_group(group_id) if exists else {}

    def is_unstable(self, key: OffsetCommitKey) -> bool:
        """Whether a transaction commits that offset whose end is not certain yet."""
        undecided = self._undecided.values()
        return self.transactions.holds(key) or any(key in keys for keys in undecided)

    def describe(self, group_id: str) -> ev.DescribedGroup:
        """A group in full."""
        group = self.groups.get(group_id)
        if group is None or not group.is_durable:
            return ev.DescribedGroup(group_id, DEAD_STATE)
        stable = group.state is STABLE
        members = tuple(
            ev.DescribedMember(
                m.member_id,
                m.group_instance_id,
                m.client_id,
                m.client_host,
                m.metadata(group.protocol) if stable else b"",
                m.assignment,
            )
            for m in group.members.values()
        )
        protocol = (group.protocol or "") if stable else ""
        return ev.DescribedGroup(
            group_id, group.state.value, group.protocol_type or "", protocol, members
        )

    # Services for the parts of the core.

    @property
    def wall_ms(self) -> int:
        """The wall clock at ``now_ms``."""
        return self.now_ms + self.wall_offset_ms

    def respond(self, request: int, result: Any) -> None:
        """Emit a response."""
        self._effects.append(Response(request, result))

    def _refuse(
        self, event: ev.Join | ev.CommitOffsets | ev.FetchOffsets, error: ErrorCode
    ) -> None:
        match event:
            case ev.Join():
                self.respond(event.request, ev.JoinResult(error, event.member))
            case ev.CommitOffsets():
                self.respond(event.request, ev.CommitResult(error))
            case ev.FetchOffsets():
                self.respond(event.request, ev.FetchResult(error))

    def _respond_failed(self, response: Response | DeferredResponse, error: ErrorCode) -> None:
        result = response.result
        if isinstance(result, ev.FetchOffsets):
            self.respond(response.request, ev.FetchResult(error))
        else:
            self.respond(response.request, ev.failed(result, error))

    def respond_when_committed(self, request: int, result: Any) -> None:
        """Respond with ``result``, or by fetching what a FetchOffsets asks for, once all that is
        appended by now is committed.

        Decisions are made on what is appended; a crash may undo that. A response without a record
        of its own that says what was decided must not be sent before it is certain.
        """
        deferred = DeferredResponse(self._last_append, request, result)
        last = self.pending.get(self._last_append)
        if last is None:
            self._respond_deferred(deferred)
        elif last.late is not None:
            self._respond_failed(deferred, last.late)
        else:
            self._deferred.append(deferred)

    def _respond_deferred(self, deferred: DeferredResponse) -> None:
        result = deferred.result
        if isinstance(result, ev.FetchOffsets):
            result = self._offsets.fetch(result)
        self.respond(deferred.request, result)

    def note(self, group: str, text: str, *, routine: bool = False) -> None:
        """Emit a line for the log."""
        self._effects.append(NoteGroup(group, text, routine))

    def refused_for_memory(self, group: str, setting: str) -> None:
        """Emit that a request was refused by a limit of memory."""
        self._effects.append(ev.OutOfMemory(group, setting))

    def append(
        self,
        records: tuple[GroupRecord, ...],
        sequel: Sequel | None = None,
        *,
        producer: TransactionalProducer | None = None,
        marker: EndMarker | None = None,
        created: str | None = None,
        removed: tuple[Group, ...] = (),
    ) -> None:
        """Emit an append and remember what follows it. Its offsets take effect when it is staged.
        ``created``, ``removed``: groups to undo when it is rejected. A request that caused an
        append without ``sequel`` is responded to by :meth:`respond_when_committed`.
        """
        self._last_append += 1
        size_bytes = records_bytes(records)
        self.pending[self._last_append] = PendingAppend(
            records, sequel, size_bytes, producer, marker, created, removed
        )
        self.memory.count_records(size_bytes)
        self._effects.append(
            AppendRecords(self._last_append, records, producer=producer, marker=marker)
        )

    # Appends.

    def _pop_pending(self, append: int) -> PendingAppend:
        pending = self.pending.pop(append)
        self.memory.count_records(-pending.size_bytes)
        return pending

    def _append_staged(self, event: AppendStaged) -> None:
        """Decisions see its offsets from now on: nothing undoes them but the loss of leadership."""
        pending = self.pending[event.append]
        pending.base_offset = event.base_offset
        undecided: set[OffsetCommitKey] = set()
        if pending.marker is not None:
            pending.ended = self.transactions.end(pending.marker.producer_id)
            undecided.update(pending.ended)
            if pending.marker.is_commit:
                self.appended.put_later(pending.ended)
        for key, stored in pending.offsets():
            if pending.producer is not None and stored is not None:
                self.transactions.add(pending.producer.producer_id, key, stored)
                continue
            self.appended.put(key, stored)
            if stored is None and self.transactions.forget(key):
                undecided.add(key)
        if undecided:
            self._undecided[event.append] = undecided

    def _append_committed(self, event: AppendCommitted) -> None:
        pending = self._pop_pending(event.append)
        self._undecided.pop(event.append, None)
        if pending.marker is not None and pending.marker.is_commit:
            self.committed.put_later(pending.ended)
        if pending.producer is None:
            for key, stored in pending.offsets():
                self.committed.put(key, stored)
        for record in pending.records:
            if record.value is not None and record.key.group in self.groups:
                self.groups[record.key.group].is_durable = True
        self._finish(pending, NO_ERROR)
        self._respond_committed()

    def _append_rejected(self, event: AppendRejected) -> None:
        pending = self._pop_pending(event.append)
        for group in reversed(pending.removed):
            self.groups[group.group_id] = group
        if pending.created is not None:
            self.groups.pop(pending.created, None)
        self._finish(pending, event.error)
        self._fail_deferred(event.append, event.error)
        self._respond_committed()

    def _append_timed_out(self, event: AppendTimedOut) -> None:
        pending = self.pending.get(event.append)
        if pending is None:
            return
        pending.late = event.error
        # A new group's record may still be committed, behind it those of others who know the group
        # by now: it stays. Its members hear of it when they ask for their assignment.
        if not isinstance(pending.sequel, GroupCreation):
            self._finish(pending, event.error)
        self._fail_deferred(event.append, event.error)

    def _finish(self, pending: PendingAppend, error: ErrorCode) -> None:
        """Do what follows an append, once: it is committed, or failed with ``error``."""
        if pending.is_over:
            return
        pending.is_over = True
        match pending.sequel:
            case Response() as response if error is NO_ERROR:
                self._effects.append(response)
            case Response() as response:
                self._respond_failed(response, error)
            case GroupCreation(group):
                self.membership.created(group, error)
            case StaticMemberReplacement() as replacement:
                self.membership.static_member_replaced(replacement, error)
            case Assignment() as assignment:
                self.membership.assigned(assignment, error)
            case SweepSlice(sweep, is_last):
                self._slice_over(sweep, is_last, error)

    def _respond_committed(self) -> None:
        """Send deferred responses whose appends are all committed."""
        if not self._deferred:
            return
        oldest = min(self.pending, default=self._last_append + 1)
        ready = [d for d in self._deferred if d.append < oldest]
        self._deferred = [d for d in self._deferred if d.append >= oldest]
        for deferred in ready:
            self._respond_deferred(deferred)

    def _fail_deferred(self, append: int, error: ErrorCode) -> None:
        failed = [d for d in self._deferred if d.append == append]
        self._deferred = [d for d in self._deferred if d.append != append]
        for deferred in failed:
            self._respond_failed(deferred, error)

    def _fetch(self, event: ev.FetchOffsets) -> None:
        """With ``require_stable`` the response waits for all that was appended before."""
        if event.require_stable:
            self.respond_when_committed(event.request, event)
        else:
            self.respond(event.request, self._offsets.fetch(event))

    # Sweeps.

    def is_being_deleted(self, group_id: str) -> bool:
        """Whether some of a group's offsets are deleted, and the rest of it is about to be."""
        return any(sweep.group == group_id for sweep in self._sweeps)

    def _start(self, sweep: Sweep) -> None:
        self._sweeps.append(sweep)
        self._make_ready(sweep)

    def _make_ready(self, sweep: Sweep) -> None:
        self._ready_sweeps.append(sweep)
        self._effects.append(ev.MoreToSweep())

    def _sweep_on(self) -> None:
        if self._ready_sweeps:
            self._sweep(self._ready_sweeps.popleft())
        if self._ready_sweeps:
            self._effects.append(ev.MoreToSweep())

    def _sweep(self, sweep: Sweep) -> None:
        """Delete the next slice."""
        is_last = sweep.next_slice()
        if sweep.records:
            records, removed = tuple(sweep.records), tuple(sweep.removed)
            self.append(records, SweepSlice(sweep, is_last), removed=removed)
        elif is_last:
            self._end(sweep)
        else:
            self._make_ready(sweep)

    def _slice_over(self, sweep: Sweep, is_last: bool, error: ErrorCode) -> None:
        if error is not NO_ERROR:
            self._sweeps.remove(sweep)
            sweep.failed(error)
            return
        sweep.committed()
        if is_last:
            self._end(sweep)
        else:
            self._make_ready(sweep)

    def _end(self, sweep: Sweep) -> None:
        self._sweeps.remove(sweep)
        self._sweep_topics()
        sweep.ended()

    def _sweep_topics(self) -> None:
        """Begin to delete the offsets of deleted topics, unless that is being done."""
        if self._gone_topics and not any(isinstance(s, TopicsSweep) for s in self._sweeps):
            gone, self._gone_topics = self._gone_topics, {}
            self._start(TopicsSweep(self, gone))

    def retry_topics(self, gone: Mapping[str, set[UUID]]) -> None:
        """Offsets of deleted topics could not be deleted: try again in a moment, and not
        at the end of another sweep, which may leave some, too. Topics that come meanwhile do not
        put that off.
        """
        for topic, topic_ids in gone.items():
            self._retried_topics.setdefault(topic, set()).update(topic_ids)
        if self.timers.deadline(SWEEP_TOPICS_KEY) is None:
            self.timers.set(SWEEP_TOPICS_KEY, self.now_ms + RETRY_MS, SweepTopics())

    # The rest.

    def _schedule_expiry(self) -> None:
        interval = self.settings.offsets_retention_check_interval_ms
        self.timers.set(EXPIRY_KEY, self.now_ms + interval, ExpireOffsets())

    def _drain_effects(self) -> tuple[Effect, ...]:
        effects, self._effects = self._effects, []
        return tuple(effects)

    def check_invariants(self) -> None:
        """Raise InvariantViolation when the state contradicts itself."""
        for group_id, group in self.groups.items():
            if group.group_id != group_id:
                raise InvariantViolation(f"group {group.group_id} is filed under {group_id}")
            group.check_invariants()
            self.membership.check_invariants(group)
        self.transactions.check_invariants()
        unstaged = [pending for pending in self.pending.values() if pending.base_offset < 0]
        deleted = {group.group_id for pending in unstaged for group in pending.removed}
        orphans = self.appended.groups() | self.transactions.groups()
        if orphans := orphans - self.groups.keys() - deleted:
            raise InvariantViolation(f"offsets without a group: {sorted(orphans)}")
        if not self.pending:
            if dict(self.appended) != dict(self.committed):
                raise InvariantViolation("nothing is pending, yet readers see other offsets")
            if self._deferred or self._undecided:
                raise InvariantViolation("something waits for an append that is over")
