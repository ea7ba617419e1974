"""kafkajs: a Node client, which negotiates and groups on its own."""

from __future__ import annotations

import json
import subprocess

import pytest

from kept.testing import Cluster
from tests.compat.scenario import story_over_a_kill

pytestmark = [pytest.mark.node_js, pytest.mark.slow, pytest.mark.timeout(600)]  # npm is slow


def test_codecs_groups_and_commits(broker, workspace):
    done = subprocess.run(
        ["node", "round_trip.js", broker.bootstrap, broker.name("node")],
        cwd=workspace,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert len(result["codecs"]) == 10
    assert result["grouped"] == 350


@pytest.mark.parametrize("nodes", [1, 3])
def test_nothing_is_lost_over_kill_9(workspace, nodes):
    with Cluster(nodes) as cluster:
        result = story_over_a_kill(
            cluster,
            "survivor",
            ["node", "over_a_kill.js", cluster.bootstrap, "survivor"],
            workspace,
        )
    assert (result["sent"], result["seen"], result["held"]) == (600, 600, 600)
    assert result["twice"] <= 300  # the second half, read on while commits found no coordinator
