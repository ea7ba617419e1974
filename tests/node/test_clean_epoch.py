"""What a node says of the process before when it registers: nothing was lost, or it cannot tell."""

from __future__ import annotations

from pathlib import Path

import pytest

from kept.cluster.controller import brokers
from kept.storage import layout


@pytest.mark.parametrize("of", ["clean stop", "kill"])
def test_all_log_directories_must_prove_the_same_epoch(of, lone_node, tmp_path, monkeypatch):
    """A directory that proves none may have lost what was acknowledged in it."""
    told: list[int] = []
    real = brokers.register_broker

    def register(image, registration, **more):
        told.append(registration.clean_epoch)
        return real(image, registration, **more)

    monkeypatch.setattr(brokers, "register_broker", register)
    paths = [tmp_path / "a", tmp_path / "b"]
    dirs = ",".join(map(str, paths))
    marks = [path / layout.CLEAN_SHUTDOWN for path in paths]
    epochs = []

    def run() -> None:
        lone = lone_node(**{"log.dirs": dirs})
        epochs.append(lone.node.parts.identity.broker_epoch)
        lone.stop()
        if of == "kill":
            for mark in marks:
                mark.unlink()

    run()
    run()
    for name in (layout.CLEAN_SHUTDOWN, layout.RUNNING):
        Path(paths[1], name).unlink(missing_ok=True)
    run()
    assert told == [-1, epochs[0], -1]
