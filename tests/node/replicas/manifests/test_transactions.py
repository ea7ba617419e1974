"""Transactions in the logs of three replicas, as an adopted log has them: one that is open holds
the passes of every leader back, and what was aborted goes everywhere.
"""

from __future__ import annotations

import glob
import os
import struct
import time

import pytest

from kept.storage.records import build_batch, headers
from tests.node.replicas.manifests.trio import Trio, trio

pytestmark = pytest.mark.slow

NODES = (0, 1, 2)
COMMIT, ABORT = 1, 0


def control(kind: int) -> tuple[bytes, bytes]:
    return struct.pack(">hh", 0, kind), struct.pack(">hi", 0, 0)


def newest_epoch(three: Trio, node: int) -> int:
    """Of its checkpoint, which a node that has never led need not have yet."""
    path = os.path.join(three.directory(node), "leader-epoch-checkpoint")
    if not os.path.exists(path):
        return 0
    with open(path) as checkpoint:
        return int(checkpoint.read().split()[-2])


def plant(three: Trio, *batches: tuple[int, int | None, bytes, bytes]) -> int:
    """Append (producer id, marker or None, key, value) to the files of all, who were killed: there
    is no coordinator to do it. Whoever starts without a clean mark reads its log again. Returns
    the offset of the first.
    """
    begins = 0
    three.until_equal()
    for node in NODES:
        three.cluster.kill(node)
    epoch = max(newest_epoch(three, node) for node in NODES)  # some were elected as others died
    now_ms = int(time.time() * 1000)
    for node in NODES:
        newest = max(glob.glob(os.path.join(three.directory(node), "*.log")))
        with open(newest, "r+b") as log:
            data = log.read()
            found = [header.next_offset for _, header in headers(data)]
            begins = offset = found[-1] if found else int(os.path.basename(newest)[:20])
            for producer_id, marker, key, value in batches:
                row = (key, value) if marker is None else control(marker)
                log.write(
                    build_batch(
                        [(now_ms, *row, ())],
                        producer_id=producer_id,
                        producer_epoch=0,
                        base_sequence=0 if marker is None else -1,
                        is_transactional=True,
                        is_control=marker is not None,
                        leader_epoch=epoch,
                        base_offset=offset,
                    )
                )
                offset += 1
    for node in NODES:
        three.cluster.start(node, wait=False)
    three.cluster.await_ready()
    three.until_in_sync(*NODES)
    return begins


def values(three: Trio, node: int) -> set[bytes]:
    return {row[3] for row in three.files(node) if len(row) == 4}


def test_leaders_that_die_clean_up_to_the_same_open_transaction():
    with trio() as three:
        three.fill(5)
        plant(
            three,
            (500, None, b"kept", b"committed"),
            (500, COMMIT, b"", b""),
            (501, None, b"k1", b"aborted"),
            (501, ABORT, b"", b""),
        )
        three.fill(25)
        opened = plant(three, (502, None, b"k2", b"open"))
        three.fill(25, start=100)
        three.clean()
        for number in (2, 3):
            leader = three.leader
            three.cluster.kill(leader)
            rest = [node for node in NODES if node != leader]
            successor = three.until_leader(*rest)
            three.fill(25, start=100 * number)
            body = {"topic": three.topic, "partition": 0, "wait": True}
            (said,) = three.api(successor).post("compaction/now", body)["partitions"]
            assert "the last stable offset begins there" in said["reason"]
            assert three.status(successor)["first_dirty_offset"] <= opened
            three.until_applied(*rest)
            three.cluster.start(leader)
            three.until_in_sync(*NODES)
            three.until_applied(*NODES)
            three.until_equal()
            for node in NODES:
                assert b"aborted" not in values(three, node)
                assert {b"committed", b"open"} <= values(three, node)
        held_back = len(three.files(0))
        plant(three, (502, COMMIT, b"", b""))
        three.fill(25, start=400)
        three.clean()
        three.until_applied(*NODES)
        three.until_equal()
        assert len(three.files(0)) < held_back, "what was held back is compacted"
        assert b"open" not in values(three, 0), "k2 was written again since"
        assert three.live()[b"kept"] == b"committed"
