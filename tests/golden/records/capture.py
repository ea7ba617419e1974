"""Make the golden batches again: ``python capture.py BOOTSTRAP LOG_DIR KAFKA_LIBS``.

BOOTSTRAP is an Apache Kafka 4.3 of one node with an empty LOG_DIR and log.cleaner.backoff.ms=300,
KAFKA_LIBS the directory of its jars. Every producer writes the same 100 records (``record``) to
topics of one partition; the segments are copied here, ``compacted`` once the cleaner has been.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
SETTINGS = {
    "append-time": {"message.timestamp.type": "LogAppendTime"},
    "compacted": {
        "cleanup.policy": "compact",
        "segment.ms": "10",
        "min.cleanable.dirty.ratio": "0.01",
        "delete.retention.ms": "1000000000000",
    },
}


def record(i: int) -> tuple[int, bytes, bytes | None, list[tuple[str, bytes | None]]]:
    """Timestamp, key, value and headers of record ``i``."""
    headers: list[tuple[str, bytes | None]] = []
    if i % 2 == 0:
        headers = [("n", str(i).encode()), ("null", None)]
    value = None if i % 10 == 9 else (f"value-{i}-" * (i % 5)).encode()
    return 1_700_000_000_000 + i, b"key-%d" % (i % 7), value, headers


def by_librdkafka(bootstrap: str) -> None:
    from confluent_kafka import Producer

    for codec in CODECS:
        producer = Producer(
            {"bootstrap.servers": bootstrap, "compression.codec": codec, "linger.ms": 500}
        )
        for i in range(100):
            timestamp, key, value, headers = record(i)
            producer.produce(
                f"librdkafka-{codec}", value, key, 0, timestamp=timestamp, headers=headers
            )
            if i == 59:
                producer.flush()
        producer.flush()


def by_kafka_python(bootstrap: str) -> None:
    from kafka import KafkaProducer

    for codec in CODECS:
        producer = KafkaProducer(
            bootstrap_servers=bootstrap,
            compression_type=None if codec == "none" else codec,
            linger_ms=500,
        )
        for i in range(100):
            timestamp, key, value, headers = record(i)
            headers = headers[:1]  # it refuses null
            producer.send(f"kafka-python-{codec}", value, key, headers, 0, timestamp)
            if i == 59:
                producer.flush()
        producer.flush()
        producer.close()


def create_topics(bootstrap: str) -> list[str]:
    from confluent_kafka.admin import AdminClient, NewTopic

    names = [f"{who}-{codec}" for who in ("java", "librdkafka", "kafka-python") for codec in CODECS]
    names += ["append-time", "transactional", "compacted"]
    admin = AdminClient({"bootstrap.servers": bootstrap})
    futures = admin.create_topics(
        [NewTopic(name, 1, 1, config=SETTINGS.get(name, {})) for name in names]
    )
    for future in futures.values():
        future.result()
    return names


def main(bootstrap: str, log_dir: Path, libs: Path) -> None:
    names = create_topics(bootstrap)
    by_librdkafka(bootstrap)
    by_kafka_python(bootstrap)
    subprocess.run(["java", "-cp", f"{libs}/*", str(HERE / "Produce.java"), bootstrap], check=True)
    first = log_dir / "compacted-0" / f"{0:020}.log"
    before = first.stat().st_size
    deadline = time.monotonic() + 120
    while first.stat().st_size == before:
        if time.monotonic() > deadline:
            raise SystemExit("the cleaner did not come")
        time.sleep(0.2)
    for name in names:
        segments = sorted((log_dir / f"{name}-0").glob("*.log"))
        if name == "compacted":
            segments = segments[:1]
        with (HERE / f"{name}.log").open("wb") as out:
            for segment in segments:
                with segment.open("rb") as source:
                    shutil.copyfileobj(source, out)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
