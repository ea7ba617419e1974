"""One entry of ``log.dirs``: who may use it, which logs it holds, how far each was durable.

Opening takes the lock for life, checks whose directory it is (``meta.properties``), reads the mark
of a clean stop and removes it durably before any log is opened: a power cut can not bring it back.
Closing writes checkpoints first and the mark last. Another mark, ``kept-running``, names the run of
the machine in which a process wrote here: after a kill it shows that nothing written is lost.

A disk error takes the directory offline: ``offline`` says why, and no file of it is written again.

Long because whatever makes, opens or deletes logs changes the same checkpoints, under one lock.
"""

from __future__ import annotations

import logging
import threading
import uuid
from collections.abc import Collection, Iterable, Mapping, Sequence
from enum import Enum
from functools import partial
from typing import Final, NamedTuple

from kept.storage import checkpoints, layout
from kept.storage.disk import Disk, Lock, parent
from kept.storage.errors import (
    DamagedData,
    DirectoryRefused,
    MachineError,
    ResourceExhausted,
    vanished,
)
from kept.storage.log import missing_files
from kept.storage.log.log import Log
from kept.storage.producers.producer_states import ProducerQuota
from kept.storage.segments.swap import SwapPlan
from kept.storage.types import MAX_INT64, LogConfig, TopicPartition

META_VERSION: Final = "1"
OWNER: Final = "kept"
"""Property of meta.properties that tells our directories from Apache Kafka's."""

GONE_MS: Final = 60_000
"""How long what was collected of a deleted log may still be on its way to a checkpoint."""

logger = logging.getLogger(__name__)


class Checkpoint(Enum):
    """The checkpoints of a directory; the value is the file's name."""

    RECOVERY_POINTS = layout.RECOVERY_POINTS
    HIGH_WATERMARKS = layout.HIGH_WATERMARKS
    LOG_STARTS = layout.LOG_STARTS
    CLEANER = layout.CLEANER_OFFSETS


class FoundLog(NamedTuple):
    """A log's directory on disk. ``topic_id`` is None when partition.metadata is missing or
    damaged. ``is_stray``: it was set aside, see :meth:`LogDirectory.set_aside`; then the topic's
    name may be cut.
    """

    directory_name: str
    topic_partition: TopicPartition
    topic_id: uuid.UUID | None
    is_delete: bool
    is_stray: bool = False


class ClosedLog(NamedTuple):
    """A log that is not open, in the directory ``directory``, which may be missing."""

    topic_partition: TopicPartition
    topic_id: uuid.UUID
    directory: str
    config: LogConfig


class NewLog(NamedTuple):
    """A log to create. ``leader_epoch``: this node leads it, from its beginning, in that epoch."""

    topic_partition: TopicPartition
    topic_id: uuid.UUID
    config: LogConfig
    leader_epoch: int | None = None


def refuse_kafka(disk: Disk, path: str) -> None:
    """Raise DirectoryRefused if ``path`` is, or is directly in, a data directory of Apache Kafka.

    To be asked before anything is created there, lock files included.
    """
    for place in (path.rstrip("/") or "/", parent(path)):
        properties = checkpoints.read_properties(disk, f"{place}/{layout.META_PROPERTIES}")
        if properties is None or OWNER in properties or properties.get("version") is None:
            continue
        if not disk.exists(f"{place}/{layout.ADOPTED}"):
            raise DirectoryRefused(
                f"{place} is Apache Kafka's data directory; a kept node needs one of its own "
                "(kept serve --adopt takes it over, for good)"
            )


def refuse_ownerless(disk: Disk, path: str) -> None:
    """Raise DirectoryRefused if ``path`` holds logs and nothing says whose they are."""
    if disk.exists(f"{path}/{layout.META_PROPERTIES}") or not disk.exists(path):
        return
    if any(log.topic_partition for log in LogDirectory(path, disk, None).scan()):
        raise DirectoryRefused(f"{path} holds logs but no {layout.META_PROPERTIES}")


def previous_broker_epoch(directories: Iterable[LogDirectory]) -> int:
    """The broker epoch that all log directories of a process prove (:attr:`LogDirectory
    .proven_epoch`), -1 unless all do and agree.

    As Kafka's ``LogManager.readBrokerEpochFromCleanShutdownFiles``, with kills on a machine that
    runs still beside clean stops. A controller takes it as proof
    that this broker lost nothing since it had that epoch: one directory that was not closed may
    have lost what was not flushed, and one with an older mark was not there the last time.
    """
    epochs = {directory.proven_epoch for directory in directories}
    return epochs.pop() if len(epochs) == 1 else -1


class LogDirectory:
    """An open data directory; see the module."""

    def __init__(
        self, path: str, disk: Disk, lock: Lock | None, producer_quota: ProducerQuota | None = None
    ) -> None:
        self.path = path
        self._producer_quota = producer_quota or ProducerQuota()
        self.disk = disk
        self._lock = lock
        self.cluster_id = ""
        self.node_id = -1
        self.directory_id = uuid.UUID(int=0)
        self.was_clean = False
        self.adopted = False
        """Apache Kafka wrote it before: its replicas were compacted each on its own."""
        self.broker_epoch = -1
        self.survived_epoch = -1
        """The broker epoch of the process before, if it ended without a clean stop and the machine
        has not been started anew since: it lost nothing that it had written; else -1."""
        self.has_lost = False
        """A log that was opened lacks records that were there."""
        self.offline: str | None = None
        self.checkpoints: dict[Checkpoint, dict[TopicPartition, int]] = {}
        """What the files say: read at open, then as last written."""
        self.missing: dict[TopicPartition, int] = {}
        """Logs that the checkpoints know and nobody finds, with where they ended at least."""
        self.unopened: set[TopicPartition] = set()
        """Logs that were there, and that nobody has opened (yet): what the checkpoints say of them
        stays, and after a crash there is no clean stop before all were looked through."""
        self._unserved: set[TopicPartition] = set()
        """Logs that were opened or created, and that whoever collects offsets does not know of yet
        (:meth:`serve`), though the thread that opened them may be done."""
        self._put_back: set[TopicPartition] = set()
        """Logs that were set aside once: the checkpoints have forgotten them."""
        self.version = 0
        """How often it was said where a log stands, since this was opened: it was created, put back
        or cut, :meth:`serve` or :meth:`state_recovery_point`; what was looked up before may not
        hold any more."""
        self._noting = threading.Lock()
        """Held for no file: :meth:`serve` does not wait for :attr:`_writing`."""
        self._writing = threading.Lock()
        self._marking = threading.Lock()
        """A mark that is being written when this fails is removed after it is there."""
        self._changed: dict[TopicPartition, int] = {}
        self._gone: dict[TopicPartition, int] = {}
        """When each log was deleted that no checkpoint may name, whatever was collected before."""
        self._deleting = threading.Lock()
        self._deleted: list[tuple[int, int, str]] = []
        """(when, when its files are due, where) of each deleted log. Files are due, too, once the
        clock was set back to before: readers finish with the files that they have open."""
        self._renamed: list[tuple[int, int, str]] = []
        """The same of those whose new names may not be durable yet."""

    @classmethod
    def open(
        cls,
        path: str,
        disk: Disk,
        *,
        cluster_id: str,
        node_id: int,
        new_directory_id: uuid.UUID,
        now_ms: int,  # noqa: ARG003 (the seam's)
        producer_quota: ProducerQuota | None = None,
    ) -> LogDirectory:
        """Lock and read a directory, created when absent.

        ``new_directory_id`` becomes its id if it has none. ``producer_quota``: what its logs share
        with those of other directories. Raises DirectoryInUse, DirectoryRefused
        (another node's or cluster's, or Apache Kafka's), DamagedData for meta.properties,
        MachineError.
        """
        path = path.rstrip("/") or "/"
        refuse_kafka(disk, path)
        disk.ensure_data_directory(path)
        lock = disk.lock(f"{path}/{layout.LOCK}")
        directory = cls(path, disk, lock, producer_quota)
        try:
            directory._read_meta(cluster_id, node_id, new_directory_id)
            directory._read_state()
        except BaseException:
            lock.release()
            raise
        return directory

    @classmethod
    def broken(cls, path: str, disk: Disk, error: MachineError) -> LogDirectory:
        """One that cannot be opened: offline from the start, and nobody's."""
        directory = cls(path.rstrip("/") or "/", disk, None)
        directory.offline = str(error)
        return directory

    def _file(self, name: str) -> str:
        return f"{self.path}/{name}"

    def _read_meta(self, cluster_id: str, node_id: int, new_directory_id: uuid.UUID) -> None:
        path = self._file(layout.META_PROPERTIES)
        values = checkpoints.read_properties(self.disk, path)
        self.cluster_id, self.node_id, self.directory_id = cluster_id, node_id, new_directory_id
        if values is None:
            refuse_ownerless(self.disk, self.path)
            properties = {
                "version": META_VERSION,
                "cluster.id": cluster_id,
                "node.id": str(node_id),
                "directory.id": layout.encode_uuid(new_directory_id),
                "kept": "1",
            }
            checkpoints.write_properties(self.disk, path, properties)
            return
        if not values.get("version"):
            raise DamagedData(path, 0, -1, "it is empty or says no version: put it back")
        if values.get("version") != META_VERSION:
            raise DirectoryRefused(
                f"{path} has version {values.get('version')!r}; this version reads {META_VERSION}"
            )
        for name, wanted in (("cluster.id", cluster_id), ("node.id", str(node_id))):
            if values.get(name) != wanted:
                raise DirectoryRefused(
                    f"{self.path} belongs to {name} {values.get(name)!r}, not to {wanted!r}"
                )
        try:
            self.directory_id = layout.decode_uuid(values.get("directory.id", ""))
        except ValueError as error:
            raise DamagedData(path, -1, -1, f"directory.id: {error}") from error

    def _read_state(self) -> None:
        self.adopted = self.disk.exists(self._file(layout.ADOPTED))
        mark = self._file(layout.CLEAN_SHUTDOWN)
        epoch = checkpoints.read_clean_shutdown(self.disk, mark)
        self.was_clean = epoch is not None
        self.broker_epoch = -1 if epoch is None else epoch
        is_damaged = False
        for kind in Checkpoint:
            path = self._file(kind.value)
            try:
                self.checkpoints[kind] = checkpoints.read_offsets(self.disk, path)
            except DamagedData as error:
                logger.warning("%s: taken as empty, logs are scanned", error)
                self.checkpoints[kind] = {}
                self.was_clean = False
                is_damaged = True
        self._find_missing()
        if self.missing or is_damaged:
            # Before the checkpoints are written anew: then nothing would tell the next start.
            self._remove_running_mark()
        self._read_running_mark()
        for name in self.disk.listdir(self.path):
            parsed = layout.parse_directory_name(name)
            if parsed is None or parsed.state or name in layout.IGNORED_NAMES:
                continue
            if self.disk.stat(self._file(name)).is_directory:
                self.unopened.add(parsed.topic_partition)
        if epoch is not None:
            self.disk.unlink(mark)
            self.disk.fsync_dir(self.path)

    def _find_missing(self) -> None:
        """A log that was removed by hand is as if its disk had lost power: after a clean stop, too,
        this directory may hold less than what was acknowledged. The checkpoints do not know one
        that was deleted with its topic, unless an earlier snapshot of kept did it.
        """
        parsed = map(layout.parse_directory_name, self.disk.listdir(self.path))
        there = {
            name.topic_partition
            for name in parsed
            if name is not None and name.state in {"", layout.DELETE_DIRECTORY}
        }
        for known in (self.recovery_points, self.high_watermarks):
            for tp, offset in known.items():
                if offset > 0 and tp not in there:
                    self.missing[tp] = max(offset, self.missing.get(tp, 0))
        if self.missing and self.was_clean:
            self.was_clean = False
            logger.error(
                "%s: stopped cleanly, but lacks %s now: taken as after a crash",
                self.path,
                ", ".join(sorted(map(layout.directory_name, self.missing))),
            )

    def _read_running_mark(self) -> None:
        """A killed process leaves what it wrote in the page cache, until the machine restarts."""
        mark = checkpoints.read_running(self.disk, self._file(layout.RUNNING))
        if mark is not None and mark[1] == self.disk.boot_id():
            self.survived_epoch = mark[0]

    def _remove_running_mark(self) -> None:
        """Raises MachineError. No fsync is due: a power cut that brings the mark back is the end of
        the machine's run that it names.
        """
        with self._marking:
            self.disk.unlink(self._file(layout.RUNNING))

    @property
    def proven_epoch(self) -> int:
        """The broker epoch of the process before, if this directory has all that it had written:
        it stopped cleanly, or was killed on a machine that runs still; else -1 (rule 33).
        """
        if self.has_lost:
            return -1
        return self.broker_epoch if self.was_clean else self.survived_epoch

    def mark_running(self, broker_epoch: int) -> None:
        """This process is registered with that epoch. A machine without a boot id leaves no mark,
        nor does a directory that failed. Blocks; raises MachineError.
        """
        boot_id = self.disk.boot_id()
        path = self._file(layout.RUNNING)
        with self._marking:
            if boot_id is not None and self.offline is None:
                checkpoints.write_running(self.disk, path, broker_epoch, boot_id)

    @property
    def recovery_points(self) -> dict[TopicPartition, int]:
        """Offsets below which each log is durable, as read at open."""
        return self.checkpoints[Checkpoint.RECOVERY_POINTS]

    @property
    def high_watermarks(self) -> dict[TopicPartition, int]:
        """High watermarks, as read at open."""
        return self.checkpoints[Checkpoint.HIGH_WATERMARKS]

    @property
    def log_starts(self) -> dict[TopicPartition, int]:
        """Log starts above the first segment's base, as read at open."""
        return self.checkpoints[Checkpoint.LOG_STARTS]

    @property
    def cleaner(self) -> dict[TopicPartition, int]:
        """First dirty offsets, as read at open (for Kafka's tools)."""
        return self.checkpoints[Checkpoint.CLEANER]

    def scan(self) -> list[FoundLog]:
        """The logs that are there. Names that are no log's are ignored with a log line."""
        entries = []
        for name in self.disk.listdir(self.path):
            try:
                is_directory = self.disk.stat(self._file(name)).is_directory
            except FileNotFoundError:
                continue  # a deleted log: finish_deletions runs beside us
            if name in layout.IGNORED_NAMES or not is_directory:
                continue
            parsed = layout.parse_directory_name(name)
            if parsed is None or parsed.state == layout.FUTURE_DIRECTORY:
                logger.warning("%s/%s: left alone, it is not a log", self.path, name)
                continue
            path = f"{self.path}/{name}/{layout.PARTITION_METADATA}"
            try:
                topic_id = checkpoints.read_partition_metadata(self.disk, path)
            except DamagedData as error:
                logger.warning("%s", error)
                topic_id = None
            deleted, stray = (
                parsed.state == state for state in (layout.DELETE_DIRECTORY, layout.STRAY_DIRECTORY)
            )
            entries.append(FoundLog(name, parsed.topic_partition, topic_id, deleted, stray))
        return entries

    def log_path(self, tp: TopicPartition) -> str:
        """Directory of a log."""
        return self._file(layout.directory_name(tp))

    def open_log(
        self,
        tp: TopicPartition,
        topic_id: uuid.UUID | None,
        config: LogConfig,
        *,
        now_ms: int,
        unfinished_swap: SwapPlan | None = None,
        producer_id_expiration_ms: int = 86_400_000,
        compacted_to: int | None = None,
        replicated: bool = False,
    ) -> Log:
        """Open a log of :meth:`scan` with what the checkpoints say of it; any thread may.

        After an error what they say stays: damage may be mended, and the log opened at a later
        start. Until then this directory is not marked as stopped cleanly after a crash.
        """
        recovery_point = self.recovery_points.get(tp)
        traces = missing_files.find_traces(self.disk, self.log_path(tp))
        log = Log.open(
            self.log_path(tp),
            tp,
            topic_id,
            config,
            self.disk,
            now_ms=now_ms,
            log_start_offset=self.log_starts.get(tp, 0),
            recovery_point=recovery_point,
            clean=self.was_clean and tp not in self._put_back,
            unfinished_swap=unfinished_swap,
            producer_id_expiration_ms=producer_id_expiration_ms,
            compacted_to=compacted_to,
            replicated=replicated,
            producer_quota=self._producer_quota,
        )
        log.before_cut = partial(self.lower_checkpoints, tp)
        high_watermark, recovery_point = self.high_watermarks.get(tp, 0), recovery_point or 0
        if missing_files.report_missing(log, traces, high_watermark, recovery_point):
            self._note_loss(log, recovery_point)
        self._unserved.add(tp)
        self.unopened.discard(tp)
        return log

    def serve(self, tp: TopicPartition) -> None:
        """Whoever collects offsets for :meth:`write_checkpoints` knows of a log from now on. Until
        then what the checkpoints say of it stays, whatever was collected before. Does not block.
        """
        self._note(tp)
        self._unserved.discard(tp)

    def _note_loss(self, log: Log, recovery_point: int) -> None:
        """A log lacks records, and that was said. Raises MachineError.

        What was durable and is not, has to go from the checkpoints before the log is appended to:
        a start would trust what is written there next, and was never synced. Two things tell the
        next start of the loss, this node's mark by its absence and the checkpoints. So the mark
        goes first. A start after a kill

        - before the mark is gone finds all as this one did;
        - between the two finds no mark, and says again what is lost; so it does where only the
          recovery point is lowered, by the high watermark;
        - after both finds no mark, and a log that is whole: there is no proof, and nothing to say.

        Where a power cut took what was not synced, only the high watermark is above the end, of
        many logs perhaps: its checkpoint is written by and by, and the mark is gone before that.
        """
        self.has_lost = True
        self._remove_running_mark()
        if log.log_end_offset < recovery_point:
            self.lower_checkpoints(log.topic_partition, log.log_end_offset, log.recovery_point)

    def create_logs(
        self,
        new_logs: Sequence[NewLog],
        *,
        now_ms: int,
        producer_id_expiration_ms: int = 86_400_000,
    ) -> list[Log]:
        """Create empty logs; all are durable when this returns, with one fsync of this directory.

        What an old log of such a name left in the checkpoints is forgotten first, durably: after a
        crash the old one's log start would empty the new log. What was collected of the old one and
        is not written yet, is not. The recovery point is there from the beginning: a start may
        rely on it.
        """
        born = {new_log.topic_partition: 0 for new_log in new_logs}
        with self._writing:
            for tp in born:
                self.unopened.discard(tp)
                self._gone.pop(tp, None)
                self._unserved.add(tp)
                self._note(tp)
            self._forget(born, born)
        logs = []
        for tp, topic_id, config, leader_epoch in new_logs:
            self.disk.mkdir(self.log_path(tp))
            log = Log.open(
                self.log_path(tp),
                tp,
                topic_id,
                config,
                self.disk,
                now_ms=now_ms,
                producer_id_expiration_ms=producer_id_expiration_ms,
                first_epoch=leader_epoch,
                producer_quota=self._producer_quota,
            )
            log.before_cut = partial(self.lower_checkpoints, tp)
            logs.append(log)
        self.disk.fsync_dir(self.path)
        return logs

    def mark_deleted(self, log: Log, unique: uuid.UUID, now_ms: int) -> None:
        """The topic is deleted: rename to ``...-delete``; :meth:`purge` removes the files."""
        self.mark_all_deleted([(log, unique)], now_ms)

    def mark_all_deleted(
        self, logs: Sequence[tuple[Log | ClosedLog, uuid.UUID]], now_ms: int
    ) -> None:
        """The same for several, open or not, with one fsync of this directory.

        The checkpoints forget them first, durably: once renamed they are not :attr:`missing`. A
        crash in between leaves a log that is looked through from its beginning, and deleted again.
        Without a descriptor for that, the next checkpoints forget them. After ResourceExhausted it
        is to be called again, for the same logs at least; meanwhile nobody makes others of them.
        """
        gone = {log.topic_partition: now_ms for log, _ in logs}
        with self._writing:
            try:
                self._forget(gone, {})
            except ResourceExhausted as error:
                logger.warning("%s: deleted logs stay in the checkpoints for now", error)
            self._gone |= gone
        for log, unique in logs:
            self._changed.pop(log.topic_partition, None)
            self._unserved.discard(log.topic_partition)
            path = self._file(layout.deleted_directory_name(log.topic_partition, unique))
            if isinstance(log, ClosedLog):
                self.unopened.discard(log.topic_partition)
                if not self.disk.exists(log.directory):
                    continue
                self.disk.rename(log.directory, path)
            elif log.directory == self.log_path(log.topic_partition):
                log.leader_epochs.retire()
                self.disk.rename(log.directory, path)
                log.segments.moved_to(path)
            else:  # renamed by a call that found no descriptor
                continue
            self._renamed.append((now_ms, now_ms + log.config.file_delete_delay_ms, path))
        self.disk.fsync_dir(self.path)
        with self._deleting:
            self._deleted += self._renamed
        self._renamed = []

    def set_aside(self, tp: TopicPartition, unique: uuid.UUID) -> str:
        """Keep a log that nobody is known to have deleted out of the way, durably, under a name
        that ends in ``-stray``, as Apache Kafka does; returns that name. Blocks.
        """
        name = layout.deleted_directory_name(tp, unique, layout.STRAY_DIRECTORY)
        self.disk.rename(self.log_path(tp), self._file(name))
        self.disk.fsync_dir(self.path)
        self.unopened.discard(tp)
        return name

    def put_back(self, name: str, tp: TopicPartition) -> None:
        """Give a log that was set aside its name again, durably: its topic is there after all. It
        is to be opened then, and is looked through as after a crash. Blocks.
        """
        self.disk.rename(self._file(name), self.log_path(tp))
        self.disk.fsync_dir(self.path)
        with self._writing:
            self._gone.pop(tp, None)
            self._note(tp)
        self._put_back.add(tp)

    def remove_unborn(self, tp: TopicPartition) -> bool:
        """Remove what a crash left of a creation: no ``partition.metadata``, and no record, since
        its name is durable before the first append. False: it is not that, or somebody else's
        file is in it, and it is left alone.
        """
        path = self.log_path(tp)
        for name in self.disk.listdir(path):
            parsed = layout.parse_segment_file(name)
            if parsed is None:
                if (
                    name.removesuffix(".tmp") != layout.LEADER_EPOCHS
                    and name != layout.PARTITION_METADATA + ".tmp"
                ):
                    return False
            elif parsed.kind == layout.LOG and self.disk.stat(f"{path}/{name}").size_bytes:
                return False
        self.disk.remove_tree(path)
        self.unopened.discard(tp)
        return True

    def purge(self, now_ms: int) -> int:
        """Remove deleted logs whose ``file.delete.delay.ms`` is over; returns how many."""
        with self._deleting:
            due = [path for since, at, path in self._deleted if not since <= now_ms < at]
            self._deleted = [entry for entry in self._deleted if entry[0] <= now_ms < entry[1]]
        for number, path in enumerate(due):
            try:
                self.disk.remove_tree(path)
            except ResourceExhausted:
                with self._deleting:
                    self._deleted += [(now_ms, now_ms, left) for left in due[number:]]
                raise
        with self._writing:
            self._gone = {
                tp: since for tp, since in self._gone.items() if since <= now_ms < since + GONE_MS
            }
        return len(due)

    def finish_deletions(self) -> int:
        """Finish deletions that a stop interrupted; returns how many. Where the checkpoints know
        them still (an earlier snapshot of kept left them there), they forget them first, durably.
        """
        entries = self.scan()
        deleted = [entry for entry in entries if entry.is_delete]
        there = {entry.topic_partition for entry in entries if not entry.is_delete}
        with self._writing:
            gone = {entry.topic_partition for entry in deleted} - there - self._changed.keys()
            self._forget(gone, {})
        for entry in deleted:
            self.disk.remove_tree(self._file(entry.directory_name))
        return len(deleted)

    def write_checkpoints(
        self, kind: Checkpoint, offsets: Mapping[TopicPartition, int], version: int = MAX_INT64
    ) -> None:
        """Replace one of the checkpoints durably; blocks, any thread may.

        ``version`` is what :attr:`version` was before the first of the offsets was looked up. What
        was said of a log since counts: one that was made meanwhile has nothing but its name in
        common with the one that an offset is of, and one that was cut may not go that far.
        """
        with self._writing:
            current, known = dict(offsets), self.checkpoints[kind]
            # Each before what comes from there.
            kept = self.unopened.copy()
            kept |= self._unserved.copy() - set(current)
            if version < self.version:
                later = {tp for tp, n in self._changed.copy().items() if n > version}
                current = {tp: offset for tp, offset in current.items() if tp not in later}
                kept |= later
            current = {tp: offset for tp, offset in current.items() if tp not in self._gone}
            current |= {tp: known[tp] for tp in kept if tp in known}
            checkpoints.write_offsets(self.disk, self._file(kind.value), current)
            self.checkpoints[kind] = current

    def state_recovery_point(self, tp: TopicPartition, offset: int, version: int) -> bool:
        """Make one log's recovery point durable, before files are put into place that have gaps
        below it. What was collected before does not undo it; nothing is written of a log that was
        deleted meanwhile. Blocks, any thread may.

        ``version`` is what :attr:`version` was when ``offset`` was looked up. False: a cut, or
        whatever was said of the log since, counts, and nothing is written.
        """
        with self._writing:
            if tp in self._gone:
                return True
            if self._changed.get(tp, 0) > version:
                return False
            self._note(tp)
            self._write(Checkpoint.RECOVERY_POINTS, tp, offset)
            return True

    def lower_checkpoints(self, tp: TopicPartition, end_offset: int, recovery_point: int) -> None:
        """A log is about to be cut to ``end_offset``: when this returns no checkpoint says that it
        reaches higher, or is durable above ``recovery_point``. What was collected before does not
        undo it; nothing is written where none does, nor of a log that was deleted. Blocks.
        """
        bounds = {
            Checkpoint.RECOVERY_POINTS: recovery_point,
            Checkpoint.HIGH_WATERMARKS: end_offset,
            Checkpoint.LOG_STARTS: end_offset,
        }
        with self._writing:
            if tp in self._gone:
                return
            self._note(tp)
            for kind, bound in bounds.items():
                if self.checkpoints[kind].get(tp, 0) > bound:
                    self._write(kind, tp, bound)

    def raise_log_start(self, tp: TopicPartition, offset: int) -> None:
        """A log that is not open yet starts at ``offset``, if no checkpoint says higher: durably.
        Blocks.
        """
        with self._writing:
            if self.checkpoints[Checkpoint.LOG_STARTS].get(tp, 0) < offset:
                self._write(Checkpoint.LOG_STARTS, tp, offset)

    def _write(self, kind: Checkpoint, tp: TopicPartition, offset: int) -> None:
        current = {**self.checkpoints[kind], tp: offset}
        checkpoints.write_offsets(self.disk, self._file(kind.value), current)
        self.checkpoints[kind] = current

    def _forget(
        self, gone: Collection[TopicPartition], recovery_points: Mapping[TopicPartition, int]
    ) -> None:
        """Take logs out of the checkpoints, durably, and put ``recovery_points`` in."""
        for kind, known in self.checkpoints.items():
            current = {tp: offset for tp, offset in known.items() if tp not in gone}
            if kind is Checkpoint.RECOVERY_POINTS:
                current |= recovery_points
            if current != known:
                checkpoints.write_offsets(self.disk, self._file(kind.value), current)
                self.checkpoints[kind] = current

    def _note(self, tp: TopicPartition) -> None:
        with self._noting:
            self._changed[tp] = self.version + 1
            self.version += 1

    def verify(self) -> None:
        """Raise MachineError unless the directory is still what its path stands for; blocks, any
        thread may. The lock file in it tells: it is held open from the start on. Without
        meta.properties no start takes the directory.
        """
        if self._lock is None:
            return
        self._lock.verify()
        path = self._file(layout.META_PROPERTIES)
        if not self.disk.exists(path):
            raise vanished(path)

    def fail(self, error: MachineError) -> None:
        """Take the directory offline; the first reason is kept."""
        if self.offline is None:
            self.offline = str(error)
            logger.error("log directory %s is offline: %s", self.path, error)

    def forget_running(self) -> None:
        """A device of this node failed, and may have dropped what it was given: the next process
        must not rely on the mark. Blocks; one that cannot be removed is only logged.
        """
        try:
            self._remove_running_mark()
        except MachineError as error:
            logger.warning("%s", error)

    def close(self, *, clean: bool = True, broker_epoch: int = -1) -> None:
        """Release the directory. ``clean``: all logs were closed and the checkpoints written; the
        mark is left, last of all. A directory that is offline is never marked clean, nor one with
        logs that were not opened since a crash; without ``broker_epoch`` the mark says the old one.
        """
        try:
            if clean and self.unopened and not self.was_clean:
                logger.warning(
                    "%s: %d logs were not opened since the last crash: not marked as stopped "
                    "cleanly",
                    self.path,
                    len(self.unopened),
                )
            elif clean and self.offline is None:
                if broker_epoch == -1 and self.was_clean and not self.has_lost:
                    broker_epoch = self.broker_epoch
                mark = self._file(layout.CLEAN_SHUTDOWN)
                checkpoints.write_clean_shutdown(self.disk, mark, broker_epoch)
        finally:
            if self._lock is not None:
                self._lock.release()
