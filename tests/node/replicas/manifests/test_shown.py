"""What anybody can check afterwards: a deleted key stays deleted, why its offsets are gone, that
the replicas are equal, and that they take the same room.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.node.replicas.manifests.trio import CONFIG, DEADLINE_S, Trio, trio

pytestmark = pytest.mark.slow
ALIVE_AT, DELETED_AT = 0, 31


def command(three: Trio, *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "kept", *arguments, "--bootstrap", three.cluster.bootstrap],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        timeout=2 * DEADLINE_S,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def why(three: Trio, offset: int) -> dict[str, Any]:
    said = command(three, "compact", "why-missing", three.topic, "0", str(offset), "--json")
    found: dict[str, Any] = json.loads(said)
    return found


def disk_use(three: Trio, node: int) -> int:
    """Bytes of a replica's records."""
    directory = three.directory(node)
    names = [name for name in os.listdir(directory) if name.endswith(".log")]
    return sum(os.stat(os.path.join(directory, name)).st_size for name in names)


def test_the_one_that_was_away_leads_and_can_tell_why():
    with trio() as three:
        assert CONFIG["delete.retention.ms"] == "0"
        away = three.leader
        others = [node for node in range(3) if node != away]
        three.put((b"gone", b"alive"))
        three.fill(30)
        three.until_in_sync(0, 1, 2)
        three.cluster.kill(away)
        three.until_leader(*others)
        three.put((b"gone", None))
        three.fill(30, start=30)
        three.clean()
        three.fill(3, start=60)
        three.clean()
        assert b"gone" not in three.table()
        three.cluster.start(away)
        three.until_in_sync(0, 1, 2)
        three.until_applied(0, 1, 2)
        three.elect(away)
        assert b"gone" not in three.table()
        asked = {"topic": three.topic, "partition": 0, "offset": ALIVE_AT}
        here = three.api(away).get("compaction/why-missing", **asked, node=away)
        assert here["reason"] == "as the leader decided", "its own journal knows no more"
        for node in range(3):  # each says the same, whoever leads and whoever knows
            said = three.api(node).get("compaction/why-missing", **asked)
            assert (said["fate"], said["reason"]) == ("removed", "superseded")
        alive, deleted = why(three, ALIVE_AT), why(three, DELETED_AT)
        assert (alive["fate"], alive["reason"]) == ("removed", "superseded")
        assert (deleted["fate"], deleted["reason"]) == ("removed", "expired tombstone")
        assert "by the journal of node" in alive["explanation"]
        assert "equal" in command(three, "compact", "verify", three.topic)
        sizes = [disk_use(three, node) for node in range(3)]
        assert max(sizes) - min(sizes) <= int(CONFIG["segment.bytes"]), sizes
