"""Transactional batches on their way into the log, before a coordinator that the test plays."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from kio.static.constants import EntityType

from kept.client.protocol import messages as protocol
from kept.node.kafka.handlers.transactions.transactional_produce import TransactionalBatches
from kept.node.runtime.completable_future import CompletableFuture
from kept.storage.records import EndTxnMarker, build_batch
from kept.storage.types import Codec, TopicPartition

NOW = 1_700_000_000_000
PRODUCE = 0
ABORT, COMMIT = EndTxnMarker(False, 4), EndTxnMarker(True, 4)


class Coordinator:
    """Answers when the test says so."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, int, frozenset[TopicPartition], bool]] = []
        self.answers: list[CompletableFuture[Mapping[TopicPartition, ErrorCode]]] = []
        self.epoch = -1

    def verify(self, transactional_id, producer_id, epoch, partitions, *, adds):
        self.asked.append((transactional_id, producer_id, epoch, partitions, adds))
        self.answers.append(CompletableFuture())
        return self.answers[-1]

    def coordinator_epoch(self, _transactional_id: str) -> int:
        return self.epoch

    def answer(self, code: str = "none", **others: str) -> None:
        """The same for all partitions of the oldest question, but for ``t_0`` and such."""
        answer, (_, _, _, partitions, _) = self.answers.pop(0), self.asked.pop(0)
        given = {name.replace("_", "-"): ErrorCode[error] for name, error in others.items()}
        answer.set_result({tp: given.get(str(tp), ErrorCode[code]) for tp in partitions})


class Wire:
    """A connection to the node, within its loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._versions: list[int] = []

    def send(
        self,
        *batches: tuple[int, bytes],
        version: int = 11,
        name: str | None = "bank",
        acks: int = -1,
        topic: str = "t",
    ) -> None:
        """Produce ``(partition, batch)`` pairs of a topic."""
        data = [{"index": index, "records": batch} for index, batch in batches]
        values = {
            "transactional_id": name,
            "acks": acks,
            "timeout": 30_000,
            "topic_data": [{"name": topic, "partition_data": data}],
        }
        cls = protocol.message_type(PRODUCE, version, EntityType.request)
        body = protocol.encode(protocol.build(cls, values))
        head = PRODUCE.to_bytes(2, "big") + version.to_bytes(2, "big") + bytes(4) + b"\xff\xff"
        frame = head + (b"\0" if version >= 9 else b"") + body
        self._writer.write(len(frame).to_bytes(4, "big") + frame)
        self._versions.append(version)

    async def receive(self) -> list[tuple[str, int]]:
        """(error, base offset) of each partition of the next response."""
        size = int.from_bytes(await asyncio.wait_for(self._reader.readexactly(4), 20), "big")
        frame = await self._reader.readexactly(size)
        _, response = protocol.decode_response(PRODUCE, self._versions.pop(0), frame)
        return [
            (p.error_code.name, p.base_offset)
            for topic in response.responses
            for p in topic.partition_responses
        ]

    def close(self) -> None:
        self._writer.close()


def batch(sequence: int = 0, *, pid: int = 7, epoch: int = 0, plain: bool = False) -> bytes:
    return build_batch(
        [(NOW, b"k", b"v", ())],
        producer_id=pid,
        producer_epoch=epoch,
        base_sequence=sequence,
        is_transactional=not plain,
    )


class World:
    """A node with a topic of two partitions, a connection, and the coordinator."""

    def __init__(self, lone: Any) -> None:
        self.lone = lone
        lone.create("t", 2, message_timestamp_before_max_ms=str(2**62))
        self.coordinator = Coordinator()
        produce = lone.node.parts.server.produce
        produce._transactional = TransactionalBatches(lone.node.parts.runtime, self.coordinator)
        self.wire = self.connect()

    def connect(self) -> Wire:
        opened = self.lone.run(asyncio.open_connection("127.0.0.1", self.lone.port))
        return Wire(*opened)

    def partition(self, index: int = 0) -> Any:
        return self.lone.node.parts.table.partition(TopicPartition("t", index))

    def until_asked(self, count: int = 1) -> None:
        async def wait() -> None:
            async with asyncio.timeout(20):
                while len(self.coordinator.asked) < count:
                    await asyncio.sleep(0)

        self.lone.run(wait())

    def produce(self, *batches: tuple[int, bytes], answer: str | None = "none", **rest: Any) -> Any:
        """Send, answer what is asked (None: nothing must be), receive."""

        async def exchange() -> list[tuple[str, int]]:
            self.wire.send(*batches, **rest)
            if answer is not None:
                async with asyncio.timeout(20):
                    while not self.coordinator.asked:
                        await asyncio.sleep(0)
                self.coordinator.answer(answer)
            return await self.wire.receive()

        received = self.lone.run(exchange())
        assert self.coordinator.asked == []
        return received

    def end(self, marker: EndTxnMarker, index: int = 0, **rest: Any) -> None:
        self.partition(index).append_marker(marker, 7, rest.pop("epoch", 0), NOW, **rest)
        self.partition(index).write()


@pytest.fixture
def world(lone):
    made = World(lone)
    yield made
    made.wire.close()


def test_the_coordinator_is_asked_once_a_transaction_and_partition(world):
    assert world.produce((0, batch(0))) == [("none", 0)]
    assert world.produce((0, batch(1)), answer=None) == [("none", 1)]
    assert world.produce((0, batch(2)), (1, batch(0))) == [("none", 2), ("none", 0)]
    world.end(COMMIT)
    assert world.produce((0, batch(3))) == [("none", 4)]
    assert world.produce((0, batch(3)), answer=None) == [("none", 4)], "it came again"


def test_what_is_asked(world):
    """Of the partitions that are not open here; from v12 on they are added."""
    world.wire.send((0, batch()), (1, batch()))
    world.until_asked()
    both = frozenset({TopicPartition("t", 0), TopicPartition("t", 1)})
    assert world.coordinator.asked == [("bank", 7, 0, both, False)]
    world.coordinator.answer("none", t_1="transaction_abortable")
    assert world.lone.run(world.wire.receive()) == [("none", 0), ("transaction_abortable", -1)]
    world.wire.send((0, batch(1)), (1, batch()), version=12)
    world.until_asked()
    assert world.coordinator.asked == [("bank", 7, 0, frozenset({TopicPartition("t", 1)}), True)]
    world.coordinator.answer()
    assert world.lone.run(world.wire.receive()) == [("none", 1), ("none", 0)]


@pytest.mark.parametrize(
    ("answer", "version", "heard"),
    [
        ("producer_fenced", 11, "invalid_producer_epoch"),
        ("invalid_producer_epoch", 12, "invalid_producer_epoch"),
        ("transaction_abortable", 10, "invalid_txn_state"),
        ("transaction_abortable", 11, "transaction_abortable"),
        ("network_exception", 12, "not_enough_replicas"),
        ("coordinator_load_in_progress", 11, "not_enough_replicas"),
        ("coordinator_not_available", 11, "not_enough_replicas"),
        ("not_coordinator", 11, "not_enough_replicas"),
        ("concurrent_transactions", 11, "not_enough_replicas"),
        ("concurrent_transactions", 12, "concurrent_transactions"),
        ("invalid_producer_id_mapping", 12, "invalid_producer_id_mapping"),
        ("transactional_id_authorization_failed", 9, "transactional_id_authorization_failed"),
        ("invalid_request", 11, "invalid_request"),
        ("operation_not_attempted", 12, "operation_not_attempted"),
        ("unknown_topic_or_partition", 12, "unknown_topic_or_partition"),
        ("unknown_server_error", 11, "unknown_server_error"),
    ],
)
def test_what_a_producer_hears(world, answer, version, heard, capfd):
    assert world.produce((0, batch()), answer=answer, version=version) == [(heard, -1)]
    assert world.partition().log_end_offset == 0
    assert world.produce((0, batch()), version=version) == [("none", 0)]


def test_requests_that_are_wrong_as_a_whole(world):
    for batches, name, heard in (
        ([(0, batch()), (1, batch(plain=True))], None, "transactional_id_authorization_failed"),
        ([(0, batch()), (1, batch(pid=8))], "bank", "invalid_producer_id_mapping"),
        ([(0, batch()), (1, batch(epoch=1))], "bank", "invalid_producer_id_mapping"),
        ([(0, batch(-1, pid=-1, epoch=-1))], "bank", "invalid_producer_id_mapping"),
    ):
        for version in (9, 12):
            told = world.produce(*batches, name=name, version=version, answer=None)
            assert told == [(heard, -1)] * len(batches)
    told = world.produce((0, batch()), (7, batch()))
    assert told == [("none", 0), ("unknown_topic_or_partition", -1)]


def test_a_plain_batch_needs_no_coordinator_but_no_open_transaction(world):
    assert world.produce((0, batch(0, plain=True)), answer=None) == [("none", 0)]
    assert world.produce((0, batch(1))) == [("none", 1)]
    for name in ("bank", None):
        told = world.produce((0, batch(2, plain=True)), name=name, answer=None)
        assert told == [("invalid_txn_state", -1)]
    world.end(ABORT)
    assert world.produce((0, batch(2, plain=True)), answer=None) == [("none", 3)]


def test_later_requests_of_the_connection_wait_and_others_do_not(world):
    world.wire.send((0, batch(0)))
    world.until_asked()
    world.wire.send((0, batch(1)))
    world.wire.send((1, batch(0, pid=9, plain=True)), name=None)
    other = world.connect()
    other.send((1, batch(0, pid=8, plain=True)), name=None)
    assert world.lone.run(other.receive()) == [("none", 0)]
    other.close()
    assert world.partition(1).log_end_offset == 1 and world.partition(0).log_end_offset == 0
    world.coordinator.answer()
    told = [world.lone.run(world.wire.receive()) for _ in range(3)]
    assert told == [[("none", 0)], [("none", 1)], [("none", 1)]]


def test_a_batch_is_not_appended_within_the_call_that_answers(world):
    """The answer may come in the middle of a Fetch, which would miss the record."""
    world.wire.send((0, batch()))
    world.until_asked()
    seen = []

    async def answer() -> None:
        world.coordinator.answer()
        seen.append(world.partition().log_end_offset)

    world.lone.run(answer())
    assert seen == [0]
    assert world.lone.run(world.wire.receive()) == [("none", 0)]
    assert world.partition().log_end_offset == 1


def test_a_bug_behind_an_answer_closes_the_connection(world, capfd):
    """Its client would wait for ever."""
    world.wire.send((0, batch()))
    world.until_asked()

    async def fail() -> None:
        world.coordinator.answers.pop().set_exception(KeyError("a bug of ours"))

    world.lone.run(fail())
    with pytest.raises(asyncio.IncompleteReadError):
        world.lone.run(world.wire.receive())
    assert 'event="produce failed"' in capfd.readouterr().err


def test_an_answer_that_comes_after_the_marker_counts_for_nothing(world):
    world.wire.send((0, batch()))
    world.until_asked()
    world.end(ABORT)
    world.coordinator.answer()
    assert world.lone.run(world.wire.receive()) == [("invalid_txn_state", -1)]
    assert world.partition().log_end_offset == 1


def test_the_yes_of_a_coordinator_that_was_replaced_counts_for_nothing(world):
    """It may lead no more without knowing it: its successor has ended the transaction."""
    world.end(ABORT)
    world.coordinator.epoch = ABORT.coordinator_epoch - 1
    assert world.produce((0, batch()), (1, batch())) == [("not_enough_replicas", -1), ("none", 0)]
    assert world.partition().log_end_offset == 1
    world.coordinator.epoch = ABORT.coordinator_epoch
    assert world.produce((0, batch())) == [("none", 1)]


def test_a_first_batch_that_was_refused_keeps_the_later_ones_out(world):
    assert world.produce((0, batch(0)), answer="not_coordinator") == [("not_enough_replicas", -1)]
    assert world.produce((0, batch(1))) == [("not_enough_replicas", -1)], "it was sent behind it"
    assert world.produce((0, batch(0))) == [("none", 0)]
    assert world.produce((0, batch(1)), answer=None) == [("none", 1)]


def test_epochs_and_sequences_are_judged_before_and_after_the_answer(world):
    assert world.produce((0, batch(epoch=3))) == [("none", 0)]
    world.end(COMMIT, epoch=4, is_tv2=True)
    assert world.produce((0, batch(epoch=3)), answer=None) == [("invalid_producer_epoch", -1)]
    told = world.produce((0, batch(2, epoch=4)), version=12)
    assert told == [("out_of_order_sequence_number", -1)]
    told = world.produce((1, batch(2, epoch=4)), version=12)
    assert told == [("out_of_order_sequence_number", -1)], "nothing is known of it there"


def test_the_coordinators_epoch_is_a_floor_for_markers(world):
    world.coordinator.epoch = 9
    assert world.produce((0, batch())) == [("none", 0)]
    (view,) = world.partition().producers()
    assert view.coordinator_epoch == 9


def test_who_is_refused_sets_no_floor_for_the_markers_of_others(world):
    """Anybody may name the producer id of another with a transactional id of his own."""
    world.coordinator.epoch = 9
    refusal = "invalid_producer_id_mapping"
    assert world.produce((0, batch()), name="mine", answer=refusal) == [(refusal, -1)]
    world.end(COMMIT)
    assert world.partition().log_end_offset == 1, "the real coordinator's, of an earlier epoch"


def test_a_batch_that_is_checked_in_a_thread_waits_for_both(world):
    rows = [(NOW, b"k", b"%d" % n * 400, ()) for n in range(4000)]
    large = build_batch(
        rows,
        producer_id=7,
        producer_epoch=0,
        base_sequence=0,
        is_transactional=True,
        codec=Codec.ZSTD,
    )
    assert (
        world.produce((0, large), answer="transaction_abortable")[0][0] == "transaction_abortable"
    )
    assert world.produce((0, large)) == [("none", 0)]
    assert world.partition().log_end_offset == 4000


def test_without_a_coordinator_a_batch_is_to_be_sent_again(lone):
    lone.create("t", 2, message_timestamp_before_max_ms=str(2**62))
    wire = Wire(*lone.run(asyncio.open_connection("127.0.0.1", lone.port)))
    wire.send((0, batch()))
    assert lone.run(wire.receive()) == [("not_enough_replicas", -1)]
    wire.close()


@pytest.mark.parametrize("topic", ["__consumer_offsets", "__transaction_state"])
def test_clients_do_not_write_to_internal_topics(lone, topic):
    """A record that its coordinator cannot read would keep it from loading."""
    lone.create(topic)
    wire = Wire(*lone.run(asyncio.open_connection("127.0.0.1", lone.port)))
    for data in (batch(plain=True), build_batch([(NOW, b"k", b"v" * 9000, ())] * 90)):
        for version, name in ((9, None), (12, None), (9, "bank")):
            wire.send((0, data), version=version, name=name, topic=topic)
            assert lone.run(wire.receive()) == [("invalid_topic_exception", -1)]
    partition = lone.node.parts.table.partition(TopicPartition(topic, 0))
    assert partition.log_end_offset == 0
    wire.close()
