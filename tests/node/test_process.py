"""What a process says of its node before it starts it."""

import asyncio
import gc
import os
import signal

import pytest
from click.testing import CliRunner

from kept.cli.commands.serve import serve
from kept.node import process
from kept.node.config.checks import STANDARD_AUTHORIZER
from kept.node.config.node_config import NodeConfig
from kept.node.kafka_import import adopt
from kept.node.metadata import preflight
from kept.node.node import Node
from kept.node.process import out_of_reach
from kept.node.security.session import Session
from tests.support.loops import until

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


class Collector:
    """What :mod:`gc` was asked for."""

    def __init__(self) -> None:
        self.full = 0
        self.asked: list[str] = []

    def get_stats(self) -> list[dict[str, int]]:
        return [{"collections": 0}, {"collections": 0}, {"collections": self.full}]

    def collect(self, generation: int) -> None:
        assert generation == 1, "a full one takes long"
        self.asked.append("collect")

    def freeze(self) -> None:
        self.asked.append("freeze")

    def unfreeze(self) -> None:
        self.asked.append("unfreeze")


def test_objects_of_many_new_replicas_are_frozen_and_those_of_many_removed_ones_are_not(
    monkeypatch,
):
    collector, many = Collector(), process.MANY_REPLICAS
    monkeypatch.setattr(process, "gc", collector)
    objects = process.LongLivedObjects(5 * many, 0)

    def look(replicas: int, removed: int) -> list[str]:
        collector.asked = []
        objects.adjust(replicas, removed)
        return collector.asked

    assert collector.asked == ["freeze"]
    assert look(6 * many - 1, 0) == []
    assert look(6 * many, 0) == ["collect", "freeze"]
    assert look(6 * many, 0) == []
    assert look(5 * many + 1, many - 1) == []
    assert look(6 * many + 1, many - 1) == [], "garbage of those that were removed is not frozen"
    assert look(6 * many, many) == ["unfreeze"]
    assert look(7 * many, many) == [], "it is not freed yet"
    collector.full += 1
    assert look(7 * many, many) == ["collect", "freeze"], "now it is"
    assert look(7 * many, many) == []


def test_garbage_that_a_full_collection_could_not_see_is_not_frozen_again(monkeypatch):
    """It ran when the replicas were removed already, and frozen still."""
    collector, many = Collector(), process.MANY_REPLICAS
    monkeypatch.setattr(process, "gc", collector)
    objects = process.LongLivedObjects(5 * many, 0)
    collector.full += 1
    objects.adjust(4 * many, many)
    objects.adjust(5 * many, many)
    assert collector.asked == ["freeze", "unfreeze"]
    collector.full += 1
    objects.adjust(5 * many, many)
    assert collector.asked == ["freeze", "unfreeze", "collect", "freeze"]


def test_a_node_looks_at_its_replicas_while_no_log_is_made(lone, monkeypatch):
    collector, seen = Collector(), []
    monkeypatch.setattr(process, "gc", collector)
    monkeypatch.setattr(process, "ADJUST_S", 0.001)
    lifecycle = lone.node.parts.replicas.log_lifecycle

    def adjust(_: process.LongLivedObjects, replicas: int, removed: int) -> None:
        assert lifecycle.is_idle
        seen.append((replicas, removed))

    monkeypatch.setattr(process.LongLivedObjects, "adjust", adjust)

    async def watched():
        task = asyncio.create_task(process.keep_collections_short(lone.node))
        await lone.created("some", 5)
        while (5, 0) not in seen:
            await asyncio.sleep(0.001)
        await lone.request(20, 6, topics=[{"name": "some", "topic_id": None}], timeout=1000)
        while (0, 5) not in seen:
            await asyncio.sleep(0.001)
        task.cancel()

    lone.run(asyncio.wait_for(watched(), 60))


def test_the_heap_of_a_node_moves_into_huge_pages_once_all_is_imported(monkeypatch, tmp_path):
    done, real = [], Node.warmed_up

    async def warmed_up(node: Node) -> None:
        await real(node)
        done.append("imported")
        node.parts.shutdown.requested.set()

    monkeypatch.setattr(Node, "warmed_up", warmed_up)
    monkeypatch.setattr(process, "collapse_heap", lambda: done.append("moved"))
    monkeypatch.setattr(process, "raise_file_limit", lambda: None)
    config = NodeConfig.load(None, {}, {}, port=0, data_dir=str(tmp_path))
    assert asyncio.run(asyncio.wait_for(process.serve(config), 60)) == ""
    assert done == ["imported", "moved"]


def test_a_signal_opens_the_audit_log_anew(monkeypatch, tmp_path):
    """As logrotate sends it, once it has renamed the file."""
    path, real = tmp_path / "audit.log", Node.warmed_up

    async def warmed_up(node: Node) -> None:
        await real(node)

        def is_written() -> bool:
            node.parts.audit.changed(Session(), "create_topics", ("t",))
            return path.exists()

        await until(is_written)
        path.rename(tmp_path / "audit.log.1")
        os.kill(os.getpid(), signal.SIGHUP)
        await until(is_written)
        node.parts.shutdown.requested.set()

    monkeypatch.setattr(Node, "warmed_up", warmed_up)
    monkeypatch.setattr(process, "raise_file_limit", lambda: None)
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        settings = {
            "kept.audit": "all",
            "kept.audit.path": str(path),
            "authorizer.class.name": STANDARD_AUTHORIZER,
            "super.users": "User:admin",
        }
        config = NodeConfig.load(None, settings, {}, port=0, data_dir=str(tmp_path / "data"))
        assert asyncio.run(asyncio.wait_for(process.serve(config), 60)) == ""
    finally:
        signal.signal(signal.SIGHUP, before)


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
    assert max(counts) < 8_000
