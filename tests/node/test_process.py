"""What a process says of its node before it starts it."""

import gc
import signal

import pytest
from click.testing import CliRunner

from kept.cli.commands.serve import serve
from kept.node import process
from kept.node.config.node_config import NodeConfig
from kept.node.kafka_import import adopt
from kept.node.metadata import preflight
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


@pytest.mark.parametrize("options", [[], ["--check"]], ids=["start", "check"])
def test_garbage_is_collected_while_directories_are_adopted(monkeypatch, tmp_path, options):
    """The command imports without the collector; adopting may work for minutes."""
    seen = []

    def adopted(*_args, **_options):
        seen.append(gc.isenabled())
        raise KeyboardInterrupt

    monkeypatch.setattr(adopt, "adopt", adopted)
    monkeypatch.setattr(preflight, "check", lambda *_, **__: [])
    monkeypatch.setattr(process.log, "configure", lambda **_: None)
    monkeypatch.setattr(process, "bridge", lambda: None)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    thresholds = gc.get_threshold()
    try:
        arguments = ["--adopt", "--data-dir", str(tmp_path), *options]
        result = CliRunner().invoke(serve, arguments)
    finally:
        gc.enable()
        gc.set_threshold(*thresholds)
    assert seen == [True], result.output
