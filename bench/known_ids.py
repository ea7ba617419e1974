"""What transactional ids cost that have no transaction: the memory of one node that made them, and
of the same node when it has read them back.

    python bench/known_ids.py [--ids 1000000]

The sizes are RSS above that of the node with :data:`FEW` ids.
"""

from __future__ import annotations

import argparse
import json
import socket
import time

import meters
from transactions import IDS_AT_ONCE, Writer, initialize

from kept.testing import Cluster

IDS = 1_000_000
FEW = 100


def main() -> None:
    """Print the sizes as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ids", type=int, default=IDS)
    count = parser.parse_args().ids
    with Cluster(1) as cluster:
        Writer(cluster.bootstrap, "first", "none")  # with which there are coordinators
        _make(cluster, range(FEW))
        before, spent = meters.resident_bytes(cluster.pid()), meters.cpu_seconds(cluster.pid())
        _make(cluster, range(FEW, count))
        made = meters.resident_bytes(cluster.pid()) - before
        spent = meters.cpu_seconds(cluster.pid()) - spent
        cluster.stop()
        cluster.start()
        _await_loaded(cluster, count)
        loaded = meters.resident_bytes(cluster.pid()) - before
        load_s = meters.cpu_seconds(cluster.pid())
    sizes = {
        "ids": count,
        "made_mb": made / 1e6,
        "made_cpu_ms_each": 1000 * spent / count,
        "read_back_mb": loaded / 1e6,
        "start_cpu_s": load_s,
    }
    print(json.dumps(sizes, indent=2))


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
