"""CPU of applying a manifest, against CPU of the pass that made it, in one run.

The input is that of ``bench/cleaner.py``, half of it clean. A follower has either the leader's
segments, or segments that end elsewhere (every boundary between two of the leader's). Medians of
three, in turn: the first to write pays for memory that the machine has to find. Also: bytes of the
manifest per byte of log.

    python bench/manifest_apply.py [--gb 0.5] [--dir DIR] [--codec none|lz4|zstd...] [--json FILE]
"""

import argparse
import json
import os
import random
import shutil
import statistics
import tempfile
import time
import uuid
from pathlib import Path

import cleaner

from kept.compaction.cleaner import job as jobs
from kept.compaction.cleaner.cleaner_run import discard, read_manifest, run_pass
from kept.compaction.manifest import follow, manifest
from kept.storage import layout
from kept.storage.disk import Disk
from kept.storage.log.log import Log
from kept.storage.segments.swap import SwapPlan
from kept.storage.types import Codec, Generation, LogConfig, TopicPartition

TOPIC_ID = uuid.UUID(int=1)
GOAL = 1 / 3
TRIES = 3


def cpu_of(work):
    """CPU seconds of this process, and what ``work`` returned."""
    before = time.process_time()
    result = work()
    return time.process_time() - before, result


def lead(directory, sources, dirty_from, end, disk):
    """The leader's pass: (CPU seconds, result, manifest)."""
    config = LogConfig(cleanup_policy=frozenset({"compact"}))
    job = jobs.Job(
        directory,
        "bench",
        0,
        str(TOPIC_ID),
        Generation(0, 1),
        0,
        dirty_from,
        end,
        sources,
        cleaner.NOW_MS + 1_000_000,
        random.Random(cleaner.SEED).randbytes(16),
        config,
    )
    cpu_s, result = cpu_of(lambda: run_pass(job, disk))
    path = layout.manifest_file(directory, *result.generation)
    os.rename(path + layout.TEMPORARY, path)
    found = read_manifest(directory, result.generation, disk)
    discard(directory, disk)
    return cpu_s, result, found


def opened(directory, disk):
    """The follower's log, with an active segment at the end."""
    config = LogConfig(cleanup_policy=frozenset({"compact"}), segment_bytes=cleaner.SEGMENT_BYTES)
    tp = TopicPartition("bench", 0)
    log = Log.open(directory, tp, TOPIC_ID, config, disk, now_ms=cleaner.NOW_MS)
    log.roll(cleaner.NOW_MS)
    return log


def shifted(directory, sources):
    """Cut the same bytes into segments that end elsewhere: by half a segment, at a batch."""
    data = b"".join(Path(directory, f"{s.base_offset:020d}.log").read_bytes() for s in sources)
    for name in os.listdir(directory):
        os.unlink(f"{directory}/{name}")
    at, limit = 0, cleaner.SEGMENT_BYTES // 2
    while at < len(data):
        start = at
        while at < len(data) and at - start < limit:
            at += int.from_bytes(data[at + 8 : at + 12], "big") + 12
        base = int.from_bytes(data[start : start + 8], "big")
        Path(directory, f"{base:020d}.log").write_bytes(data[start:at])
        limit = cleaner.SEGMENT_BYTES


def applied(directory, found, disk):
    """CPU seconds of applying: of the job, and of building."""
    log = opened(directory, disk)
    job_s, job = cpu_of(lambda: follow.job_for(log, found, None, cleaner.NOW_MS))
    build_s, result = cpu_of(lambda: follow.follow(job, disk))
    discard(directory, disk)
    return job_s + build_s, result


def main():
    """Measure both and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, default=0.5)
    parser.add_argument("--dir", default=tempfile.gettempdir())
    parser.add_argument("--codec", default="none", choices=[c.name.lower() for c in Codec])
    parser.add_argument("--segment-mb", type=int, default=64)
    parser.add_argument("--json")
    options = parser.parse_args()
    cleaner.SEGMENT_BYTES = options.segment_mb << 20
    disk = Disk()
    names = ("leader", "follower", "elsewhere")
    leader, follower, elsewhere = (f"{options.dir}/kept-following-{name}-0" for name in names)
    for directory in (leader, follower, elsewhere):
        shutil.rmtree(directory, ignore_errors=True)
    os.makedirs(leader)
    try:
        codec = Codec[options.codec.upper()]
        sources, dirty_from, end = cleaner.generate(leader, options.gb * 1e9, codec, 0.5)
        shutil.copytree(leader, follower)
        shutil.copytree(leader, elsewhere)
        shifted(elsewhere, sources)
        cleaned, same, other = [], [], []
        for _ in range(TRIES):
            cleaned.append(lead(leader, sources, dirty_from, end, disk))
            _, result, found = cleaned[-1]
            same.append(applied(follower, found, disk))
            other.append(applied(elsewhere, found, disk))
    finally:
        for directory in (leader, follower, elsewhere):
            shutil.rmtree(directory, ignore_errors=True)
    clean_s, same_s, other_s = (statistics.median(r[0] for r in t) for t in (cleaned, same, other))
    size = sum(source.size_bytes for source in sources)
    travels = len(manifest.encode(found, SwapPlan(())))
    figures = {
        "bytes": size,
        "records": end,
        "records_removed": result.records_removed,
        "clean_cpu_s": round(clean_s, 3),
        "apply_cpu_s": round(same_s, 3),
        "apply_other_boundaries_cpu_s": round(other_s, 3),
        "apply_per_clean": round(same_s / clean_s, 3),
        "apply_other_boundaries_per_clean": round(other_s / clean_s, 3),
        "bytes_after": [result.bytes_after, same[0][1].bytes_after, other[0][1].bytes_after],
        "manifest_bytes": travels,
        "manifest_percent": round(100 * travels / size, 4),
        "goal_apply_per_clean": round(GOAL, 3),
    }
    print(json.dumps(figures, indent=1))
    if options.json:
        Path(options.json).write_text(json.dumps(figures))


if __name__ == "__main__":
    main()
