"""The sending half of a connection: bytes and slices of files, in order, without blocking the loop.

:class:`ResponseWriter` writes with ``writev`` and ``sendfile`` straight to the socket; only when
the socket is full does the loop watch a duplicate of its descriptor (uvloop refuses to watch a
transport's own). Slices below :data:`SENDFILE_BYTES` are read and join the bytes around them. A
slice whose pages are not in memory is read in a thread first (rule 44): ``sendfile`` would make the
whole loop wait for the disk.

:class:`TransportWriter` gives a transport bytes instead, in pieces, as far as it takes them: over
TLS, where the kernel cannot send files, and where there is no descriptor.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from kept.node.kafka.response_slot import Segment
from kept.node.runtime.logging import log
from kept.storage.disk import FileSlice
from kept.storage.errors import DamagedData, MachineError

if TYPE_CHECKING:
    from kept.node.replicas.replica_table import ReplicaTable
    from kept.node.runtime.memory_budget import MemoryBudget
    from kept.node.runtime.runtime import Runtime

SENDFILE_BYTES: Final = 32 * 1024
"""Below this a copy is cheaper than the calls that ``sendfile`` needs: it took 4.5 us against 5.2
for 16 KiB, 7.3 against 5.9 for 32, 14 against 10 for 64."""
MAX_COPIED_BYTES: Final = 1024 * 1024
"""What one response may copy into memory; further small slices go by ``sendfile`` too."""
CHUNK_BYTES: Final = 512 * 1024
"""What one ``sendfile`` is asked for: the span whose first and last page are probed."""
TURN_BYTES: Final = 4 * 1024 * 1024
"""What one connection may send before others get their turn."""
MAX_BUFFERS: Final = 64
PIECE_BYTES: Final = 256 * 1024
"""What a transport is given at once: never a whole response, which may be 55 MiB."""
HELD_BYTES: Final = 128 * 1024
"""What a transport may hold that its peer does not take, before it gets no further piece; uvloop's
own for TLS, 512 KiB, are no faster. With the piece that is one too many: 384 KiB."""


class _Writer(ABC):
    """A queue of segments in front of something that sends them. ``on_progress`` is called when
    what had to wait was sent, ``on_failure`` when nothing can be sent any more. Bytes that wait are
    drawn on ``budget``.
    """

    __slots__ = (
        "_budget",
        "_closed",
        "_full",
        "_on_failure",
        "_on_progress",
        "_runtime",
        "_table",
        "_waiting",
        "queue",
        "unsent_bytes",
    )

    def __init__(
        self,
        *,
        runtime: Runtime,
        table: ReplicaTable,
        budget: MemoryBudget,
        on_progress: Callable[[], None],
        on_failure: Callable[[], None],
    ) -> None:
        self._runtime = runtime
        self._table = table
        self._budget = budget
        self._on_progress = on_progress
        self._on_failure = on_failure
        self.queue: deque[Any] = deque()
        """Pieces of responses that wait to be sent, in order."""
        self._closed = False
        self._full = False
        """The peer takes no more for now: the socket, or the transport's buffer, is full."""
        self._waiting = False
        """A thread reads, or another turn is scheduled."""
        self.unsent_bytes = 0
        """Bytes in memory that wait for the peer to take what came before: what the budget
        counts."""

    def close(self) -> None:
        """The socket is closing: drop what waits."""
        self._closed = True
        self.queue.clear()
        self._count_unsent()

    def stage(self, segments: list[Segment]) -> None:
        """Queue a response; :meth:`push` sends. Nothing any more, once it is closed."""
        if self._closed:
            return
        self.queue.extend(segments)
        if self._full or self._waiting:
            more = sum(len(s) for s in segments if type(s) is not FileSlice)
            self.unsent_bytes += more
            self._budget.overdraw(more)

    def push(self) -> None:
        """Send what is taken."""
        if self.queue and not self._full and not self._waiting:
            self._pump()

    @abstractmethod
    def _pump(self) -> None:
        """Send until the queue is empty, nothing is taken any more, or the turn is over."""

    def _fail(self, path: str = "", error: BaseException | None = None) -> None:
        """Nothing more can be sent; ``error``: since a slice of the file ``path`` was not read."""
        if error is not None:
            log.error("reading records failed", path=path, error=str(error))
        self._closed = True
        self.queue.clear()
        self._on_failure()

    def _read_now(self, piece: FileSlice) -> bytes | bytearray | None:
        """A small slice's bytes; None when reading them would wait for the disk. Raises
        MachineError, DamagedData where the file ends inside it.
        """
        file, position, size = piece
        disk = self._runtime.disk
        if self._table.reads_in_memory:
            whole = disk.pread(file, position, size)
            if len(whole) < size:
                raise ends_early(piece, size, len(whole))
            return whole
        data = disk.preadv_nowait(file, position, size)
        return data if data is not None and len(data) == size else None

    def _read_in_thread(self, size: int) -> None:
        slice_ = self.queue[0]
        self._waiting = True
        future = self._runtime.in_thread(
            self._runtime.disk.pread, slice_.file, slice_.position, size
        )

        def done(finished: Any) -> None:
            self._waiting = False
            if self._closed:
                finished.exception()
                return
            error = finished.exception()
            if error is None and (got := len(finished.result())) < size:
                error = ends_early(slice_, size, got)
            if error is not None:
                self._fail(slice_.file.path, error)
                return
            self.queue.popleft()
            if size < slice_.size_bytes:
                rest = FileSlice(slice_.file, slice_.position + size, slice_.size_bytes - size)
                self.queue.appendleft(rest)
            self.queue.appendleft(finished.result())
            self._next_turn()

        future.add_done_callback(done)

    def _turn_later(self) -> None:
        """Others get their turn before this goes on."""
        self._waiting = True
        self._runtime.loop.call_soon(self._next_turn)

    def _next_turn(self) -> None:
        """Another turn; what went out may let the connection be read again."""
        self._waiting = False
        if not self._closed:
            self.push()
            if not self._closed:
                self._on_progress()

    def _held_bytes(self) -> int:
        """What was given away, and is not sent yet."""
        return 0

    def _count_unsent(self) -> None:
        now = sum(len(s) for s in self.queue if type(s) is not FileSlice) + self._held_bytes()
        change = now - self.unsent_bytes
        self.unsent_bytes = now
        if change > 0:
            self._budget.overdraw(change)
        elif change:
            self._budget.release(-change)


class ResponseWriter(_Writer):
    """Writes to the socket ``fd`` itself."""

    __slots__ = ("_duplicate", "_fd")

    def __init__(self, *, fd: int, **shared: Any) -> None:
        super().__init__(**shared)
        self._fd = fd
        self._duplicate: socket.socket | None = None
        """Over the same connection, for what a transport's own descriptor cannot be used for."""

    def close(self) -> None:
        """Drop what waits, and the duplicate, else the peer sees no end."""
        super().close()
        if self._duplicate is not None:
            if self._full:
                self._runtime.loop.remove_writer(self._duplicate.fileno())
                self._full = False
            self._duplicate.close()
            self._duplicate = None

    def _pump(self) -> None:
        turn = TURN_BYTES
        queue = self.queue
        try:
            while queue:
                if turn <= 0:
                    self._turn_later()
                    break
                sent = self._send_file() if type(queue[0]) is FileSlice else self._send_bytes()
                if sent < 0:
                    break
                turn -= sent
        except BlockingIOError:
            self._watch()
        except OSError:
            self._fail()
            return
        except (MachineError, DamagedData) as error:
            self._fail(error.path, error)
            return
        if self._full and not queue:
            self._runtime.loop.remove_writer(self._socket().fileno())
            self._full = False
        if queue or self.unsent_bytes:
            self._count_unsent()

    def _send_bytes(self) -> int:
        """Send the run of bytes at the head, with the small slices among them."""
        queue = self.queue
        buffers: list[Any] = []
        size = 0
        for index in range(min(len(queue), MAX_BUFFERS)):
            segment = queue[index]
            if type(segment) is FileSlice:
                if segment.size_bytes >= SENDFILE_BYTES or size > MAX_COPIED_BYTES:
                    break
                segment = self._read_now(segment)
                if segment is None:
                    break
                queue[index] = segment
            buffers.append(segment)
            size += len(segment)
        if len(buffers) < len(queue):
            # A file's bytes follow: the head of a response does not wake its reader alone.
            sent = self._socket().sendmsg(buffers, (), socket.MSG_MORE)
        elif len(buffers) == 1:
            sent = os.write(self._fd, buffers[0])
        else:
            sent = os.writev(self._fd, buffers)
        if sent == size and len(buffers) == len(queue):
            queue.clear()
            return sent
        left = sent
        while left or (queue and not len(queue[0])):
            head = queue[0]
            if left < len(head):
                queue[0] = memoryview(head)[left:]
                break
            left -= len(head)
            queue.popleft()
        if sent < size:
            raise BlockingIOError
        return sent

    def _send_file(self) -> int:
        """Send from the slice at the head; -1 when a thread has to read first."""
        queue = self.queue
        file, position, size = queue[0]
        if size < SENDFILE_BYTES:
            data = self._read_now(queue[0])
            if data is None:
                self._read_in_thread(size)
                return -1
            queue[0] = data
            return 0
        disk = self._runtime.disk
        chunk = min(size, CHUNK_BYTES)
        if not disk.resident(file, position, chunk):
            self._read_in_thread(chunk)
            return -1
        sent = disk.sendfile(self._fd, file, position, chunk)
        if sent == size:
            queue.popleft()
        elif sent == 0:
            raise ends_early(queue[0], chunk, 0)
        else:
            queue[0] = FileSlice(file, position + sent, size - sent)
        return sent

    def _socket(self) -> socket.socket:
        if self._duplicate is None:
            # Its family does not matter to what is done with it.
            duplicate = os.dup(self._fd)
            self._duplicate = socket.socket(socket.AF_INET, socket.SOCK_STREAM, fileno=duplicate)
        return self._duplicate

    def _watch(self) -> None:
        if not self._full:
            self._runtime.loop.add_writer(self._socket().fileno(), self._writable)
            self._full = True

    def _writable(self) -> None:
        if not self._closed and not self._waiting:
            self._pump()
            if not self._closed:
                self._on_progress()


class TransportWriter(_Writer):
    """Gives ``transport`` bytes in pieces of :data:`PIECE_BYTES`, until its buffer is full: whoever
    has the transport's protocol calls :meth:`pause` and :meth:`resume` then. What the transport
    holds at that moment counts as unsent.
    """

    __slots__ = ("_transport",)

    def __init__(self, *, transport: Any, **shared: Any) -> None:
        super().__init__(**shared)
        self._transport = transport
        transport.set_write_buffer_limits(high=HELD_BYTES)

    def pause(self) -> None:
        """The transport's buffer is full."""
        self._full = True
        self._count_unsent()

    def resume(self) -> None:
        """It is not any more."""
        self._full = False
        self._count_unsent()
        if not self._closed and not self._waiting:
            self._pump()
            if not self._closed:
                self._on_progress()

    def close(self) -> None:
        """The transport is closing, and gives back what it holds."""
        self._full = False
        super().close()

    def _held_bytes(self) -> int:
        return int(self._transport.get_write_buffer_size()) if self._full else 0

    def _pump(self) -> None:
        turn = TURN_BYTES
        try:
            while self.queue and not self._full:
                if turn <= 0:
                    self._turn_later()
                    break
                piece = self._next_piece()
                if not piece:
                    break
                turn -= len(piece)
                self._transport.write(piece)
        except (MachineError, DamagedData) as error:
            self._fail(error.path, error)
            return
        if self.queue or self.unsent_bytes:
            self._count_unsent()

    def _next_piece(self) -> Any:
        """The next bytes to give; none when a thread has to read them first."""
        queue = self.queue
        pieces: list[Any] = []
        room = PIECE_BYTES
        while queue and room > 0:
            head = queue[0]
            if type(head) is FileSlice:
                size = min(head.size_bytes, room)
                data: Any = self._read_now(FileSlice(head.file, head.position, size))
                if data is None:
                    if not pieces:
                        self._read_in_thread(size)
                    break
                rest: Any = FileSlice(head.file, head.position + size, head.size_bytes - size)
                left = rest.size_bytes
            else:
                data, rest = (head, b"") if len(head) <= room else _cut(head, room)
                left = len(rest)
            pieces.append(data)
            room -= len(data)
            if left:
                queue[0] = rest
            else:
                queue.popleft()
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def ends_early(piece: FileSlice, wanted: int, got: int) -> DamagedData:
    """The file has ``got`` bytes of the ``wanted`` ones of a slice, whose size was announced."""
    why = f"{wanted} bytes are to be sent from there, and the file has {got}"
    return DamagedData(piece.file.path, piece.position, -1, why)


def _cut(data: Any, size: int) -> tuple[memoryview, memoryview]:
    view = memoryview(data)
    return view[:size], view[size:]
