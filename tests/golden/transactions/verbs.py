"""The steps of a script as requests, and answers as short lines."""

from __future__ import annotations

import itertools
import struct
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from kept.client.protocol.wire import read_uvarint
from kept.storage.records import build_batch, headers
from tests.support.kafka_connection import Connection
from tests.support.request_values import topic_values

if TYPE_CHECKING:
    from tests.golden.transactions.held import Hold

PRODUCE, FETCH, LIST_OFFSETS, METADATA, OFFSET_FETCH, FIND, JOIN, SYNC, CREATE = (
    0,
    1,
    2,
    3,
    9,
    10,
    11,
    14,
    19,
)
DELETE_RECORDS, INIT, ADD, ADD_OFFSETS, END, MARKERS, COMMIT_OFFSETS = 21, 22, 24, 25, 26, 27, 28
PRODUCERS, DESCRIBE, LIST = 61, 65, 66
DEADLINE_S = 30.0
STAYS_S = 3.0
"""A state that did not change for so long stays."""
PIPELINED = 50
LAST_EPOCH = 32766
SCENARIOS = itertools.count(1)
"""No two scenarios of a process have a name in common."""
MARKER_TYPE_AT = 61 + 5 + 2
"""The type in a control batch: behind its header, a record's five bytes, and the key's version."""
NOBODY = 999_999_999
"""The producer id that stands for a name that was not given to anybody."""


class Verbs:
    """One connection to a broker, and the names of a scenario.

    A partition is ``topic-number``, a producer ``p1/0``: an id that was given to the scenario (or
    a number) and its epoch.
    """

    def __init__(self, bootstrap: str, markers: Hold | None = None) -> None:
        self._bootstrap = bootstrap
        self._markers = markers
        self._connection = Connection(bootstrap)
        self._number = next(SCENARIOS)
        self._pids: dict[str, int] = {}
        self._topics: dict[str, Any] = {}
        self._members: dict[str, str] = {}

    def close(self) -> None:
        self._connection.close()
        if self._markers is not None:
            self._markers.release()

    def ready(self) -> None:
        """Wait until a transaction comes to its end: its internal topics are there then."""
        deadline = time.monotonic() + DEADLINE_S
        self.scenario()
        self.topic("warm", "1")
        for step in (
            lambda: self.find("warm", version=4),
            lambda: self.init("warm", version=4),
            lambda: self.find_group("warm"),
            lambda: self.committed("warm", "warm-0"),
            lambda: self.add("warm", "p1/0", "warm-0", version=3),
            lambda: self.produce("warm", "p1/0", "warm-0", version=11),
            lambda: self.end("warm", "p1/0", "commit", version=4),
        ):
            answer = step()
            while not answer.startswith(("none", "p1/0", "warm none", "-1")):
                if time.monotonic() > deadline:
                    raise AssertionError(f"the broker is not ready for transactions: {answer}")
                time.sleep(0.1)
                answer = step()
        assert self.until("warm", "CompleteCommit") == "CompleteCommit"

    # Names.

    def scenario(self, *_: str) -> str:
        """A new one begins: names and producers are its own. Its words are a title."""
        self._number = next(SCENARIOS)
        self._pids = {}
        self._members = {}
        return ""

    def _name(self, plain: str) -> str:
        return plain and f"{plain}.{self._number}"

    def _plain(self, name: str) -> str:
        return name.removesuffix(f".{self._number}") or '""'

    def _topic_of(self, answered: Any) -> str:
        """The topic of an answer that has its name, or its id alone."""
        names = {uuid: name for name, uuid in self._topics.items()}
        return self._plain(answered.name if hasattr(answered, "name") else names[answered.topic_id])

    def _pid(self, number: int) -> str:
        known = {pid: name for name, pid in self._pids.items()}
        if number < 0:
            return str(number)
        if number not in known:
            known[number] = f"p{len(known) + 1}"
            self._pids[known[number]] = number
        return known[number]

    def _producer(self, producer: str) -> tuple[int, int]:
        name, _, epoch = producer.partition("/")
        if name.startswith("p"):
            return self._pids.get(name, NOBODY), int(epoch)
        return int(name), int(epoch)

    def _partitions(self, partitions: Iterable[str]) -> list[tuple[str, list[int]]]:
        """(topic, numbers) in order."""
        grouped: dict[str, list[int]] = {}
        for partition in partitions:
            topic, _, number = partition.rpartition("-")
            grouped.setdefault(self._name(topic), []).append(int(number))
        return list(grouped.items())

    def _ask(self, api: int, version: int, **values: Any) -> Any:
        """The response, None where the broker closed the connection instead."""
        try:
            return self._connection.ask(api, version, **values)
        except ConnectionError:
            self._connection.close()
            self._connection = Connection(self._bootstrap)
            return None

    # Preparations.

    def topic(self, name: str, partitions: str, *configs: str) -> str:
        """Create a topic: ``topic orders 2 min.insync.replicas=2``."""
        settings = dict(config.split("=") for config in configs)
        new = topic_values(self._name(name), int(partitions), **settings)
        leader = None if self._markers is None else self._markers.node
        if leader is not None:
            numbers = range(int(partitions))
            placed = [{"partition_index": n, "broker_ids": [leader]} for n in numbers]
            new |= {"num_partitions": -1, "replication_factor": -1, "assignments": placed}
        (made,) = self._ask(CREATE, 7, topics=[new], timeout=30_000, validate_only=False).topics
        assert not made.error_code, made
        self._topics[self._name(name)] = made.topic_id
        for number in range(int(partitions)):
            if leader is None:
                led = self.await_answer(lambda n=number: self.ends(f"{name}-{n}"), "0", DEADLINE_S)
                assert led == "0", f"{name}-{number}: {led}"
            else:
                led = self.await_answer(
                    lambda n=number: self._leader(name, n), str(leader), DEADLINE_S
                )
                assert led == str(leader), f"{name}-{number}: {led}"
        return ""

    def _leader(self, name: str, number: int) -> str:
        """Who leads a partition, as this broker has heard."""
        asked = [{"topic_id": None, "name": self._name(name)}]
        found = self._ask(METADATA, 9, topics=asked, allow_auto_topic_creation=False)
        leaders = {p.partition_index: p.leader_id for p in found.topics[0].partitions}
        return str(leaders.get(number))

    def hold(self) -> str:
        """Markers are not written from now on. In scripts of :mod:`.held` alone."""
        assert self._markers is not None
        self._markers.hold()
        return ""

    def release(self) -> str:
        """Markers are written."""
        assert self._markers is not None
        self._markers.release()
        return ""

    def until(self, transactional_id: str, state: str) -> str:
        """Wait until a transaction is in a state; the state in which it stays otherwise."""
        return self.await_answer(lambda: self.describe(transactional_id).split()[1], state, STAYS_S)

    @staticmethod
    def await_answer(question: Callable[[], str], wanted: str, patience_s: float) -> str:
        """The answer, once it is the one that is wanted; the last one otherwise."""
        deadline = time.monotonic() + patience_s
        while (answer := question()) != wanted and time.monotonic() < deadline:
            time.sleep(0.01)
        return answer

    def find_group(self, group: str, *, version: int = 3) -> str:
        """FindCoordinator of a group."""
        found = self._ask(FIND, version, key=self._name(group), key_type=0)
        return _error(found.error_code)

    def join(self, group: str) -> str:
        """Make a group stable with one member, ``m1``, of generation 1."""
        name = self._name(group)
        joined = self._ask(
            JOIN,
            3,
            group_id=name,
            session_timeout=60_000,
            rebalance_timeout=60_000,
            member_id="",
            protocol_type="consumer",
            protocols=[{"name": "range", "metadata": b""}],
        )
        self._members["m1"] = joined.member_id
        self._ask(
            SYNC,
            1,
            group_id=name,
            generation_id=1,
            member_id=joined.member_id,
            assignments=[{"member_id": joined.member_id, "assignment": b""}],
        )
        return f"generation {joined.generation_id}"

    def level(self, number: str) -> str:
        """The scenario is of one level of ``transaction.version``: see the script."""
        return number

    def exhaust(self, transactional_id: str) -> str:
        """InitProducerId until the epoch is the last but one, 32766."""
        while True:
            for _ in range(PIPELINED):
                self._connection.send(INIT, 4, **self._initial(transactional_id, "60000", "-1/-1"))
            answers = [self._connection.receive() for _ in range(PIPELINED)]
            epoch = answers[-1].producer_epoch
            if epoch >= LAST_EPOCH - PIPELINED:
                break
        while epoch < LAST_EPOCH:
            epoch = self._ask(INIT, 4, **self._initial(transactional_id, "60000", "-1/-1"))
            epoch = epoch.producer_epoch
        return f"{self._pid(answers[-1].producer_id)}/{epoch}"

    # Requests to the coordinator.

    def find(self, *keys: str, version: int) -> str:
        """FindCoordinator of transactional ids."""
        names = [self._name(key) for key in keys]
        found = self._ask(FIND, version, key=names[0], key_type=1, coordinator_keys=names)
        if version < 4:
            return _error(found.error_code)
        return ", ".join(f"{self._plain(c.key)} {_error(c.error_code)}" for c in found.coordinators)

    def _initial(self, transactional_id: str, timeout: str, given: str) -> dict[str, Any]:
        pid, epoch = self._producer(given)
        return {
            "transactional_id": None if transactional_id == "-" else self._name(transactional_id),
            "transaction_timeout": int(timeout),
            "producer_id": pid,
            "producer_epoch": epoch,
        }

    def init(
        self, transactional_id: str, *, version: int, timeout: str = "60000", given: str = "-1/-1"
    ) -> str:
        """InitProducerId; ``-`` is a null id."""
        answer = self._ask(INIT, version, **self._initial(transactional_id, timeout, given))
        if answer is None:
            return "closed"
        if answer.error_code:
            return _error(answer.error_code)
        return f"{self._pid(answer.producer_id)}/{answer.producer_epoch}"

    def add(
        self,
        transactional_id: str,
        producer: str,
        *partitions: str,
        version: int,
        verify: str = "no",
    ) -> str:
        """AddPartitionsToTxn."""
        pid, epoch = self._producer(producer)
        name = self._name(transactional_id)
        topics = [{"name": t, "partitions": n} for t, n in self._partitions(partitions)]
        one = {
            "transactional_id": name,
            "producer_id": pid,
            "producer_epoch": epoch,
            "verify_only": verify == "yes",
            "topics": topics,
        }
        answer = self._ask(
            ADD,
            version,
            v3_and_below_transactional_id=name,
            v3_and_below_producer_id=pid,
            v3_and_below_producer_epoch=epoch,
            v3_and_below_topics=topics,
            transactions=[one],
        )
        if answer is None:
            return "closed"
        if version < 4:
            return self._each(answer.results_by_topic_v3_and_below)
        if answer.error_code:
            return f"whole request {_error(answer.error_code)}"
        return self._each(r for t in answer.results_by_transaction for r in t.topic_results)

    def _each(self, topics: Iterable[Any]) -> str:
        """Errors by partition; the error alone where all have the same."""
        codes = {
            f"{self._plain(topic.name)}-{p.partition_index}": _error(
                p.partition_error_code if hasattr(p, "partition_error_code") else p.error_code
            )
            for topic in topics
            for p in getattr(topic, "results_by_partition", None) or topic.partitions
        }
        return _short(codes)

    def offsets(self, transactional_id: str, producer: str, group: str, *, version: int) -> str:
        """AddOffsetsToTxn."""
        pid, epoch = self._producer(producer)
        answer = self._ask(
            ADD_OFFSETS,
            version,
            transactional_id=self._name(transactional_id),
            producer_id=pid,
            producer_epoch=epoch,
            group_id=self._name(group),
        )
        return "closed" if answer is None else _error(answer.error_code)

    def end(self, transactional_id: str, producer: str, result: str, *, version: int) -> str:
        """EndTxn; from version 5 on also the producer that goes on."""
        pid, epoch = self._producer(producer)
        answer = self._ask(
            END,
            version,
            transactional_id=self._name(transactional_id),
            producer_id=pid,
            producer_epoch=epoch,
            committed={"commit": True, "abort": False}[result],
        )
        if answer is None:
            return "closed"
        if version < 5 or answer.error_code:
            return _error(answer.error_code)
        return f"none, {self._pid(answer.producer_id)}/{answer.producer_epoch}"

    def describe(self, *transactional_ids: str) -> str:
        """DescribeTransactions."""
        names = [self._name(name) for name in transactional_ids]
        frame = self._connection.frame_of(DESCRIBE, 0, transactional_ids=names)
        return ", ".join(self._described(one) for one in described(frame))

    def _described(self, one: dict[str, Any]) -> str:
        name = self._plain(one["id"])
        if one["error"]:
            return f"{name} error {one['error']}"
        started = "started" if one["start"] > 0 else "not started"
        topics = [f"{self._plain(t)}-{n}" for t, numbers in one["topics"] for n in sorted(numbers)]
        return " ".join(
            [
                name,
                one["state"],
                f"{self._pid(one['pid'])}/{one['epoch']}",
                f"timeout {one['timeout']}",
                started,
                *sorted(topics),
            ]
        )

    def list(
        self,
        *,
        version: int,
        states: str = "",
        pids: str = "",
        duration: str = "-1",
        pattern: str = "",
    ) -> str:
        """ListTransactions; those of other scenarios are left out."""
        answer = self._ask(
            LIST,
            version,
            state_filters=states.split(",") if states else (),
            producer_id_filters=[self._producer(f"{p}/0")[0] for p in pids.split(",") if p],
            duration_filter=int(duration),
            transactional_id_pattern=pattern or None,
        )
        if answer.error_code:
            return _error(answer.error_code)
        listed = [
            f"{self._plain(t.transactional_id)} {t.transaction_state} {self._pid(t.producer_id)}"
            for t in answer.transaction_states
            if t.transactional_id.endswith(f".{self._number}")
        ]
        unknown = [f"unknown state {name}" for name in answer.unknown_state_filters]
        return ", ".join(sorted(listed) + unknown) or "nothing"

    # Requests to the group coordinator.

    def commit_offsets(
        self,
        transactional_id: str,
        producer: str,
        group: str,
        *offsets: str,
        version: int,
        generation: str = "-1",
        member: str = "",
        instance: str = "",
    ) -> str:
        """TxnOffsetCommit: ``commit-offsets bank p1/0 readers orders-0=5 v3``."""
        pid, epoch = self._producer(producer)
        wanted = [(*o.partition("=")[0].rsplit("-", 1), int(o.partition("=")[2])) for o in offsets]
        topics = [
            {
                "name": self._name(topic),
                "partitions": [
                    {
                        "partition_index": int(number),
                        "committed_offset": offset,
                        "committed_metadata": "",
                    }
                ],
            }
            for topic, number, offset in wanted
        ]
        answer = self._ask(
            COMMIT_OFFSETS,
            version,
            transactional_id=self._name(transactional_id),
            group_id=self._name(group),
            producer_id=pid,
            producer_epoch=epoch,
            generation_id=int(generation),
            member_id=self._members.get(member, member),
            group_instance_id=instance or None,
            topics=topics,
        )
        return "closed" if answer is None else self._each(answer.topics)

    def committed(self, group: str, *partitions: str, version: int = 7, stable: str = "no") -> str:
        """OffsetFetch, with require_stable for ``stable=yes``."""
        topics = [
            {"name": t, "topic_id": self._topics.get(t), "partition_indexes": n}
            for t, n in self._partitions(partitions)
        ]
        one = {"group_id": self._name(group), "topics": topics, "member_id": None}
        answer = self._ask(
            OFFSET_FETCH, version, groups=[one], require_stable=stable == "yes", **one
        )
        found = answer.groups[0] if version >= 8 else answer
        if found.error_code:
            return _error(found.error_code)
        return _short(
            {
                f"{self._topic_of(t)}-{p.partition_index}": (
                    _error(p.error_code) if p.error_code else str(p.committed_offset)
                )
                for t in found.topics
                for p in t.partitions
            }
        )

    # Requests to the leader of a partition.

    def produce(
        self,
        transactional_id: str,
        producer: str,
        partition: str,
        *,
        version: int,
        sequence: str = "0",
        count: str = "1",
        acks: str = "-1",
        plain: str = "no",
    ) -> str:
        """Produce of one batch, transactional unless ``plain=yes``; ``-`` is a null id."""
        pid, epoch = self._producer(producer)
        ((topic, (number,)),) = self._partitions([partition])
        stamp = int(time.time() * 1000)
        batch = build_batch(
            [(stamp, b"key", b"value", ())] * int(count),
            producer_id=pid,
            producer_epoch=epoch,
            base_sequence=int(sequence),
            is_transactional=plain == "no",
        )
        answer = self._ask(
            PRODUCE,
            version,
            acks=int(acks),
            timeout=30_000,
            transactional_id=None if transactional_id == "-" else self._name(transactional_id),
            topic_data=[
                {
                    "name": topic,
                    "topic_id": self._topics.get(topic),
                    "partition_data": [{"index": number, "records": batch}],
                }
            ],
        )
        if answer is None:
            return "closed"
        (told,) = answer.responses[0].partition_responses
        error = _error(told.error_code)
        return error if told.error_code else f"none at {told.base_offset}"

    def markers(
        self,
        producer: str,
        result: str,
        *partitions: str,
        version: int,
        coordinator: str = "0",
        transaction: str = "0",
    ) -> str:
        """WriteTxnMarkers, with a coordinator epoch and a transaction version."""
        pid, epoch = self._producer(producer)
        topics = [{"name": t, "partition_indexes": n} for t, n in self._partitions(partitions)]
        marker = {
            "producer_id": pid,
            "producer_epoch": epoch,
            "topics": topics,
            "transaction_result": {"commit": True, "abort": False}[result],
            "coordinator_epoch": int(coordinator),
            "transaction_version": int(transaction),
        }
        answer = self._ask(MARKERS, version, markers=[marker])
        return "closed" if answer is None else self._each(answer.markers[0].topics)

    def producers(self, *partitions: str) -> str:
        """DescribeProducers; the coordinator epoch and what differs from run to run are named."""
        topics = [{"name": t, "partition_indexes": n} for t, n in self._partitions(partitions)]
        answer = self._ask(PRODUCERS, 0, topics=topics)
        shown = []
        for topic in answer.topics:
            for p in topic.partitions:
                where = f"{self._plain(topic.name)}-{p.partition_index}"
                if p.error_code:
                    shown.append(f"{where} {_error(p.error_code)}")
                for one in sorted(p.active_producers, key=lambda one: one.producer_id):
                    epoch = "-1" if one.coordinator_epoch < 0 else "known"
                    shown.append(
                        f"{where} {self._pid(one.producer_id)}/{one.producer_epoch} "
                        f"sequence {one.last_sequence} coordinator {epoch} "
                        f"from {one.current_txn_start_offset}"
                    )
        return ", ".join(shown) or "nobody"

    def ends(
        self, partition: str, *, version: int = 5, isolation: str = "0", at: str = "-1"
    ) -> str:
        """ListOffsets: of the latest unless ``at`` says another timestamp."""
        ((topic, (number,)),) = self._partitions([partition])
        answer = self._ask(
            LIST_OFFSETS,
            version,
            replica_id=-1,
            isolation_level=int(isolation),
            timeout=30_000,
            topics=[
                {"name": topic, "partitions": [{"partition_index": number, "timestamp": int(at)}]}
            ],
        )
        (told,) = answer.topics[0].partitions
        return _error(told.error_code) if told.error_code else str(told.offset)

    def read(
        self,
        partition: str,
        *,
        version: int = 11,
        isolation: str = "1",
        offset: str = "0",
        limit: str = "1048576",
    ) -> str:
        """Fetch, read_committed unless ``isolation=0``: ends, batches, aborted transactions."""
        ((topic, (number,)),) = self._partitions([partition])
        answer = self._ask(
            FETCH,
            version,
            replica_id=-1,
            max_wait=0,
            min_bytes=1,
            max_bytes=1 << 24,
            isolation_level=int(isolation),
            session_id=0,
            session_epoch=-1,
            rack_id="",
            forgotten_topics_data=(),
            topics=[
                {
                    "topic": topic,
                    "topic_id": self._topics.get(topic),
                    "partitions": [
                        {
                            "partition": number,
                            "fetch_offset": int(offset),
                            "partition_max_bytes": int(limit),
                        }
                    ],
                }
            ],
        )
        if answer.error_code:
            return _error(answer.error_code)
        (told,) = answer.responses[0].partitions
        if told.error_code:
            return _error(told.error_code)
        batches = [self._batch(header, data) for header, data in _batches(told.records or b"")]
        aborted = told.aborted_transactions
        listed = (
            "null"
            if aborted is None
            else " ".join(
                f"{self._pid(a.producer_id)}@{a.first_offset}"
                for a in sorted(aborted, key=lambda a: (a.first_offset, a.producer_id))
            )
            or "none"
        )
        return (
            f"high watermark {told.high_watermark}, stable {told.last_stable_offset}: "
            f"{', '.join(batches) or 'nothing'}; aborted {listed}"
        )

    def _batch(self, header: Any, data: bytes) -> str:
        who = f"{self._pid(header.producer_id)}/{header.producer_epoch}"
        if header.attributes & 0x20:
            (kind,) = struct.unpack_from(">h", data, MARKER_TYPE_AT)
            return f"{header.base_offset} {('abort', 'commit')[kind]} of {who}"
        last = header.base_offset + header.last_offset_delta
        return f"{header.base_offset}-{last} of {who}"

    def delete_records(self, partition: str, before: str, *, version: int = 2) -> str:
        """DeleteRecords; the new log start."""
        ((topic, (number,)),) = self._partitions([partition])
        answer = self._ask(
            DELETE_RECORDS,
            version,
            timeout=30_000,
            topics=[
                {"name": topic, "partitions": [{"partition_index": number, "offset": int(before)}]}
            ],
        )
        (told,) = answer.topics[0].partitions
        return _error(told.error_code) if told.error_code else f"from {told.low_watermark}"


def _error(code: Any) -> str:
    return str(code.name)


def _short(answers: dict[str, str]) -> str:
    if not answers:
        return "nothing"
    values = set(answers.values())
    if len(values) == 1:
        return values.pop()
    return ", ".join(f"{name} {answer}" for name, answer in sorted(answers.items()))


def _batches(data: bytes) -> list[tuple[Any, bytes]]:
    """(header, bytes) of each whole batch."""
    return [(header, data[at : at + header.size_bytes]) for at, header in headers(data)]


def described(frame: bytes) -> list[dict[str, Any]]:
    """The transactions in a response to DescribeTransactions v0: kio refuses a start of -1."""
    position = 4 + 1 + 4  # correlation id, tags, throttle time

    def text() -> str:
        nonlocal position
        size, position = read_uvarint(frame, position)
        position += size - 1
        return frame[position - size + 1 : position].decode()

    def fields(layout: str) -> Sequence[int]:
        nonlocal position
        values = struct.unpack_from(layout, frame, position)
        position += struct.calcsize(layout)
        return values

    def count() -> range:
        nonlocal position
        size, position = read_uvarint(frame, position)
        return range(size - 1)

    found = []
    for _ in count():
        (error,) = fields(">h")
        one: dict[str, Any] = {"error": error, "id": text(), "state": text()}
        one |= zip(("timeout", "start", "pid", "epoch"), fields(">iqqh"), strict=True)
        one["topics"] = []
        for _ in count():
            topic = text()
            numbers = [fields(">i")[0] for _ in count()]
            position += 1
            one["topics"].append((topic, numbers))
        position += 1
        found.append(one)
    return found
