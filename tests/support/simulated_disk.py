"""A disk in memory that loses what a real one may lose, from one seed.

What it models, per file: bytes written since the last fsync; per directory: names created, renamed
and removed since its last fsync, in order (journaling file systems keep that order). It counts
every call that changes something, so that a test can crash at each of them:

- :meth:`SimulatedDisk.crash_at` makes the n-th such call raise :class:`SimulatedCrash`, a write
  after part of its bytes;
- :meth:`SimulatedDisk.after_kill` is the disk after ``kill -9``: everything written is there;
- :meth:`SimulatedDisk.after_power_loss` is the disk after a power cut: of what was not synced, any
  prefix, torn, with holes of zeros, or nothing.

Errors are injected with :meth:`SimulatedDisk.fail`, a full disk with ``capacity_bytes``, rot with
:meth:`SimulatedDisk.flip_bit`; a device that is gone is a path in ``broken``: every call on it and
below fails.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from random import Random

from kept.storage.disk import EXHAUSTED, Bytes, Disk, File, FileStat, Lock
from kept.storage.errors import DirectoryInUse, MachineError, ResourceExhausted, vanished

PAGE_BYTES = 4096


class SimulatedCrash(BaseException):
    """The process ends here. Not an Exception: nobody may handle it."""


@dataclass(eq=False)
class Inode:
    """A file: its bytes, those that are durable, and the changes in between."""

    data: bytearray = field(default_factory=bytearray)
    durable: bytes = b""
    pending: list[tuple[int, bytes | None]] = field(default_factory=list)
    mtime_ms: int = 0

    def write(self, position: int, content: bytes) -> None:
        """Put bytes at a position; a gap becomes zeros."""
        if position > len(self.data):
            self.data.extend(bytes(position - len(self.data)))
        self.data[position : position + len(content)] = content
        self.pending.append((position, content))

    def truncate(self, size: int) -> None:
        """Cut or extend."""
        if size < len(self.data):
            del self.data[size:]
        else:
            self.data.extend(bytes(size - len(self.data)))
        self.pending.append((size, None))

    def copy(self) -> Inode:
        """As it is: what is pending still is."""
        return Inode(bytearray(self.data), self.durable, self.pending.copy(), self.mtime_ms)

    def sync(self) -> None:
        """Everything is durable now."""
        self.durable = bytes(self.data)
        self.pending.clear()

    def survivor(self, random: Random) -> Inode:
        """What a power cut leaves of it."""
        left = Inode(bytearray(self.durable), mtime_ms=self.mtime_ms)
        if self.pending and random.random() < 0.2:
            left.data = bytearray(self.data)
            for start in range(0, len(left.data), PAGE_BYTES):
                if random.random() < 0.3:
                    old = self.durable[start : start + PAGE_BYTES]
                    size = min(PAGE_BYTES, len(left.data) - start)
                    left.data[start : start + size] = old.ljust(size, b"\0")[:size]
        else:
            count = random.randint(0, len(self.pending))
            for i, (position, content) in enumerate(self.pending[: count + 1]):
                torn = content
                if i == count:
                    if content is None or random.random() < 0.5:
                        break
                    torn = content[: random.randint(0, len(content))]
                if torn is None:
                    left.truncate(position)
                else:
                    left.write(position, torn)
        left.sync()
        return left


@dataclass(eq=False)
class Directory:
    """Names: as the process sees them, as they are durable, and the changes in between."""

    entries: dict[str, Inode | Directory] = field(default_factory=dict)
    durable: dict[str, Inode | Directory] = field(default_factory=dict)
    pending: list[tuple[str, Inode | Directory | None, str | None]] = field(default_factory=list)

    @staticmethod
    def apply(
        entries: dict[str, Inode | Directory],
        change: tuple[str, Inode | Directory | None, str | None],
    ) -> None:
        """Do one change: (name, node, None) links, (name, None, None) unlinks, (old, _, new)
        renames.
        """
        name, node, target = change
        if target is not None:
            moved = entries.pop(name, None)
            if moved is not None:
                entries[target] = moved
        elif node is None:
            entries.pop(name, None)
        else:
            entries[name] = node

    def change(self, name: str, node: Inode | Directory | None, target: str | None = None) -> None:
        """Change it for the process; not durable."""
        change = (name, node, target)
        self.apply(self.entries, change)
        self.pending.append(change)

    def sync(self) -> None:
        """The names are durable now."""
        self.durable = dict(self.entries)
        self.pending.clear()

    def survivor(self, random: Random) -> Directory:
        """What a power cut leaves of it and of all below it."""
        entries = dict(self.durable)
        for change in self.pending[: random.randint(0, len(self.pending))]:
            self.apply(entries, change)
        return Directory._settled({name: node.survivor(random) for name, node in entries.items()})

    @staticmethod
    def _settled(entries: dict[str, Inode | Directory]) -> Directory:
        return Directory(entries, dict(entries))

    def copy(self, copies: dict[int, Inode | Directory]) -> Directory:
        """As it is, and all below it: ``kill -9`` keeps the page cache. ``copies``: by identity."""

        def again(node: Inode | Directory) -> Inode | Directory:
            if id(node) not in copies:
                copies[id(node)] = node.copy() if isinstance(node, Inode) else node.copy(copies)
            return copies[id(node)]

        return Directory(
            {name: again(node) for name, node in self.entries.items()},
            {name: again(node) for name, node in self.durable.items()},
            [(name, node and again(node), to) for name, node, to in self.pending],
        )


class SimulatedFile(File):
    """An open file of the simulated disk."""

    __slots__ = ("inode",)

    def __init__(self, inode: Inode, path: str) -> None:
        super().__init__(-1, path)
        self.inode = inode


class _SimulatedLock(Lock):
    __slots__ = ("_disk", "_held", "_inode")

    def __init__(self, disk: SimulatedDisk, held: set[str], path: str) -> None:
        self._disk = disk
        self._held = held
        self._inode = disk.inode(path)
        self.path = path

    def verify(self) -> None:
        try:
            if self._disk.inode(self.path) is self._inode:
                return
        except FileNotFoundError:
            pass
        raise vanished(self.path)

    def release(self) -> None:
        self._held.discard(self.path)


@dataclass
class Injection:
    """An error to raise: at the ``skip``-th next ``operation`` on a path that contains ``path``."""

    operation: str
    path: str
    code: int
    skip: int = 0
    partial: bool = False


class SimulatedDisk(Disk):
    """A disk in memory. ``calls`` counts the changing calls so far; ``now_ms`` stamps files."""

    def __init__(self, root: Directory | None = None, seed: int = 0, boots: int | None = 0) -> None:
        super().__init__(environ={})
        self.boots = boots
        """How often its machine has lost power; None: it has no boot id."""
        self.root = root or Directory()
        self.random = Random(seed)
        self.calls = 0
        self.now_ms = 0
        self.capacity_bytes: int | None = None
        self.injections: list[Injection] = []
        self.broken: set[str] = set()
        self.trace: list[str] = []
        self._crash_at: int | None = None
        self._locks: set[str] = set()

    # What tests do to it.

    def crash_at(self, call: int) -> None:
        """The changing call number ``call`` (from 1) raises SimulatedCrash instead of working."""
        self._crash_at = call

    def fail(
        self,
        operation: str,
        path: str = "",
        code: int = errno.EIO,
        *,
        skip: int = 0,
        partial: bool = False,
    ) -> None:
        """Make a later call fail once. ``partial``: a write puts half of its bytes first."""
        self.injections.append(Injection(operation, path, code, skip, partial))

    def after_kill(self) -> SimulatedDisk:
        """A new disk with everything that was written; what was not synced still is not."""
        return SimulatedDisk(self.root.copy({}), boots=self.boots)

    def after_power_loss(self, seed: int) -> SimulatedDisk:
        """A new disk with what was durable and, by chance, some of the rest."""
        boots = None if self.boots is None else self.boots + 1
        return SimulatedDisk(self.root.survivor(Random(seed)), seed, boots)

    def boot_id(self) -> str | None:
        """Another one after each power loss."""
        return None if self.boots is None else f"boot-{self.boots}"

    def flip_bit(self, path: str, position: int, bit: int = 0) -> None:
        """Rot: one bit of a file changes, durably."""
        inode = self.inode(path)
        inode.data[position] ^= 1 << bit
        inode.sync()

    def durable(self, path: str) -> bytes | None:
        """What every power cut keeps of a file; None: perhaps not even its name."""
        node: Inode | Directory | None = self.root
        for part in filter(None, path.split("/")):
            node = node.durable.get(part) if isinstance(node, Directory) else None
        return node.durable if isinstance(node, Inode) else None

    def files(self) -> Iterator[tuple[str, Inode]]:
        """(path, file) of everything, ascending."""
        yield from self._below("", self.root)

    def _below(self, path: str, directory: Directory) -> Iterator[tuple[str, Inode]]:
        for name, node in sorted(directory.entries.items()):
            if isinstance(node, Directory):
                yield from self._below(f"{path}/{name}", node)
            else:
                yield f"{path}/{name}", node

    # Inside.

    def _find(self, path: str) -> Inode | Directory:
        node: Inode | Directory = self.root
        for part in filter(None, path.split("/")):
            if not isinstance(node, Directory) or part not in node.entries:
                raise FileNotFoundError(errno.ENOENT, "no such file", path)
            node = node.entries[part]
        return node

    def inode(self, path: str) -> Inode:
        """What a name stands for. Raises FileNotFoundError; MachineError for a directory."""
        node = self._find(path)
        if isinstance(node, Directory):
            raise MachineError(path, "open", OSError(errno.EISDIR, "is a directory"))
        return node

    def _parent(self, path: str) -> tuple[Directory, str]:
        head, _, name = path.rstrip("/").rpartition("/")
        node = self._find(head)
        if not isinstance(node, Directory):
            raise MachineError(path, "open", OSError(errno.ENOTDIR, "not a directory"))
        return node, name

    def _step(self, operation: str, path: str) -> bool:
        """Count a changing call; True when the process crashes at it."""
        self.calls += 1
        self.trace.append(f"{operation} {path}")
        return self.calls == self._crash_at

    def _inject(self, operation: str, path: str) -> Injection | None:
        if any(path == broken or path.startswith(f"{broken}/") for broken in self.broken):
            return Injection(operation, path, errno.EIO)
        for injection in self.injections:
            if injection.operation == operation and injection.path in path:
                if injection.skip:
                    injection.skip -= 1
                    return None
                self.injections.remove(injection)
                return injection
        return None

    def _may_fail(self, operation: str, path: str) -> None:
        injection = self._inject(operation, path)
        if injection is not None:
            kind = ResourceExhausted if injection.code in EXHAUSTED else MachineError
            raise kind(path, operation, OSError(injection.code, os.strerror(injection.code)))
        if self._step(operation, path):
            raise SimulatedCrash(f"{operation} {path}")

    def used_bytes(self) -> int:
        """Bytes of all files."""
        return sum(len(inode.data) for _, inode in self.files())

    # The calls of Disk.

    def _open(self, path: str, flags: int) -> File:
        try:
            node = self._find(path)
        except FileNotFoundError:
            if not flags & os.O_CREAT:
                raise
            try:
                directory, name = self._parent(path)
            except FileNotFoundError as error:
                raise MachineError(path, "create", error) from error
            self._may_fail("create", path)
            node = Inode(mtime_ms=self.now_ms)
            directory.change(name, node)
        else:
            if flags & os.O_EXCL:
                raise FileExistsError(errno.EEXIST, "exists", path)
        if isinstance(node, Directory):
            raise MachineError(path, "open", OSError(errno.EISDIR, "is a directory"))
        if flags & os.O_TRUNC and node.data:
            self._may_fail("truncate", path)
            node.truncate(0)
        return SimulatedFile(node, path)

    def pread(self, file: File, position: int, size: int) -> bytes:
        """See :meth:`Disk.pread`."""
        assert isinstance(file, SimulatedFile)
        injection = self._inject("read", file.path)
        if injection is not None:
            raise MachineError(file.path, "read", OSError(injection.code, "injected"))
        return bytes(file.inode.data[position : position + size])

    def preadv_nowait(self, file: File, position: int, size: int) -> bytes | None:
        """See :meth:`Disk.preadv_nowait`."""
        return self.pread(file, position, size)

    def sendfile(self, socket_fd: int, file: File, position: int, size: int) -> int:
        """See :meth:`Disk.sendfile`."""
        return os.write(socket_fd, self.pread(file, position, size))

    def writev(self, file: File, buffers: Sequence[Bytes], position: int) -> int:
        """See :meth:`Disk.writev`."""
        assert isinstance(file, SimulatedFile)
        content = b"".join(map(bytes, buffers))
        injection = self._inject("write", file.path)
        if injection is None and self.capacity_bytes is not None:
            grown = max(0, position + len(content) - len(file.inode.data))
            if self.used_bytes() + grown > self.capacity_bytes:
                injection = Injection("write", file.path, errno.ENOSPC, partial=True)
        if injection is not None:
            if injection.partial:
                file.inode.write(position, content[: len(content) // 2])
            error = OSError(injection.code, os.strerror(injection.code))
            raise MachineError(file.path, "write", error)
        if self._step("write", file.path):
            file.inode.write(position, content[: self.random.randint(0, len(content))])
            raise SimulatedCrash(f"write {file.path}")
        file.inode.write(position, content)
        file.inode.mtime_ms = self.now_ms
        return len(content)

    def truncate(self, file: File, size: int) -> None:
        """See :meth:`Disk.truncate`."""
        assert isinstance(file, SimulatedFile)
        self._may_fail("truncate", file.path)
        file.inode.truncate(size)

    def fsync(self, file: File) -> None:
        """See :meth:`Disk.fsync`."""
        assert isinstance(file, SimulatedFile)
        self._may_fail("fsync", file.path)
        file.inode.sync()

    def fdatasync(self, file: File) -> None:
        """See :meth:`Disk.fdatasync`."""
        self.fsync(file)

    def fsync_dir(self, path: str) -> None:
        """See :meth:`Disk.fsync_dir`."""
        self._may_fail("fsync_dir", path)
        try:
            node = self._find(path)
        except FileNotFoundError as error:
            raise MachineError(path, "open", error) from error
        assert isinstance(node, Directory)
        node.sync()

    def drop_cache(self, file: File, position: int, size: int) -> None:
        """Advice: nothing happens."""

    def rename(self, source: str, target: str) -> None:
        """See :meth:`Disk.rename`."""
        node = self._find(source)
        self._may_fail("rename", source)
        old, old_name = self._parent(source)
        new, new_name = self._parent(target)
        if old is new:
            old.change(old_name, None, new_name)
        else:
            new.change(new_name, node)
            old.change(old_name, None)

    def unlink(self, path: str) -> None:
        """See :meth:`Disk.unlink`."""
        try:
            self._find(path)
        except FileNotFoundError:
            return
        self._may_fail("unlink", path)
        directory, name = self._parent(path)
        directory.change(name, None)

    def listdir(self, path: str) -> list[str]:
        """See :meth:`Disk.listdir`."""
        node = self._find(path)
        if not isinstance(node, Directory):
            raise MachineError(path, "listdir", OSError(errno.ENOTDIR, "not a directory"))
        return sorted(node.entries)

    def mkdir(self, path: str) -> None:
        """See :meth:`Disk.mkdir`."""
        node = self.root
        for part in filter(None, path.split("/")):
            child = node.entries.get(part)
            if child is None:
                self._may_fail("mkdir", path)
                child = Directory()
                node.change(part, child)
            if not isinstance(child, Directory):
                raise MachineError(path, "mkdir", OSError(errno.ENOTDIR, "not a directory"))
            node = child

    def rmdir(self, path: str) -> None:
        """See :meth:`Disk.rmdir`."""
        directory, name = self._parent(path)
        self._may_fail("rmdir", path)
        directory.change(name, None)

    def stat(self, path: str) -> FileStat:
        """See :meth:`Disk.stat`."""
        node = self._find(path)
        if isinstance(node, Directory):
            return FileStat(0, 0, True)
        return FileStat(len(node.data), node.mtime_ms, False)

    def is_link(self, path: str) -> bool:
        """See :meth:`Disk.is_link`."""
        return False

    def is_at(self, file: File, path: str, size_bytes: int = 0) -> bool:
        """See :meth:`Disk.is_at`."""
        assert isinstance(file, SimulatedFile)
        try:
            return self._find(path) is file.inode and len(file.inode.data) >= size_bytes
        except FileNotFoundError:
            return False

    def size(self, file: File) -> int:
        """See :meth:`Disk.size`."""
        assert isinstance(file, SimulatedFile)
        return len(file.inode.data)

    def set_mtime(self, path: str, mtime_ms: int) -> None:
        """See :meth:`Disk.set_mtime`."""
        self.inode(path).mtime_ms = mtime_ms

    def free_bytes(self, path: str) -> int:
        """See :meth:`Disk.free_bytes`."""
        if self.capacity_bytes is None:
            return 1 << 40
        return max(0, self.capacity_bytes - self.used_bytes())

    def lock(self, path: str) -> Lock:
        """See :meth:`Disk.lock`."""
        self._open(path, os.O_RDWR | os.O_CREAT)
        if path in self._locks:
            raise DirectoryInUse(f"{path} is held by this process already")
        self._locks.add(path)
        return _SimulatedLock(self, self._locks, path)
