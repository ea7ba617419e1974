"""What transactional ids cost that have no transaction: the memory of one node that made them, and
of the same node when it has read them back; how long that takes, and holds its loop.

    python bench/known_ids.py [--ids 1000000]

The sizes are RSS above that of the node with :data:`FEW` ids; that of the node when it has read
them, its peak meanwhile, and that some time later. The node has a probe inside (``probe.py``).
"""

from __future__ import annotations

import argparse
import json
import socket
import time

import meters
from loop_stalls import node_reports, probed
from transactions import IDS_AT_ONCE, Writer, initialize

from kept.testing import Cluster

IDS = 1_000_000
FEW = 100
SETTLE_S = 20.0


def main() -> None:
    """Print the sizes as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ids", type=int, default=IDS)
    count = parser.parse_args().ids
    with probed(1, {}) as cluster:
        Writer(cluster.bootstrap, "first", "none")  # with which there are coordinators
        _make(cluster, range(FEW))
        before, spent = meters.resident_bytes(cluster.pid()), meters.cpu_seconds(cluster.pid())
        _make(cluster, range(FEW, count))
        made = meters.resident_bytes(cluster.pid()) - before
        spent = meters.cpu_seconds(cluster.pid()) - spent
        cluster.stop()
        started = time.monotonic()
        cluster.start()
        _await_loaded(cluster, count)
        load_s = time.monotonic() - started
        load_cpu_s = meters.cpu_seconds(cluster.pid())
        loaded = meters.resident_bytes(cluster.pid()) - before
        peak = meters.peak_bytes(cluster.pid()) - before
        (report,) = node_reports(cluster)
        time.sleep(SETTLE_S)
        settled = meters.resident_bytes(cluster.pid()) - before
    found = {
        "ids": count,
        "node_mb": before / 1e6,
        "made_mb": made / 1e6,
        "made_cpu_ms_each": 1000 * spent / count,
        "read_back_mb": loaded / 1e6,
        "read_back_peak_mb": peak / 1e6,
        "read_back_settled_mb": settled / 1e6,
        "read_back_s": load_s,
        "start_cpu_s": load_cpu_s,
        "longest_stall_ms": report["own_longest_ms"],
        "worst": report["worst"][:3],
    }
    print(json.dumps(found, indent=2))


def _make(cluster: Cluster, numbers: range) -> None:
    """An InitProducerId for each."""
    with socket.create_connection((cluster.host(), cluster.port()), 60) as connection:
        initialize(connection, numbers)


def _await_loaded(cluster: Cluster, count: int) -> None:
    """Until every partition is read: the last ids of all are answered for."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        try:
            _make(cluster, range(max(0, count - IDS_AT_ONCE), count))
        except RuntimeError:
            time.sleep(0.2)
        else:
            return
    raise RuntimeError("the ids were not read back within 600 s")


if __name__ == "__main__":
    main()
