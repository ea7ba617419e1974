"""The largest requests that a node takes, of every API that it serves; and how long each holds its
loop.

For each version's schema each array in turn is made as long as ``kept.request.max.entries`` allows,
its elements with one element in each array of their own, everything else short. Names are those of
topics and groups that exist, or invented. Then every text is as long as texts may be, in as many
elements as ``kept.request.decoded.max.bytes`` allows; and tagged fields that nobody knows are put
wherever they may be. ``python -m tests.node.largest_requests`` prints a table
of the longest callback for each, against a node of many partitions; ``--help`` says what it takes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import signal
import struct
import sys
import tempfile
import threading
import time
import uuid
from asyncio import events
from collections import Counter
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, Final, get_args, get_origin, get_type_hints

from kio.static.constants import EntityType

from kept.client.protocol import messages as protocol
from kept.client.protocol.wire import uvarint
from kept.node.kafka import api
from kept.node.process import GC_THRESHOLDS
from kept.storage.records import build_batch
from tests.node.conftest import Lone
from tests.support.made_requests import NUMBERS

Path = tuple[str, ...]

TOPIC: Final = "many"
GROUP: Final = "g"
PADS: Final = ("x", "語")
LONGEST: Final = 32_700
"""Bytes of a long text: a little less than Kafka's limit."""
TOPIC_NAMES: Final = frozenset({"topic", "topic_name"})
ALSO_TOPICS: Final = frozenset({1, 2, 3, 8, 9, 19, 20, 21, 37, 45, 46, 47, 75})
"""APIs whose ``name`` is a topic's, at the outer level."""


@dataclass(frozen=True)
class Shape:
    """One request: which array of it is long, and whether what it names exists."""

    api: api.Api
    version: int
    path: Path
    known: bool
    pad: str = ""
    """What every text is filled up with."""
    tags: str = ""
    """Unknown tagged fields: ``many`` or ``large`` of the message, or ``each`` element's."""

    def __str__(self) -> str:
        names = "known" if self.known else "unknown"
        pad = f" long {self.pad}" if self.pad else ""
        tags = f" {self.tags} tags" if self.tags else ""
        return f"{self.api.name} v{self.version} {'.'.join(self.path) or '-'} {names}{pad}{tags}"

    @property
    def request(self) -> Any:
        """kio's class."""
        return protocol.message_type(self.api.key, self.version, EntityType.request)


def shapes(version_pick: Any = None) -> Iterator[Shape]:
    """Every API in its oldest and newest version, each array of it long."""
    for served in api.APIS:
        if served.key == api.API_VERSIONS:
            continue
        oldest = max(served.min_version, served.refused_below)
        for version in sorted({oldest, served.max_version}):
            if version_pick is not None and version != version_pick(served):
                continue
            cls = protocol.message_type(served.key, version, EntityType.request)
            paths = list(_arrays(cls, ())) or [()]
            for path in paths:
                for known in (True, False):
                    yield Shape(served, version, path, known)


def long_shapes() -> Iterator[Shape]:
    """The same with texts as long as they may be, of one byte a character and of three."""
    for shape in shapes():
        for pad in PADS:
            if _texts(shape.request):
                yield replace(shape, pad=pad)


def tagged_shapes() -> Iterator[Shape]:
    """The newest version of every API with tagged fields that it does not know."""
    for shape in shapes(lambda served: served.max_version):
        if shape.version >= shape.api.flexible_from and not shape.known:
            yield replace(shape, tags="each")
            if len(shape.path) <= 1:
                yield replace(shape, tags="many")
                yield replace(shape, tags="large")


def _texts(cls: Any) -> int:
    """Texts and bytes of a message with one element in each array."""
    if not hasattr(cls, "__dataclass_fields__"):
        return 0
    return sum(
        _texts(element) if hasattr(element, "__dataclass_fields__") else kind in ("string", "bytes")
        for kind, element in _members(cls).values()
    )


def _element(hint: Any) -> Any:
    """What an array holds; None for any other field."""
    if get_origin(hint) is not tuple:
        hint = next((arg for arg in get_args(hint) if get_origin(arg) is tuple), None)
    return None if hint is None else get_args(hint)[0]


@cache
def _members(cls: Any) -> dict[str, tuple[str, Any]]:
    """Kafka's type of each field without a tag, and what it holds if it is an array."""
    hints = get_type_hints(cls)
    return {
        field.name: (
            str(field.metadata.get("kafka_type", "entity")),
            _element(hints[field.name]),
        )
        for field in fields(cls)
        if "tag" not in field.metadata
    }


def _arrays(cls: Any, above: Path) -> Iterator[Path]:
    for name, (_, element) in _members(cls).items():
        if element is not None:
            yield (*above, name)
            if hasattr(element, "__dataclass_fields__"):
                yield from _arrays(element, (*above, name))


class Filler:
    """Makes the values of a request. ``topics`` exist, with ``partitions`` each."""

    def __init__(
        self,
        topics: list[tuple[str, uuid.UUID]],
        partitions: int,
        entries: int,
        decoded_bytes: int = 1 << 24,
    ) -> None:
        self.topics = topics
        self.partitions = partitions
        self.entries = entries
        self.decoded_bytes = decoded_bytes

    def frame(self, shape: Shape) -> bytes:
        """The whole request."""
        if shape.tags == "each":
            return self._with_tagged_elements(shape)
        if shape.tags:
            return self._with_tags(shape)
        count = (self.entries - 10) // self._weight(shape.request, shape.path)
        if shape.pad:
            count = min(count, self._most_long(shape))
        return self._frame(shape, count)

    def _frame(self, shape: Shape, count: int) -> bytes:
        values = self._message(shape.request, shape, (), 0, count)
        return protocol.encode_request(shape.api.key, shape.version, 7, "stalls", values)

    def _most_long(self, shape: Shape) -> int:
        """How many elements with long texts may be decoded."""
        one, two = len(self._frame(shape, 1)), len(self._frame(shape, 2))
        return max(1, (self.decoded_bytes - one) // max(two - one, 1))

    def _with_tags(self, shape: Shape) -> bytes:
        """A message ends with the number of its tagged fields, none."""
        frame = self._frame(shape, 1)
        room = self.decoded_bytes - len(frame) - 1000
        if shape.tags == "large":
            return _sized(frame[:-1] + uvarint(1) + _tag(9999, room))
        count = self.entries - 20
        tags = b"".join(_tag(9000 + number, min(600, room // count)) for number in range(count))
        return _sized(frame[:-1] + uvarint(count) + tags)

    def _with_tagged_elements(self, shape: Shape) -> bytes:
        """Each element of an array has one more entry, at its end."""
        cls = shape.request
        for name in shape.path:
            _, cls = _members(cls)[name]
        if not shape.path or not hasattr(cls, "__dataclass_fields__"):
            return self._frame(shape, 1)
        values = self._message(cls, shape, shape.path, 0, 1)
        element = protocol.encode(protocol.build(cls, values))
        before, found, after = self._frame(shape, 1).rpartition(uvarint(2) + element)
        assert found, f"{shape}: the element is not where it should be"
        count = (self.entries - 20) // (1 + self._weight(shape.request, shape.path))
        tagged = element[:-1] + uvarint(1) + _tag(9999, 200)
        return _sized(before + uvarint(count + 1) + tagged * count + after)

    def _weight(self, cls: Any, path: Path) -> int:
        """Entries of one element of the array at ``path``, itself included."""
        for name in path:
            _, cls = _members(cls)[name]
        return 1 + self._below(cls)

    def _below(self, cls: Any) -> int:
        if not hasattr(cls, "__dataclass_fields__"):
            return 0
        elements = (element for _, element in _members(cls).values() if element is not None)
        return sum(1 + self._below(element) for element in elements)

    def _message(self, cls: Any, shape: Shape, at: Path, number: int, count: int) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for name, (kind, element) in _members(cls).items():
            path = (*at, name)
            if element is None:
                values[name] = self._value(shape, path, kind, number)
                continue
            on_path = shape.path[: len(path)] == path
            below = at[: len(shape.path)] == shape.path
            length = count if path == shape.path else 1 if on_path or below else 0
            if hasattr(element, "__dataclass_fields__"):
                values[name] = [
                    self._message(element, shape, path, one, count) for one in range(length)
                ]
            else:
                values[name] = [self._value(shape, path, kind, one) for one in range(length)]
        return values

    def _value(self, shape: Shape, path: Path, kind: str, number: int) -> Any:
        name = path[-1]
        if kind == "bool":
            return False
        if kind == "uuid":
            if not shape.known:
                return uuid.UUID(int=(1 << 100) + number)
            return self.topics[number % len(self.topics)][1]
        if kind in ("bytes", "records"):
            return bytes(LONGEST) if shape.pad and kind == "bytes" else b"none"
        if kind == "entity":
            return None
        if kind != "string":
            value = NUMBERS.get(name, number)
            many = "partition" in name or name == "index"
            value = value % self.partitions if many and shape.known else value
            return min(value, 2) if kind == "int8" else value
        text = self._text(shape, path, number)
        if text is None or not shape.pad:
            return text
        return text + shape.pad * ((LONGEST - len(text)) // len(shape.pad.encode()))

    def _text(self, shape: Shape, path: Path, number: int) -> Any:
        name, key = path[-1], shape.api.key
        if name == "transactional_id" and key not in (0, 22):
            return f"{name}-{number}"
        if name in ("transactional_id", "group_instance_id", "cluster_id"):
            return "elsewhere" if key in (24, 25, 26, 28, 80, 81) else None
        if name in ("group_id",) and len(path) == 1 and key in (8, 9, 47):
            return GROUP
        topic = name in TOPIC_NAMES or (name == "name" and len(path) == 2 and key in ALSO_TOPICS)
        if topic or name == "resource_name" or path == ("topics",):
            if shape.known and key not in (19, 20):
                return self.topics[number % len(self.topics)][0]
            return f"none-{number}"
        if name == "name" and "configs" in path and shape.known:
            return "retention.ms"
        if name == "value":
            return str(1000 + number)
        if name == "group_id":
            return f"{GROUP}-{number}"
        return f"{name}-{number}"


def _tag(number: int, size: int) -> bytes:
    return uvarint(number) + uvarint(size) + bytes(size)


def _sized(frame: bytes) -> bytes:
    return struct.pack(">i", len(frame) - 4) + frame[4:]


async def from_outside(asked: Coroutine[Any, Any, int]) -> int:
    """What a client finds in a thread of its own: its callbacks are not the node's."""
    return await asyncio.to_thread(asyncio.run, asked)


async def exchange(port: int, frame: bytes) -> int:
    """Send a request and read its answer to the end; the answer's size, 0 if there is none."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    try:
        writer.write(frame)
        (size,) = struct.unpack(">i", await reader.readexactly(4))
        left = size
        while left:
            left -= len(await reader.read(left))
    except (asyncio.IncompleteReadError, ConnectionError):
        return 0
    finally:
        writer.close()
    return int(size)


class Longest:
    """CPU seconds of the longest callback of this thread's loop since the last :meth:`reset`."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.what = ""
        self.where: Counter[str] = Counter()
        """Functions that it was in, by how often one of them was met, where it was sampled."""
        self._samples: Counter[str] = Counter()
        self._sampled = False
        self._run = events.Handle._run

    def install(self, *, sampled: bool = False) -> None:
        """Measure from now on; ``sampled``: and look every millisecond of CPU where it is."""
        original, longest, here = self._run, self, threading.get_ident()
        self._sampled = sampled
        if sampled:
            signal.signal(signal.SIGPROF, self._sample)
            signal.setitimer(signal.ITIMER_PROF, 0.001, 0.001)

        def timed(handle: events.Handle) -> None:
            if threading.get_ident() != here:
                original(handle)
                return
            started = time.thread_time()
            longest._samples.clear()
            original(handle)
            took = time.thread_time() - started
            if took > longest.seconds:
                longest.seconds, longest.what = took, repr(handle)[:150]
                longest.where = longest._samples.copy()

        events.Handle._run = timed  # type: ignore[method-assign]

    def _sample(self, _: int, frame: Any) -> None:
        met = set()
        while frame is not None:
            code = frame.f_code
            if "kept" in code.co_filename or "kio" in code.co_filename:
                met.add(f"{code.co_filename.rpartition('/')[2]}:{code.co_name}")
            frame = frame.f_back
        self._samples.update(met)

    def remove(self) -> None:
        """Measure no more."""
        if self._sampled:
            signal.setitimer(signal.ITIMER_PROF, 0)
        events.Handle._run = self._run  # type: ignore[method-assign]

    def reset(self) -> None:
        """Begin anew."""
        self.seconds, self.what = 0.0, ""
        self.where.clear()


def collect_as_a_node() -> None:
    """Garbage is collected as in a node's process, where only what came since is looked at."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)


def questions(topics: list[str], groups: list[str]) -> Iterator[tuple[str, bytes]]:
    """Small requests with large answers: about everything that a node has."""

    def ask(key: int, version: int, **values: Any) -> tuple[str, bytes]:
        frame = protocol.encode_request(key, version, 7, "stalls", values)
        return f"{api.served()[key].name} v{version} of all", frame

    every_config = [
        {"resource_type": 2, "resource_name": name, "configuration_keys": None} for name in topics
    ]
    told = {"include_synonyms": True, "include_documentation": True}
    fetched = [{"group_id": group, "topics": None} for group in groups]
    for version in (1, 13):
        yield ask(3, version, topics=None)
    for version in (11, 12, 17):
        for names in (topics, [f"none-{number}" for number in range(100)]):
            name, frame = ask(1, version, **fetched_in_session(names, 248))
            yield f"{name} in a session, {names[0]}", frame
    yield ask(0, 3, **produced(topics))
    yield ask(16, 5, states_filter=(), types_filter=())
    yield ask(15, 6, groups=groups, include_authorized_operations=True)
    yield ask(9, 8, groups=fetched, require_stable=True)
    yield ask(9, 2, group_id=GROUP, topics=None)
    yield ask(32, 4, resources=every_config, **told)
    yield ask(35, 5, topics=None)
    yield ask(43, 2, election_type=0, topic_partitions=None, timeout=1000)
    yield ask(46, 0, topics=None, timeout=1000)
    wanted = [{"name": name} for name in topics]
    yield ask(75, 0, topics=wanted, response_partition_limit=100_000, cursor=None)
    for path in PATHS:
        target = path.format(topic=topics[0], group=GROUP)
        head = f"GET {target} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
        yield target, head.encode()


def fetched_in_session(topics: list[str], partitions: int) -> dict[str, Any]:
    """A Fetch that begins a session, of 24,800 partitions at most."""
    wanted = [
        {
            "partition": number,
            "fetch_offset": 0,
            "partition_max_bytes": 1,
            "current_leader_epoch": -1,
        }
        for number in range(min(partitions * 100 // len(topics), 9000))
    ]
    return {
        "replica_id": -1,
        "max_wait": 0,
        "min_bytes": 0,
        "max_bytes": 1 << 20,
        "rack_id": "",
        "isolation_level": 0,
        "session_id": 0,
        "session_epoch": 0,
        "forgotten_topics_data": (),
        "topics": [
            {"topic": name, "topic_id": uuid.uuid5(uuid.NAMESPACE_DNS, name), "partitions": wanted}
            for name in topics
        ],
    }


def produced(topics: list[str]) -> dict[str, Any]:
    """A real batch for the first partition of every topic."""
    batch = build_batch([(0, b"k", b"v", ())])
    data = [{"name": name, "partition_data": [{"index": 0, "records": batch}]} for name in topics]
    return {"transactional_id": None, "acks": 1, "timeout": 1000, "topic_data": data}


PATHS: Final = (
    "/metrics",
    "/api/v1/cluster",
    "/api/v1/topics",
    "/api/v1/topics/{topic}",
    "/api/v1/groups",
    "/api/v1/groups/{group}",
    "/api/v1/compaction",
    "/api/v1/cleaner",
    "/api/v1/quorum",
    "/api/v1/pulse",
    "/api/v1/compaction/passes",
    "/api/v1/compaction/history",
    "/api/v1/compaction/lost",
    "/api/v1/compaction/digests",
)


def committed(group: str, topics: list[str], partitions: int) -> bytes:
    """Offsets of all partitions, for one group."""
    wanted = [
        {
            "partition_index": number,
            "committed_offset": 1,
            "committed_leader_epoch": -1,
            "committed_metadata": "",
        }
        for number in range(partitions)
    ]
    values = {
        "group_id": group,
        "generation_id_or_member_epoch": -1,
        "member_id": "",
        "group_instance_id": None,
        "topics": [{"name": name, "partitions": wanted} for name in topics],
    }
    return protocol.encode_request(8, 8, 7, "stalls", values)


class Table:
    """A started node, and a line for each request that it was sent."""

    def __init__(self, lone: Lone, longest: Longest, at_least_ms: float) -> None:
        self.lone = lone
        self.longest = longest
        self.at_least_ms = at_least_ms

    def add(self, name: str, frame: bytes) -> None:
        """Send a request, Kafka's or HTTP's, and print how it went."""
        lone, longest = self.lone, self.longest
        gc.collect()
        longest.reset()
        started = time.perf_counter()
        send = fetch_page if frame[:4] == b"GET " else exchange
        size = lone.run(from_outside(asyncio.wait_for(send(lone.port, frame), 300)))
        took = time.perf_counter() - started
        self.line(f"{name}  {len(frame)} -> {size} bytes in {took:.2f} s")

    def line(self, text: str) -> None:
        """Print the longest callback since the last reset."""
        longest = self.longest
        if 1000 * longest.seconds >= self.at_least_ms:
            print(f"{1000 * longest.seconds:7.1f} ms  {text}  {longest.what}", flush=True)
            for place, count in longest.where.most_common(12):
                print(f"             {count:4} {place}", flush=True)


async def fetch_page(port: int, request: bytes) -> int:
    """Bytes of the answer to an HTTP request that ends with its connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(request)
    size = 0
    with contextlib.suppress(ConnectionError):  # what is too large is not read to its end
        while data := await reader.read(1 << 16):
            size += len(data)
    writer.close()
    return size


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--topics", type=int, default=10)
    parser.add_argument("--partitions", type=int, default=50, help="of each topic")
    parser.add_argument("--groups", type=int, default=10)
    parser.add_argument("--entries", type=int, default=25_000)
    parser.add_argument("--only", default="", help="a part of the request's name")
    parser.add_argument("--answers", action="store_true", help="small requests, large answers")
    parser.add_argument("--sampled", action="store_true", help="say where the time goes")
    parser.add_argument("--at-least-ms", type=float, default=0.0)
    options = parser.parse_args()
    longest = Longest()
    with tempfile.TemporaryDirectory() as directory, asyncio.Runner() as runner:
        lone = Lone(runner, directory)
        collect_as_a_node()
        longest.install(sampled=options.sampled)
        table = Table(lone, longest, options.at_least_ms)
        for number in range(options.topics):
            lone.create(f"{TOPIC}-{number}", options.partitions)
        table.line("creating topics")
        topics = [(t.name, t.topic_id) for t in lone.node.parts.metadata.image.topics.values()]
        lone.ask(10, 4, key_type=0, coordinator_keys=[GROUP])
        collect_as_a_node()
        names = [name for name, _ in topics]
        groups = [f"{GROUP}-{number}" for number in range(options.groups)]
        if options.answers:
            for number, group in enumerate([GROUP, *groups]):
                frame = committed(group, names[: 1 if number else None], options.partitions)
                lone.run(from_outside(exchange(lone.port, frame)))
            for name, frame in questions(names, groups):
                if options.only in name:
                    table.add(name, frame)
        else:
            filler = Filler(topics, options.partitions, options.entries)
            for shape in (*shapes(), *long_shapes(), *tagged_shapes()):
                if options.only in str(shape):
                    table.add(str(shape), filler.frame(shape))
        longest.remove()
        lone.stop()


if __name__ == "__main__":
    sys.exit(main())
