"""The sending half of a connection, alone: a socket pair, files, and a disk with cold pages."""

from __future__ import annotations

import asyncio
import os
import random
import socket

import pytest

from kept.node.kafka.response_writer import (
    CHUNK_BYTES,
    HELD_BYTES,
    MAX_COPIED_BYTES,
    PIECE_BYTES,
    SENDFILE_BYTES,
    TURN_BYTES,
    ResponseWriter,
    TransportWriter,
)
from kept.node.replicas.replica_table import ReplicaTable
from kept.node.runtime.memory_budget import MemoryBudget
from kept.node.runtime.runtime import Runtime
from kept.storage import disk as disk_module
from kept.storage.disk import Disk, FileSlice
from tests.tools.needs import cannot_run


class ColdDisk(Disk):
    """Says of the given pages that a read would block; counts who reads, and where."""

    def __init__(self, error=None):
        super().__init__({})
        self.cold = True
        self.reads = []
        self.sendfiles = 0
        self.error = error

    def preadv_nowait(self, file, position, size):
        return None if self.cold else super().preadv_nowait(file, position, size)

    def pread(self, file, position, size):
        if self.error is not None:
            raise self.error
        import threading

        self.reads.append((position, size, threading.current_thread() is threading.main_thread()))
        return super().pread(file, position, size)

    def sendfile(self, socket_fd, file, position, size):
        self.sendfiles += 1
        return super().sendfile(socket_fd, file, position, size)


class Bench:
    """A sender over one end of a socket pair; the test reads the other."""

    def __init__(self, disk, *, in_memory=False):
        self.loop = asyncio.get_running_loop()
        self.ours, self.theirs = socket.socketpair()
        self.ours.setblocking(False)
        self.theirs.setblocking(False)
        self.progress = self.failures = 0
        self.budget = MemoryBudget(1 << 30)
        self.runtime = Runtime(disk)
        self.table = ReplicaTable()
        self.table.reads_in_memory = in_memory
        self.sender = self.writer(ResponseWriter)

    def writer(self, cls):
        return cls(
            runtime=self.runtime,
            table=self.table,
            budget=self.budget,
            fd=self.ours.fileno(),
            on_progress=self.on_progress,
            on_failure=self.on_failure,
        )

    def on_progress(self):
        self.progress += 1

    def on_failure(self):
        self.failures += 1
        self.sender.close()

    async def receive(self, size):
        found = bytearray()
        while len(found) < size:
            more = await asyncio.wait_for(self.loop.sock_recv(self.theirs, 1 << 20), 60)
            if not more:
                break
            found += more
        return bytes(found)

    def close(self):
        self.sender.close()
        self.ours.close()
        self.theirs.close()
        self.runtime.close()


@pytest.fixture
def content(tmp_path):
    data = random.Random(3).randbytes(3_000_000)
    (tmp_path / "file").write_bytes(data)
    return tmp_path / "file", data


def on_bench(disk, job, **options):
    async def main():
        bench = Bench(disk, **options)
        try:
            return await job(bench)
        finally:
            bench.close()

    return asyncio.run(main())


def need_page_cache(file):
    """Not on overlayfs, as in a container: nobody tells there what is in memory."""
    if Disk({}).preadv_nowait(file, 0, 1) is None:
        cannot_run("page_cache", "this file system does not tell what is in memory")


def test_bytes_and_slices_leave_in_order(content):
    path, data = content
    disk = Disk({})
    file = disk.open_read(str(path))

    async def job(bench):
        pieces = [b"head", FileSlice(file, 5, 100), b"", FileSlice(file, 0, 2_500_000), b"tail"]
        bench.sender.stage(pieces)
        bench.sender.push()
        expected = b"head" + data[5:105] + data[:2_500_000] + b"tail"
        assert await bench.receive(len(expected)) == expected
        await asyncio.sleep(0)
        assert not bench.sender.queue and bench.sender.unsent_bytes == 0
        assert bench.budget.used_bytes == 0
        assert bench.progress > 0, "the socket was full in between"

    on_bench(disk, job)


@pytest.mark.parametrize("size", [SENDFILE_BYTES - 1, SENDFILE_BYTES, 2 * CHUNK_BYTES + 7])
def test_cold_pages_are_read_in_a_thread(content, size):
    """Rule 44: nobody reads them on the loop, and sendfile is not asked for them."""
    path, data = content
    disk = ColdDisk()
    file = disk.open_read(str(path))

    async def job(bench):
        bench.sender.stage([b"<", FileSlice(file, 11, size), b">"])
        bench.sender.push()
        assert await bench.receive(size + 2) == b"<" + data[11 : 11 + size] + b">"

    on_bench(disk, job)
    assert disk.reads and not any(on_loop for _, _, on_loop in disk.reads)
    assert max(count for _, count, _ in disk.reads) <= CHUNK_BYTES
    assert disk.sendfiles == 0


def test_warm_pages_go_by_sendfile(content):
    path, data = content
    disk = ColdDisk()
    disk.cold = False
    file = disk.open_read(str(path))
    need_page_cache(file)

    async def job(bench):
        bench.sender.stage([FileSlice(file, 0, 1_000_000)])
        bench.sender.push()
        assert await bench.receive(1_000_000) == data[:1_000_000]

    on_bench(disk, job)
    assert disk.sendfiles >= 2 and not disk.reads


def test_pages_that_become_warm_go_on_by_sendfile(content):
    path, data = content
    disk = ColdDisk()
    file = disk.open_read(str(path))
    need_page_cache(file)

    async def job(bench):
        bench.sender.stage([FileSlice(file, 0, 2_000_000)])
        bench.sender.push()
        disk.cold = False
        assert await bench.receive(2_000_000) == data[:2_000_000]

    on_bench(disk, job)
    assert len(disk.reads) == 1


def test_small_slices_are_read_at_once_where_nobody_can_tell(content):
    """tmpfs: preadv always says EOPNOTSUPP, and its pages are in memory anyway."""
    path, data = content
    disk = ColdDisk()
    file = disk.open_read(str(path))

    async def job(bench):
        bench.sender.stage([FileSlice(file, 0, 500)])
        bench.sender.push()
        assert await bench.receive(500) == data[:500]

    on_bench(disk, job, in_memory=True)
    assert disk.reads == [(0, 500, True)]


@pytest.mark.parametrize("code", ["EAGAIN", "EOPNOTSUPP"])
def test_what_the_system_says_of_cold_pages(content, monkeypatch, code):
    import errno

    path, _ = content
    disk = Disk({})
    file = disk.open_read(str(path))
    flags = []

    def preadv(fd, buffers, position, flag):
        flags.append(flag)
        raise OSError(getattr(errno, code), code)

    monkeypatch.setattr(os, "preadv", preadv)
    assert disk.preadv_nowait(file, 0, 10) is None
    assert not disk.resident(file, 0, 100_000)
    assert flags == [os.RWF_NOWAIT] * 2
    monkeypatch.setitem(disk_module.CAPABILITIES, "preadv_nowait", False)
    assert disk.preadv_nowait(file, 0, 10) is None and len(flags) == 2


@pytest.mark.parametrize("in_memory", [False, True])
@pytest.mark.parametrize("size", [SENDFILE_BYTES - 1, 200_000])
@pytest.mark.parametrize("failing", ["error", "short"])
def test_a_read_that_fails_ends_the_connection(content, capsys, failing, size, in_memory):
    """Of a response that is cut off nothing more is sent: the peer would read the next one as its
    end.
    """
    from kept.storage.errors import MachineError

    path, _ = content
    error = MachineError(str(path), "read", OSError(5, "EIO")) if failing == "error" else None
    disk = ColdDisk(error)
    file = disk.open_read(str(path))

    async def job(bench):
        position = 0 if failing == "error" else 2_999_000
        bench.sender.stage([FileSlice(file, position, size), b"after"])
        bench.sender.push()
        async with asyncio.timeout(60):
            while not bench.failures:
                await asyncio.sleep(0.001)
        assert not bench.sender.queue and bench.budget.used_bytes == 0
        with pytest.raises(BlockingIOError):
            bench.theirs.recv(1)

    on_bench(disk, job, in_memory=in_memory)
    said = capsys.readouterr().err
    assert 'event="reading records failed"' in said and f"path={path}" in said
    why = f"{size} bytes are to be sent from there, and the file has 1000"
    assert (why if failing == "short" else "read failed") in said


def test_what_a_full_socket_holds_back_is_counted_and_given_back():
    async def job(bench):
        bench.sender.stage([bytes(8_000_000)])
        bench.sender.push()
        first = bench.sender.unsent_bytes
        assert 0 < first < 8_000_000 and bench.budget.used_bytes == first
        for _ in range(5):  # staged behind it: counted though nothing can be sent
            bench.sender.stage([b"x" * 1000, b"y"])
            bench.sender.push()
        assert bench.sender.unsent_bytes == bench.budget.used_bytes == first + 5005
        assert (await bench.receive(8_005_005))[-1002:] == b"y" + b"x" * 1000 + b"y"
        while bench.sender.queue:
            await asyncio.sleep(0.001)
        assert bench.sender.unsent_bytes == bench.budget.used_bytes == 0
        assert bench.progress

    on_bench(Disk({}), job)


def test_a_connection_that_goes_gives_everything_back_and_the_peer_sees_the_end():
    async def job(bench):
        bench.sender.stage([bytes(8_000_000)])
        bench.sender.push()
        bench.sender.close()
        assert bench.budget.used_bytes == 0
        bench.ours.close()
        data = await bench.receive(1 << 40)
        assert 0 < len(data) < 8_000_000

    on_bench(Disk({}), job)


def test_a_peer_that_is_gone_is_a_failure():
    async def job(bench):
        bench.theirs.close()
        bench.sender.stage([bytes(100)])
        bench.sender.push()
        assert bench.failures == 1 and not bench.sender.queue

    on_bench(Disk({}), job)


def test_others_get_their_turn(content):
    """A fast reader of much does not keep the loop."""
    path, data = content
    disk = Disk({})
    file = disk.open_read(str(path))
    total = 3 * TURN_BYTES

    class Endless(ResponseWriter):
        """Over a socket that is never full."""

        __slots__ = ("sent",)

        def _send_file(self):
            self.sent += CHUNK_BYTES
            return CHUNK_BYTES

    async def job(bench):
        sender = bench.writer(Endless)
        sender.sent = 0
        sender.stage([FileSlice(file, 0, total)])
        sender.push()
        assert sender.sent == TURN_BYTES
        sender.queue.clear()
        await asyncio.sleep(0)
        assert bench.progress == 1
        sender.close()

    on_bench(disk, job)
    assert data and MAX_COPIED_BYTES < TURN_BYTES


class Transport:
    """A transport that keeps what is written, and says after ``room`` bytes that it is full: then
    it holds what is over, and :data:`HELD_BYTES` besides.
    """

    def __init__(self, room=1 << 40):
        self.written = []
        self.room = room
        self.writer = None
        self.high = None

    def set_write_buffer_limits(self, high):
        self.high = high

    def get_write_buffer_size(self):
        return max(self.high - self.room, 0)

    def write(self, data):
        self.written.append(bytes(data))
        self.room -= len(data)
        if self.room <= 0:
            self.writer.pause()


def transport_writer(bench, transport):
    writer = TransportWriter(
        transport=transport,
        runtime=bench.runtime,
        table=bench.table,
        budget=bench.budget,
        on_progress=bench.on_progress,
        on_failure=bench.on_failure,
    )
    transport.writer = writer
    return writer


def made(tmp_path, size):
    data = random.Random(7).randbytes(size)
    (tmp_path / "log").write_bytes(data)
    return data, str(tmp_path / "log")


@pytest.mark.parametrize("in_memory", [False, True])
def test_a_transport_gets_a_small_response_in_one_write(tmp_path, capsys, in_memory):
    data, path = made(tmp_path, 10)
    disk, transport = Disk({}), Transport()
    file = disk.open_read(path)
    if not in_memory:
        need_page_cache(file)

    async def job(bench):
        writer = transport_writer(bench, transport)
        writer.stage([b"head ", FileSlice(file, 2, 3), b" tail"])
        assert len(writer.queue) == 3 and not transport.written
        writer.push()
        writer.push()
        assert transport.written == [b"head " + data[2:5] + b" tail"] and not writer.queue
        writer.stage([b"lost"])
        writer.close()
        writer.push()
        assert len(transport.written) == 1 and not bench.failures
        writer = transport_writer(bench, transport)
        writer.stage([FileSlice(file, 8, 3)])
        writer.push()
        async with asyncio.timeout(60):
            while not bench.failures:
                await asyncio.sleep(0.001)
        assert len(transport.written) == 1, "a file that ends inside a slice"
        assert "3 bytes are to be sent from there, and the file has 2" in capsys.readouterr().err

    on_bench(disk, job, in_memory=in_memory)


@pytest.mark.parametrize("cold", [False, True])
def test_a_transport_gets_a_large_response_in_pieces_as_far_as_it_takes_them(tmp_path, cold):
    data, path = made(tmp_path, 3 * PIECE_BYTES + 5)
    disk = ColdDisk()
    disk.cold = cold
    file = disk.open_read(path)
    if not cold:
        need_page_cache(file)
    transport = Transport(room=2 * PIECE_BYTES)

    async def job(bench):
        writer = transport_writer(bench, transport)
        writer.stage([b"head", FileSlice(file, 0, len(data)), b"tail"])
        writer.push()
        while transport.room > 0:
            await asyncio.sleep(0.001)
        written = sum(map(len, transport.written))
        assert written <= 3 * PIECE_BYTES, "it is full, and gets no more"
        assert max(map(len, transport.written)) <= PIECE_BYTES
        waiting = writer.unsent_bytes
        held = transport.get_write_buffer_size()
        assert HELD_BYTES <= held <= HELD_BYTES + PIECE_BYTES
        writer.stage([b"x" * 1000])
        assert writer.unsent_bytes == waiting + 1000 == bench.budget.used_bytes
        assert held <= waiting <= held + PIECE_BYTES, "the rest stands in the file, not in memory"
        writer.push()
        assert sum(map(len, transport.written)) == written
        transport.room = 1 << 40
        writer.resume()
        while writer.queue:
            await asyncio.sleep(0.001)
        assert b"".join(transport.written) == b"head" + data + b"tail" + b"x" * 1000
        assert bench.progress and not bench.failures and bench.budget.used_bytes == 0
        in_main = [main for _, _, main in disk.reads]
        assert not any(in_main) and bool(in_main) == cold
        transport.room = 10
        writer.stage([b"x" * 1000])
        writer.push()
        assert not writer.queue and bench.budget.used_bytes == HELD_BYTES + 990
        writer.close()
        assert bench.budget.used_bytes == 0

    on_bench(disk, job)


def test_a_transport_lets_others_have_their_turn(tmp_path):
    total = TURN_BYTES + PIECE_BYTES
    _, path = made(tmp_path, total)
    disk, transport = Disk({}), Transport()
    file = disk.open_read(path)
    need_page_cache(file)

    async def job(bench):
        writer = transport_writer(bench, transport)
        writer.stage([FileSlice(file, 0, total)])
        writer.push()
        assert sum(map(len, transport.written)) == TURN_BYTES
        await asyncio.sleep(0)
        assert sum(map(len, transport.written)) == total and bench.progress == 1

    on_bench(disk, job)
