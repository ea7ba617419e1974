"""Deleted keys stay deleted: three nodes, one of which is away while a tombstone is removed."""

from __future__ import annotations

import pytest

from tests.node.manifests.trio import trio

pytestmark = pytest.mark.slow


def test_a_replica_that_was_away_does_not_bring_a_deleted_key_back():
    with trio() as three:
        first = three.leader
        others = [node for node in range(3) if node != first]
        three.put((b"gone", b"alive"))
        three.fill(30)
        three.cluster.stop(first)
        three.until_leader(*others)
        three.put((b"gone", None))
        three.fill(30, start=30)
        three.clean()
        three.fill(3, start=60)
        three.clean()
        assert b"gone" not in three.table(), "the tombstone is gone, too"
        three.until_applied(*others)
        three.cluster.start(first)
        three.until_in_sync(0, 1, 2)
        three.until_applied(0, 1, 2)
        three.elect(first)
        assert b"gone" not in three.table()
        assert len(three.live()) == 7
        three.until(
            lambda: three.files(0) == three.files(1) == three.files(2), "the files are equal"
        )
        assert [three.left_over(node) for node in range(3)] == [[], [], []]
