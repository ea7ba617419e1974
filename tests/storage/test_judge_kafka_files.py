"""Partition directories that Apache Kafka wrote open here and hold the same records.

The test makes them: all codecs, an idempotent and a transactional producer, compaction, several
segments; once after a clean stop, once after kill -9.
"""

from __future__ import annotations

import re
import shutil
import time
from contextlib import suppress
from pathlib import Path

import pytest

from kept.storage import layout
from kept.storage.disk import Disk
from kept.storage.errors import OutOfOrderSequenceNumber
from kept.storage.inspect.check import check_directory
from kept.storage.log.log import Log
from kept.storage.records import headers
from kept.storage.segments.txn_index import AbortedTxn
from kept.storage.types import LogConfig, TopicPartition
from kept.testing.ports import free_port

pytestmark = [pytest.mark.java, pytest.mark.slow, pytest.mark.timeout(600)]

RECORD = re.compile(
    r"^\| offset: (\d+) (?!.*endTxnMarker).*?keySize: (-?\d+) valueSize: (-?\d+)", re.M
)
TOPICS = ["codec-none", "codec-gzip", "codec-snappy", "codec-lz4", "codec-zstd"]
TOPICS += ["idempotent", "txn", "compacted"]
SEGMENTED = {"segment.bytes": "1048576", "index.interval.bytes": "4096"}
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")


def produce(bootstrap: str, topic: str, count: int, size: int, **config: object) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 5, **config})
    for n in range(count):
        value = b"v%05d" % n + b"x" * size
        producer.produce(topic, value, b"k%d" % (n % 50), headers={"n": str(n)})
        producer.poll(0)
    assert producer.flush(60) == 0


def transactions(bootstrap: str) -> None:
    from confluent_kafka import Producer

    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": "tx"})
    producer.init_transactions(30)
    for n in range(20):
        producer.begin_transaction()
        for i in range(10):
            producer.produce("txn", b"v%d" % i + b"y" * 12_000, b"t%d" % n)
        producer.flush(30)
        (producer.abort_transaction if n % 3 == 1 else producer.commit_transaction)(30)


def wait_for_markers(bootstrap: str) -> None:
    """Apache Kafka answers the end of a transaction before its marker is in the log."""
    from confluent_kafka import IsolationLevel, TopicPartition
    from confluent_kafka.admin import AdminClient, OffsetSpec

    admin, asked = AdminClient({"bootstrap.servers": bootstrap}), TopicPartition("txn", 0)

    def end(level: IsolationLevel) -> int:
        (found,) = admin.list_offsets({asked: OffsetSpec.latest()}, isolation_level=level).values()
        return found.result(30).offset

    deadline = time.monotonic() + 60
    while end(IsolationLevel.READ_COMMITTED) < end(IsolationLevel.READ_UNCOMMITTED):
        assert time.monotonic() < deadline, "a transaction stays open"
        time.sleep(0.05)


def create(bootstrap: str) -> None:
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": bootstrap})
    compact = {
        "cleanup.policy": "compact",
        "min.cleanable.dirty.ratio": "0.01",
        "delete.retention.ms": "60000",
    }
    topics = [NewTopic(f"codec-{c}", 1, 1, config=SEGMENTED) for c in CODECS]
    topics += [
        NewTopic("idempotent", 1, 1, config=SEGMENTED),
        NewTopic("txn", 1, 1, config=SEGMENTED),
        NewTopic("compacted", 1, 1, config=SEGMENTED | compact),
    ]
    for future in admin.create_topics(topics).values():
        future.result(60)


def wait_for_cleaning(data: Path) -> None:
    deadline = time.monotonic() + 180
    while time.monotonic() < deadline:
        with suppress(OSError, ValueError, IndexError):
            text = (data / "cleaner-offset-checkpoint").read_text()
            if int(re.search(r"compacted 0 (\d+)", text)[1]) > 0:
                return
        time.sleep(0.2)
    raise AssertionError("Apache Kafka did not compact")


@pytest.fixture(scope="module")
def written(tmp_path_factory, kafka_dist) -> dict[bool, Path]:
    """Data directories by whether the stop was clean."""
    root = tmp_path_factory.mktemp("kafka")
    broker = kafka_dist.Broker(
        root,
        free_port(above=[1]),
        log_cleaner_backoff_ms=200,
        log_cleaner_dedupe_buffer_size=2_000_000,
    )
    with broker:
        create(broker.bootstrap)
        for codec in CODECS:
            produce(broker.bootstrap, f"codec-{codec}", 3000, 1000, **{"compression.type": codec})
        produce(broker.bootstrap, "idempotent", 3000, 1000, **{"enable.idempotence": True})
        for _ in range(3):
            produce(broker.bootstrap, "compacted", 2000, 1000)
        transactions(broker.bootstrap)
        wait_for_markers(broker.bootstrap)
        wait_for_cleaning(broker.data)
        shutil.copytree(broker.data, root / "crashed", ignore=shutil.ignore_patterns(".lock"))
    return {True: broker.data, False: root / "crashed"}


def open_copy(source: Path, target: Path, topic: str, clean: bool) -> Log:
    path = target / f"{topic}-0"
    shutil.copytree(source / f"{topic}-0", path)
    policy = frozenset({"compact" if topic == "compacted" else "delete"})
    config = LogConfig(segment_bytes=1 << 20, cleanup_policy=policy)
    return Log.open(
        str(path), TopicPartition(topic, 0), None, config, Disk({}), now_ms=0, clean=clean
    )


@pytest.mark.parametrize("clean", [True, False])
@pytest.mark.parametrize("topic", TOPICS)
def test_the_same_records(  # noqa: PLR0917
    kit, kafka_dist, written, tmp_path, topic, clean
) -> None:
    log = open_copy(written[clean], tmp_path, topic, clean)
    log.check_invariants()
    files = sorted((written[clean] / f"{topic}-0").glob("*.log"))
    output = kafka_dist.dump(files, "--deep-iteration", "--print-data-log")
    expected = [tuple(map(int, found)) for found in RECORD.findall(output)]
    found = [
        (offset, -1 if key is None else len(key), -1 if value is None else len(value))
        for offset, _, key, value in kit.values(log)
    ]
    assert found == expected and len(found) >= 50
    if topic == "txn":
        check_transactions(log)
    if topic == "idempotent":
        assert len(log.producers) == 1
    if topic == "compacted":
        assert len(found) < 5000, "it was compacted"
    else:
        assert topic == "txn" or [f[0] for f in found] == list(range(3000))
    for n in range(0, log.log_end_offset, 97):
        position = log.read(n, 1, log.log_end_offset)
        assert position is None or position.size_bytes > 0


def check_transactions(log: Log) -> None:
    assert log.first_unstable_offset is None
    aborted = log.aborted_transactions(0, log.log_end_offset)
    markers = [
        header.base_offset
        for _, _, content in _batches(log)
        for _, header in headers(content)
        if header.is_control
    ]
    assert len(markers) == 20
    assert [a.last_offset for a in aborted] == markers[1::3]
    assert all(a.last_offset - a.first_offset == 10 for a in aborted)
    check_slices(log, aborted)
    for producer_id, state in log.producers.items():
        expected = state.last_sequence + 1  # 0 after a marker that brought a new epoch
        assert log.producers.check(producer_id, state.epoch, expected, 1) is None
        with pytest.raises(OutOfOrderSequenceNumber):
            log.producers.check(producer_id, state.epoch, expected + 1, 1)


def check_slices(log: Log, aborted: list[AbortedTxn]) -> None:
    """What a read_committed consumer gets that reads Kafka's log in small steps: each aborted
    transaction with the slices that it reaches into, and with no other."""
    offset, end, listed = 0, log.log_end_offset, 0
    while (found := log.read(offset, 500, end)) is not None:
        read = [header for _, header in headers(log.disk.pread(*found))]
        last = read[-1].last_offset
        of_slice = [a for a in aborted if a.last_offset >= offset and a.first_offset <= last]
        assert log.aborted_in_slice(offset, found, end) == of_slice
        offset, listed = read[-1].next_offset, max(listed, len(of_slice))
    assert offset == end and listed < len(aborted)


def _batches(log: Log) -> list[tuple[int, int, bytes]]:
    offset, found = 0, []
    while data := log.read_batches(offset, 1 << 20, log.log_end_offset):
        for position, header in headers(data):
            found.append((0, 0, data[position : position + header.size_bytes]))
            offset = header.next_offset
    return found


@pytest.mark.parametrize("topic", ["codec-none", "txn", "compacted"])
def test_what_we_derive_is_what_kafka_derived(written, tmp_path, topic) -> None:
    """Indexes rebuilt from the batches alone are byte for byte those that Kafka wrote."""
    source = written[True] / f"{topic}-0"
    log = open_copy(written[False], tmp_path, topic, clean=False)
    log.close()
    compared = 0
    for path in sorted(source.glob("*.log")):
        for kind in (layout.INDEX, layout.TIME_INDEX, layout.TXN_INDEX):
            theirs, ours = path.with_suffix(kind), tmp_path / f"{topic}-0" / f"{path.stem}{kind}"
            if topic == "compacted" and path.stem == "0" * 20:
                continue
            assert ours.exists() == theirs.exists(), kind
            if theirs.exists():
                assert ours.read_bytes() == theirs.read_bytes(), f"{path.stem}{kind}"
                compared += 1
    # Kafka's cleaner leaves more or fewer, by when it ran; the active segment is always there.
    assert compared >= (2 if topic == "compacted" else 4)


def test_check_passes_on_them(written) -> None:
    for clean in (True, False):
        findings = check_directory(str(written[clean]))
        serious = [f for f in findings if f.damaged]
        assert not serious, serious[:5]


def test_snapshots_hold_the_producers(written, tmp_path) -> None:
    log = open_copy(written[True], tmp_path, "txn", clean=True)
    rebuilt = open_copy(written[False], tmp_path / "again", "txn", clean=False)
    (pid, ours), (same_pid, theirs) = [*rebuilt.producers.items(), *log.producers.items()]
    assert pid == same_pid
    assert (ours.epoch, ours.last_sequence, ours.last_offset) == (
        theirs.epoch,
        theirs.last_sequence,
        theirs.last_offset,
    )
    assert ours.coordinator_epoch == theirs.coordinator_epoch >= 0
