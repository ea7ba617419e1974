"""Histories of a group core as prose: commands at the margin, effects indented below them.

A command is a line that starts at the margin; what the core does about it follows, indented by two
spaces. ``#`` begins a comment. Appends commit at once unless ``hold appends`` was said; then
``commit append`` and ``time out append ERROR`` end the oldest one, and ``reject append ERROR`` the
one of the command before.
"""

from __future__ import annotations

import shlex
import uuid

from kio.schema.errors import ErrorCode

from kept.client.admin.groups import encode_subscription
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
from kept.node.coordinator.groups import events as ev
from kept.node.coordinator.groups.core import GroupCore
from kept.node.coordinator.groups.records import (
    GroupMetadataValue,
    GroupRecord,
    OffsetCommitKey,
    OffsetCommitValue,
)
from kept.steps import run_to_end
from tests.support.histories import Words, milliseconds

TOPIC_IDS = {name: uuid.uuid5(uuid.NAMESPACE_DNS, name) for name in ("orders", "users")}


def partition(text: str) -> tuple[str, int]:
    topic, _, number = text.rpartition("-")
    return topic, int(number)


class History:
    """Runs commands on a core and says what it did."""

    def __init__(self, settings: dict[str, int] | None = None) -> None:
        self.settings = {"group_initial_rebalance_delay_ms": 0, **(settings or {})}
        self.now = 0
        self.request = 0
        self.uuid = 0
        self.hold = False
        self.log: list[tuple[GroupRecord, int] | EndMarker] = []
        """What is committed, record by record with the producer of its transaction, or -1."""
        self.held: list[AppendRecords] = []
        self.unstaged: AppendRecords | None = None
        self.end_offset = 0
        self.lines: list[str] = []
        self.core = self._new_core()

    def _new_core(self) -> GroupCore:
        return GroupCore(ev.GroupSettings(**self.settings))

    def run(self, line: str) -> list[str]:
        """Carry out one command; the effects, one a line."""
        self.lines = []
        words = shlex.split(line)
        if words[0] != "reject":
            self._stage()
        getattr(self, "do_" + words[0])(Words(words[1:]))
        self.core.check_invariants()
        return self.lines

    def _perform(self, effects: tuple[ev.Effect, ...]) -> None:
        for effect in effects:
            if isinstance(effect, ev.MoreToSweep):
                self._perform(self.core.step(ev.SweepOn(), self.now))
                continue
            self.lines += describe(effect)
            if isinstance(effect, AppendRecords):
                self._stage()
                self.held.append(effect)
                self.unstaged = effect
                if not self.hold:
                    self._stage()
                    self._commit_oldest()

    def _stage(self) -> None:
        append, self.unstaged = self.unstaged, None
        if append is not None:
            base_offset = self.end_offset
            self.end_offset += len(append.records) or 1
            self._perform(self.core.step(AppendStaged(append.append, base_offset), self.now))

    def _commit_oldest(self) -> None:
        append = self.held.pop(0)
        producer_id = -1 if append.producer is None else append.producer.producer_id
        self.log += [(record, producer_id) for record in append.records]
        if append.marker is not None:
            self.log.append(append.marker)
        self._perform(self.core.step(AppendCommitted(append.append), self.now))

    def _tick(self) -> None:
        """Fire all timers that are due."""
        while (due := self.core.next_deadline_ms) is not None and due <= self.now:
            self._perform(self.core.tick(self.now))

    def _next_request(self) -> int:
        self.request += 1
        return self.request

    # Commands.

    def do_set(self, words: Words) -> None:
        """Other settings, which need a restart."""
        self.settings.update({w.partition("=")[0]: int(w.partition("=")[2]) for w in words.words})
        self.do_restart(words)

    def do_after(self, words: Words) -> None:
        """Time passes; every timer on the way fires at its own moment."""
        until = self.now + milliseconds(words.words[0])
        while (due := self.core.next_deadline_ms) is not None and due <= until:
            self.now = max(self.now, due)
            before = len(self.lines)
            self._tick()
            if len(self.lines) > before:
                self.lines.insert(before, f"at {self.now}ms:")
        self.now = until

    def do_stall(self, words: Words) -> None:
        """The process stands still: time passes, and nothing happens meanwhile."""
        self.now += milliseconds(words.words[0])
        self._perform(self.core.restart_timeouts(self.now))
        self._tick()

    def do_join(self, words: Words) -> None:
        member = words.option("as", "")
        offers = words.option("offers", "range=orders")
        protocol_type = words.option("type", "consumer")
        consumer = protocol_type == "consumer"
        protocols = []
        for offer in offers.split(","):
            name, _, data = offer.partition("=")
            topics = data.split("+") if data else []
            protocols.append((name, encode_subscription(topics) if consumer else data.encode()))
        version = int(words.option("version", "9"))
        self.uuid += 1
        event = ev.Join(
            self._next_request(),
            words.words[0],
            member,
            words.option("client", "app"),
            "/127.0.0.1",
            milliseconds(words.option("session", "10s")),
            milliseconds(words.option("rebalance", "60s")),
            protocol_type,
            tuple(protocols) if offers != "nothing" else (),
            str(self.uuid),
            words.option("static"),
            version >= 4,
            version >= 9,
        )
        self._perform(self.core.step(event, self.now))

    def do_sync(self, words: Words) -> None:
        assign = words.option("assign", "")
        pairs = [a.partition("=") for a in assign.split(",") if a]
        event = ev.Sync(
            self._next_request(),
            words.words[0],
            words.option("as", ""),
            int(words.option("generation", "1")),
            tuple((name, data.encode()) for name, _, data in pairs),
            words.option("static"),
            words.option("type"),
            words.option("protocol"),
        )
        self._perform(self.core.step(event, self.now))

    def do_heartbeat(self, words: Words) -> None:
        member, generation = words.option("as", ""), int(words.option("generation", "1"))
        instance = words.option("static")
        event = ev.Heartbeat(self._next_request(), words.words[0], member, generation, instance)
        self._perform(self.core.step(event, self.now))

    def do_stay(self, words: Words) -> None:
        """A member sends heartbeats, one every twenty minutes, whose answers are not shown."""
        until = self.now + milliseconds(words.option("for"))
        group, member = words.words[0], words.option("as")
        generation = int(words.option("generation"))
        while self.now < until:
            self._tick()
            responses = self.core.step(ev.Heartbeat(0, group, member, generation), self.now)
            assert responses == (Response(0, ev.HeartbeatResult()),)
            self.now += milliseconds("20m")

    def do_leave(self, words: Words) -> None:
        members = []
        for word in words.words[1:]:
            member, at, instance = word.partition("@")
            members.append((member, instance if at else None))
        event = ev.Leave(self._next_request(), words.words[0], tuple(members))
        self._perform(self.core.step(event, self.now))

    def do_commit(self, words: Words) -> None:
        if words.words == ["append"]:
            self._commit_oldest()
            return
        member, generation = words.option("as", ""), int(words.option("generation", "-1"))
        metadata, retention = words.option("metadata"), words.option("retention")
        instance, version = words.option("static"), int(words.option("version", "10"))
        inside = words.option("in")
        producer = None if inside is None else TransactionalProducer(int(inside), 0)
        topics: dict[str, list[ev.CommitPartition]] = {}
        for word in words.words[1:]:
            where, _, offset = word.partition("=")
            topic, number = partition(where)
            topics.setdefault(topic, []).append(
                ev.CommitPartition(number, int(offset), 0, metadata)
            )
        event = ev.CommitOffsets(
            self._next_request(),
            words.words[0],
            tuple(ev.CommitTopic(t, TOPIC_IDS[t], tuple(p)) for t, p in topics.items()),
            member,
            generation,
            instance,
            milliseconds(retention) if retention else -1,
            version >= 9 and producer is None,
            producer,
        )
        self._perform(self.core.step(event, self.now))

    def do_end(self, words: Words) -> None:
        """The end of a transaction comes to this partition: ``end 7 commit``."""
        producer_id, result = words.words
        marker = EndMarker(int(producer_id), 0, 0, {"commit": True, "abort": False}[result])
        self._perform(self.core.step(ev.WriteTxnMarker(self._next_request(), marker), self.now))

    def do_fetch(self, words: Words) -> None:
        stable = words.flag("stable")
        other_id = words.flag("recreated")
        topics: dict[str, list[int]] = {}
        for word in words.words[1:]:
            topic, number = partition(word)
            topics.setdefault(topic, []).append(number)
        asked = tuple(
            ev.OffsetFetchTopic(t, tuple(p), uuid.UUID(int=7) if other_id else TOPIC_IDS[t])
            for t, p in topics.items()
        )
        event = ev.FetchOffsets(self._next_request(), words.words[0], asked or None, stable)
        self._perform(self.core.step(event, self.now))

    def do_delete(self, words: Words) -> None:
        what = words.words.pop(0)
        if what == "groups":
            event: ev.Event = ev.DeleteGroups(self._next_request(), tuple(words.words))
        else:
            topics: dict[str, list[int]] = {}
            for word in words.words[1:]:
                topic, number = partition(word)
                topics.setdefault(topic, []).append(number)
            event = ev.DeleteOffsets(
                self._next_request(),
                words.words[0],
                tuple((t, tuple(p)) for t, p in topics.items()),
            )
        self._perform(self.core.step(event, self.now))

    def do_topic(self, words: Words) -> None:
        name, verb = words.words
        assert verb == "deleted"
        self._perform(self.core.step(ev.TopicsDeleted(((name, TOPIC_IDS[name]),)), self.now))

    def do_hold(self, words: Words) -> None:
        assert words.words == ["appends"]
        self.hold = True

    def do_release(self, words: Words) -> None:
        assert words.words == ["appends"]
        self.hold = False
        while self.held:
            self._commit_oldest()

    def do_reject(self, words: Words) -> None:
        append = self.held.pop()
        assert append is self.unstaged, "refused before anything else, or not at all"
        self.unstaged = None
        error = ErrorCode[words.words[1]]
        self._perform(self.core.step(AppendRejected(append.append, error), self.now))

    def do_time(self, words: Words) -> None:
        error = ErrorCode[words.words[2]]
        self._perform(self.core.step(AppendTimedOut(self.held[0].append, error), self.now))

    def do_list(self, words: Words) -> None:
        states, types = words.option("states", ""), words.option("types", "")
        found = tuple(
            self.core.list_groups(
                [s.lower() for s in states.split(",") if s],
                [t.lower() for t in types.split(",") if t],
            )
        )
        for group in found:
            kind = group.protocol_type or "no protocol"
            self.lines.append(f"{group.group} is {group.state}, {kind}, {group.group_type}")
        if not found:
            self.lines.append("no groups")

    def do_describe(self, words: Words) -> None:
        group = self.core.describe(words.words[0])
        self.lines.append(f"{group.group} is {group.state} {group.protocol_type} {group.protocol}")
        for m in group.members:
            static = f" static {m.group_instance_id}" if m.group_instance_id else ""
            self.lines.append(
                f"  {m.member}{static} of {m.client_id} at {m.client_host}: "
                f"{len(m.metadata)} bytes of metadata, "
                f"assigned {m.assignment.decode() or 'nothing'}"
            )

    def do_restart(self, _: Words) -> None:
        """The node dies and reads the log again, as bytes."""
        self.held.clear()
        self.end_offset = len(self.log)
        self.core = self._new_core()
        for offset, entry in enumerate(self.log):
            if isinstance(entry, EndMarker):
                self.core.end_transaction(entry.producer_id, is_commit=entry.is_commit)
            else:
                self.core.replay(reread(entry[0]), offset, entry[1])
        self._perform(run_to_end(self.core.loaded(self.now)))

    def do_unload(self, _: Words) -> None:
        self._perform(self.core.unload())
        self.core = self._new_core()
        self.held.clear()
        self.end_offset = len(self.log)


def reread(record: GroupRecord) -> GroupRecord:
    """A record as it comes back from the log."""
    from kept.node.coordinator.groups.records import decode_record

    back = decode_record(*record.encode())
    assert back is not None
    return back


def describe(effect: ev.Effect) -> list[str]:
    """An effect as a line of a history."""
    if isinstance(effect, AppendRecords):
        kind = "append"
        if effect.producer is not None:
            kind += f" in {effect.producer.producer_id}"
        if effect.marker is not None:
            result = "commit" if effect.marker.is_commit else "abort"
            return [f"append {result} of {effect.marker.producer_id}"]
        return [f"{kind} {describe_record(record)}" for record in effect.records]
    if isinstance(effect, ev.NoteGroup):
        return [f"note: {effect.group} {effect.text}"]
    return [f"answer #{effect.request}: {describe_result(effect.result)}"]


def describe_record(record: GroupRecord) -> str:
    key, value = record.key, record.value
    if isinstance(key, OffsetCommitKey):
        where = f"offset {key.group} {key.topic}-{key.partition}"
        if not isinstance(value, OffsetCommitValue):
            return f"{where} deleted"
        note = f" {value.metadata!r}" if value.metadata else ""
        expires = f" until {value.expire_timestamp}ms" if value.expire_timestamp != -1 else ""
        return f"{where} = {value.offset}{note}{expires}"
    if not isinstance(value, GroupMetadataValue):
        return f"group {key.group} deleted"
    members = ", ".join(
        f"{m.member_id}{'@' + m.group_instance_id if m.group_instance_id else ''}"
        f"={m.assignment.decode()}"
        for m in value.members
    )
    return (
        f"group {key.group} generation {value.generation} {value.protocol_type or '-'} "
        f"{value.protocol or '-'} led by {value.leader or '-'}: {members or 'nobody'}"
    )


def describe_result(result: object) -> str:
    match result:
        case ev.JoinResult():
            if result.error is not ev.NO_ERROR:
                return f"{result.error.name} for {result.member!r}"
            members = ", ".join(
                f"{m.member}{'@' + m.group_instance_id if m.group_instance_id else ''}"
                for m in result.members
            )
            skip = " skip assignment" if result.skip_assignment else ""
            return (
                f"{result.member} is in generation {result.generation} of {result.leader}, "
                f"{result.protocol_type} {result.protocol}{skip}"
                + (f" with {members}" if members else "")
            )
        case ev.SyncResult() if result.error is ev.NO_ERROR:
            return f"reads {result.assignment.decode() or 'nothing'} by {result.protocol}"
        case ev.LeaveResult() if result.error is ev.NO_ERROR:
            return ", ".join(f"{m or i} {error.name}" for m, i, error in result.members)
        case ev.CommitResult() | ev.DeleteOffsetsResult() if result.error is ev.NO_ERROR:
            done = [(t[0], p, e) for t in result.topics for p, e in t[-1]]
            return ", ".join(f"{t}-{p} {e.name}" for t, p, e in done)
        case ev.FetchResult() if result.error is ev.NO_ERROR:
            found = [(t[0], f) for t in result.topics for f in t[-1]]
            return ", ".join(map(describe_offset, found)) or "no offsets"
        case ev.DeleteGroupsResult():
            return ", ".join(f"{g} {e.name}" for g, e in result.groups)
    return result.error.name


def describe_offset(found: tuple[str, ev.FetchedOffset]) -> str:
    topic, f = found
    error = f" {f.error.name}" if f.error is not ev.NO_ERROR else ""
    note = f" {f.metadata!r}" if f.metadata else ""
    return f"{topic}-{f.partition} = {f.offset}{note}{error}"
