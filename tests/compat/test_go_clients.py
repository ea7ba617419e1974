"""Three clients written in Go: franz-go, sarama and kafka-go."""

from __future__ import annotations

import pytest

from kept.testing import Cluster
from tests.compat.scenario import story_over_a_kill
from tests.tools import go_tools

pytestmark = [pytest.mark.go, pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("library", ["franz", "sarama", "segmentio"])
def test_nothing_is_lost_over_kill_9(library):
    program = go_tools.kafka_clients()
    with Cluster(nodes=3) as cluster:
        command = [str(program), library, cluster.bootstrap, "survivor"]
        result = story_over_a_kill(cluster, "survivor", command)
    assert (result["sent"], result["seen"]) == (600, 600)
    assert result["twice"] <= 310  # the second half, read on while commits found no coordinator
    if library == "segmentio":  # it is not idempotent
        assert 600 <= result["held"] <= 610
    else:
        assert result["held"] == 600
