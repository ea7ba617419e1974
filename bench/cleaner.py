"""CPU of one cleaning pass: survey and build in the worker process, per GB of log.

Input (pinned seed): 1 GB, 5.7 M records of about 180 bytes in batches of 16 KiB, keys drawn from 2
million, in segments of 256 MiB. Two cases: the whole log is dirty; the first half is clean (its
keys are distinct). Apache Kafka 4.3 needs 5.35 CPU-s/GB for the first.

Other strategies than ``latest`` map the whole log in any case. For ``highest-version-header`` every
record carries a version of 8 digits; ``user`` is a class by entry point, in Python:
examples/strategies/first_and_latest.py.

    python bench/cleaner.py [--gb 1.0] [--dir DIR] [--codec none|lz4|zstd...] [--json FILE]
                            [--strategy NAME|all] [--case both|all_dirty|half_clean]
"""

import argparse
import json
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
import tempfile
import time
import uuid
from array import array
from pathlib import Path

from kept.compaction.cleaner import job as jobs
from kept.compaction.cleaner import worker
from kept.storage.records import KERNEL, build_batch, crc32c
from kept.storage.records.codecs import compress
from kept.storage.types import Codec, Generation, LogConfig

SEED = 20261121
KEYS = 2_000_000
RECORDS_PER_BATCH = 90
VALUE_BYTES = 150
SEGMENT_BYTES = 256 << 20
NOW_MS = 1_795_000_000_000
HEADER = "version"
STRATEGIES = {
    "latest": ("latest", {}),
    "latest-n": ("latest-n", {"kept.compaction.latest.n": "3"}),
    "highest-version": ("highest-version", {}),
    "highest-version-header": ("highest-version", {"kept.compaction.version.header": HEADER}),
    "by-key-prefix": (
        "by-key-prefix",
        {
            "kept.compaction.prefixes": "cfg.=latest,user-000000=latest-n:3,"
            "user-0000005=highest-version,user-0000015=latest-n:2"
        },
    ),
    "user": ("first-and-latest", {}),
}
"""Name here, name in the topic's settings, further settings."""
ENTRY_POINT = "[kept.compaction.strategies]\nfirst-and-latest = first_and_latest:FirstAndLatest\n"
EXAMPLES = Path(__file__).resolve().parent.parent / "examples" / "strategies"


def template(versions=False):
    """A batch of records with 16-byte keys, and where the keys are."""
    noise = random.Random(SEED)
    value = bytes(noise.randrange(97, 123) for _ in range(VALUE_BYTES))
    records = [
        (NOW_MS + i, b"k" * 16, value, ((HEADER, b"%08d" % noise.randrange(10**8)),) * versions)
        for i in range(RECORDS_PER_BATCH)
    ]
    batch = bytearray(build_batch(records))
    places, at = [], batch.find(b"k" * 16)
    while at >= 0:
        places.append(at)
        at = batch.find(b"k" * 16, at + 16)
    return batch, places


def close(file):
    """The log was on disk long before: its writing out must not count as the cleaner's."""
    file.flush()
    os.fsync(file.fileno())
    file.close()


def generate(directory, total_bytes, codec, clean_share, versions=False):
    """Write the segments; returns the sources and where the dirty part begins."""
    batch, places = template(versions)
    draw = random.Random(SEED + 1)
    batches = int(total_bytes / len(batch)) + 1
    clean_batches = int(batches * clean_share)
    sources, offset, dirty_from = [], 0, 0
    file, size, base = None, 0, 0
    for number in range(batches):
        roll = file is None or size + len(batch) > SEGMENT_BYTES or number == clean_batches > 0
        if roll:
            if file is not None:
                close(file)
                sources.append(jobs.Source(base, offset, size, NOW_MS))
            base, size = offset, 0
            file = open(f"{directory}/{base:020d}.log", "wb")  # noqa: SIM115
            if number == clean_batches:
                dirty_from = base
        drawn = array("I", draw.randbytes(4 * RECORDS_PER_BATCH))
        for i, place in enumerate(places):
            key = offset + i if number < clean_batches else drawn[i] % KEYS
            batch[place : place + 16] = b"user-%011d" % key
        struct.pack_into(">q", batch, 0, offset)
        out = batch
        if codec != Codec.NONE:
            out = bytearray(batch[:61] + compress(codec, batch[61:]))
            struct.pack_into(">i", out, 8, len(out) - 12)
            out[22] |= codec
        struct.pack_into(">I", out, 17, crc32c(memoryview(out)[21:]))
        file.write(out)
        size += len(out)
        offset += RECORDS_PER_BATCH
    close(file)
    sources.append(jobs.Source(base, offset, size, NOW_MS))
    return tuple(sources), dirty_from, offset


def install_example(site):
    """An environment in which the example's entry point is found."""
    info = Path(site, "bench_strategy-1.dist-info")
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: bench-strategy\nVersion: 1\n")
    (info / "entry_points.txt").write_text(ENTRY_POINT)
    paths = [site, str(EXAMPLES), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def pass_over(directory, sources, dirty_from, end, strategy):
    """The job of a pass over what :func:`generate` has made."""
    name, raw = STRATEGIES[strategy]
    config = LogConfig(cleanup_policy=frozenset({"compact"}), compaction_strategy=name, raw=raw)
    return jobs.Job(
        directory,
        "bench",
        0,
        str(uuid.UUID(int=1)),
        Generation(0, 1),
        0,
        dirty_from,
        end,
        sources,
        NOW_MS + 1_000_000,
        random.Random(SEED).randbytes(16),
        config,
    )


def measure(directory, total_bytes, codec, clean_share, strategy="latest"):
    """One case: generate, clean in a worker process, return the figures."""
    shutil.rmtree(directory, ignore_errors=True)
    os.makedirs(directory)
    versions = strategy == "highest-version-header"
    sources, dirty_from, end = generate(directory, total_bytes, codec, clean_share, versions)
    size = sum(source.size_bytes for source in sources)
    job = pass_over(directory, sources, dirty_from, end, strategy)
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.monotonic()
    process = subprocess.Popen(
        worker.COMMAND,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=install_example(f"{directory}.site") if strategy == "user" else None,
    )
    process.stdin.write(jobs.encode(job) + "\n")
    process.stdin.flush()
    messages = [json.loads(line) for line in process.stdout]
    process.stdin.close()
    process.wait()
    wall = time.monotonic() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if "result" not in messages[-1]:
        raise SystemExit(f"the worker failed: {messages[-1]}")
    result = messages[-1]["result"]
    user, system = after.ru_utime - before.ru_utime, after.ru_stime - before.ru_stime
    shutil.rmtree(directory)
    return {
        "bytes": size,
        "records": end,
        "keys_mapped": result["keys"],
        "records_removed": result["records_removed"],
        "bytes_after": result["bytes_after"],
        "scans": result["scans"],
        "cpu_s": round(user + system, 3),
        "user_s": round(user, 3),
        "system_s": round(system, 3),
        "wall_s": round(wall, 3),
        "cpu_s_per_gb": round((user + system) / (size / 1e9), 3),
        "max_resident_mb": after.ru_maxrss // 1024,
        "map_bytes_per_key_at_capacity": round(16 / jobs.DEFAULT_LOAD_FACTOR, 2),
    }


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gb", type=float, default=1.0)
    parser.add_argument("--dir", default=None, help="where the log is written")
    parser.add_argument("--codec", default="none", choices=[c.name.lower() for c in Codec])
    parser.add_argument("--strategy", default="latest", choices=[*STRATEGIES, "all"])
    parser.add_argument("--case", default="both", choices=["both", "all_dirty", "half_clean"])
    parser.add_argument("--json", default=None, help="also write the figures to this file")
    options = parser.parse_args()
    codec = Codec[options.codec.upper()]
    found = {"benchmark": "cleaner", "kernel": KERNEL, "codec": options.codec, "seed": SEED}
    found["kafka_4_3_all_dirty_cpu_s_per_gb"] = 5.35
    chosen = list(STRATEGIES) if options.strategy == "all" else [options.strategy]
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        for case, share in (("all_dirty", 0.0), ("half_clean", 0.5)):
            if options.case not in ("both", case):
                continue
            for strategy in chosen:
                figures = measure(f"{directory}/bench-0", options.gb * 1e9, codec, share, strategy)
                if strategy == "latest":
                    found[case] = figures
                found.setdefault("strategies", {}).setdefault(strategy, {})[case] = figures
    text = json.dumps(found, indent=2)
    print(text)
    if options.json:
        Path(options.json).write_text(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
