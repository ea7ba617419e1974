"""A flood of one node from many addresses of this machine: halves of requests, batches of 1 MB and
such that inflate, fetches that nobody takes, and the record browser. It notes what is acknowledged.
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from typing import Final

from kept.client.protocol import messages as protocol
from kept.storage.records import build_batch, records
from kept.storage.types import Codec
from tests.support.kafka_connection import Connection
from tests.support.request_values import fetch_values, topic_values

MIB: Final = 1 << 20
HALVES: Final = 40
ANNOUNCED: Final = 15 * MIB
SENT: Final = 14 * MIB
PRODUCERS: Final = 8
BATCH: Final = 1_000_000
INFLATED: Final = 15 * MIB
"""Of zeros in 15 kB of gzip, each of which takes so much memory while it is checked."""
DEAF: Final = 20
ROUND_S: Final = 3.0
PATIENCE_S: Final = 60.0
PRODUCE, FETCH, CREATE_TOPICS = 0, 1, 19


def value_at(connection: Connection, topic: str, offset: int) -> bytes | None:
    """The value of the record at an offset, None where there is none: of the first batch alone, as
    many that inflate may follow.
    """
    found = connection.fetch(topic, offset, version=4, partition_max_bytes=1)
    rows = records(bytes(found.records or b""))
    return next((record.value for record in rows if record.offset == offset), None)


def digest_of(value: bytes) -> bytes:
    return hashlib.sha256(value).digest()


def batch_of(key: bytes, value: bytes, codec: Codec = Codec.NONE) -> bytes:
    """A batch of one record."""
    return build_batch([(int(time.time() * 1000), key, value, ())], codec=codec)


class Flood:
    """``topic`` is compacted in small segments, so that the cleaner works besides; each record of
    1 MB has a key of its own, and stays.
    """

    def __init__(self, port: int, topic: str = "flooded") -> None:
        self.port = port
        self.bootstrap = f"127.0.0.1:{port}"
        self.topic = topic
        self.acknowledged: dict[int, bytes] = {}
        """Offset -> SHA-256 of the value."""
        self.refused: list[str] = []
        self.taken_of_halves: list[int] = []
        """Bytes that the node, or the sockets between, took in each round; of HALVES x SENT."""
        self.browsed = 0
        self._stop = threading.Event()
        self._threads: list[threading.Thread] = []

    def create_topic(self) -> None:
        """Make the topic."""
        topic = topic_values(
            self.topic,
            cleanup_policy="compact",
            segment_bytes=str(8 * MIB),
            min_cleanable_dirty_ratio="0.01",
        )
        with contextlib.closing(Connection(self.bootstrap)) as connection:
            made = connection.ask(
                CREATE_TOPICS, 4, topics=[topic], timeout=60_000, validate_only=False
            )
        assert made.topics[0].error_code.name == "none", made

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Flood the node within the block; an error of a thread that is not the node's is raised
        at its end.
        """
        failures: list[Exception] = []

        def guarded(work: Callable[[int], None], number: int) -> None:
            while not self._stop.is_set():
                try:
                    work(number)
                except (OSError, http.client.HTTPException):
                    self._stop.wait(0.05)  # refused, closed, or the node is gone: come again
                except Exception as error:  # noqa: BLE001 - raised by the test
                    failures.append(error)
                    return

        works = (
            [(self._halves, 0), (self._browse, 0)]
            + [(self._produce, number) for number in range(PRODUCERS)]
            + [(self._inflate, number) for number in range(4)]
            + [(self._hardly_read, number) for number in range(DEAF)]
        )
        self._threads = [threading.Thread(target=guarded, args=one, daemon=True) for one in works]
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._stop.set()
            for thread in self._threads:
                thread.join(2 * PATIENCE_S)
        assert not failures, failures[:3]

    def lost(self) -> list[int]:
        """Offsets of records that were acknowledged and are not what was sent."""
        with contextlib.closing(Connection(self.bootstrap)) as connection:
            return [
                offset
                for offset, digest in sorted(self.acknowledged.items())
                if digest != digest_of(value_at(connection, self.topic, offset) or b"")
            ]

    # What its threads do until they are stopped.

    def _halves(self, _: int) -> None:
        head = struct.pack(">ihhih", ANNOUNCED, PRODUCE, 7, 1, -1)
        with contextlib.ExitStack() as stack:
            halves = []
            for number in range(HALVES):
                half = stack.enter_context(socket.socket())
                half.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65_536)
                half.bind((f"127.0.1.{number}", 0))
                half.settimeout(PATIENCE_S)
                half.connect(("127.0.0.1", self.port))
                half.setblocking(False)
                half.send(head)
                halves.append(half)
            left = dict.fromkeys(halves, SENT)
            end = time.monotonic() + ROUND_S
            piece = memoryview(bytes(65_536))
            while any(left.values()) and time.monotonic() < end and not self._stop.is_set():
                before = sum(left.values())
                for half, size in left.items():
                    with contextlib.suppress(BlockingIOError):
                        left[half] = size - half.send(piece[:size]) if size else 0
                if sum(left.values()) == before:
                    self._stop.wait(0.01)
            self.taken_of_halves.append(HALVES * SENT - sum(left.values()))
            self._stop.wait(max(0.0, end - time.monotonic()))

    def _produce(self, number: int) -> None:
        draw = random.Random(time.monotonic_ns() + number)
        address = f"127.0.2.{number}"
        with contextlib.closing(Connection(self.bootstrap, address=address)) as connection:
            while not self._stop.is_set():
                value = draw.randbytes(BATCH)
                found = connection.produce(self.topic, batch_of(draw.randbytes(16), value), acks=-1)
                if int(found.error_code):
                    self.refused.append(found.error_message or found.error_code.name)
                else:
                    self.acknowledged[found.base_offset] = digest_of(value)
                self._stop.wait(0.2)  # the disk is not what is tried here

    def _inflate(self, number: int) -> None:
        batch = batch_of(b"inflates%d" % number, bytes(INFLATED), Codec.GZIP)
        address = f"127.0.3.{number}"
        with contextlib.closing(Connection(self.bootstrap, address=address)) as connection:
            while not self._stop.is_set():
                found = connection.produce(self.topic, batch, acks=-1)
                if int(found.error_code):
                    self.refused.append(found.error_message or found.error_code.name)

    def _hardly_read(self, number: int) -> None:
        wanted = fetch_values(self.topic, partition_max_bytes=50 * MIB, max_bytes=50 * MIB)
        frame = protocol.encode_request(FETCH, 4, 1, "deaf", wanted)
        with contextlib.closing(socket.socket()) as deaf:
            deaf.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            deaf.settimeout(PATIENCE_S)
            deaf.bind((f"127.0.4.{number}", 0))
            deaf.connect(("127.0.0.1", self.port))
            deaf.sendall(frame * 10)
            while not self._stop.wait(0.2):
                if not deaf.recv(1000):
                    return

    def _browse(self, _: int) -> None:
        path = f"/api/v1/records?topic={self.topic}&partition=0"
        browser = http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)
        with contextlib.closing(browser):
            while not self._stop.is_set():
                browser.request("GET", path)
                answer = browser.getresponse()
                answer.read()
                self.browsed += answer.status == 200
