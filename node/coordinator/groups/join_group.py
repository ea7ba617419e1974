"""Joining, syncing, heartbeats, leaving: how a group agrees on who reads what.

A part of :class:`.core.GroupCore`; a port of the classic groups of Kafka's
``GroupMetadataManager`` (KIP-394 member ids, KIP-345 static members; KIP-429 cooperative
rebalancing needs nothing here, since metadata and assignments are opaque).

Where we differ: when a member repeats a pending JoinGroup or SyncGroup, the first one gets
REBALANCE_IN_PROGRESS (Kafka drops it, which blocks all later responses on its connection); a
refused join leaves no empty group behind; static members without a rebalance timeout are waited for
a second at a time; ids given to clients that have not returned are limited
(:data:`.events.MAX_PENDING_MEMBERS`), and so is memory (:mod:`.memory_limit`); and a new member
whose connection is closed while its JoinGroup is pending is removed at once.

Long because joining, syncing and leaving move one state machine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from kio.schema.errors import ErrorCode

from kept.node.coordinator.groups import events as ev
from kept.node.coordinator.groups.events import NO_ERROR, UNKNOWN_MEMBER_ID
from kept.node.coordinator.groups.group import (
    COMPLETING_REBALANCE,
    EMPTY,
    PREPARING_REBALANCE,
    STABLE,
    Group,
    GroupError,
    Member,
    protocols_bytes,
)
from kept.node.coordinator.groups.memory_limit import GROUP_BYTES, MEMBER_BYTES, records_bytes
from kept.node.coordinator.groups.pending_append import (
    Assignment,
    FormerStaticMember,
    GroupCreation,
    StaticMemberReplacement,
)
from kept.node.coordinator.groups.timers import JoinDeadline, SessionExpiry, SyncDeadline
from kept.storage.errors import InvariantViolation

if TYPE_CHECKING:
    from kept.node.coordinator.groups.core import GroupCore
    from kept.node.coordinator.groups.records import GroupRecord
    from kept.steps import Steps

MIN_STATIC_WAIT_MS: Final = 1_000
"""After a rebalance timeout that nobody met, how long static members have at least until the next
one: theirs may be 0, or less, and the deadline would be due again at once, for ever."""


class GroupMembership:
    """Requests and timers that concern members."""

    def __init__(self, core: GroupCore) -> None:
        self._core = core
        self._timers = core.timers

    # JoinGroup.

    def join(self, event: ev.Join) -> None:
        """Let a client in, or tell it its id, or why not."""
        core = self._core
        group = core.groups.get(event.group)
        if group is None and event.member != UNKNOWN_MEMBER_ID:
            self._refuse_join(event, ErrorCode.unknown_member_id)
            return
        is_new_group = group is None
        group = group or Group(event.group, state_timestamp=core.wall_ms)
        if not self._accepts(group, event.member):
            group.remove(event.member)
            self._refuse_join(event, ErrorCode.group_max_size_reached, UNKNOWN_MEMBER_ID)
            return
        if not group.supports_protocols(event.protocol_type, (name for name, _ in event.protocols)):
            self._refuse_join(event, ErrorCode.inconsistent_group_protocol)
            return
        if self._lacks_memory(group, event, is_new_group):
            return
        core.groups[event.group] = group
        if event.member == UNKNOWN_MEMBER_ID:
            self._join_new(group, event)
        else:
            self._join_existing(group, event)
        if is_new_group:
            core.append((group.empty_record(),), GroupCreation(group))

    def _refuse_join(self, event: ev.Join, error: ErrorCode, member: str | None = None) -> None:
        member = event.member if member is None else member
        self._core.respond(event.request, ev.JoinResult(error, member))

    def created(self, group: Group, error: ErrorCode) -> None:
        """The record of a new group is committed; or it was refused, and the group is removed."""
        if error is NO_ERROR or self._core.groups.get(group.group_id) is not group:
            return
        del self._core.groups[group.group_id]
        for member in group.members.values():
            self._respond_join(member, ev.JoinResult(error))
        for member_id in (*group.members, *group.pending_join):
            self._timers.cancel(_session_key(group, member_id))
        self._timers.cancel(_join_key(group))
        self._core.note(group.group_id, f"not created: {error.name}")

    def _accepts(self, group: Group, member_id: str) -> bool:
        """Whether ``group.max.size`` leaves room; those who wait for the others go first."""
        limit = self._core.settings.group_max_size
        member = group.members.get(member_id)
        if member_id == UNKNOWN_MEMBER_ID and len(group.pending_join) >= ev.MAX_PENDING_MEMBERS:
            return False
        if group.state is EMPTY:
            return True
        if group.state is PREPARING_REBALANCE:
            waits = member is not None and member.awaiting_join is not None
            return waits or group.awaiting_join_count < limit
        return member is not None or len(group.members) < limit

    def _lacks_memory(self, group: Group, event: ev.Join, is_new_group: bool) -> bool:
        """Refuse whoever brings more than there is room for, in this group or on this node.

        A group that is too large stays so: its client is told for good, as for too many members.
        The node's room may be free again soon: that client looks for its coordinator and comes
        back. Nobody who is in is sent away, unless he brings more than before.
        """
        core = self._core
        member = group.members.get(event.member)
        if member is not None:
            more = protocols_bytes(event.protocols) - protocols_bytes(member.protocols)
        else:
            ids = len(event.member) + len(event.client_id) + len(event.group_instance_id or "")
            more = MEMBER_BYTES + ids + protocols_bytes(event.protocols)
        if more > 0 and group.members_bytes + more > core.settings.group_max_bytes:
            self._refuse_join(event, ErrorCode.group_max_size_reached)
            core.refused_for_memory(event.group, "kept.group.max.bytes")
            return True
        if is_new_group:
            more += GROUP_BYTES + len(event.group)
        if not core.memory.admits(more):
            self._refuse_join(event, ErrorCode.coordinator_not_available)
            core.refused_for_memory(event.group, "kept.groups.max.bytes")
            return True
        return False

    def join_abandoned(self, event: ev.JoinAbandoned) -> None:
        """Who waited to join is gone. A client that was in the group before has its session to
        come back in; one that is new joins anew, and its place would be nobody's until then.
        """
        group = self._core.groups.get(event.group)
        if group is None:
            return
        for member in group.members.values():
            if member.awaiting_join == event.request:
                break
        else:
            return
        member.awaiting_join = None
        self._core.respond(event.request, ev.JoinResult(ErrorCode.unknown_member_id))
        if not member.is_new or group.state is not PREPARING_REBALANCE:
            self.restart_session(group, member)
            return
        group.remove(member.member_id)
        self._timers.cancel(_session_key(group, member.member_id))
        self._core.note(group.group_id, f"removed {member.member_id}: its connection is gone")
        if group.has_all_members_joined and group.previous_state is not EMPTY:
            self._complete_join(group)

    def _join_new(self, group: Group, event: ev.Join) -> None:
        core, instance = self._core, event.group_instance_id
        name = event.client_id if instance is None else instance
        member_id = f"{name[: ev.MEMBER_NAME_LENGTH]}-{event.uuid}"
        if instance is not None and instance in group.static_members:
            self._replace_static(group, event, group.static_members[instance], member_id)
        elif instance is None and event.requires_known_member_id:
            group.expect(member_id)
            self._schedule_session(group, member_id, event.session_timeout_ms, core.now_ms)
            self._refuse_join(event, ErrorCode.member_id_required, member_id)
        else:
            self._add_member(group, event, member_id)

    def _join_existing(self, group: Group, event: ev.Join) -> None:
        if event.member in group.pending_join:
            if event.group_instance_id is not None:
                self._refuse_join(event, ErrorCode.unknown_server_error)
            else:
                self._add_member(group, event, event.member)
            return
        try:
            group.validate_member(event.member, event.group_instance_id)
        except GroupError as refusal:
            self._refuse_join(event, refusal.code)
            return
        member = group.members[event.member]
        leads = group.is_leader(event.member)
        unchanged = member.protocols == event.protocols
        if group.state is COMPLETING_REBALANCE and unchanged:
            # Its first response may have been lost; the generation is the same.
            self._core.respond(event.request, self._joined(group, member))
        elif group.state is STABLE and unchanged and not leads:
            self._core.respond(event.request, self._joined(group, member))
        elif group.state is EMPTY:
            self._refuse_join(event, ErrorCode.unknown_member_id)
        else:
            # A leader that rejoins a stable group wants another assignment.
            self._update_member(group, member, event)
            why = f"member {event.member} joins again in state {group.state.value}"
            self._prepare_or_complete(group, why)

    def _joined(
        self, group: Group, member: Member, *, skip_assignment: bool = False
    ) -> ev.JoinResult:
        leads = group.is_leader(member.member_id)
        return ev.JoinResult(
            NO_ERROR,
            member.member_id,
            group.generation,
            group.protocol_type,
            group.protocol,
            group.leader or "",
            skip_assignment,
            self._members_for_leader(group) if leads else (),
        )

    def _members_for_leader(self, group: Group) -> tuple[ev.JoinedMember, ...]:
        return tuple(
            ev.JoinedMember(m.member_id, m.group_instance_id, m.metadata(group.protocol))
            for m in group.members.values()
        )

    def _add_member(self, group: Group, event: ev.Join, member_id: str) -> None:
        member = Member(
            member_id,
            event.group_instance_id,
            event.client_id,
            event.client_host,
            event.rebalance_timeout_ms,
            event.session_timeout_ms,
            event.protocol_type,
            event.protocols,
            awaiting_join=event.request,
            is_new=True,
        )
        if group.state is PREPARING_REBALANCE and group.previous_state is EMPTY:
            group.new_member_added = True
        group.add(member)
        now_ms = self._core.now_ms
        self._schedule_session(group, member_id, ev.NEW_MEMBER_JOIN_TIMEOUT_MS, now_ms)
        self._prepare_or_complete(group, f"new member {member_id}")

    def _update_member(self, group: Group, member: Member, event: ev.Join) -> None:
        self._respond_join(member, ev.JoinResult(ErrorCode.rebalance_in_progress, member.member_id))
        group.offer(member, event.protocols)
        member.rebalance_timeout_ms = event.rebalance_timeout_ms
        member.session_timeout_ms = event.session_timeout_ms
        member.awaiting_join = event.request

    # Static members.

    def _replace_static(self, group: Group, event: ev.Join, old_id: str, new_id: str) -> None:
        """A static member came back: it gets a new id, and its assignment if the group is
        stable."""
        core, instance = self._core, event.group_instance_id or ""
        member = group.members[old_id]
        fenced = ErrorCode.fenced_instance_id
        self._respond_join(member, ev.JoinResult(fenced, old_id))
        self._respond_sync(member, ev.SyncResult(fenced))
        old_leader = group.leader or ""
        before = FormerStaticMember(
            old_id,
            old_leader,
            member.protocols,
            member.rebalance_timeout_ms,
            member.session_timeout_ms,
        )
        group.replace_static_member(instance, old_id, new_id)
        self._timers.cancel(_session_key(group, old_id))
        self.restart_session(group, member)
        self._update_member(group, member, event)
        if group.state is COMPLETING_REBALANCE:
            # The leader may hold the old id already: the new one would get nothing.
            self._prepare_rebalance(group, f"static member {instance} was replaced")
        elif group.state is not STABLE:
            self._maybe_complete_join(group)
        elif group.select_protocol() != group.protocol:
            why = f"static member {instance} changes the protocol"
            self._prepare_or_complete(group, why)
        else:
            core.append((group.to_record(),), StaticMemberReplacement(group, event, before))

    def static_member_replaced(self, stored: StaticMemberReplacement, error: ErrorCode) -> None:
        """A static member's new id is committed; or it is not, and the old one is restored."""
        group, event, before = stored.group, stored.event, stored.before
        instance = event.group_instance_id or ""
        new_id = group.static_members.get(instance, "")
        member = group.members.get(new_id)
        if member is None or member.awaiting_join != event.request:
            return
        if error is not NO_ERROR:
            failed = self._joined_follower(group, before.leader, UNKNOWN_MEMBER_ID, error)
            self._respond_join(member, failed)
            group.offer(member, before.protocols)
            member.rebalance_timeout_ms = before.rebalance_timeout_ms
            member.session_timeout_ms = before.session_timeout_ms
            group.replace_static_member(instance, new_id, before.member_id)
            self._timers.cancel(_session_key(group, new_id))
            self.restart_session(group, member)
            return
        # Its session may have ended while the append took its time; then nobody watched any more.
        self.restart_session(group, member)
        if event.supports_skipping_assignment:
            leads = group.is_leader(new_id)
            self._respond_join(member, self._joined(group, member, skip_assignment=leads))
        else:
            # An older leader that found itself leading would assign anew, and nobody would ask for
            # it: it is told the old leader's id.
            self._respond_join(member, self._joined_follower(group, before.leader, new_id, error))

    def _joined_follower(
        self, group: Group, leader: str, member_id: str, error: ErrorCode
    ) -> ev.JoinResult:
        return ev.JoinResult(
            error, member_id, group.generation, group.protocol_type, group.protocol, leader
        )

    # Rebalancing.

    def _prepare_or_complete(self, group: Group, why: str) -> None:
        if group.state is PREPARING_REBALANCE:
            self._maybe_complete_join(group)
        else:
            self._prepare_rebalance(group, why)

    def _maybe_complete_join(self, group: Group) -> None:
        first = group.previous_state is EMPTY
        if group.state is PREPARING_REBALANCE and not first and group.has_all_members_joined:
            self._complete_join(group)

    def _prepare_rebalance(self, group: Group, why: str) -> None:
        """Ask everybody to rejoin; the first time, wait for more to come instead."""
        if group.state is COMPLETING_REBALANCE:
            self._reset_assignments(group, ErrorCode.rebalance_in_progress)
        group.pending_sync.clear()
        self._timers.cancel(_sync_key(group))
        first = group.state is EMPTY
        if first:
            delay = self._core.settings.group_initial_rebalance_delay_ms
            remaining = max(group.rebalance_timeout_ms - delay, 0)
            now_ms = self._core.now_ms
            timer = JoinDeadline(group.group_id, now_ms, True, delay, remaining)
            self._timers.set(_join_key(group), now_ms + delay, timer)
        group.transition_to(PREPARING_REBALANCE, self._core.wall_ms)
        self._core.note(
            group.group_id, f"rebalances, generation {group.generation}: {why}", routine=True
        )
        if first:
            return
        if group.has_all_members_joined:
            self._complete_join(group)
        else:
            self._schedule_join(group, self._core.now_ms)

    def _complete_join(self, group: Group) -> None:
        """Begin a generation with the members that joined; static ones may be missing."""
        self._timers.cancel(_join_key(group))
        late = [m for m in group.members.values() if m.awaiting_join is None and not m.is_static]
        for member in late:
            group.remove(member.member_id)
            self._timers.cancel(_session_key(group, member.member_id))
            self._core.note(group.group_id, f"removed {member.member_id}: did not rejoin in time")
        if group.members and not group.elect_joined_leader():
            # Only static members are left, and none has come back: their sessions decide.
            self._schedule_join(group, self._core.now_ms, MIN_STATIC_WAIT_MS)
            return
        group.init_next_generation(self._core.wall_ms)
        if group.state is EMPTY:
            self._core.note(
                group.group_id, f"is empty, generation {group.generation}", routine=True
            )
            self._core.append((group.to_record(),))
            return
        for member in group.members.values():
            self._respond_join(member, self._joined(group, member))
            self.restart_session(group, member)
            member.is_new = False
            group.pending_sync.add(member.member_id)
        self._schedule_sync(group, self._core.now_ms)
        count = len(group.members)
        self._core.note(
            group.group_id, f"generation {group.generation} has {count} members", routine=True
        )

    def _schedule_join(self, group: Group, began_ms: int, least_ms: int = 0) -> None:
        deadline = began_ms + max(group.rebalance_timeout_ms, least_ms)
        self._timers.set(_join_key(group), deadline, JoinDeadline(group.group_id, began_ms))

    def _schedule_sync(self, group: Group, began_ms: int) -> None:
        timer = SyncDeadline(group.group_id, group.generation, began_ms)
        self._timers.set(_sync_key(group), began_ms + group.rebalance_timeout_ms, timer)

    def join_deadline(self, timer: JoinDeadline) -> None:
        """Members had their time to rejoin."""
        group = self._core.groups.get(timer.group)
        if group is None or group.state is not PREPARING_REBALANCE:
            return
        if timer.began_ms < self._core.restarted_ms and not timer.initial:
            self._schedule_join(group, self._core.restarted_ms)
        elif timer.initial and group.new_member_added and timer.remaining_ms != 0:
            group.new_member_added = False
            delay = min(self._core.settings.group_initial_rebalance_delay_ms, timer.remaining_ms)
            remaining = max(timer.remaining_ms - timer.delay_ms, 0)
            now_ms = self._core.now_ms
            extended = JoinDeadline(timer.group, now_ms, True, delay, remaining)
            self._timers.set(_join_key(group), now_ms + delay, extended)
        else:
            self._complete_join(group)

    # SyncGroup.

    def sync(self, event: ev.Sync) -> None:
        """Give a member its assignment, now or once the leader has brought it."""
        core = self._core
        group = core.groups.get(event.group)
        if group is None or group.state is EMPTY:
            core.respond(event.request, ev.SyncResult(ErrorCode.unknown_member_id))
            return
        try:
            self._validate_sync(group, event)
        except GroupError as refusal:
            core.respond(event.request, ev.SyncResult(refusal.code))
            return
        member = group.members[event.member]
        leads = group.is_leader(event.member)
        # What is for nobody in the group would be held until the record is committed.
        assignments = {m: a for m, a in event.assignments if leads and m in group.members}
        before = sum(len(m.assignment) for m in group.members.values())
        more = sum(map(len, assignments.values())) - before
        if more > 0 and group.members_bytes + more > core.settings.group_max_bytes:
            core.respond(event.request, ev.SyncResult(ErrorCode.group_max_size_reached))
            core.refused_for_memory(event.group, "kept.group.max.bytes")
            return
        records: list[GroupRecord] = []
        if leads and group.state is not STABLE:
            records.append(group.to_record({m: assignments.get(m, b"") for m in group.members}))
        if not core.memory.admits_records(records_bytes(records)):
            core.respond(event.request, ev.SyncResult(ErrorCode.coordinator_not_available))
            core.refused_for_memory(event.group, "kept.groups.max.bytes")
            return
        group.pending_sync.discard(event.member)
        if not group.pending_sync:
            self._timers.cancel(_sync_key(group))
        if group.state is STABLE:
            result = ev.SyncResult(NO_ERROR, group.protocol_type, group.protocol, member.assignment)
            core.respond(event.request, result)
            return
        self._respond_sync(member, ev.SyncResult(ErrorCode.rebalance_in_progress))
        member.awaiting_sync = event.request
        if leads:
            core.append(tuple(records), Assignment(group, group.generation, assignments))

    def _validate_sync(self, group: Group, event: ev.Sync) -> None:
        group.validate_member(event.member, event.group_instance_id)
        if event.generation != group.generation:
            raise GroupError(ErrorCode.illegal_generation)
        for wanted, present in (
            (event.protocol_type, group.protocol_type),
            (event.protocol, group.protocol),
        ):
            if wanted is not None and present is not None and wanted != present:
                raise GroupError(ErrorCode.inconsistent_group_protocol)
        if group.state is PREPARING_REBALANCE:
            raise GroupError(ErrorCode.rebalance_in_progress)

    def assigned(self, stored: Assignment, error: ErrorCode) -> None:
        """The leader's assignment is committed, or could not be stored."""
        group = stored.group
        if group.state is not COMPLETING_REBALANCE or group.generation != stored.generation:
            return
        if error is not NO_ERROR:
            self._reset_assignments(group, error)
            self._prepare_or_complete(group, f"assignment not stored: {error.name}")
            return
        for member in group.members.values():
            group.assign(member, stored.assignments.get(member.member_id, b""))
        self._propagate(group, NO_ERROR)
        group.transition_to(STABLE, self._core.wall_ms)

    def _reset_assignments(self, group: Group, error: ErrorCode) -> None:
        for member in group.members.values():
            group.assign(member, b"")
        self._propagate(group, error)

    def _propagate(self, group: Group, error: ErrorCode) -> None:
        ok = error is NO_ERROR
        for member in group.members.values():
            result = ev.SyncResult(
                error,
                group.protocol_type if ok else None,
                group.protocol if ok else None,
                member.assignment,
            )
            if self._respond_sync(member, result):
                self.restart_session(group, member)

    def sync_deadline(self, timer: SyncDeadline) -> None:
        """Members that did not ask for their assignment are taken out."""
        group = self._core.groups.get(timer.group)
        if group is None or group.generation != timer.generation or not group.pending_sync:
            return
        if group.state not in (COMPLETING_REBALANCE, STABLE):
            return
        if timer.began_ms < self._core.restarted_ms:
            self._schedule_sync(group, self._core.restarted_ms)
            return
        late = [m for m in group.members if m in group.pending_sync]
        for member_id in late:
            # A static member may be rejoining at this moment.
            self._respond_join(group.members[member_id], ev.JoinResult(ErrorCode.unknown_member_id))
            group.remove(member_id)
            self._timers.cancel(_session_key(group, member_id))
        self._prepare_rebalance(group, f"no sync from {', '.join(late)} in time")

    # Heartbeat.

    def heartbeat(self, event: ev.Heartbeat) -> None:
        """Keep a session alive; tell a member that it must rejoin. Raises GroupError."""
        core = self._core
        group = core.groups.get(event.group)
        try:
            if group is None:
                raise GroupError(ErrorCode.unknown_member_id)
            group.validate_member(event.member, event.group_instance_id)
            if event.generation != group.generation:
                raise GroupError(ErrorCode.illegal_generation)
        except GroupError as refusal:
            core.respond(event.request, ev.HeartbeatResult(refusal.code))
            return
        self.restart_session(group, group.members[event.member])
        preparing = group.state is PREPARING_REBALANCE
        error = ErrorCode.rebalance_in_progress if preparing else NO_ERROR
        core.respond(event.request, ev.HeartbeatResult(error))

    def restart_session(self, group: Group, member: Member) -> None:
        """A member's session begins anew."""
        timeout_ms = member.session_timeout_ms
        self._schedule_session(group, member.member_id, timeout_ms, self._core.now_ms)

    def _schedule_session(
        self, group: Group, member_id: str, timeout_ms: int, began_ms: int
    ) -> None:
        timer = SessionExpiry(group.group_id, member_id, timeout_ms, began_ms)
        self._timers.set(_session_key(group, member_id), began_ms + timeout_ms, timer)

    def session_expired(self, timer: SessionExpiry) -> None:
        """A member is gone, unless it is we who let it wait."""
        group, restarted_ms = self._core.groups.get(timer.group), self._core.restarted_ms
        if group is None:
            return
        if timer.began_ms < restarted_ms:
            self._schedule_session(group, timer.member, timer.timeout_ms, restarted_ms)
            return
        if timer.member in group.pending_join:
            group.remove(timer.member)
            if group.state is PREPARING_REBALANCE and group.has_all_members_joined:
                self._complete_join(group)
            return
        member = group.members.get(timer.member)
        if member is None or member.has_satisfied_heartbeat:
            return
        self._core.note(group.group_id, f"removed {timer.member}: session expired")
        self._respond_join(member, ev.JoinResult(ErrorCode.unknown_member_id))
        group.remove(timer.member)
        if group.state in (STABLE, COMPLETING_REBALANCE):
            self._prepare_rebalance(group, f"session of {timer.member} expired")
        elif group.state is PREPARING_REBALANCE and group.has_all_members_joined:
            self._complete_join(group)

    # LeaveGroup.

    def leave(self, event: ev.Leave) -> None:
        """Take members out; by instance id alone an administrator can do it.

        The response waits for the record of the empty group. Otherwise, after a crash, the group
        would still have the member, and the next one would wait until that session ends.
        """
        core = self._core
        group = core.groups.get(event.group)
        if group is None:
            gone = tuple((m, i, ErrorCode.unknown_member_id) for m, i in event.members)
            core.respond(event.request, ev.LeaveResult(members=gone))
            return
        results = tuple(
            (member_id, instance, self._remove_member(group, member_id, instance))
            for member_id, instance in event.members
        )
        if any(error is NO_ERROR for _, _, error in results):
            if group.state in (STABLE, COMPLETING_REBALANCE):
                self._prepare_rebalance(group, "members left")
            else:
                self._maybe_complete_join(group)
        core.respond_when_committed(event.request, ev.LeaveResult(members=results))

    def _remove_member(self, group: Group, member_id: str, instance: str | None) -> ErrorCode:
        if member_id in group.pending_join:
            group.remove(member_id)
            self._timers.cancel(_session_key(group, member_id))
            return NO_ERROR
        if member_id == UNKNOWN_MEMBER_ID:
            if instance is None or instance not in group.static_members:
                return ErrorCode.unknown_member_id
            member_id = group.static_members[instance]
        else:
            try:
                group.validate_member(member_id, instance)
            except GroupError as refusal:
                return refusal.code
        self._timers.cancel(_session_key(group, member_id))
        member = group.members[member_id]
        self._respond_join(member, ev.JoinResult(ErrorCode.unknown_member_id))
        self._respond_sync(member, ev.SyncResult(ErrorCode.unknown_member_id))
        group.remove(member_id)
        return NO_ERROR

    # Loading and unloading.

    def loaded(self, group: Group) -> Steps[None]:
        """A group was read from the log: its members have a session timeout to show up."""
        for member in group.members.values():
            self.restart_session(group, member)
            yield
        if len(group.members) > self._core.settings.group_max_size:
            self._prepare_rebalance(group, "has more members than group.max.size")

    def unload(self, group: Group, error: ErrorCode) -> None:
        """Send everybody who waits away."""
        for member in group.members.values():
            if member.awaiting_join is not None:
                self._respond_join(member, ev.JoinResult(error, member.member_id))
            if member.awaiting_sync is not None:
                self._respond_sync(member, ev.SyncResult(error))

    def check_invariants(self, group: Group) -> None:
        """Raise InvariantViolation when a group could wait for ever."""
        for member in group.members.values():
            watched = self._timers.deadline(_session_key(group, member.member_id)) is not None
            if not watched and not member.has_satisfied_heartbeat:
                raise InvariantViolation(f"nobody watches the session of {member.member_id}")
        for member_id in group.pending_join:
            if self._timers.deadline(_session_key(group, member_id)) is None:
                raise InvariantViolation(f"{member_id} may come for ever")
        if group.state is PREPARING_REBALANCE and self._timers.deadline(_join_key(group)) is None:
            raise InvariantViolation(f"group {group.group_id} would rebalance for ever")
        if group.pending_sync and self._timers.deadline(_sync_key(group)) is None:
            raise InvariantViolation(f"group {group.group_id} would wait for syncs for ever")

    def _respond_join(self, member: Member, result: ev.JoinResult) -> bool:
        if member.awaiting_join is None:
            return False
        self._core.respond(member.awaiting_join, result)
        member.awaiting_join = None
        return True

    def _respond_sync(self, member: Member, result: ev.SyncResult) -> bool:
        if member.awaiting_sync is None:
            return False
        self._core.respond(member.awaiting_sync, result)
        member.awaiting_sync = None
        return True


def _session_key(group: Group, member_id: str) -> tuple[str, ...]:
    return ("session", group.group_id, member_id)


def _join_key(group: Group) -> tuple[str, ...]:
    return ("join", group.group_id)


def _sync_key(group: Group) -> tuple[str, ...]:
    return ("sync", group.group_id)
