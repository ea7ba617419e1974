"""Three nodes that are killed or restarted while clients go on (:mod:`.scenario`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kept.testing import Cluster
from tests.compat.adapters import Aiokafka, KafkaPython, Librdkafka
from tests.compat.scenario import over_a_kill, over_restarts


@pytest.fixture(scope="module")
def three() -> Iterator[Cluster]:
    with Cluster(nodes=3) as cluster:
        yield cluster


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("story", [over_a_kill, over_restarts])
@pytest.mark.parametrize("client", [Librdkafka, KafkaPython, Aiokafka])
def test_nothing_is_lost(three, client, story):
    made = client()
    try:
        story(three, made)
    finally:
        if isinstance(made, Aiokafka):
            made.end()
