"""One node: start, produce, codecs, fetch, latency and the cleaner."""

from __future__ import annotations

import time
from collections.abc import Callable

import baseline
import cleaning
import frames
from brokers import Broker
from harness import GB, Bench

from kept.client.client import Client
from kept.storage.types import Codec


def start(bench: Bench, broker: Broker) -> None:
    """Ready time (files formatted) and resident memory, idle."""
    bench.add("start", "ready", broker.name, "s", broker.ready_seconds)
    bench.add("start", "resident, idle", broker.name, "MB", broker.resident_bytes() / 1e6)


def create(broker: Broker, topic: str, **config: str) -> None:
    """A topic of one partition."""
    with Client(broker.bootstrap) as client:
        client.create_topic(
            topic, partitions=1, config={k.replace("_", "."): v for k, v in config.items()}
        )


def produce(bench: Bench, broker: Broker) -> None:
    """acks=1, eight requests in flight on one connection."""
    now_ms = int(time.time() * 1000)
    for size, total in ((1024, 0.2e9), (16_384, 1e9), (65_536, 1e9), (1_048_000, 1e9)):
        topic = f"produce-{size}"
        create(broker, topic, max_message_bytes="4000000")
        data = frames.batch(size, 1000, Codec.NONE, now_ms)
        frame = frames.produce(topic, data)
        count = (
            max(2000, int(total * bench.scale / len(frame)))
            if size < 100_000
            else int(max(200, total * bench.scale / len(frame)))
        )
        bench.run_load("send", broker.port, frame, 1, 8, max(200, count // 4))
        baseline.use_memory(bench, count * len(frame))
        before, kernel = broker.cpu_seconds(), broker.kernel_seconds()
        got = bench.run_load("send", broker.port, frame, 1, 8, count)
        cpu, kernel = broker.cpu_seconds() - before, broker.kernel_seconds() - kernel
        name = f"produce {size // 1024} KiB, acks=1"
        gigabytes = got["bytes"] / GB
        bench.add("produce", name, broker.name, "CPU-s/GB", cpu / gigabytes)
        bench.add("produce", f"{name}, in the kernel", broker.name, "CPU-s/GB", kernel / gigabytes)
        bench.add("produce", name, broker.name, "us/request", cpu / got["requests"] * 1e6)
        bench.add("produce", name, broker.name, "MB/s", got["bytes"] / got["seconds"] / 1e6)
        if broker.name == "kept":
            baseline.produce(bench, name, frame, count)
    bench.add("produce", "resident, loaded", broker.name, "MB", broker.resident_bytes() / 1e6)


def codecs(bench: Bench, broker: Broker) -> None:
    """64 KiB of records, compressed: per GB of uncompressed records."""
    now_ms = int(time.time() * 1000)
    for codec in (Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD):
        topic = f"codec-{codec.name.lower()}"
        create(broker, topic)
        frame = frames.produce(topic, frames.batch(65_536, 1000, codec, now_ms))
        count = max(500, int(0.5e9 * bench.scale / 65_536))
        bench.run_load("send", broker.port, frame, 1, 8, count // 4)
        before = broker.cpu_seconds()
        bench.run_load("send", broker.port, frame, 1, 8, count)
        cpu = broker.cpu_seconds() - before
        name = f"produce 64 KiB {codec.name.lower()}"
        bench.add("codecs", name, broker.name, "CPU-s/GB", cpu / (count * 65_536 / GB))


def fetch(bench: Bench, broker: Broker) -> None:
    """A log of 64 KiB batches in the page cache, read again and again."""
    topic = "fetch"
    create(broker, topic)
    data = frames.batch(65_536, 1000, Codec.NONE, int(time.time() * 1000))
    count = int(0.5e9 * max(bench.scale, 0.2) / len(data))
    bench.run_load("send", broker.port, frames.produce(topic, data), 1, 8, count)
    for size, total in ((65_536, 2e9), (262_144, 4e9), (1_048_576, 6e9)):
        frame, at = frames.fetch(topic, size + 2048)
        bench.run_load("fetch", broker.port, frame, at, 1, total * bench.scale / 4)
        before = broker.cpu_seconds()
        got = bench.run_load("fetch", broker.port, frame, at, 1, total * bench.scale)
        cpu = broker.cpu_seconds() - before
        name = f"fetch {size // 1024} KiB"
        bench.add("fetch", name, broker.name, "CPU-s/GB", cpu / (got["bytes"] / GB))
        bench.add("fetch", name, broker.name, "MB/s", got["bytes"] / got["seconds"] / 1e6)


def latency(bench: Bench, broker: Broker, group: str = "latency") -> None:
    """1 KiB, acks=1, 500 requests a second on one connection."""
    topic = f"{group}-topic"
    create(broker, topic)
    frame = frames.produce(topic, frames.batch(1024, 1000, Codec.NONE, int(time.time() * 1000)))
    count = max(2500, int(8000 * bench.scale))
    bench.run_load("pace", broker.port, frame, 500, 2500)
    got = bench.run_load("pace", broker.port, frame, 500, count)
    for quantile in ("p50_ms", "p99_ms", "p999_ms"):
        bench.add(group, f"{group} {quantile[:-3]}, 500/s", broker.name, "ms", got[quantile])


def cleaner(bench: Bench, broker: Broker) -> None:
    """Passes inside the broker, and the p99 of producers while another one runs."""
    gigabytes = max(0.6, bench.scale)
    for what, share in (("all dirty", 0.0), ("half clean", 0.5)):
        topic = f"cleaning-{what.replace(' ', '-')}"
        cpu, wall = cleaning.cpu_of_a_pass(broker, topic, gigabytes, share)
        bench.add("cleaner", f"cleaner, {what}", broker.name, "CPU-s/GB", cpu)
        bench.add("cleaner", f"cleaner, {what}", broker.name, "s", wall)
    create(broker, "aside")
    frame = frames.produce("aside", frames.batch(1024, 1000, Codec.NONE, int(time.time() * 1000)))
    quiet, during = cleaning.latency_during_a_pass(broker, bench.load, frame, gigabytes)
    bench.add("cleaner", "p99 without a pass, 500/s", broker.name, "ms", quiet)
    bench.add("cleaner", "p99 during a pass, 500/s", broker.name, "ms", during)
    bench.add("cleaner", "p99 during / without", broker.name, "ratio", during / quiet)


SECTIONS: dict[str, Callable[[Bench, Broker], None]] = {
    "start": start,
    "produce": produce,
    "codecs": codecs,
    "fetch": fetch,
    "latency": latency,
    "cleaner": cleaner,
}
