"""What the check of a pass costs, of the CPU of the whole pass (the goal: 3 %).

The log of bench/cleaner.py, cleaned in this process: the time of drawing keys and of proving them
right is taken around these calls; what the scans note for it is a look into a small table per
record, and shows in two passes with and without keys to watch, the faster of each.

    python bench/self_check_cost.py [--gb 0.5] [--dir DIR] [--codec none|lz4|zstd...] [--json FILE]
"""

import argparse
import json
import os
import shutil
import struct
import tempfile
import time
from dataclasses import replace

from cleaner import SEED, generate, pass_over

from kept.compaction.cleaner import cleaner_run, self_check
from kept.storage import layout
from kept.storage.disk import Disk
from kept.storage.records import headers
from kept.storage.types import Codec

CHOSEN = ("latest", "latest-n", "highest-version")
REPEATS = 3


def timed(module, name, into):
    """Count the CPU of a function of a module; returns what undoes it."""
    real = getattr(module, name)

    def counting(*args, **kwargs):
        started = time.process_time()
        try:
            return real(*args, **kwargs)
        finally:
            into[name] = into.get(name, 0.0) + time.process_time() - started

    setattr(module, name, counting)
    return lambda: setattr(module, name, real)


def time_one(job, spent):
    """CPU of one pass over the log; its outputs go."""
    undo = [timed(self_check, name, spent) for name in ("sample_records", "check")]
    started = time.process_time()
    result = cleaner_run.run_pass(job, Disk())
    total = time.process_time() - started
    for back in undo:
        back()
    cleaner_run.discard(job.directory, Disk())
    return total, result.keys_checked


def write_indexes(directory, sources):
    """An entry for each batch, as a log has it where batches are larger than the interval."""
    for source in sources:
        with open(source.path(directory), "rb") as file:
            data = file.read()
        entries = [(h.last_offset - source.base_offset, at) for at, h in headers(data) if at]
        with open(source.path(directory, layout.INDEX), "wb") as file:
            file.write(b"".join(struct.pack(">ii", *entry) for entry in entries))


def measure(directory, total_bytes, codec, strategy):
    """One strategy: passes with and without the check, in turn."""
    shutil.rmtree(directory, ignore_errors=True)
    os.makedirs(directory)
    sources, dirty_from, end = generate(directory, total_bytes, codec, 0.0)
    write_indexes(directory, sources)
    job = pass_over(directory, sources, dirty_from, end, strategy)
    without, checked, own, keys = [], [], [], 0
    for _ in range(REPEATS):
        without.append(time_one(replace(job, check_keys=0), {})[0])
        spent = {}
        total, keys = time_one(job, spent)
        checked.append(total)
        own.append(sum(spent.values()))
    shutil.rmtree(directory)
    noting = max(0.0, (min(checked) - min(own)) - min(without))
    return {
        "keys_checked": keys,
        "pass_cpu_s": round(min(checked), 3),
        "draw_and_prove_cpu_s": round(min(own), 4),
        "noting_cpu_s": round(noting, 4),
        "share_percent": round(100 * (min(own) + noting) / min(checked), 2),
        "draw_and_prove_percent": round(100 * min(own) / min(checked), 2),
    }


def main():
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--gb", type=float, default=0.5)
    parser.add_argument("--dir", default=None, help="where the log is written")
    parser.add_argument("--codec", default="none", choices=[c.name.lower() for c in Codec])
    parser.add_argument("--json", default=None, help="also write the figures to this file")
    options = parser.parse_args()
    found = {"benchmark": "checked", "codec": options.codec, "gb": options.gb, "seed": SEED}
    with tempfile.TemporaryDirectory(dir=options.dir) as directory:
        for strategy in CHOSEN:
            codec = Codec[options.codec.upper()]
            found[strategy] = measure(f"{directory}/bench-0", options.gb * 1e9, codec, strategy)
            figures = found[strategy]
            print(
                f"{strategy:16} {figures['keys_checked']:3} keys checked, "
                f"{figures['share_percent']} % of {figures['pass_cpu_s']} CPU-s"
            )
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            json.dump(found, file, indent=2)
    print(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
