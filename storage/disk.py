"""The only user of the operating system's file calls.

The simulator (``tests.support.simulated_disk``) and the fault tests replace this one class. Every
``OSError`` becomes :class:`MachineError` with the path and the call; ``FileNotFoundError`` and, for
exclusive creation, ``FileExistsError`` stay what they are, because callers decide by them. A file
that cannot be created because its directory is gone is a MachineError, too: nobody expects that.

Without a free descriptor (EMFILE, ENFILE) an opening closes files that can be opened again; when
there are none it raises :class:`ResourceExhausted`, which says nothing bad of the disk.

Durability: data is durable after :meth:`Disk.fsync` of the file, a created, renamed or removed name
only after :meth:`Disk.fsync_dir` of its directory. A failed fsync must never be tried again: the
kernel has marked the pages clean.

Fail points are named places in the code (``append.write``, ``swap.renamed``...). Tests arm them
with ``disk.fail_points[name] = action``; a real process arms them with the environment variable
``KEPT_FAIL_POINT=name[=kill|eio|enospc|emfile][:N]``, several separated by commas (N: at the N-th
time), or ``name=slow:MS@FILE`` (a slow disk while FILE exists).

Long because it is the one seam to the operating system: what replaces it replaces all of it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import signal
import sys
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple, Protocol

from kept.storage.errors import DirectoryInUse, MachineError, ResourceExhausted, vanished

Bytes = bytes | bytearray | memoryview
"""A contiguous buffer of bytes."""

IOV_LIMIT: Final = 1024
"""Buffers in one call of writev (IOV_MAX on Linux)."""

ENV_FAIL_POINT: Final = "KEPT_FAIL_POINT"

HEADROOM: Final = 16
"""The last descriptors of a process: no file stays open on one. What opens a file for a moment (the
threads that flush, write checkpoints and the metadata log, a roll's indexes) finds them free."""

MAX_REOPENABLE: Final = 256
"""Closed segments whose files stay open, of all logs of a process: those that were read last."""

MEMORY_WAITS_S: Final = (0.001, 0.004, 0.016)
"""Before a write that found no memory (ENOMEM) is tried again; the loop stands still meanwhile."""

FILE_MODE: Final = 0o600
DIRECTORY_MODE: Final = 0o700
"""Mode of new files: records are for the node's user alone. Existing ones keep theirs."""

_OUT_OF_DESCRIPTORS: Final = frozenset({errno.EMFILE, errno.ENFILE})
_NOT_OURS: Final = frozenset({errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL})
"""What opening or syncing a directory gives that this process cannot have made names in."""
EXHAUSTED: Final = _OUT_OF_DESCRIPTORS | {errno.ENOMEM}

CAPABILITIES: Final[dict[str, bool]] = {
    "sendfile": hasattr(os, "sendfile"),
    "pwritev": hasattr(os, "pwritev"),
    "preadv_nowait": hasattr(os, "preadv") and hasattr(os, "RWF_NOWAIT"),
    "fadvise": hasattr(os, "posix_fadvise"),
    "fdatasync": hasattr(os, "fdatasync"),
}
"""Calls that only some systems have; the code asks here and nowhere else."""

BOOT_ID: Final = "/proc/sys/kernel/random/boot_id"
"""Linux draws it anew at every boot; other systems have no such file."""

_LOCKED: dict[tuple[int, int], str] = {}
"""Files this process holds a lock on: POSIX locks do not exclude their own process."""


class File:
    """An open file. Its descriptor closes when the last reference drops, so that a slice handed to
    a reader stays readable after the file was deleted.
    """

    __slots__ = ("__weakref__", "fd", "path")

    def __init__(self, fd: int, path: str) -> None:
        self.fd = fd
        self.path = path

    def __del__(self) -> None:
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)

    def __repr__(self) -> str:
        return f"File({self.path!r})"


class FileSlice(NamedTuple):
    """Bytes of a file: what ``sendfile`` sends. It owns a reference to the open file."""

    file: File
    position: int
    size_bytes: int


class FileStat(NamedTuple):
    """What is known of a name in a directory."""

    size_bytes: int
    mtime_ms: int
    is_directory: bool
    mode: int = 0
    """Permission bits."""


class Lock:
    """A lock on a file, kept until :meth:`release` or the end of the process."""

    __slots__ = ("_fd", "_key", "path")

    def __init__(self, fd: int, key: tuple[int, int], path: str) -> None:
        self._fd = fd
        self._key = key
        self.path = path

    def release(self) -> None:
        """Give the lock up; calling it again does nothing."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            _LOCKED.pop(self._key, None)
            os.close(fd)

    def verify(self) -> None:
        """Raise MachineError unless the locked file is still what ``path`` names.

        It is not once its directory was removed, moved or replaced, or another file system was
        mounted over it: what is written to open files there is lost, or nobody finds it again.
        """
        try:
            status = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError) as error:
            raise vanished(self.path) from error
        except OSError as error:
            raise MachineError(self.path, "stat", error) from error
        if self._fd >= 0 and (status.st_dev, status.st_ino) != self._key:
            raise vanished(self.path)


class Reopenable(Protocol):
    """Whoever has a file open that it can open again whenever it needs it."""

    def close_file(self) -> None:
        """Give the descriptor up; any thread may ask for it."""


def _failing(path: str, operation: str, error: OSError) -> OSError | MachineError:
    if isinstance(error, FileNotFoundError):  # another one: an error that is its own cause stays
        name, other = error.filename, error.filename2
        return FileNotFoundError(error.errno, error.strerror, name, None, other)
    if error.errno in EXHAUSTED:
        return ResourceExhausted(path, operation, error)
    return MachineError(path, operation, error)


class Disk:
    """The operating system's files. Its state: fail points, and whose files may be closed.

    Every call raises MachineError; of a name that is absent FileNotFoundError, unless it says
    otherwise. Positions and sizes are in bytes.
    """

    def __init__(self, environ: dict[str, str] | None = None) -> None:
        self.keep_below = sys.maxsize
        """Descriptors from this number on are for moments only; see :data:`HEADROOM`."""
        self.max_reopenable = MAX_REOPENABLE
        self._reopenable: deque[Reopenable] = deque()
        self.fail_points: dict[str, Callable[[], None]] = {}
        armed = (os.environ if environ is None else environ).get(ENV_FAIL_POINT, "")
        for spec in filter(None, armed.split(",")):
            name, action = parse_fail_point(spec)
            self.fail_points[name] = action

    def reach(self, name: str) -> None:
        """The code is at the fail point ``name``: run what is armed there."""
        if self.fail_points:
            action = self.fail_points.get(name)
            if action is not None:
                try:
                    action()
                except OSError as error:
                    raise _failing(name, "fail point", error) from error

    # Opening.

    def can_close(self, holder: Reopenable) -> None:
        """A file that ``holder`` does not need now: the last ``max_reopenable`` stay open."""
        self._reopenable.append(holder)
        if len(self._reopenable) > self.max_reopenable:
            self._close_oldest()

    def _close_oldest(self) -> bool:
        try:
            holder = self._reopenable.popleft()
        except IndexError:  # another thread was faster
            return False
        holder.close_file()
        return True

    def _open(self, path: str, flags: int) -> File:
        while True:
            try:
                return File(os.open(path, flags | os.O_CLOEXEC, FILE_MODE), path)
            except FileExistsError:
                raise
            except OSError as error:
                if error.errno in _OUT_OF_DESCRIPTORS and self._close_oldest():
                    continue
                if flags & os.O_CREAT and isinstance(error, FileNotFoundError):
                    raise MachineError(path, "create", error) from error
                raise _failing(path, "open", error) from error

    def _open_to_keep(self, path: str, flags: int) -> File:
        """Open what stays open: not on one of the last descriptors. The number of a new one is the
        lowest that was free.
        """
        while (file := self._open(path, flags)).fd >= self.keep_below:
            if not self._close_oldest():
                del file  # the error remembers this frame, and somebody may keep the error
                error = OSError(errno.EMFILE, os.strerror(errno.EMFILE))
                raise ResourceExhausted(path, "open", error)
        return file

    def open_append(self, path: str) -> File:
        """Open for reading and writing, created when absent."""
        return self._open_to_keep(path, os.O_RDWR | os.O_CREAT)

    def open_existing(self, path: str) -> File:
        """Open for reading and writing what must be there: without it the disk has failed."""
        try:
            return self._open_to_keep(path, os.O_RDWR)
        except FileNotFoundError as error:
            raise vanished(path) from error

    def open_new(self, path: str) -> File:
        """Create for reading and writing; ``FileExistsError`` when the name is taken."""
        return self._open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL)

    def open_read(self, path: str) -> File:
        """Open for reading."""
        return self._open(path, os.O_RDONLY)

    # Reading.

    def pread(self, file: File, position: int, size: int) -> bytes:
        """Read up to ``size`` bytes; fewer only at the end of the file."""
        try:
            data = os.pread(file.fd, size, position)
            if len(data) == size or not data:
                return data
            parts = [data]
            read = len(data)
            while read < size:
                data = os.pread(file.fd, size - read, position + read)
                if not data:
                    break
                parts.append(data)
                read += len(data)
            return b"".join(parts)
        except OSError as error:
            raise MachineError(file.path, "read", error) from error

    def preadv_nowait(self, file: File, position: int, size: int) -> bytes | bytearray | None:
        """Read what the page cache holds; None when the read would block or nobody can tell."""
        if not CAPABILITIES["preadv_nowait"]:
            return None
        buffer = bytearray(size)
        try:
            read = os.preadv(file.fd, [buffer], position, os.RWF_NOWAIT)
        except OSError as error:
            if error.errno in (errno.EAGAIN, errno.EOPNOTSUPP):
                return None
            raise MachineError(file.path, "read", error) from error
        except RuntimeError:  # Python's word for headers with the flag and no preadv2 at run time
            return None
        if read < size:
            del buffer[read:]
        return buffer

    def resident(self, file: File, position: int, size: int) -> bool:
        """Probe whether ``sendfile`` of a range would block: its first and last page are cached."""
        if size <= 0:
            return True
        first = self.preadv_nowait(file, position, 1)
        return first is not None and self.preadv_nowait(file, position + size - 1, 1) is not None

    def read(self, path: str) -> bytes:
        """The whole content of a small file."""
        file = self.open_read(path)
        try:
            return self.pread(file, 0, self.size(file))
        except OverflowError:  # a directory of ext4 ends at 2^63 - 1
            error = IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            raise MachineError(path, "read", error) from None

    def sendfile(self, socket_fd: int, file: File, position: int, size: int) -> int:
        """Send bytes of a file to a socket; returns how many it took.

        ``BlockingIOError`` and ``ConnectionError`` are the socket's and pass through.
        """
        try:
            return os.sendfile(socket_fd, file.fd, position, size)
        except (BlockingIOError, ConnectionError):
            raise
        except OSError as error:
            raise MachineError(file.path, "sendfile", error) from error

    # Writing.

    def writev(self, file: File, buffers: Sequence[Bytes], position: int) -> int:
        """Write all buffers one after another at ``position``; returns the bytes written.

        On an error part of them may be in the file: the caller cuts it back. A want of memory is
        waited out for :data:`MEMORY_WAITS_S`; after that it is a failure, not ResourceExhausted:
        several callers may have staged what is dropped with it, and each must learn of it.
        """
        waits = iter(MEMORY_WAITS_S)
        while True:
            try:
                return self._writev(file, buffers, position)
            except OSError as error:
                wait_s = next(waits, None) if error.errno == errno.ENOMEM else None
                if wait_s is None:
                    raise MachineError(file.path, "write", error) from error
            time.sleep(wait_s)

    def _writev(self, file: File, buffers: Sequence[Bytes], position: int) -> int:
        if len(buffers) == 1:
            size = len(buffers[0])
            written = os.pwrite(file.fd, buffers[0], position)
        else:
            size = sum(map(len, buffers))
            written = 0
            if len(buffers) <= IOV_LIMIT and CAPABILITIES["pwritev"]:
                written = os.pwritev(file.fd, buffers, position)
        if written != size:
            self._write_rest(file, buffers, position, written)
        return size

    def _write_rest(
        self, file: File, buffers: Sequence[Bytes], position: int, written: int
    ) -> None:
        for buffer in buffers:
            size = len(buffer)
            if written >= size:
                written -= size
            else:
                view = memoryview(buffer)[written:]
                position_in_file = position + written
                while view:
                    count = os.pwrite(file.fd, view, position_in_file)
                    position_in_file += count
                    view = view[count:]
                written = 0
            position += size

    def write_file(self, path: str, data: Bytes) -> None:
        """Create or overwrite a file; neither atomic nor durable."""
        file = self._open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        if len(data):
            self.writev(file, [data], 0)

    def write_atomic(self, path: str, data: Bytes, *, sync_name: bool = True) -> None:
        """Replace a file durably; without ``sync_name`` the caller syncs the directory."""
        temporary = path + ".tmp"
        file = self._open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        if len(data):
            self.writev(file, [data], 0)
        self.fsync(file)
        self.reach("atomic.written")
        try:
            self.rename(temporary, path)
        except FileNotFoundError as error:
            raise MachineError(path, "rename", error) from error
        if sync_name:
            self.fsync_dir(parent(path))

    def truncate(self, file: File, size: int) -> None:
        """Cut (or extend) a file."""
        try:
            os.ftruncate(file.fd, size)
        except OSError as error:
            raise MachineError(file.path, "truncate", error) from error

    # Durability.

    def fsync(self, file: File) -> None:
        """Make content and metadata durable."""
        try:
            os.fsync(file.fd)
        except OSError as error:
            raise MachineError(file.path, "fsync", error) from error

    def fdatasync(self, file: File) -> None:
        """Make content and size durable."""
        try:
            (os.fdatasync if CAPABILITIES["fdatasync"] else os.fsync)(file.fd)
        except OSError as error:
            raise MachineError(file.path, "fdatasync", error) from error

    def fsync_dir(self, path: str) -> None:
        """Make the names in a directory durable; one that is gone is a MachineError."""
        try:
            directory = self._open(path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise MachineError(path, "open", error) from error
        self.fsync(directory)

    def drop_cache(self, file: File, position: int, size: int) -> None:
        """Tell the kernel that these pages are not needed again (advice only)."""
        if CAPABILITIES["fadvise"]:
            try:
                os.posix_fadvise(file.fd, position, size, os.POSIX_FADV_DONTNEED)
            except OSError as error:
                raise MachineError(file.path, "fadvise", error) from error

    # Names.

    def rename(self, source: str, target: str) -> None:
        """Rename, replacing the target."""
        try:
            os.rename(source, target)
        except OSError as error:
            raise _failing(source, "rename", error) from error

    def unlink(self, path: str) -> None:
        """Remove a file; one that is not there is no error."""
        try:
            os.unlink(path)
        except FileNotFoundError:
            return
        except OSError as error:
            raise MachineError(path, "unlink", error) from error

    def listdir(self, path: str) -> list[str]:
        """The names in a directory, sorted."""
        while True:
            try:
                return sorted(os.listdir(path))
            except OSError as error:
                if error.errno in _OUT_OF_DESCRIPTORS and self._close_oldest():
                    continue
                raise _failing(path, "listdir", error) from error

    def mkdir(self, path: str) -> None:
        """Create a directory with its parents; one that exists is no error.

        It is private (:data:`DIRECTORY_MODE`), its parents are as the process' umask has it.
        """
        try:
            os.makedirs(path, DIRECTORY_MODE, exist_ok=True)
        except OSError as error:
            raise MachineError(path, "mkdir", error) from error

    def ensure_directory(self, path: str) -> None:
        """Create a directory with its parents, durably; one that exists is no error."""
        created = []
        while not self.exists(path):
            created.append(path)
            path = parent(path)
        if created:
            self.mkdir(created[0])
            for name in reversed(created):
                self.fsync_dir(parent(name))

    def ensure_data_directory(self, path: str) -> None:
        """Like :meth:`ensure_directory`, once at the start of a process that keeps its data there.

        It also makes durable what a process before made and was killed before syncing: the names
        in the directory, and those of all its parents. A parent that this user cannot read, or
        that takes no fsync (a read-only or special file system), is left out: it is not ours, or
        we would have synced it when we made what is in it.
        """
        self.ensure_directory(path)
        self.fsync_dir(path)
        while path not in ("/", "."):
            path = parent(path)
            try:
                self.fsync_dir(path)
            except MachineError as error:
                if error.cause.errno not in _NOT_OURS:
                    raise

    def remove_tree(self, path: str) -> None:
        """Remove a directory with everything in it; one that is not there is no error."""
        try:
            names = self.listdir(path)
        except FileNotFoundError:
            return
        for name in names:
            inner = f"{path}/{name}"
            if self.stat(inner).is_directory:
                self.remove_tree(inner)
            else:
                self.unlink(inner)
        self.rmdir(path)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        try:
            os.rmdir(path)
        except OSError as error:
            raise MachineError(path, "rmdir", error) from error

    def stat(self, path: str) -> FileStat:
        """Size, modification time and kind of a name; ``FileNotFoundError`` when absent."""
        try:
            status = os.stat(path)
        except OSError as error:
            raise _failing(path, "stat", error) from error
        is_directory = (status.st_mode & 0o170000) == 0o040000
        mode = status.st_mode & 0o777
        return FileStat(status.st_size, status.st_mtime_ns // 1_000_000, is_directory, mode)

    def is_link(self, path: str) -> bool:
        """Whether the name is a symbolic link, wherever that leads; not where it is absent."""
        return os.path.islink(path)

    def exists(self, path: str) -> bool:
        """Whether the name is there."""
        try:
            self.stat(path)
        except FileNotFoundError:
            return False
        return True

    def is_at(self, file: File, path: str, size_bytes: int = 0) -> bool:
        """Whether an open file is still what ``path`` names, with every directory above it, and
        holds ``size_bytes`` at least.
        """
        try:
            there, opened = os.stat(path), os.fstat(file.fd)
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError as error:
            raise MachineError(path, "stat", error) from error
        return os.path.samestat(there, opened) and opened.st_size >= size_bytes

    def size(self, file: File) -> int:
        """Size of an open file, by a third of what ``fstat`` costs: each append looks at it. The
        file's own position moves; nobody reads or writes by that.
        """
        try:
            return os.lseek(file.fd, 0, os.SEEK_END)
        except OSError as error:
            raise MachineError(file.path, "lseek", error) from error

    def set_mtime(self, path: str, mtime_ms: int) -> None:
        """Set a file's modification time (the cleaner keeps that of the last source)."""
        try:
            os.utime(path, ns=(mtime_ms * 1_000_000, mtime_ms * 1_000_000))
        except OSError as error:
            raise _failing(path, "utime", error) from error

    def free_bytes(self, path: str) -> int:
        """Bytes that a process without privileges may still write there."""
        try:
            statistics = os.statvfs(path)
        except OSError as error:
            raise _failing(path, "statvfs", error) from error
        return statistics.f_bavail * statistics.f_frsize

    def boot_id(self) -> str | None:
        """Names the run of the kernel that this process is in: as long as it is the same, the page
        cache was not lost. None where the system has no such name.
        """
        try:
            with open(BOOT_ID, encoding="ascii") as source:
                return str(uuid.UUID(source.read().strip()))
        except (OSError, ValueError):
            return None

    def lock(self, path: str) -> Lock:
        """Take the exclusive POSIX lock of a file, as Apache Kafka does (``flock`` would not
        exclude it).

        Raises DirectoryInUse when another process, or this one, holds it. The file is opened once
        and stays open: closing any descriptor of it would lose the lock.
        """
        try:
            status = os.stat(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise MachineError(path, "lock", error) from error
        else:
            if (status.st_dev, status.st_ino) in _LOCKED:
                raise DirectoryInUse(f"{path} is held by this process already")
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, FILE_MODE)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(fd)
                raise
        except (BlockingIOError, PermissionError) as error:
            if error.errno == errno.EACCES and not os.access(path, os.W_OK):
                raise MachineError(path, "lock", error) from error
            raise DirectoryInUse(
                f"{path} is locked by another process: is a node (or Apache Kafka) running on it?"
            ) from error
        except OSError as error:
            raise MachineError(path, "lock", error) from error
        status = os.fstat(fd)
        key = (status.st_dev, status.st_ino)
        _LOCKED[key] = path
        return Lock(fd, key, path)


def parent(path: str) -> str:
    """The directory that a name is in."""
    head, separator, _ = path.rstrip("/").rpartition("/")
    return head or separator or "."


def parse_fail_point(spec: str) -> tuple[str, Callable[[], None]]:
    """``name[=kill|eio|enospc|emfile][:N]`` as (name, action); the action acts at its N-th call.

    ``name=slow:MS@FILE``: each call takes MS milliseconds longer while FILE exists.
    """
    name, _, rest = spec.partition("=")
    if rest.startswith("slow:"):
        return name, _slow(*rest.removeprefix("slow:").split("@", 1))
    count_text = rest
    if not rest:
        name, _, count_text = name.partition(":")
        kind = "kill"
    else:
        kind, _, count_text = rest.partition(":")
    remaining = int(count_text) if count_text else 1
    errors: dict[str, Any] = {"eio": errno.EIO, "enospc": errno.ENOSPC, "emfile": errno.EMFILE}
    if kind != "kill" and kind not in errors:
        raise ValueError(
            f"{ENV_FAIL_POINT}: {spec!r}: expected kill, eio, enospc, emfile or slow, not {kind!r}"
        )

    def act() -> None:
        nonlocal remaining
        remaining -= 1
        if remaining > 0:
            return
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        raise OSError(errors[kind], os.strerror(errors[kind]))

    return name, act


def _slow(milliseconds: str, while_file: str) -> Callable[[], None]:
    pause_s = int(milliseconds) / 1000

    def act() -> None:
        if os.path.exists(while_file):
            time.sleep(pause_s)

    return act
