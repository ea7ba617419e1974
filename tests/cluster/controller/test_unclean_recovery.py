"""Rule 33: what an acknowledgement is worth when processes and machines die."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kept.cluster.controller import partition_election, topics, unclean_recovery
from kept.cluster.controller.brokers import (
    RegisterRequest,
    fence_brokers,
    register_broker,
    unfence_broker,
)
from kept.cluster.controller.heartbeats import ReplicaLog
from kept.cluster.controller.partition_election import AlterIsr, alter_isr
from kept.cluster.controller.topics import create_topic
from kept.cluster.metadata.image import Image
from kept.cluster.metadata.records import NO_LEADER

TOPIC = UUID(int=7)
KEY = (TOPIC, 0)
NODES = (1, 2, 3)


class Cluster:
    """One partition on three nodes: the decisions are real, the logs are lists of (epoch, id).

    ``obliged``: the members of the ISR that the last acknowledgement relied on, as changed by the
    leader's own requests and by what the controller has proof of. While one of them keeps what its
    disk held, nothing acknowledged may be lost.
    """

    def __init__(self, nodes=NODES) -> None:
        self.nodes = nodes
        self.image = Image()
        self.logs: dict[int, list[tuple[int, int]]] = {n: [] for n in nodes}
        self.up: dict[int, int] = {}  # node -> broker epoch of its live process
        self.acked: list[int] = []
        self.obliged: set[int] = set(nodes)
        self.lost: set[int] = set()
        self.void = False
        self.reports: dict[tuple[UUID, int], dict[int, tuple[int, ReplicaLog]]] = {}
        self.ids = 100
        for node in nodes:
            self.start(node)
        self.apply(create_topic(self.image, topics.CreateTopic("t", TOPIC, 1, len(nodes))))

    @property
    def state(self):
        return self.image.partition(TOPIC, 0)

    def apply(self, records) -> None:
        before = self.state
        self.image, _ = self.image.apply(records)
        after = self.state
        if before and after.leader not in (NO_LEADER, before.leader) and after.leader in self.up:
            self.elected(after.leader)

    def elected(self, leader: int) -> None:
        """A live leader: it must have what was acknowledged; the rest is its to say."""
        if self.void:
            self.acked = [number for _, number in self.logs[leader]]
        else:
            assert set(self.acked) <= {number for _, number in self.logs[leader]}

    def start(self, node: int, clean: bool = False) -> None:
        if node in self.up:
            return
        self.ids += 1
        epoch = -1
        if clean:
            epoch = self.image.brokers[node].broker_epoch
        who = RegisterRequest(node, UUID(int=self.ids), (), None, epoch)
        self.apply(register_broker(self.image, who))
        self.up[node] = self.image.brokers[node].broker_epoch
        self.apply(unfence_broker(self.image, node, self.up[node]))
        if self.state is not None and self.state.leader == node:
            self.elected(node)

    def crash(self, node: int, keep: int | None = None) -> None:
        """The process is gone; with ``keep`` the power, and what was not flushed, too."""
        if self.up.pop(node, None) is None:
            return
        if keep is not None:
            self.logs[node] = self.logs[node][:keep]
            self.lost.add(node)
            self.void = self.void or self.obliged <= self.lost

    def detect(self, node: int) -> None:
        if node not in self.up:
            broker = self.image.brokers[node]
            self.apply(fence_brokers(self.image, {node: broker.broker_epoch}))

    def leading(self) -> bool:
        return self.state.leader in self.up

    def append(self) -> None:
        if self.leading() and set(self.state.isr) <= set(self.up):
            self.sync(self.state.isr)
            self.ids += 1
            for member in self.state.isr:
                self.logs[member].append((self.state.leader_epoch, self.ids))
            self.acked.append(self.ids)
            self.obliged = set(self.state.isr)
            self.lost -= self.obliged

    def write_unacked(self) -> None:
        if self.leading():
            self.ids += 1
            self.logs[self.state.leader].append((self.state.leader_epoch, self.ids))

    def sync(self, members) -> None:
        for member in members:
            self.logs[member] = list(self.logs[self.state.leader])

    def ask(self, members: set[int]) -> None:
        """The leader's own ISR: whoever lives and caught up."""
        if not self.leading():
            return
        state = self.state
        isr = [b for b in state.replicas if b in members & set(self.up) or b == state.leader]
        self.sync(isr)
        request = AlterIsr(
            TOPIC,
            0,
            state.leader,
            self.up[state.leader],
            state.leader_epoch,
            state.partition_epoch,
            tuple((b, self.up[b]) for b in isr),
            True,
        )
        self.apply(alter_isr(self.image, request))
        self.heard()

    def heard(self) -> None:
        self.obliged = set(self.state.isr)
        self.lost -= self.obliged
        self.void = False

    def clear_elr(self) -> None:
        if self.leading():
            self.apply(unclean_recovery.clear_elr(self.image, {KEY: self.state.partition_epoch}))
            self.obliged = set(self.state.isr)
            self.void = self.void or self.obliged <= self.lost

    def report(self, node: int) -> None:
        if node in self.up and self.state in unclean_recovery.partitions_awaiting(self.image, node):
            log = self.logs[node]
            last = log[-1][0] if log else -1
            told = ReplicaLog(*KEY, self.state.leader_epoch, last, len(log))
            self.reports.setdefault(KEY, {})[node] = (self.up[node], told)
            self.apply(unclean_recovery.elect_longest(self.image, [KEY], self.reports))


OPS = (
    "crash",
    "power",
    "start",
    "detect",
    "append",
    "append",
    "unacked",
    "isr",
    "clear-elr",
    "report",
)
steps = st.lists(
    st.tuples(st.sampled_from(OPS), st.sampled_from(NODES), st.integers(0, 7)), max_size=60
)


def play(cluster: Cluster, op: str, node: int, number: int) -> None:
    match op:
        case "crash":
            cluster.crash(node)
        case "power":
            cluster.crash(node, keep=max(0, len(cluster.logs[node]) - number))
        case "start":
            cluster.start(node)
        case "detect":
            cluster.detect(node)
        case "append":
            cluster.append()
        case "unacked":
            cluster.write_unacked()
        case "isr":
            cluster.ask({b for b in NODES if number >> (b - 1) & 1})
        case "clear-elr":
            cluster.clear_elr()
        case "report":
            cluster.report(node)


@settings(max_examples=600, deadline=None)
@given(steps)
def test_nothing_acknowledged_is_lost_while_one_member_keeps_its_disk(history) -> None:
    cluster = Cluster()
    for op, node, number in history:
        play(cluster, op, node, number)
    for node in NODES:
        cluster.start(node)
    for node in NODES:
        cluster.report(node)
    assert cluster.leading(), "all are back: somebody leads"


def test_all_lose_power_and_only_the_first_to_be_missed_kept_its_disk() -> None:
    cluster = Cluster()
    cluster.append()
    for node in (3, 1, 2):
        cluster.crash(node, keep=1 if node == 3 else 0)
    cluster.lost.discard(3)
    cluster.void = False
    for node in (3, 1, 2):
        cluster.detect(node)
    for node in (1, 2):
        cluster.start(node)
    for node in (1, 2):
        cluster.report(node)
    assert cluster.state.leader == NO_LEADER and cluster.state.recovering
    assert unclean_recovery.missing_candidates(cluster.image, cluster.state, cluster.reports) == (
        3,
    )
    cluster.start(3)
    assert cluster.state.leader == NO_LEADER, "3 has not reported"
    cluster.report(3)
    assert cluster.state.leader == 3 and cluster.state.isr == (3,)
    assert cluster.state.unclean and not cluster.state.elr


def test_a_node_that_died_long_ago_is_not_waited_for() -> None:
    cluster = Cluster()
    cluster.crash(3)
    cluster.detect(3)
    assert cluster.state.elr == (3,)
    cluster.clear_elr()
    assert cluster.state.elr == ()
    for node in (1, 2):
        cluster.crash(node)
        cluster.detect(node)
    for node in (1, 2):
        cluster.start(node)
    for node in (1, 2):
        cluster.report(node)
    assert cluster.leading()


def test_a_lone_replica_waits_for_nobody() -> None:
    cluster = Cluster((1,))
    cluster.append()
    cluster.crash(1)
    cluster.start(1)
    assert cluster.state.leader == 1 and not cluster.state.elr


def test_a_clean_restart_of_the_last_member_leads_at_once() -> None:
    cluster = Cluster()
    for node in (1, 2, 3):
        cluster.crash(node)
        cluster.detect(node)
    last = cluster.state.isr[0]
    cluster.start(last, clean=True)
    assert cluster.state.leader == last


def test_an_old_mark_is_no_clean_mark() -> None:
    cluster = Cluster()
    for node in (1, 2, 3):
        cluster.crash(node)
        cluster.detect(node)
    last = cluster.state.isr[0]
    old = cluster.image.brokers[last].broker_epoch
    cluster.start(last)
    assert cluster.state.recovering
    who = RegisterRequest(last, UUID(int=9), (), None, old)
    cluster.apply(register_broker(cluster.image, who, fenced=False))
    assert cluster.state.recovering


def waiting_for_three() -> Cluster:
    cluster = Cluster()
    for node in (3, 1, 2):
        cluster.crash(node)
        cluster.detect(node)
    for node in (1, 2):
        cluster.start(node)
    return cluster


@pytest.mark.parametrize("what", ["stale broker epoch", "stale leader epoch", "fenced"])
def test_reports_that_do_not_count(what) -> None:
    cluster = waiting_for_three()
    cluster.start(3)
    state = cluster.state
    log = ReplicaLog(*KEY, state.leader_epoch, 0, 5)
    reports = {KEY: {n: (cluster.up[n], log) for n in NODES}}
    assert unclean_recovery.elect_longest(cluster.image, [KEY], reports)
    if what == "stale broker epoch":
        reports[KEY][3] = (cluster.up[3] - 1, log)
    elif what == "stale leader epoch":
        reports[KEY][3] = (cluster.up[3], ReplicaLog(*KEY, state.leader_epoch - 1, 0, 5))
    else:
        cluster.apply(fence_brokers(cluster.image, {3: cluster.up[3]}))
    assert unclean_recovery.elect_longest(cluster.image, [KEY], reports) == []
    assert unclean_recovery.missing_candidates(cluster.image, cluster.state, reports) == (3,)


@pytest.mark.parametrize(
    ("logs", "winner"),
    [
        ({1: (2, 10), 2: (3, 5), 3: (2, 99)}, 2),
        ({1: (2, 10), 2: (2, 11), 3: (2, 9)}, 2),
        ({1: (-1, 0), 2: (-1, 0), 3: (0, 1)}, 3),
    ],
)
def test_the_last_epoch_counts_before_the_offset(logs, winner) -> None:
    cluster = waiting_for_three()
    cluster.start(3)
    epoch = cluster.state.leader_epoch
    reports = {KEY: {n: (cluster.up[n], ReplicaLog(*KEY, epoch, *logs[n])) for n in NODES}}
    (record,) = unclean_recovery.elect_longest(cluster.image, [KEY], reports)
    assert record.leader == winner and record.isr == (winner,)


@pytest.mark.parametrize(("winner", "unclean"), [(1, True), (2, False)])
def test_who_was_not_in_the_isr_any_more_begins_with_a_base(winner, unclean) -> None:
    """Others may have been compacted since; but nothing is lost, and nobody is told so."""
    cluster = waiting_for_three()
    cluster.start(3)
    state = cluster.state
    assert winner in state.elr and (winner in state.isr) is not unclean
    logs = {n: ReplicaLog(*KEY, state.leader_epoch, 0, 9 if n == winner else 5) for n in NODES}
    reports = {KEY: {n: (cluster.up[n], log) for n, log in logs.items()}}
    (record,) = unclean_recovery.elect_longest(cluster.image, [KEY], reports)
    assert (record.leader, record.unclean) == (winner, unclean)
    image, delta = cluster.image.apply([record])
    assert unclean_recovery.unclean_elections(image, delta, reports) == ()
    if unclean:  # what another one's former process said is no word of its disk now
        reports[KEY][3] = (cluster.up[3] - 1, logs[3])
        (told,) = unclean_recovery.unclean_elections(image, delta, reports)
        assert told.leader == winner


def test_of_equal_logs_one_that_was_in_the_isr_leads() -> None:
    """All were killed, and their disks have everything: no log is read for a base generation."""
    cluster = Cluster()
    for node in (1, 2, 3):
        cluster.crash(node)
        cluster.detect(node)
    for node in (1, 2, 3):
        cluster.start(node)
    state = cluster.state
    assert state.recovering and state.isr != state.replicas[:1]
    log = ReplicaLog(*KEY, state.leader_epoch, 0, 5)
    reports = {KEY: {n: (cluster.up[n], log) for n in NODES}}
    (record,) = unclean_recovery.elect_longest(cluster.image, [KEY], reports)
    assert (record.leader,) == state.isr and not record.unclean


def test_who_gives_up_the_missing_one_is_told_what_may_be_lost() -> None:
    cluster = waiting_for_three()
    cluster.report(1)
    cluster.report(2)
    logs = unclean_recovery.current_reports(cluster.image, cluster.state, cluster.reports)
    logs[2] = ReplicaLog(*KEY, cluster.state.leader_epoch, 4, 44)
    before = cluster.image
    records = partition_election.elect_unclean(before, "t", 0, logs)
    image, delta = before.apply(records)
    assert image.partition(*KEY).leader == 2 and image.partition(*KEY).unclean
    (lost,) = unclean_recovery.unclean_elections(image, delta, cluster.reports)
    assert set(lost.isr) == {1, 2, 3} and lost.leader == 2
    assert [broker for broker, _, _ in lost.logs] == [1, 2]
    assert "acknowledged records may be lost" in str(lost) and "t-0" in str(lost)


def test_an_ordinary_election_is_no_loss() -> None:
    cluster = Cluster()
    leader = cluster.state.leader
    records = fence_brokers(cluster.image, {leader: cluster.up[leader]})
    image, delta = cluster.image.apply(records)
    assert unclean_recovery.unclean_elections(image, delta) == ()


@pytest.mark.parametrize(("behind", "waits"), [(0, False), (1, True)])
def test_only_the_mark_of_the_very_last_process_is_clean(behind, waits) -> None:
    cluster = Cluster()
    for node in (1, 2, 3):
        cluster.crash(node)
        cluster.detect(node)
    (last,) = cluster.state.isr
    mark = cluster.image.brokers[last].broker_epoch - behind
    who = RegisterRequest(last, UUID(int=9), (), None, mark)
    cluster.apply(register_broker(cluster.image, who))
    assert cluster.state.recovering == waits


def test_what_moved_on_since_its_leader_was_heard_of_keeps_its_elr() -> None:
    cluster = Cluster()
    cluster.crash(3)
    cluster.detect(3)
    now = cluster.state.partition_epoch
    assert unclean_recovery.clear_elr(cluster.image, {KEY: now - 1}) == []
    assert len(unclean_recovery.clear_elr(cluster.image, {KEY: now})) == 1
