"""Files of metadata are private; wider ones are named, with what makes them so."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from kept.node.config.node_config import NodeConfig
from kept.node.node import Node


def start_once(directory: Path) -> None:
    async def once() -> None:
        node = Node(NodeConfig.load(None, {}, {}, port=0, data_dir=str(directory)))
        await node.start()
        await node.stop()

    asyncio.run(once())


def modes(directory: Path) -> set[int]:
    return {path.stat().st_mode & 0o777 for path in (directory, *directory.rglob("*"))}


def test_what_others_may_read_is_named(tmp_path, capfd: pytest.CaptureFixture[str]) -> None:
    before = os.umask(0)
    try:
        start_once(tmp_path)
    finally:
        os.umask(before)
    meta = tmp_path / "meta"
    assert modes(meta) <= {0o700, 0o600} and modes(tmp_path / "log") <= {0o700, 0o600}
    assert "other users" not in capfd.readouterr().err
    (meta / "metadata.wal").chmod(0o640)
    meta.chmod(0o755)
    start_once(tmp_path)
    said = capfd.readouterr().err
    assert f"paths={meta},{meta}/metadata.wal " in said and f"chmod -R go= {meta}" in said
    assert modes(meta) == {0o755, 0o640, 0o600}, "it is the operator's to change"
