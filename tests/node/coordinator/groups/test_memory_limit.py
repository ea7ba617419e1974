"""What groups hold in memory is counted, and limited: members, ids given out, offsets, and records
that wait to be committed."""

from __future__ import annotations

import uuid
from typing import Any

import pytest
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
from kept.node.coordinator.groups import events as ev
from kept.node.coordinator.groups.core import GroupCore
from kept.node.coordinator.groups.group import Group
from kept.node.coordinator.groups.memory_limit import GROUP_BYTES, GroupMemory, GroupTable
from kept.node.coordinator.groups.records import (
    GroupMetadataKey,
    GroupMetadataValue,
    GroupRecord,
    MemberMetadata,
    OffsetCommitKey,
    OffsetCommitValue,
)
from kept.steps import run_to_end
from tests.support.allocations import freed_by_steps, traced

TOPIC_ID = uuid.UUID(int=9)


class Shell:
    """A core whose appends are committed at once, or by :meth:`end_appends` where it holds them, or
    refused with an error.
    """

    def __init__(self, memory: GroupMemory | None = None, **settings: int) -> None:
        settings = {"group_initial_rebalance_delay_ms": 0, **settings}
        self.core = GroupCore(ev.GroupSettings(**settings), memory)
        self.answers: dict[int, Any] = {}
        self.refusals: list[str] = []
        self.now_ms = 0
        self._request = 0
        self.hold = False
        self.refuse: ErrorCode | None = None
        self.end_offset = 0

    def carry_out(self, effects: tuple[ev.Effect, ...]) -> None:
        for effect in effects:
            match effect:
                case Response():
                    self.answers[effect.request] = effect.result
                case AppendRecords() if self.refuse is not None:
                    self.step(AppendRejected(effect.append, self.refuse))
                case AppendRecords():
                    self.step(AppendStaged(effect.append, self.end_offset))
                    self.end_offset += len(effect.records)
                    if not self.hold:
                        self.step(AppendCommitted(effect.append))
                case ev.OutOfMemory():
                    self.refusals.append(effect.setting)
        self.core.check_invariants()

    def step(self, event: ev.Event) -> None:
        self.carry_out(self.core.step(event, self.now_ms))

    def tick(self, now_ms: int) -> None:
        self.now_ms = now_ms
        while (due_ms := self.core.next_deadline_ms) is not None and due_ms <= now_ms:
            self.carry_out(self.core.tick(now_ms))

    def join(self, group: str = "g", size: int = 100, **more: Any) -> int:
        """A JoinGroup with ``size`` bytes of metadata; its request."""
        self._request += 1
        given = {"member": "", "requires_known_member_id": False, **more}
        protocols = given.pop("protocols", (("range", bytes(size)),))
        event = ev.Join(
            self._request,
            group,
            given.pop("member"),
            "c",
            "/h",
            10_000,
            60_000,
            "consumer",
            protocols,
            f"id{self._request}",
            **given,
        )
        self.step(event)
        return self._request

    def abandon(self, request: int, group: str = "g") -> None:
        self.step(ev.JoinAbandoned(group, request))

    def commit(
        self,
        group: str,
        partitions: int,
        metadata: str = "",
        producer: TransactionalProducer | None = None,
    ) -> list[str]:
        self._request += 1
        wanted = tuple(ev.CommitPartition(n, 5, -1, metadata) for n in range(partitions))
        topic = ev.CommitTopic("t", TOPIC_ID, wanted)
        event = ev.CommitOffsets(self._request, group, (topic,), producer=producer)
        self.step(event)
        if self._request not in self.answers:
            return ["waits"]
        result = self.answers[self._request]
        if result.error.name != "none":
            return [result.error.name]
        (answered,) = result.topics
        return [error.name for _, error in answered[2]]

    def end_appends(self, end: Any = AppendCommitted, *more: Any) -> None:
        for append in sorted(self.core.pending):
            self.step(end(append, *more))

    @property
    def used(self) -> int:
        return self.core.memory.used_bytes


def test_a_group_is_limited_in_bytes() -> None:
    shell = Shell(group_max_bytes=100_000)
    first = shell.join(size=60_000)
    second = shell.join(size=60_000)
    assert shell.answers[second].error.name == "group_max_size_reached"
    assert shell.refusals == ["kept.group.max.bytes"]
    assert len(shell.core.groups["g"].members) == 1
    shell.join("other", size=60_000)
    assert len(shell.refusals) == 1, "another group has room of its own"
    # Who is in may come again with as much, and not with more than there is room for.
    shell.tick(1000)
    assert shell.answers[first].error.name == "none"
    member = shell.answers[first].member
    again = shell.join(size=60_001, member=member)
    assert shell.answers[again].error.name == "none"
    more = shell.join(size=120_000, member=member)
    assert shell.answers[more].error.name == "group_max_size_reached"


def test_protocols_count_though_their_names_are_short() -> None:
    """Each is two objects, and is compared with those of all members when one joins."""
    shell = Shell(group_max_bytes=1_000_000)
    many = tuple((str(number), b"") for number in range(5_000))
    shell.join(protocols=many)
    refused = shell.join(protocols=many)
    assert shell.answers[refused].error.name == "group_max_size_reached"
    assert len(shell.core.groups["g"].members) == 1


def test_all_groups_are_limited_together_over_all_partitions() -> None:
    memory = GroupMemory(200_000)
    one, other = Shell(memory), Shell(memory)
    for n in range(3):
        one.join(f"a{n}", size=60_000)
    late = other.join("b", size=60_000)
    assert other.answers[late].error.name == "coordinator_not_available", "it may come back"
    assert other.refusals == ["kept.groups.max.bytes"] and "b" not in other.core.groups
    one.core.unload()
    assert memory.used_bytes > 0
    run_to_end(one.core.release())
    assert memory.used_bytes == 0
    again = other.join("b", size=60_000)
    assert again not in other.answers or other.answers[again].error.name == "none"


def member(n: int) -> MemberMetadata:
    return MemberMetadata(f"member-{n}", f"i-{n}", "client", "/host", 1, 1, bytes(40), bytes(40))


@pytest.mark.parametrize("kind", ["members", "offsets", "transactional offsets"])
def test_what_a_partition_held_is_freed_a_little_at_a_time(kind) -> None:
    """To drop half a million offsets at a stretch holds the loop for half a second."""
    with traced():
        core, many = GroupCore(ev.GroupSettings()), 3000
        if kind == "members":
            members = tuple(member(n) for n in range(many))
            value = GroupMetadataValue("consumer", 1, "range", "member-0", -1, members)
            del members
            core.replay(GroupRecord(GroupMetadataKey("g"), value), 0)
            del value
        else:
            producer_id = -1 if kind == "offsets" else 7
            for n in range(many):
                stored = OffsetCommitValue(n, f"metadata of {n}", 1)
                core.replay(GroupRecord(OffsetCommitKey("g", "t", n), stored), n, producer_id)
        run_to_end(core.loaded(0))
        assert core.memory.used_bytes > 100 * many
        core.unload()
        steps = core.release()
        next(steps)
        core.unload()  # a second time, as by a load that fails later
        total, largest = freed_by_steps(steps)
        assert total > 100 * many and largest < total // 4
        assert core.memory.used_bytes == 0 and len(core.timers) == 0
        assert not (core.groups or core.appended.groups() or core.committed.groups())
        core.check_invariants()


def test_ids_that_are_given_out_count_until_their_time_is_over() -> None:
    shell = Shell(group_max_bytes=1 << 16)
    errors = set()
    for _ in range(200):
        request = shell.join(size=10, requires_known_member_id=True)
        errors.add(shell.answers[request].error.name)
    assert errors == {"member_id_required", "group_max_size_reached"}
    assert 10 < len(shell.core.groups["g"].pending_join) < 130
    shell.tick(20_000)
    assert not shell.core.groups["g"].pending_join
    assert shell.core.groups["g"].members_bytes == 0


def test_a_new_member_whose_connection_is_gone_is_out_at_once() -> None:
    shell = Shell(group_initial_rebalance_delay_ms=3000)
    empty = shell.used
    requests = [shell.join(size=1_000_000) for _ in range(4)]
    assert shell.used > 4_000_000
    for request in requests:
        shell.abandon(request)
    assert not shell.core.groups["g"].members
    assert shell.used - empty < 5_000
    for now_ms in (10_000, 20_000):
        shell.tick(now_ms)
    assert shell.core.groups["g"].state.value == "Empty"


def test_the_others_go_on_without_a_new_member_that_is_gone() -> None:
    shell = Shell()
    first = shell.join()
    shell.tick(1)
    assert shell.answers[first].error.name == "none"
    gone = shell.join()
    rejoined = shell.join(member=shell.answers[first].member, size=101)
    assert shell.answers[rejoined].generation == 2
    third = shell.join()
    shell.abandon(third)
    assert len(shell.core.groups["g"].members) == 2
    assert gone in shell.answers


def test_a_member_that_was_in_has_its_session_to_come_back() -> None:
    shell = Shell()
    first = shell.join()
    shell.tick(1)
    member = shell.answers[first].member
    shell.join()  # a second one, so that the first has to rejoin and wait
    other = next(iter(set(shell.core.groups["g"].members) - {member}))
    assert shell.core.groups["g"].state.value == "PreparingRebalance"
    rejoined = shell.join(member=member, size=102)
    shell.core.groups["g"].members[other]
    third = shell.join()
    waiting = shell.join(member=member, size=103)
    assert rejoined in shell.answers
    shell.abandon(waiting)
    assert member in shell.core.groups["g"].members
    shell.tick(70_000)
    assert member not in shell.core.groups["g"].members, "its session is over"
    assert third


def test_an_abandoned_join_of_nobody_is_nothing() -> None:
    shell = Shell()
    shell.abandon(7, "no such group")
    first = shell.join()
    shell.abandon(first + 1)
    assert len(shell.core.groups["g"].members) == 1


def test_an_assignment_is_kept_for_members_only() -> None:
    shell = Shell(group_max_bytes=1 << 20)
    first = shell.join()
    shell.tick(1)
    member = shell.answers[first].member
    wanted = ((member, b"mine"), ("nobody", bytes(5_000_000)))
    effects = shell.core.step(ev.Sync(900, "g", member, 1, wanted), shell.now_ms)
    (append,) = [effect for effect in effects if isinstance(effect, AppendRecords)]
    assert sum(len(record.encode()[1] or b"") for record in append.records) < 1000
    shell.carry_out(effects)
    assert shell.answers[900].assignment == b"mine"


def test_an_assignment_above_the_groups_limit_is_refused() -> None:
    shell = Shell(group_max_bytes=1 << 16)
    first = shell.join()
    shell.tick(1)
    member = shell.answers[first].member
    shell.step(ev.Sync(900, "g", member, 1, ((member, bytes(100_000)),)))
    assert shell.answers[900].error.name == "group_max_size_reached"
    shell.step(ev.Sync(901, "g", member, 1, ((member, b"fits"),)))
    assert shell.answers[901].assignment == b"fits"


def test_offsets_of_new_partitions_are_refused_above_the_limit_and_others_are_not() -> None:
    shell = Shell(GroupMemory(1 << 20))
    assert set(shell.commit("mine", 10)) == {"none"}
    refused = 0
    for n in range(100):
        refused += shell.commit(f"invented{n}", 100).count("invalid_commit_offset_size")
    assert refused > 5_000 and shell.used <= 1 << 20
    assert shell.refusals[0] == "kept.groups.max.bytes"
    assert set(shell.commit("mine", 10)) == {"none"}, "what is there may be committed anew"
    assert "invalid_commit_offset_size" in shell.commit("mine", 10, "x" * 4000)
    shell.step(ev.DeleteGroups(999, ("invented0",)))
    assert shell.commit("mine", 11)[-1] == "none", "there is room again"


def commit_until_refused(shell: Shell, group: str, partitions: int) -> int:
    """How many commits wait when one is refused for now."""
    for count in range(10_000):
        (answer,) = shell.commit(group, partitions)
        if answer != "waits":
            assert answer == "coordinator_not_available", "the client may come again"
            return count
    raise AssertionError("nothing was refused")


def test_commits_that_wait_for_replicas_are_refused_above_the_limit() -> None:
    shell = Shell(GroupMemory(1 << 20))
    shell.commit("mine", 10)
    before = shell.used
    shell.hold = True
    assert commit_until_refused(shell, "mine", 10) > 10
    assert (1 << 20) * 0.9 < shell.used <= (1 << 20) * 1.125
    assert shell.refusals == ["kept.groups.max.bytes"]
    assert shell.answers[shell.join("other", size=200_000)].error.name == (
        "coordinator_not_available"
    )
    assert shell.commit("new", 20) == ["coordinator_not_available"]
    assert "new" not in shell.core.groups
    shell.end_appends(AppendTimedOut, ErrorCode.coordinator_not_available)
    assert commit_until_refused(shell, "mine", 10) == 0, "what is late is held as before"
    shell.end_appends()
    assert shell.used == before
    assert shell.commit("mine", 10) == ["waits"]


@pytest.mark.parametrize("end", ["rejected", "unloaded"])
def test_records_that_wait_are_counted_out_when_they_fail_or_the_shard_goes(end: str) -> None:
    shell = Shell(memory := GroupMemory(1 << 20))
    shell.hold = end == "unloaded"
    shell.refuse = ErrorCode.not_coordinator if end == "rejected" else None
    for group in ("a", "b"):
        assert shell.commit(group, 10) == ["waits" if shell.hold else "not_coordinator"]
    shell.join("c")
    assert (memory.records_bytes > 20 * 512) == shell.hold
    shell.carry_out(shell.core.unload())
    assert memory.records_bytes == 0
    run_to_end(shell.core.release())
    assert memory.used_bytes == 0


def test_groups_that_fill_the_memory_do_not_end_the_commits_of_others() -> None:
    shell = Shell(GroupMemory(1 << 20))
    shell.commit("mine", 10)
    for n in range(30):
        shell.commit(f"invented{n}", 100)
    assert not shell.core.memory.admits(2_000)
    shell.hold = True
    assert commit_until_refused(shell, "mine", 10) > 5
    shell.end_appends()
    assert commit_until_refused(shell, "mine", 10) > 5


def test_an_assignment_that_comes_again_and_again_is_refused_while_the_first_ones_wait() -> None:
    shell = Shell(GroupMemory(1 << 20))
    first = shell.join()
    shell.tick(1)
    member = shell.answers[first].member
    shell.hold = True
    for request in range(900, 1_000):
        wanted = ((member, bytes(100_000)),)
        shell.step(ev.Sync(request, "g", member, 1, wanted))
    assert shell.answers[999].error.name == "coordinator_not_available"
    assert shell.used <= (1 << 20) * 1.125
    shell.end_appends()
    assert shell.core.groups["g"].state.value == "Stable"


@pytest.mark.parametrize("undo", [False, True])
def test_what_goes_is_counted_out(undo: bool) -> None:
    shell = Shell()
    before = shell.used
    shell.commit("g", 50, "note" * 100)
    assert shell.used > before + 50 * 2 * 256
    if undo:
        held = shell.used
        shell.refuse = ErrorCode.coordinator_not_available
        shell.step(ev.DeleteGroups(50, ("g",)))
        assert shell.used == held
        shell.refuse = None
    shell.step(ev.DeleteGroups(51, ("g",)))
    assert shell.used == before


@pytest.mark.parametrize("is_commit", [False, True])
def test_offsets_of_transactions_are_limited_and_counted_out(is_commit: bool) -> None:
    shell = Shell(GroupMemory(1 << 20))
    assert shell.commit("g", 1) == ["none"]
    before = shell.used
    for n in range(100):
        shell.commit("g", 100, "note" * 100, TransactionalProducer(n, 0))
    assert shell.refusals[0] == "kept.groups.max.bytes" and shell.used <= 1 << 20
    assert shell.used > (1 << 20) // 2
    for n in range(100):
        shell.step(ev.WriteTxnMarker(900 + n, EndMarker(n, 0, 0, is_commit)))
    assert (shell.used > before + 50 * 2 * 256) == is_commit
    assert is_commit or shell.used == before
    shell.commit("g", 1, producer=TransactionalProducer(1, 0))
    shell.carry_out(shell.core.unload())
    run_to_end(shell.core.release())
    assert shell.used == 0 and not list(shell.core.transactions)


@pytest.mark.parametrize(
    ("used", "more", "admitted"),
    [
        (0, 100, True),
        (1, 99, True),
        (1, 100, False),
        (200, 1, False),
        (200, 0, True),
        (200, -1, True),
    ],
)
def test_there_is_room_up_to_the_limit_and_always_for_nothing(used, more, admitted) -> None:
    memory = GroupMemory(100)
    memory.used_bytes = used
    assert memory.admits(more) is admitted


def test_groups_count_for_as_long_as_they_are_in_the_table() -> None:
    table = GroupTable(memory := GroupMemory(1 << 20))

    def group(members_bytes: int) -> Group:
        return Group("", members_bytes=members_bytes)

    table["a"], table["b"], table["c"] = group(1), group(10), group(100)
    assert memory.used_bytes == 3 * GROUP_BYTES + 111
    table["a"] = group(2)
    assert memory.used_bytes == 3 * GROUP_BYTES + 112 and len(table) == 3
    del table["b"]
    assert memory.used_bytes == 2 * GROUP_BYTES + 102 and "b" not in table
    assert table.pop("nobody", 7) == 7 and table.pop("c") is not None
    assert memory.used_bytes == GROUP_BYTES + 2 and list(table) == ["a"]
    run_to_end(table.release())
    assert memory.used_bytes == 0 and not table
