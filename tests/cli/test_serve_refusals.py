"""``kept serve`` where it may not serve: nothing is left behind by a start that fails."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from kept.testing.ports import free_port


@pytest.fixture
def used(kept_cluster) -> Path:
    """The log directory of a node that ran."""
    cluster = kept_cluster()
    cluster.create_topic()
    cluster.stop()
    return Path(cluster.log_dir())


def serve(offline, tmp_path, *settings: str, node_id: int = 0) -> str:
    given = [part for one in settings for part in ("--set", one)]
    listener = f"listeners=PLAINTEXT://localhost:{free_port()}"
    more = ("--node-id", node_id, "--set", listener)
    return offline("serve", *more, *given, status=1, cwd=tmp_path).err


def test_a_log_directory_of_another_cluster(offline, tmp_path, used):
    before = sorted(used.rglob("*"))
    meta = tmp_path / "fresh" / "meta"
    said = serve(offline, tmp_path, f"log.dirs={used}", f"metadata.log.dir={meta}")
    assert f"{used} belongs to cluster.id" in said
    assert f"{meta} holds no metadata of it" in said
    assert sorted(used.rglob("*")) == before
    assert list(tmp_path.iterdir()) == []


def test_a_log_directory_of_another_node(offline, tmp_path, used):
    meta = used.parent / "meta"
    before = sorted(used.parent.rglob("*"))
    said = serve(offline, tmp_path, f"log.dirs={used}", f"metadata.log.dir={meta}", node_id=5)
    assert f"{used} belongs to node.id '0', not to '5'" in said
    assert sorted(used.parent.rglob("*")) == before


def test_metadata_of_another_cluster(offline, tmp_path, used, kept_cluster):
    other = kept_cluster()
    other.stop()
    meta = tmp_path / "meta"
    shutil.copytree(Path(other.data_dir()) / "meta", meta)
    said = serve(offline, tmp_path, f"log.dirs={used}", f"metadata.log.dir={meta}")
    assert "log-directories" in said or "belongs to cluster.id" in said
