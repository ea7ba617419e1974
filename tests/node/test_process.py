"""What a process says of its node before it starts it."""

import asyncio
import gc
import signal

import pytest
from click.testing import CliRunner

from kept.cli.commands.serve import serve
from kept.node import process
from kept.node.config.node_config import NodeConfig
from kept.node.kafka_import import adopt
from kept.node.metadata import preflight
from kept.node.node import Node
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


def test_a_node_that_serves_does_not_look_through_all_it_has_for_garbage(monkeypatch, tmp_path):
    """What there is after a start is not looked at by any collection, that of the start included:
    the loop would stand still for as long as that takes."""
    full = []
    real = Node.warmed_up

    async def warmed_up(node: Node) -> None:
        await real(node)
        loop = asyncio.get_running_loop()
        loop.call_soon(lambda: loop.call_soon(node.parts.shutdown.requested.set))

    def collected(phase: str, told: dict[str, int]) -> None:
        full.extend([phase] * (told["generation"] == 2))

    monkeypatch.setattr(Node, "warmed_up", warmed_up)
    monkeypatch.setattr(process, "raise_file_limit", lambda: None)
    thresholds, frozen = gc.get_threshold(), gc.get_freeze_count()
    gc.callbacks.append(collected)
    try:
        gc.set_threshold(*process.GC_THRESHOLDS)
        config = NodeConfig.load(None, {}, {}, port=0, data_dir=str(tmp_path))
        assert asyncio.run(process.serve(config)) == ""
        assert not full
        assert gc.get_freeze_count() > frozen + 100
    finally:
        gc.callbacks.remove(collected)
        gc.set_threshold(*thresholds)


def test_a_collection_of_new_objects_is_short():
    """The loop stands still for it."""
    counts = []

    def collecting(phase: str, told: dict[str, int]) -> None:
        if phase == "start" and told["generation"] == 1:
            counts.append(len(gc.get_objects(0)) + len(gc.get_objects(1)))

    thresholds = gc.get_threshold()
    gc.collect()
    gc.callbacks.append(collecting)
    try:
        gc.set_threshold(*process.GC_THRESHOLDS)
        kept = [[] for _ in range(120_000)]
    finally:
        gc.callbacks.remove(collecting)
        gc.set_threshold(*thresholds)
    assert len(kept) == 120_000 and counts
    assert max(counts) < 40_000
