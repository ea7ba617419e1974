"""Apache Kafka's own DumpLogSegments accepts every file that we write."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from kept.storage.disk import Disk
from kept.storage.records import headers
from kept.storage.types import Codec, LogConfig

pytestmark = [pytest.mark.java, pytest.mark.slow]

FAULTS = re.compile(
    r"mismatch|exception|error|corrupt|invalid|out of order|not monoton|Found", re.I
)
BATCH = re.compile(r"baseOffset: (\d+) lastOffset: (\d+) count: (\d+).*?isvalid: (\w+)")
RECORD = re.compile(r"^\| offset: (\d+) .*?key: (\S*) payload: (\S*)", re.M)


def faults(output: str) -> list[str]:
    lines = [line for line in output.splitlines() if FAULTS.search(line)]
    return [line for line in lines if not line.startswith(("baseOffset", "| offset"))]


@pytest.fixture(scope="module")
def written(tmp_path_factory, kit) -> Path:
    path = tmp_path_factory.mktemp("judge") / "t-0"
    config = LogConfig(segment_bytes=6_000, index_interval_bytes=500)
    log = kit.open_log(Disk({}), str(path), config=config)
    for n in range(300):
        kit.append(
            log,
            kit.batch(
                n % 5 + 1,
                mark=n,
                size=n % 90,
                codec=Codec(n % 5),
                timestamp=kit.NOW + n % 77,
                pid=40 + n % 3,
                epoch=2,
                sequence=sum(m % 5 + 1 for m in range(n % 3, n, 3)),
            ),
            leader_epoch=n // 100,
        )
    log.close()
    assert len(log.segments) > 3
    log = kit.open_log(Disk({}), str(path), config=config, clean=True)
    for n in range(100):
        kit.append(log, kit.batch(2, mark=n, timestamp=kit.NOW + n), leader_epoch=5)
    log.roll(kit.NOW)
    kit.append(log, kit.batch(2, pid=40, epoch=3, sequence=0), leader_epoch=5)
    log.close()
    return path


def test_logs(kit, kafka_dist, written) -> None:
    files = sorted(written.glob("*.log"))
    output = kafka_dist.dump(files, "--deep-iteration", "--print-data-log")
    assert not faults(output), output[:3000]
    expected = []
    count = 0
    for path in files:
        for _, header in headers(path.read_bytes()):
            expected.append((header.base_offset, header.last_offset, header.record_count))
            count += header.record_count
    found = BATCH.findall(output)
    assert [(int(a), int(b), int(c)) for a, b, c, _ in found] == expected
    assert {valid for *_, valid in found} == {"true"}
    assert [int(o) for o, _, _ in RECORD.findall(output)] == list(range(count))


@pytest.mark.parametrize("check", ["--index-sanity-check", "--verify-index-only"])
def test_indexes(kafka_dist, written, check) -> None:
    files = [p for kind in ("index", "timeindex") for p in sorted(written.glob(f"*.{kind}"))]
    assert len(files) > 8 and any(p.stat().st_size for p in files)
    output = kafka_dist.dump(files, check)
    assert not faults(output), output[:3000]
    if check == "--index-sanity-check":
        empty = sum(1 for p in files if not p.stat().st_size)
        assert output.count("passed sanity check.") == len(files) - empty
        assert output.count("is empty.") == empty


def test_producer_snapshots(kafka_dist, written) -> None:
    files = sorted(written.glob("*.snapshot"))
    assert len(files) > 4
    output = kafka_dist.dump(files)
    assert not faults(output), output[:3000]
    producers = {int(p) for p in re.findall(r"producerId: (\d+)", output)}
    assert producers == {40, 41, 42}
    assert "producerEpoch: 3" in output
