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
    """Why a node does not start; ``--check`` says the same."""
    given = [part for one in settings for part in ("--set", one)]
    listener = f"listeners=PLAINTEXT://localhost:{free_port()}"
    command = ("serve", "--node-id", node_id, "--set", listener, *given)
    said = offline(*command, status=1, cwd=tmp_path).err
    assert offline(*command, "--check", status=1, cwd=tmp_path).err == said
    return said


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


def test_a_log_directory_that_is_missing(offline, tmp_path, used):
    meta = used.parent / "meta"
    moved = used.rename(tmp_path / "moved")
    said = serve(offline, tmp_path, f"log.dirs={used}", f"metadata.log.dir={meta}")
    assert f"last seen at {used}, is not in log.dirs or is empty" in said
    moved.rename(used)


def test_logs_that_nobody_owns(offline, tmp_path):
    (tmp_path / "log" / "users-0").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    given = ("--set", f"log.dirs={tmp_path}/log", "--set", f"metadata.log.dir={tmp_path}/meta")
    ran = offline("serve", "--check", *given, status=1, cwd=tmp_path)
    assert f"{tmp_path}/log holds logs but no meta.properties" in ran.err
    assert sorted(tmp_path.rglob("*")) == before, "a check writes nothing"


def test_a_data_directory_of_apache_kafka(offline, tmp_path):
    kafkas = tmp_path / "kafka"
    kafkas.mkdir()
    (kafkas / "meta.properties").write_text("version=1\ncluster.id=x\nnode.id=0\n")
    said = serve(offline, tmp_path, f"log.dirs={kafkas}", f"metadata.log.dir={tmp_path}/meta")
    assert "is Apache Kafka's data directory" in said


def test_a_check_of_a_running_node_is_right_and_says_that_the_port_is_in_use(offline, kept_broker):
    given = ("--port", kept_broker.port(), "--data-dir", kept_broker.data_dir(), "--check")
    ran = offline("serve", *given)
    assert ran.out == "settings are right\n"
    assert f"warning: listeners: the port of PLAINTEXT://localhost:{kept_broker.port()}" in ran.err
    assert "is in use, it seems by this node" in ran.err


def test_a_port_that_somebody_else_has_is_refused(offline, kept_broker, tmp_path):
    given = ("--port", kept_broker.port(), "--data-dir", tmp_path / "new", "--check")
    said = offline("serve", *given, status=1).err
    assert f"the port of PLAINTEXT://localhost:{kept_broker.port()} is in use, and not by" in said
    assert not (tmp_path / "new").exists()


def test_the_file_goes_by_its_old_name_too(offline, tmp_path):
    (tmp_path / "a.yaml").write_text("num.partitions: 0\n")
    for name in ("--config-file", "-f", "--config"):
        ran = offline("serve", "--check", name, "a.yaml", status=1, cwd=tmp_path)
        assert "num.partitions" in ran.err
    shown = offline("serve", "--help").out
    assert "-f, --config-file FILE" in shown and "--config " not in shown
