"""What a process says of its node before it starts it."""

import pytest

from kept.node.config.node_config import NodeConfig
from kept.node.process import out_of_reach

HERE = {"listeners": "PLAINTEXT://localhost:9092"}
EVERYWHERE = {"listeners": "PLAINTEXT://:9092", "advertised.listeners": "PLAINTEXT://k:9092"}
TOLD = {"advertised.listeners": "PLAINTEXT://k:9092"}


@pytest.mark.parametrize(
    ("settings", "pid", "said"),
    [
        ({}, 7, None),
        ({}, 1, "set KEPT_LISTENERS and KEPT_ADVERTISED_LISTENERS"),
        (EVERYWHERE, 1, None),
        (EVERYWHERE, 7, None),
        (TOLD, 7, "listens on PLAINTEXT://localhost:9092, and they are told PLAINTEXT://k:9092"),
        ({**HERE, **TOLD}, 7, "set listeners, as in PLAINTEXT://:9092"),
        ({**HERE, "advertised.listeners": "PLAINTEXT://127.0.0.1:9092"}, 7, None),
    ],
)
def test_clients_that_do_not_reach_it_are_told_of(settings, pid, said):
    found = out_of_reach(NodeConfig.load(None, settings, {}), pid)
    assert (found is None) == (said is None)
    assert found is None or (said in found[1] and "do not reach the node" in found[0])
