"""The state machine of one partition of ``__consumer_offsets``: all its groups and their offsets.

:meth:`GroupCore.step` takes an event and gives effects; :meth:`GroupCore.tick` fires the timers
that are due; :attr:`GroupCore.next_deadline_ms` says when to call it next. No clock, I/O,
randomness or ``async`` in here. ``now_ms`` everywhere is a clock that never jumps, so that no
session ends because somebody set the time; what goes into records is the wall clock, which the
shell keeps as :attr:`GroupCore.wall_offset_ms`.

Duties of the shell, in this order: carry out effects as they come; an :class:`~.events.Append` that
fails is followed at once by AppendRejected, before any other event; appends commit in their order.

Kafka keeps a snapshot per log offset; we keep two offset stores, appended and committed, and undo
what an append that failed had changed. A group that was created shows in lists when its first
record is committed; one that was deleted is gone as soon as its tombstone is appended.

Source: Kafka's ``GroupCoordinatorShard``, ``OffsetMetadataManager``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from kio.schema.errors import ErrorCode

from kept.node.coordinator.groups import events as ev
from kept.node.coordinator.groups.events import NO_ERROR, Answer, Append, Effect, Event, Note
from kept.node.coordinator.groups.group import (
    CLASSIC_GROUP_TYPE,
    DEAD_STATE,
    EMPTY,
    STABLE,
    Group,
)
from kept.node.coordinator.groups.join_group import GroupMembership
from kept.node.coordinator.groups.memory_limit import GroupMemory, GroupTable, records_bytes
from kept.node.coordinator.groups.offset_requests import OffsetRequests
from kept.node.coordinator.groups.offsets import (
    LIVE_RECORD_OFFSET,
    OffsetStore,
    OpenTransactions,
    StoredOffset,
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
    SyncDeadline,
    Timers,
)
from kept.storage.errors import InvariantViolation

EXPIRY_KEY: Final = ("expire-offsets",)


@dataclass(slots=True)
class PendingAppend:
    """An append that is not committed yet.

    ``request`` is answered with ``result`` or, on failure, with ``failed(error)``; ``then`` is
    called with the time and the error instead where more than an answer follows. ``undo`` reverts
    what appending had changed, last change first. ``late`` is the error of an append that was not
    committed in time; it may still be. ``size_bytes`` is what is counted of it while it waits.
    """

    records: tuple[GroupRecord, ...]
    request: int | None = None
    result: Any = None
    failed: Callable[[ErrorCode], Any] | None = None
    then: Callable[[int, ErrorCode], None] | None = None
    undo: list[Callable[[], None]] | None = None
    told: bool = False
    late: ErrorCode | None = None
    size_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DeferredAnswer:
    """An answer that shows what ``append`` and those before it changed: it waits for them."""

    append: int
    request: int
    result: Callable[[], Any]
    failed: Callable[[ErrorCode], Any]


class GroupCore:
    """The groups of one partition; ``memory`` counts those of other partitions, too."""

    def __init__(self, settings: ev.GroupSettings, memory: GroupMemory | None = None) -> None:
        self.settings = settings
        self.memory = GroupMemory(settings.groups_max_bytes) if memory is None else memory
        self.wall_offset_ms = 0
        self.groups: dict[str, Group] = GroupTable(self.memory)
        self.appended = OffsetStore(self.memory)
        self.committed = OffsetStore(self.memory)
        self.transactions = OpenTransactions()
        self.timers = Timers()
        self.pending: dict[int, PendingAppend] = {}
        self._deferred: list[DeferredAnswer] = []
        self._last_append = 0
        self._effects: list[Effect] = []
        self.membership = GroupMembership(self)
        self._offsets = OffsetRequests(self)

    # Loading.

    def replay(self, record: GroupRecord, record_offset: int, producer_id: int = -1) -> None:
        """Take over one record of the log; ``producer_id`` if it is part of a transaction."""
        key, value = record.key, record.value
        if isinstance(key, GroupMetadataKey):
            self.groups.pop(key.group, None)
            if isinstance(value, GroupMetadataValue):
                self.groups[key.group] = Group.from_record(key.group, value)
            return
        if not isinstance(value, OffsetCommitValue):
            self.appended.put(key, None)
            self.transactions.forget(key)
            return
        if key.group not in self.groups:
            self.groups[key.group] = Group(key.group, is_durable=True)
        stored = StoredOffset(value, record_offset)
        if producer_id == -1:
            self.appended.put(key, stored)
        else:
            self.transactions.add(producer_id, key, stored)

    def end_transaction(self, producer_id: int, *, is_commit: bool) -> None:
        """Take over the end of a producer's transaction."""
        for key, stored in self.transactions.end(producer_id):
            present = self.appended.get(key)
            if is_commit and (present is None or present.record_offset < stored.record_offset):
                self.appended.put(key, stored)

    def loaded(self, now_ms: int) -> list[Effect]:
        """All records are replayed: sessions of the members begin."""
        for key, stored in self.appended:
            self.committed.put(key, stored)
        for group in self.groups.values():
            self.membership.loaded(group, now_ms)
        self._schedule_expiry(now_ms)
        return self._taken()

    def stood_still(self, now_ms: int) -> None:
        """Nobody could be heard of for a while: what members have time for begins anew."""
        for group in self.groups.values():
            self.membership.stood_still(group, now_ms)

    def unload(self) -> list[Effect]:
        """Another node leads the partition now: everybody who waits is sent to look for it."""
        error = ErrorCode.not_coordinator
        for pending in self.pending.values():
            if pending.request is not None and not pending.told and pending.failed is not None:
                self.answer(pending.request, pending.failed(error))
            self.memory.count_records(-pending.size_bytes)
        for deferred in self._deferred:
            self.answer(deferred.request, deferred.failed(error))
        for group in self.groups.values():
            self.membership.unload(group, error)
        self.pending.clear()
        self._deferred.clear()
        self.groups.clear()
        self.appended.clear()
        self.committed.clear()
        return self._taken()

    # Events.

    def step(self, event: Event) -> list[Effect]:
        """Handle an event; the effects, in the order in which to carry them out."""
        match event:
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
            case ev.DeleteOffsets():
                self._offsets.delete(event)
            case ev.DeleteGroups():
                self._delete_groups(event)
            case ev.TopicsDeleted():
                self._offsets.topics_deleted(event)
            case ev.AppendCommitted():
                self._append_committed(event)
            case ev.AppendRejected():
                self._append_rejected(event)
            case ev.AppendTimedOut():
                self._append_timed_out(event)
        return self._taken()

    def tick(self, now_ms: int) -> list[Effect]:
        """Fire the timers that are due."""
        while (timer := self.timers.pop_due(now_ms)) is not None:
            match timer:
                case SessionExpiry():
                    self.membership.session_expired(timer, now_ms)
                case JoinDeadline():
                    self.membership.join_deadline(timer, now_ms)
                case SyncDeadline():
                    self.membership.sync_deadline(timer, now_ms)
                case ExpireOffsets():
                    self._schedule_expiry(now_ms)
                    self._offsets.expire(now_ms)
        return self._taken()

    @property
    def next_deadline_ms(self) -> int | None:
        """When to call :meth:`tick` next."""
        return self.timers.next_deadline_ms

    # Questions, answered from what is committed.

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

    def describe(self, group_id: str) -> ev.DescribedGroup:
        """A group in full."""
        group = self.groups.get(group_id)
        if group is None or not group.is_durable:
            return ev.DescribedGroup(group_id, DEAD_STATE)
        stable = group.state is STABLE
        members = tuple(
            ev.DescribedMember(
                m.member_id, m.group_instance_id, m.client_id, m.client_host,
                m.metadata(group.protocol) if stable else b"", m.assignment,
            )
            for m in group.members.values()
        )  # fmt: skip
        protocol = (group.protocol or "") if stable else ""
        return ev.DescribedGroup(
            group_id, group.state.value, group.protocol_type or "", protocol, members
        )

    # Services for the parts of the core.

    def wall_ms(self, now_ms: int) -> int:
        """The wall clock at ``now_ms``."""
        return now_ms + self.wall_offset_ms

    def answer(self, request: int, result: Any) -> None:
        """Emit an answer."""
        self._effects.append(Answer(request, result))

    def answer_when_committed(
        self, request: int, result: Callable[[], Any], failed: Callable[[ErrorCode], Any]
    ) -> None:
        """Answer with ``result()`` once all that is appended by now is committed.

        Decisions are made on what is appended; a crash may take that back. An answer without a
        record of its own that says what was decided must not be heard before it is certain.
        """
        last = self.pending.get(self._last_append)
        if last is None:
            self.answer(request, result())
        elif last.late is not None:
            self.answer(request, failed(last.late))
        else:
            self._deferred.append(DeferredAnswer(self._last_append, request, result, failed))

    def note(self, group: str, text: str) -> None:
        """Emit a line for the log."""
        self._effects.append(Note(group, text))

    def refused_for_memory(self, group: str, setting: str) -> None:
        """Emit that a request was refused by a limit of memory."""
        self._effects.append(ev.OutOfMemory(group, setting))

    def append(self, pending: PendingAppend, *, atomic: bool = True) -> None:
        """Emit an append and let its records take effect on what decisions see."""
        self._last_append += 1
        pending.undo = pending.undo or []
        for record in pending.records:
            if isinstance(record.key, OffsetCommitKey):
                self._apply(record.key, record.value, pending.undo)
        pending.size_bytes = records_bytes(pending.records)
        self.memory.count_records(pending.size_bytes)
        self.pending[self._last_append] = pending
        self._effects.append(Append(self._last_append, pending.records, atomic))

    def append_and_answer(
        self,
        records: list[GroupRecord],
        request: int,
        result: Any,
        failed: Callable[[ErrorCode], Any],
        undo: list[Callable[[], None]] | None = None,
    ) -> None:
        """Append, then answer a request."""
        self.append(PendingAppend(tuple(records), request, result, failed, undo=undo))

    def append_then(
        self, records: list[GroupRecord], then: Callable[[int, ErrorCode], None]
    ) -> None:
        """Append, then go on with (now_ms, error)."""
        self.append(PendingAppend(tuple(records), then=then))

    def append_silently(
        self, records: list[GroupRecord], undo: list[Callable[[], None]] | None = None
    ) -> None:
        """Append what no request is answered with; it may be spread over several batches.

        A request that brought it about is answered by :meth:`answer_when_committed`.
        """
        self.append(PendingAppend(tuple(records), undo=undo), atomic=False)

    def _apply(self, key: OffsetCommitKey, value: Any, undo: list[Callable[[], None]]) -> None:
        stored = _stored(value)
        before = self.appended.put(key, stored)
        undo.append(lambda: _void(self.appended.put(key, before)))
        if stored is None:
            self.transactions.forget(key)

    # Appends.

    def _append_over(self, append: int) -> PendingAppend:
        pending = self.pending.pop(append)
        self.memory.count_records(-pending.size_bytes)
        return pending

    def _append_committed(self, event: ev.AppendCommitted) -> None:
        pending = self._append_over(event.append)
        for record in pending.records:
            key, value = record.key, record.value
            if isinstance(key, OffsetCommitKey):
                self.committed.put(key, _stored(value))
            if value is not None and key.group in self.groups:
                self.groups[key.group].is_durable = True
        self._tell(pending, event.now_ms, NO_ERROR)
        self._answer_deferred()

    def _append_rejected(self, event: ev.AppendRejected) -> None:
        pending = self._append_over(event.append)
        for undo in reversed(pending.undo or []):
            undo()
        self._tell(pending, event.now_ms, event.error)
        self._fail_deferred(event.append, event.error)
        self._answer_deferred()

    def _append_timed_out(self, event: ev.AppendTimedOut) -> None:
        pending = self.pending.get(event.append)
        if pending is not None:
            pending.late = event.error
            self._tell(pending, event.now_ms, event.error)
            self._fail_deferred(event.append, event.error)

    def _tell(self, pending: PendingAppend, now_ms: int, error: ErrorCode) -> None:
        if pending.told:
            return
        pending.told = True
        if pending.then is not None:
            pending.then(now_ms, error)
        elif pending.request is not None and pending.failed is not None:
            failed = error is not NO_ERROR
            self.answer(pending.request, pending.failed(error) if failed else pending.result)

    # Fetching.

    def _fetch(self, event: ev.FetchOffsets) -> None:
        """With ``require_stable`` the answer waits for all that was appended before."""
        if event.require_stable:
            self.answer_when_committed(
                event.request, lambda: self._offsets.fetch(event), ev.FetchResult
            )
        else:
            self.answer(event.request, self._offsets.fetch(event))

    # Answers that wait.

    def _answer_deferred(self) -> None:
        if not self._deferred:
            return
        oldest = min(self.pending, default=self._last_append + 1)
        ready = [d for d in self._deferred if d.append < oldest]
        self._deferred = [d for d in self._deferred if d.append >= oldest]
        for deferred in ready:
            self.answer(deferred.request, deferred.result())

    def _fail_deferred(self, append: int, error: ErrorCode) -> None:
        failed = [d for d in self._deferred if d.append == append]
        self._deferred = [d for d in self._deferred if d.append != append]
        for deferred in failed:
            self.answer(deferred.request, deferred.failed(error))

    # Deleting groups.

    def _delete_groups(self, event: ev.DeleteGroups) -> None:
        results: list[tuple[str, ErrorCode]] = []
        records: list[GroupRecord] = []
        undo: list[Callable[[], None]] = []
        for group_id in event.groups:
            group = self.groups.get(group_id)
            if group is None:
                results.append((group_id, ErrorCode.group_id_not_found))
            elif group.state is not EMPTY:
                results.append((group_id, ErrorCode.non_empty_group))
            else:
                records += self._offsets.tombstones(group_id)
                records.append(self.remove_group(group, undo))
                results.append((group_id, NO_ERROR))
        result = ev.DeleteGroupsResult(tuple(results))

        def failed(error: ErrorCode) -> ev.DeleteGroupsResult:
            refused = ErrorCode.non_empty_group
            return ev.DeleteGroupsResult(
                tuple((g, code if code is refused else error) for g, code in results)
            )

        if not records:
            # A group that is not there any more may have a tombstone that is not committed.
            self.answer_when_committed(event.request, lambda: result, failed)
            return
        self.append(PendingAppend(tuple(records), event.request, result, failed, undo=undo))

    def remove_group(self, group: Group, undo: list[Callable[[], None]]) -> GroupRecord:
        """Forget an empty group; the tombstone that says so."""
        del self.groups[group.group_id]
        undo.append(lambda: self.groups.__setitem__(group.group_id, group))
        return GroupRecord(GroupMetadataKey(group.group_id), None)

    # The rest.

    def _schedule_expiry(self, now_ms: int) -> None:
        interval = self.settings.offsets_retention_check_interval_ms
        self.timers.set(EXPIRY_KEY, now_ms + interval, ExpireOffsets())

    def _taken(self) -> list[Effect]:
        effects, self._effects = self._effects, []
        return effects

    def check_invariants(self) -> None:
        """Raise InvariantViolation when the state contradicts itself."""
        for group_id, group in self.groups.items():
            if group.group_id != group_id:
                raise InvariantViolation(f"group {group.group_id} is filed under {group_id}")
            group.check_invariants()
            self.membership.check_invariants(group)
        orphans = self.appended.groups() - self.groups.keys()
        if orphans:
            raise InvariantViolation(f"offsets without a group: {sorted(orphans)}")
        if not self.pending:
            if dict(self.appended) != dict(self.committed):
                raise InvariantViolation("nothing is pending, yet readers see other offsets")
            if self._deferred:
                raise InvariantViolation("an answer waits for an append that is over")


def _stored(value: object) -> StoredOffset | None:
    if isinstance(value, OffsetCommitValue):
        return StoredOffset(value, LIVE_RECORD_OFFSET)
    return None


def _void(_: object) -> None:
    """Ignore a value."""
