"""The simulated loop itself: one seed one history, connections like TCP's, processes that die."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Coroutine, Iterator
from hashlib import blake2b
from typing import Any

import pytest

from tests.sim.connections import SimSocket
from tests.sim.loop import SimLoop
from tests.sim.process import Process
from tests.sim.short_runs import printed_elsewhere
from tests.sim.world import Violation

SERVER = ("10.0.0.1", 9092)


class Frames(asyncio.BufferedProtocol):
    """Answers each frame with its length, which an executor computes; sometimes with a reset."""

    def __init__(self, loop: SimLoop, note: Callable[..., None]) -> None:
        self.loop, self.note = loop, note
        self.buffer, self.have = bytearray(1 << 16), 0

    def connection_made(self, transport: Any) -> None:
        self.transport = transport

    def get_buffer(self, sizehint: int) -> memoryview:
        return memoryview(self.buffer)[self.have :]

    def buffer_updated(self, nbytes: int) -> None:
        self.have += nbytes
        while self.have >= 4:
            (size,) = struct.unpack_from(">i", self.buffer)
            if self.have < size + 4:
                break
            frame = bytes(self.buffer[4 : size + 4])
            rest = bytes(self.buffer[size + 4 : self.have])
            self.have = len(rest)
            self.buffer[: self.have] = rest
            self.loop.create_task(self.serve(frame))

    async def serve(self, frame: bytes) -> None:
        size = await self.loop.run_in_executor(None, len, frame)
        self.note("served", size)
        if self.loop.random.random() < 0.02:
            self.transport.abort()
        else:
            self.transport.write(struct.pack(">ii", 4, size))

    def connection_lost(self, exc: Exception | None) -> None:
        self.note("server lost", type(exc).__name__)


class Replies(asyncio.Protocol):
    """Collects what comes."""

    def __init__(self) -> None:
        self.got: asyncio.Queue[bytes] = asyncio.Queue()
        self.lost: list[Exception | None] = []
        self.paused = 0

    def data_received(self, data: bytes) -> None:
        self.got.put_nowait(data)

    def connection_lost(self, exc: Exception | None) -> None:
        self.lost.append(exc)
        self.got.put_nowait(b"")

    def pause_writing(self) -> None:
        self.paused += 1


async def serve(loop: SimLoop, factory: Callable[[], Any], process: Process) -> Any:
    sock = SimSocket(loop.network, process)
    sock.bind(SERVER)
    return await loop.create_server(factory, sock=sock)


def history(seed: int) -> str:
    """The digest of clients, a server, locks, timeouts and threads under one seed."""
    digest, loop = blake2b(digest_size=8), SimLoop(seed)

    def note(*what: Any) -> None:
        digest.update(repr((round(loop.time(), 9), what)).encode())

    async def client(number: int, lock: asyncio.Lock) -> None:
        for request in range(10):
            transport, protocol = await loop.create_connection(Replies, *SERVER)
            data = bytes(loop.random.randint(1, 3000))
            transport.write(struct.pack(">i", len(data)) + data)
            reply = b""
            try:
                async with asyncio.timeout(5):
                    while len(reply) < 8 and not protocol.lost:
                        reply += await protocol.got.get()
            except TimeoutError:
                note("late", number)
            async with lock:
                note("client", number, request, len(data), reply)
                await asyncio.sleep(loop.random.random() / 100)
            transport.close()

    async def main() -> None:
        process = Process("server", SERVER[0])
        accepting = loop.spawn(process, lambda: serve(loop, lambda: Frames(loop, note), process))
        await accepting
        lock = asyncio.Lock()
        async with asyncio.TaskGroup() as group:
            for number in range(4):
                group.create_task(client(number, lock))

    asyncio.set_event_loop(loop)
    try:
        loop.run_until_complete(main())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    assert not loop.escaped
    return f"{digest.hexdigest()}-{loop.turns}"


def test_one_seed_is_one_history_in_every_process() -> None:
    code = "from tests.sim.test_loop import history; print([history(seed) for seed in range(20)])"
    own = [history(seed) for seed in range(20)]
    assert printed_elsewhere(code) == {f"{own}\n"}
    assert len(set(own)) == 20


@pytest.fixture
def loop() -> Iterator[SimLoop]:
    made = SimLoop(7)
    asyncio.set_event_loop(made)
    yield made
    asyncio.set_event_loop(None)
    made.close()


def run(loop: SimLoop, main: Callable[[], Coroutine[Any, Any, None]]) -> None:
    loop.run_until_complete(main())
    assert not loop.escaped


def test_time_passes_only_where_something_waits(loop: SimLoop) -> None:
    async def main() -> None:
        began = loop.time()
        await asyncio.sleep(0)
        assert loop.time() == began
        await asyncio.sleep(3600)
        assert loop.time() == began + 3600

    run(loop, main)


def test_a_loop_without_anything_to_wait_for_says_so(loop: SimLoop) -> None:
    with pytest.raises(RuntimeError, match="come to a halt"):
        loop.run_until_complete(loop.create_future())


def test_a_timer_that_is_always_due_is_found(loop: SimLoop) -> None:
    def due_again() -> None:
        loop.call_later(0, due_again)

    async def main() -> None:
        due_again()
        await asyncio.sleep(1)

    with pytest.raises(Violation, match="due_again"):
        loop.run_until_complete(main())


def test_an_executor_of_one_thread_does_one_job_after_another(loop: SimLoop) -> None:
    from concurrent.futures import ThreadPoolExecutor

    async def main() -> None:
        pool, done = ThreadPoolExecutor(1), []
        jobs = [loop.run_in_executor(pool, done.append, number) for number in range(20)]
        await asyncio.gather(*jobs)
        assert done == list(range(20))
        pool.shutdown()
        with pytest.raises(RuntimeError, match="after shutdown"):
            loop.run_in_executor(pool, len, "")

    run(loop, main)


def test_bytes_come_in_order_and_after_a_cut(loop: SimLoop) -> None:
    received = bytearray()

    class Sink(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            received.extend(data)

    async def main() -> None:
        process = Process("server", SERVER[0])
        await loop.spawn(process, lambda: serve(loop, Sink, process))
        transport, _ = await loop.create_connection(Replies, *SERVER)
        sent = bytes(range(256)) * 8
        transport.write(sent[:1000])
        loop.network.cuts.add((loop.network.client_host, SERVER[0]))
        await asyncio.sleep(1)
        assert not received
        transport.write(sent[1000:])
        loop.network.cuts.clear()
        await asyncio.sleep(1)
        assert received == sent

    run(loop, main)


def test_who_writes_faster_than_the_other_reads_is_told(loop: SimLoop) -> None:
    class Deaf(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            transport.pause_reading()

    async def main() -> None:
        process = Process("server", SERVER[0])
        await loop.spawn(process, lambda: serve(loop, Deaf, process))
        transport, protocol = await loop.create_connection(Replies, *SERVER)
        transport.set_write_buffer_limits(high=1000)
        transport.write(bytes(900))
        assert not protocol.paused
        transport.write(bytes(200))
        assert protocol.paused == 1 and transport.get_write_buffer_size() == 1100

    run(loop, main)


def test_a_cut_link_holds_all_back_by_one_timer(loop: SimLoop) -> None:
    got = bytearray()

    class Collect(asyncio.Protocol):
        def data_received(self, data: bytes) -> None:
            got.extend(data)

    async def main() -> None:
        process = Process("server", SERVER[0])
        await loop.spawn(process, lambda: serve(loop, Collect, process))
        transport, _ = await loop.create_connection(Replies, *SERVER)
        loop.network.cuts.add((loop.network.client_host, SERVER[0]))
        sent = bytes(range(200))
        for byte in sent:
            transport.write(bytes([byte]))
        transport.close()
        await asyncio.sleep(1)
        turns = loop.turns
        await asyncio.sleep(1)
        assert not got and loop.turns - turns < 30
        loop.network.cuts.clear()
        await asyncio.sleep(1)
        assert got == sent

    run(loop, main)


def test_timers_of_one_moment_run_in_the_order_in_which_they_were_made(loop: SimLoop) -> None:
    async def main() -> None:
        ran: list[int] = []
        for number in range(20):
            loop.call_at(2.0, ran.append, number)
            loop.call_at(1.0 + number % 3, int)
        await asyncio.sleep(5)
        assert ran == list(range(20))

    run(loop, main)


def test_an_early_job_does_its_work_before_the_loop_hears_of_it(loop: SimLoop) -> None:
    """What dies in between has changed the disk, and knows nothing of it."""

    def job() -> float:
        done_s.append(loop.time())
        raise ValueError("its result")

    done_s: list[float] = []
    loop.early_share = 1.0
    loop.job_times[job] = (2.0, 2.0)

    async def main() -> None:
        began_s = loop.time()
        waiting = loop.run_in_executor(None, job)
        assert not done_s, "not within the call"
        await asyncio.sleep(1)
        assert done_s == [began_s] and not waiting.done()
        with pytest.raises(ValueError, match="its result"):
            await waiting
        assert loop.time() == began_s + 2.0

        process = Process("server", SERVER[0])
        told: list[float] = []

        async def work() -> None:
            await loop.run_in_executor(None, done_s.append, -1.0)
            told.append(loop.time())

        process.kept.append(loop.spawn(process, work))
        loop.job_times[done_s.append] = (2.0, 2.0)
        await asyncio.sleep(0)
        await asyncio.sleep(1e-4)
        process.die()
        await asyncio.sleep(5)
        assert done_s == [began_s, -1.0] and not told

    run(loop, main)


def test_nothing_of_a_dead_process_runs_and_its_peers_see_a_reset(loop: SimLoop) -> None:
    ran = []

    class Once(asyncio.Protocol):
        def connection_made(self, transport: Any) -> None:
            transport.write(b"last words")

    async def work() -> None:
        try:
            while True:
                await asyncio.sleep(0.01)
                ran.append(loop.time())
        finally:
            ran.append(-1.0)

    async def main() -> None:
        process = Process("server", SERVER[0])
        await loop.spawn(process, lambda: serve(loop, Once, process))
        task = loop.spawn(process, work)
        _, protocol = await loop.create_connection(Replies, *SERVER)
        await asyncio.sleep(0.1)
        process.die()
        loop.network.forget(process)
        count = len(ran)
        assert count
        await asyncio.sleep(1)
        assert len(ran) == count and not task.done()
        said = b""
        while more := await protocol.got.get():
            said += more
        assert said == b"last words"
        assert [type(error) for error in protocol.lost] == [ConnectionResetError]
        with pytest.raises(ConnectionRefusedError):
            await loop.create_connection(Replies, *SERVER)
        process.kept.append(task)

    run(loop, main)
