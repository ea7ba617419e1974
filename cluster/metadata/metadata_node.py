"""One node's part in the metadata: Raft core, log, snapshots and image, voters and observers alike.

Nothing here waits, starts threads or reads clocks. The shell owns the loop::

    node = MetadataNode.open(...)
    after every tick(), receive(), peer_down(), propose()...:
        send(node.drain_messages())             # never waits for the disk
        if (work := node.work()) is not None:   # one outstanding at a time
            work.run()                          # blocks if work.blocks; any thread
            outcome = node.done(work)           # on the loop's thread again
            send(outcome.messages); act on the rest; ask for work() again

The shell's duties, on top of those of :mod:`kept.cluster.raft`:

- ``tick()`` at a steady pace; every message of a peer through ``receive()``; ``peer_down()`` on
  evidence that a process died (connection broken *and* a probe refused), and never a guess;
- messages of one ``drain_messages()`` or outcome in order, those of an outcome after its work ran;
- ``lost_proposals`` before ``applied``: an index that was lost holds another leader's entry;
- when :attr:`MetadataNode.role` is no longer the leader's, whoever waits for a proposal is told
  NotController: it may still be committed, and is then among ``applied``;
- ``work.run()`` raises MachineError: call :meth:`MetadataNode.disk_failed`, then run that work
  again later (what it had written it does not write twice). KafkaStorageError, DamagedData and
  DirectoryRefused are final: the node stops;
- :attr:`MetadataNode.refusal` is not None: the node stops with that message (DirectoryRefused).

Decisions are taken only while :attr:`MetadataNode.controller_ready`. Several proposals may be
under way: each is checked against the image that the ones before it make, so that no entry that
contradicts the image is ever written.

Long because the core, its files, the image and the history of one node move together.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Final
from uuid import UUID

from msgspec import Struct
from msgspec.structs import replace

from kept.cluster.metadata.image import Delta, Image
from kept.cluster.metadata.metadata_files import (
    DiskWork,
    HistoryWrite,
    MetadataFiles,
    open_metadata_files,
)
from kept.cluster.metadata.records import (
    ClusterRecord,
    MetadataRecord,
    VotersRecord,
    decode_batch,
    decode_batch_in_steps,
    encode_batch,
    encode_batch_in_steps,
)
from kept.cluster.metadata.snapshot import encode_snapshot
from kept.cluster.metadata.voters import Voter
from kept.cluster.metadata.wal import Entry
from kept.cluster.raft.core import RaftCore
from kept.cluster.raft.formation import Formation
from kept.cluster.raft.messages import NO_NODE, AppendEntries, LeaderHint, Message, Observe
from kept.cluster.raft.progress import Progress
from kept.cluster.raft.ready import RaftSettings, Role, Snapshot
from kept.cluster.raft.voter_set import voters_entry
from kept.steps import Steps, run_to_end
from kept.storage.disk import Disk
from kept.storage.errors import (
    CorruptMessage,
    DamagedData,
    DirectoryRefused,
    InvalidRequest,
    InvariantViolation,
    NotController,
    UnsupportedVersion,
)
from kept.storage.layout import encode_uuid

SNAPSHOT_AFTER_BYTES: Final = 4 * 1024 * 1024
"""A log larger than this, and than the last snapshot, is replaced by a snapshot: it bounds the disk
and the time of a start, and writes at most twice what was proposed."""

SNAPSHOT_RETRIES: Final = 16
"""A snapshot that failed is tried again when the log has grown by one such part of the limit: a
full disk is not written to without end."""

Applied = tuple[Image, Delta, int]
"""The image after an entry, what the entry changed, its index."""


class Outcome(Struct, frozen=True):
    """What came of a :class:`DiskWork`."""

    messages: tuple[Message, ...] = ()
    """To send now, in order."""
    applied: tuple[Applied, ...] = ()
    """The image moved: entry by entry, in order, each once. Where a snapshot of the leader took the
    place of entries, one step stands for all of them."""
    reads: tuple[tuple[object, int], ...] = ()
    """(token, index): a read barrier is confirmed; read once the image has reached the index."""
    lost_reads: tuple[object, ...] = ()
    """Tokens of barriers that this node can no longer confirm."""
    lost_proposals: tuple[int, ...] = ()
    """Indexes of own proposals that another leader's entries replaced, or whose fate a snapshot
    hides: decide again on the new image."""
    role_changed: bool = False
    """Role, leader or :attr:`MetadataNode.controller_ready` are not what they were."""


class _Proposal(Struct, frozen=True):
    entry: Entry
    image: Image
    delta: Delta


class MetadataNode:
    """One node's metadata. All calls but :meth:`DiskWork.run` are made by one thread."""

    def __init__(
        self,
        files: MetadataFiles,
        *,
        node_id: int,
        listed: tuple[Voter, ...],
        founding: bool,
        found_with: Callable[[], Sequence[MetadataRecord]],
        random: Callable[[int], int],
        settings: RaftSettings,
        snapshot_after_bytes: int,
        cluster_id: str | None,
    ) -> None:
        self.node_id = node_id
        self.directory_id = files.identity.directory_id
        self._handed_over = False
        self.image = files.image
        self.history = files.history
        """What befell this node's replicas; ``applied_index`` in it is what the disk knows."""
        self.refusal: str | None = None
        """Why this node must not go on, if it must not."""
        self.last_snapshot_error: str | None = None
        self._files = files
        self._snapshot_after_bytes = snapshot_after_bytes
        self._snapshot_retry_bytes = 0  # the log's size at which one that failed is tried again
        self._expected_cluster = cluster_id
        self._new_cluster = cluster_id or _new_id(random)
        self._listed = listed
        self._checked_listed = False
        self._work: DiskWork | None = None
        self._proposals: deque[_Proposal] = deque()
        self._lost: list[int] = []
        self._opened_at = files.wal.last_index
        self._snapshot: Snapshot | None = None
        self._compact_to = files.image.index
        me = next((v for v in listed if v.node_id == node_id), Voter(node_id, self.directory_id))
        self._me = replace(me, directory_id=self.directory_id)
        self.founding = founding
        """Whether this node began without a log, and might form the cluster."""
        self._formation = Formation(self._me, listed) if founding else None
        self._found_with = tuple(found_with()) if founding else ()
        self.core = RaftCore(
            node_id=node_id,
            directory_id=self.directory_id,
            voters=files.voters(self._me),
            log=files.wal,
            hard_state=files.hard_state,
            applied=files.image.index,
            random=random,
            take_snapshot=self._take_snapshot,
            settings=settings,
            contacts=tuple(sorted(v.node_id for v in listed)),
        )
        self._check_identity()
        self._note_formation()
        self._role = self._roles()

    @classmethod
    def open(
        cls,
        directory: str,
        disk: Disk,
        *,
        node_id: int,
        directory_id: UUID,
        voters: tuple[Voter, ...] = (),
        observer: bool = False,
        random: Callable[[int], int],
        raft: RaftSettings | None = None,
        snapshot_after_bytes: int = SNAPSHOT_AFTER_BYTES,
        cluster_id: str | None = None,
        found_with: Callable[[], Sequence[MetadataRecord]] = tuple,
    ) -> MetadataNode:
        """Open the metadata of a directory, created when absent.

        ``directory_id`` is taken where the directory has no id of its own yet. ``voters``: from
        configuration, their directory ids are not read; no ``voters`` or this node alone: a lone
        node, which leads and has applied everything when this returns. ``observer``: never votes.
        ``cluster_id``: the one that this node's other directories belong to, if any. ``found_with``
        is called where this node may form the cluster: records that stand beside the cluster's id.

        Blocks. Raises DamagedData (path, position), DirectoryRefused, MachineError. The caller
        holds the lock of the node's directories.
        """
        files = open_metadata_files(directory, disk, directory_id, node_id)
        listed = voters or ((Voter(node_id, directory_id),) if not observer else ())
        member = cls(
            files,
            node_id=node_id,
            listed=listed,
            founding=files.is_empty and not observer and any(v.node_id == node_id for v in listed),
            found_with=found_with,
            random=random,
            settings=raft or RaftSettings(),
            snapshot_after_bytes=snapshot_after_bytes,
            cluster_id=cluster_id,
        )
        if member.refusal is not None:
            raise DirectoryRefused(member.refusal)
        if member.is_alone:
            while (work := member.work()) is not None:
                work.run()
                member.done(work)
        return member

    # What it knows.

    @property
    def cut_at_start(self) -> str | None:
        """What was cut off the end of the log when it was opened; None: nothing."""
        return self._files.wal.cut

    @property
    def role(self) -> Role:
        """What this node is in its term."""
        return self.core.role

    @property
    def leader_id(self) -> int | None:
        """Who leads, as far as this node knows."""
        known = self.core.leader_id
        return None if known == NO_NODE else known

    @property
    def term(self) -> int:
        """The current term."""
        return self.core.term

    @property
    def voters(self) -> tuple[Voter, ...]:
        """Who votes, by the newest record in the log; before there is one, by configuration."""
        return self.core.voters or self._listed

    @property
    def is_alone(self) -> bool:
        """Whether this node is the only voter."""
        return self.core.voters == (self._me,)

    @property
    def majority_is_gone(self) -> bool:
        """Whether so many voters are known to be dead that no leader can be elected."""
        voter_set = self.core.state.voter_set
        alive = sum(node_id not in self.core.state.down for node_id in voter_set.ids)
        return alive < voter_set.quorum

    @property
    def commit_index(self) -> int:
        """A majority has the entries up to here; the image follows."""
        return self.core.commit_index

    @property
    def last_index(self) -> int:
        """The end of this node's log."""
        return self.core.log.last_index

    @property
    def cluster_id(self) -> str | None:
        """The cluster's id, once it is applied; before that the one this node was told."""
        return self.image.cluster_id or self._expected_cluster

    @property
    def controller_ready(self) -> bool:
        """Whether this node leads and its image holds everything that was committed before: only
        then may it take decisions."""
        replicator = self.core.replicator
        return replicator.commits_own_term and self.image.index >= replicator.first_of_term

    @property
    def recovered(self) -> bool:
        """Whether the image holds again what this node may have acted on before it started.

        A start knows its last snapshot only; what of its log is committed, a leader must say first.
        Nobody may conclude from an image before that that something here is not wanted any more.
        """
        return self.image.index >= min(self._opened_at, self.last_index)

    @property
    def predecessor(self) -> dict[int, int]:
        """On the leader: who led before it, and for how many ticks that one was not heard."""
        node_id, last_contact = self.core.state.predecessor
        return {} if node_id in (NO_NODE, self.node_id) else {node_id: self.ticks - last_contact}

    @property
    def progress(self) -> Mapping[int, Progress]:
        """On the leader: what it knows of each follower's log."""
        return self.core.state.progress

    def is_alive(self, node_id: int) -> bool:
        """On the leader: :meth:`RaftState.is_alive`."""
        return self.core.state.is_alive(node_id)

    def trusts(self, message: Message) -> bool:
        """Whether a message's sender may lead or be voted for: :meth:`Observer.trusts`."""
        return self.core.observer.trusts(message)

    @property
    def observers(self) -> tuple[int, ...]:
        """Those of :attr:`progress` that do not vote: a voter with another disk, too."""
        votes = self.core.state.voter_set.has
        return tuple(
            n for n, follower in self.progress.items() if not votes(n, follower.directory_id)
        )

    @property
    def ticks(self) -> int:
        """How often :meth:`tick` was called: what ``Progress.last_contact`` compares to."""
        return self.core.state.ticks

    # Input.

    def tick(self) -> None:
        """Time passes: one tick."""
        if self.refusal is None:
            self.core.tick()

    def receive(self, message: Message) -> None:
        """A message arrived from a node of this cluster."""
        if self.refusal is not None:
            return
        if isinstance(message, LeaderHint):
            # A node that has its log knows its cluster, and whom to believe, without hints.
            if message.sender in self.core.state.contacts and self.image.cluster_id is None:
                self._check_cluster(message)
            if self._formation is not None:
                self._formation.learn(message)
                self._note_formation()
        elif isinstance(message, Observe) and self._formation is not None:
            self.core.observer.observe_in = 0  # it is there: ask it
        self.core.step(message)
        if self.core.follower.log_regression is not None:
            self._refuse_log_regression(self.core.follower.log_regression)

    def _refuse_log_regression(self, shown: AppendEntries) -> None:
        """This disk is older than what this node has said: its vote cannot be relied on."""
        self.refusal = (
            f"{self._files.directory}: the metadata log ends at entry {self.last_index}, but this "
            f"node has acknowledged entry {shown.acknowledged} to node {shown.sender}: the disk is "
            f"an old copy, or lost what was synced. Empty {self._files.directory}: the node "
            f"follows then, and `kept cluster voter add {self.node_id}` gives it its vote back"
        )

    def peer_down(self, node_id: int) -> None:
        """There is evidence that a node's process died. It may be wrong."""
        self.core.peer_down(node_id)

    def disk_failed(self) -> None:
        """The outstanding work could not be run: another voter should lead meanwhile."""
        self.core.resign()

    def propose(self, records: Sequence[MetadataRecord]) -> int:
        """Ask for records to become true, together; returns the index of their entry.

        It is committed when that index is among the applied ones and was not lost. Raises
        NotController (``leader_id``), InvariantViolation when the records contradict the image,
        RequestTimedOut while too much waits for a majority.
        """
        return run_to_end(self.propose_in_steps(records))

    def propose_in_steps(self, records: Sequence[MetadataRecord]) -> Steps[int]:
        """:meth:`propose` for many records, yielding between them; another proposal restarts it.
        Raises as :meth:`propose`.
        """
        if any(isinstance(record, VotersRecord) for record in records):
            raise InvalidRequest("Voters change by change_voters alone")
        return (yield from self._propose(records))

    def _propose(self, records: Sequence[MetadataRecord]) -> Steps[int]:
        while True:
            self._check_ready()
            base = self._newest()
            image, delta = yield from base.apply_in_steps(records)
            data = yield from encode_batch_in_steps(records)
            if self._newest() is base:
                self._check_ready()
                return self._proposed(self.core.propose(data), image, delta)

    def _check_ready(self) -> None:
        if not self.controller_ready:
            leader = NO_NODE if self.leader_id is None else self.leader_id
            raise NotController(f"Node {self.node_id} is not the active controller", leader)

    def _newest(self) -> Image:
        return self._proposals[-1].image if self._proposals else self.image

    def _proposed(self, index: int, image: Image, delta: Delta) -> int:
        if index != image.index:
            raise InvariantViolation(f"entry {index} makes image {image.index}")
        self._proposals.append(_Proposal(self.core.log.entry(index), image, delta))
        return index

    def change_voters(self, voters: tuple[Voter, ...]) -> int:
        """Let one voter join (it must be an observer already) or leave; returns the entry's index.

        Raises NotController, InvalidRequest with what would be right.
        """
        self._check_ready()
        image, delta = self._newest().apply([VotersRecord(voters)])
        return self._proposed(self.core.change_voters(voters), image, delta)

    def transfer(self, to: int) -> None:
        """Hand leadership to a voter. Raises NotController, InvalidRequest."""
        self.core.transfer(to)

    def hand_over(self) -> bool:
        """Before a leader ends: let another voter lead, without an election's time-out.

        Call it again while it returns True: until somebody else leads. False: that is so, or this
        node does not lead, or no other voter is there that could.
        """
        core = self.core
        if core.role is not Role.LEADER:
            return self._handed_over and core.leader_id == NO_NODE and not self.majority_is_gone
        if core.state.transferee == NO_NODE:
            successor = core.replicator.successor
            if successor == NO_NODE:
                return False
            core.transfer(successor)
        self._handed_over = True
        return True

    def read_barrier(self, token: object) -> None:
        """Ask until which index a read must wait to see all that was committed before this call.

        Raises NotController.
        """
        self.core.read_barrier(token)

    # Output.

    def drain_messages(self) -> tuple[Message, ...]:
        """What may be sent at once, in order, even while a :class:`DiskWork` runs."""
        return self.core.drain_messages()

    def drain_refused(self) -> tuple[tuple[int, str], ...]:
        """(sender, why) of messages that were dropped since the last call."""
        refused = tuple(self.core.state.refused)
        self.core.state.refused.clear()
        return refused

    def drain_probes(self) -> frozenset[int]:
        """Nodes that a peer calls dead and this one does not: probe them, :meth:`peer_down` if the
        probe is refused."""
        probes = frozenset(self.core.state.to_probe)
        self.core.state.to_probe.clear()
        return probes

    def work(self) -> DiskWork | None:
        """What is to be done next; None while nothing is, or one is outstanding."""
        if self._work is not None:
            return None
        due = self._snapshot_due()
        if not due and not self.core.has_ready:
            return None
        snapshot = None
        if due:
            term = self.core.log.term_at(self.image.index)
            snapshot = (self.image, term) if term is not None else None
        ready = self.core.ready()
        history = None
        if snapshot is not None or ready.snapshot is not None:
            history = self.history.copy()
        self._work = DiskWork(self._files, ready, snapshot, self.image, history)
        return self._work

    def _snapshot_due(self) -> bool:
        files = self._files
        return (
            files.wal.size_bytes > max(self._snapshot_after_bytes, files.snapshot_bytes)
            and files.wal.size_bytes >= self._snapshot_retry_bytes
            and files.wal.base_index < self.image.index
            and self.image.index <= self.core.committed_to
        )

    def done(self, work: DiskWork) -> Outcome:
        """The outstanding work ran."""
        return run_to_end(self.done_in_steps(work))

    def done_in_steps(self, work: DiskWork) -> Steps[Outcome]:
        """:meth:`done` for entries of many records: yields between a few of them."""
        if work is not self._work or not work.finished:
            raise InvariantViolation("work that is not outstanding, or did not run")
        ready = work.ready
        self.core.advance(ready)
        applied: list[Applied] = []
        if work.installed is not None:
            self._lose_until(work.installed.index)
            self.image = work.installed
            self.history.observe(self.image.index, work.changed, hidden=True)
            applied.append((self.image, work.changed, self.image.index))
        yield from self._apply(applied)
        self._lose_replaced()
        if work.snapshot is not None:
            self.last_snapshot_error = work.snapshot_error
            grown = self._files.wal.size_bytes + self._snapshot_after_bytes // SNAPSHOT_RETRIES
            self._snapshot_retry_bytes = 0 if work.snapshot_error is None else grown
            if work.snapshot_error is None:
                self.core.compact(self._compact_to)
                self._compact_to = work.snapshot[0].index
        self._write_missing()
        self._check_identity()
        self.core.announced()
        lost, self._lost = tuple(self._lost), []
        before, self._role = self._role, self._roles()
        self._work = None
        return Outcome(
            messages=ready.messages,
            applied=tuple(applied),
            reads=ready.reads,
            lost_reads=ready.lost_reads,
            lost_proposals=lost,
            role_changed=before != self._role,
        )

    def _roles(self) -> tuple[Role, int, int, bool]:
        return self.core.role, self.core.term, self.core.leader_id, self.controller_ready

    def _apply(self, applied: list[Applied]) -> Steps[None]:
        log = self.core.log
        committed = range(self.image.index + 1, self.core.committed_to + 1)
        for index, entry in [(index, log.entry(index)) for index in committed]:
            mine = self._proposals[0] if self._proposals else None
            if mine is not None and mine.entry.index == index and mine.entry == entry:
                self._proposals.popleft()
                self.image, delta = mine.image, mine.delta
            else:
                self.image, delta = yield from apply_entry(self._files.wal.path, self.image, entry)
            self.history.observe(index, delta)
            applied.append((self.image, delta, index))
            yield

    def _lose_replaced(self) -> None:
        log = self.core.log
        first = next(
            (
                n
                for n, p in enumerate(self._proposals)
                if not log.matches(p.entry.index, p.entry.term)
            ),
            None,
        )
        while first is not None and len(self._proposals) > first:
            self._lost.append(self._proposals[first].entry.index)
            del self._proposals[first]

    def _lose_until(self, index: int) -> None:
        while self._proposals and self._proposals[0].entry.index <= index:
            self._lost.append(self._proposals.popleft().entry.index)

    # Snapshots, identity.

    def _take_snapshot(self) -> Snapshot:
        """What a follower gets that lacks entries which are no longer here."""
        term = self.core.log.term_at(self.image.index)
        if term is None:
            raise InvariantViolation(f"entry {self.image.index} was applied and is not known")
        if self._snapshot is None or self._snapshot.index < self.core.log.base_index:
            data = encode_snapshot(self.image, term)
            self._snapshot = Snapshot(self.image.index, term, data, self.image.voters)
        return self._snapshot

    def _write_missing(self) -> None:
        """A log that a lone node of 0.1.0 began names no voters: this one."""
        if not self.controller_ready or self._proposals or self._newest().voters:
            return
        records: list[MetadataRecord] = [VotersRecord(self.core.voters)]
        if self.image.cluster_id is None:
            records.append(ClusterRecord(self._new_cluster))
        run_to_end(self._propose(records))

    def _note_formation(self) -> None:
        formation = self._formation
        if formation is None:
            return
        self.refusal = self.refusal or formation.refusal
        founders = formation.founders
        if self.core.log.last_index > 0 or formation.joins:
            self._formation = None
        elif founders is not None:
            self._formation = None
            cluster = encode_batch([ClusterRecord(self._new_cluster), *self._found_with])
            self.core.form(founders, _joined(voters_entry(founders), cluster))

    def _check_cluster(self, hint: LeaderHint) -> None:
        mine = self.image.cluster_id or self._expected_cluster
        if mine is not None and hint.cluster_id not in ("", mine):
            self.refusal = (
                f"node {hint.sender} belongs to cluster {hint.cluster_id}, "
                f"this node's directories to cluster {mine}"
            )

    def _check_identity(self) -> None:
        """Does the log agree with what this node was told?"""
        self.core.observer.cluster_id = self.image.cluster_id or ""
        expected = self._expected_cluster
        if expected is not None and self.image.cluster_id not in (None, expected):
            self.refusal = (
                f"{self._files.directory} holds the metadata of cluster {self.image.cluster_id}, "
                f"this node's other directories belong to cluster {expected}"
            )
        voters = {voter.node_id for voter in self.image.voters}
        if voters and not self._checked_listed:
            self._checked_listed = True
            listed = {voter.node_id for voter in self._listed}
            if listed and not voters & listed:
                self.refusal = (
                    f"controller.quorum.voters names the nodes {sorted(listed)}, none of which "
                    f"votes; the voters are {sorted(voters)}"
                )

    def remember_applied(self) -> HistoryWrite | None:
        """What makes durable what was applied, and removals and elections up to there; None where
        the disk knows. It runs where works run, and never beside one.
        """
        history = self.history
        if history.applied_index == self.image.index:
            return None
        history.applied_index = self.image.index
        return HistoryWrite(self._files, history.copy())

    def check_invariants(self) -> None:
        """Raises InvariantViolation where the state contradicts itself."""
        self.core.check_invariants()
        if self.image.index > self.core.commit_index:
            raise InvariantViolation(
                f"applied {self.image.index}, committed {self.core.commit_index}"
            )


def apply_entry(path: str, image: Image, entry: Entry) -> Steps[tuple[Image, Delta]]:
    """The image after an entry of a log. Raises DirectoryRefused for what a newer kept wrote,
    DamagedData for what cannot be."""
    try:
        records = yield from decode_batch_in_steps(entry.data)
        return (yield from image.apply_in_steps(records))
    except UnsupportedVersion as error:
        raise DirectoryRefused(f"{path}: entry {entry.index}: {error}") from error
    except (CorruptMessage, InvariantViolation) as error:
        raise DamagedData(path, -1, -1, f"entry {entry.index}: {error}") from error


def _joined(first: bytes, second: bytes) -> bytes:
    return encode_batch([*decode_batch(first), *decode_batch(second)])


def _new_id(random: Callable[[int], int]) -> str:
    while True:
        text = encode_uuid(UUID(bytes=bytes(random(256) for _ in range(16)), version=4))
        if not text.startswith("-"):
            return text
