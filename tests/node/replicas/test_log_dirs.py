"""What is made of log directories that are broken when they are opened, or marked as in use."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from kept.node.metadata import directory_ids
from kept.node.metadata.node_identity import NodeIdentity
from kept.node.replicas import log_dirs
from kept.node.replicas.log_dirs import LogDirs
from kept.node.replicas.replica_table import ReplicaTable
from kept.node.runtime.counters import Counters
from kept.storage import checkpoints, layout
from kept.storage.disk import Disk
from kept.storage.errors import DirectoryRefused, MachineError
from kept.storage.producers.producer_states import ProducerQuota
from tests.support.replicas import InlineRuntime, live_config, recorded_failures
from tests.support.simulated_disk import SimulatedDisk


def failure(path: str) -> MachineError:
    return MachineError(path, "open", OSError(5, "EIO"))


def directories(paths: str, disk: Any = None, table: ReplicaTable | None = None) -> LogDirs:
    """The entries ``paths`` of ``log.dirs``, one letter each; none: it is a controller only."""
    settings = {"log_dirs": ",".join(f"/{path}" for path in paths)}
    if not paths:
        voter = "1@localhost:10092"
        settings = {
            "process_roles": "controller",
            "node_id": "1",
            "log_dirs": "/a",
            "controller_quorum_voters": voter,
        }
    runtime: Any = InlineRuntime(disk)
    return LogDirs(
        runtime=runtime,
        config=live_config(**settings).current,
        identity=NodeIdentity(1, "c"),
        table=table or ReplicaTable(),
        failures=recorded_failures([]),
        counters=Counters(),
        producer_quota=ProducerQuota(10),
    )


@pytest.mark.parametrize(
    ("paths", "broken", "refused"),
    [("ab", "", ""), ("ab", "b", ""), ("ab", "ba", "a"), ("", "", ""), ("a", "a", "a")],
)
def test_a_node_starts_while_one_directory_is_left(monkeypatch, paths, broken, refused) -> None:
    def check(_: object, path: str) -> None:
        if path[1:] in broken:
            raise failure(path)

    monkeypatch.setattr(log_dirs, "refuse_kafka", check)
    found = directories(paths)
    if refused:
        with pytest.raises(MachineError) as caught:
            found.find_usable()
        assert caught.value.path == f"/{refused}"
    else:
        assert found.find_usable() == [f"/{path}" for path in paths if path not in broken]


def test_every_directory_that_works_is_marked_as_in_use(lone_node, tmp_path, monkeypatch) -> None:
    lone = lone_node(log_dirs=",".join(str(tmp_path / name) for name in "abc"))
    breaks, offline, works = lone.node.parts.table.directories
    marked = []

    def mark(epoch: int, name: str) -> None:
        marked.append((name, epoch))
        if name == breaks.name:
            raise failure(name)

    for one in (breaks, offline, works):
        monkeypatch.setattr(one.directory, "mark_running", partial(mark, name=one.name))
    offline.offline = "it broke"
    lone.run(lone.node.parts.replicas.mark_running(7))
    assert marked == [(breaks.name, 7), (works.name, 7)]
    assert "EIO" in breaks.offline and works.offline is None


@pytest.mark.parametrize("probe", ["read", "not in memory", "fails"])
def test_whether_files_are_read_from_memory_is_found_out_where_they_are(monkeypatch, probe) -> None:
    closed = []

    class Opened:
        def close(self, *, clean: bool) -> None:
            closed.append(clean)

    class Probed:
        def open_read(self, path: str) -> str:
            return path

        def preadv_nowait(self, file: str, position: int, size: int) -> bytes | None:
            assert (file, position, size) == ("/d/meta.properties", 0, 1)
            if probe == "fails":
                raise failure("/d")
            return b"v" if probe == "read" else None

    opened, table = Opened(), ReplicaTable()
    table.reads_in_memory = False
    monkeypatch.setattr(log_dirs.LogDirectory, "open", lambda *_, **__: opened)
    dirs = directories("d", Probed(), table)
    if probe == "fails":
        with pytest.raises(MachineError):
            dirs._open("/d")
    else:
        assert dirs._open("/d") is opened
    assert table.reads_in_memory is (probe == "not in memory")
    assert closed == ([False] if probe == "fails" else [])


@pytest.mark.parametrize("other", ["", "dir-c"])
def test_a_directory_that_is_missing_is_named_with_what_is_in_its_place(tmp_path, other) -> None:
    disk = Disk({})
    meta, kept, gone = (str(tmp_path / name) for name in ("meta", "kept", "gone"))
    for path in (meta, kept, gone):
        disk.ensure_directory(path)
    known = {"dir-a": kept, "dir-b": gone}
    checkpoints.write_properties(disk, f"{meta}/{directory_ids.FILE}", known)
    found = {"directory.id": "dir-a"}
    checkpoints.write_properties(disk, f"{kept}/{layout.META_PROPERTIES}", found)
    if other:
        found = {"directory.id": other}
        checkpoints.write_properties(disk, f"{gone}/{layout.META_PROPERTIES}", found)
    with pytest.raises(DirectoryRefused) as refused:
        directory_ids.refuse_missing(disk, meta, [kept, gone])
    said = str(refused.value)
    assert f"the log directory dir-b, last seen at {gone}, is not in log.dirs" in said
    assert f"({gone}/{layout.META_PROPERTIES} has {other or 'no directory.id'})" in said
    assert f"({kept}/" not in said
    directory_ids.refuse_missing(disk, meta, [kept, gone], broken=[gone])


@pytest.mark.parametrize("found", ["another node", "nothing", "no id"])
def test_a_directory_of_another_node_is_refused_before_anything_is_made(tmp_path, found) -> None:
    disk = Disk({})
    meta, path = str(tmp_path / "meta"), str(tmp_path / "a")
    disk.ensure_directory(meta)
    disk.ensure_directory(path)
    given = {"version": "1", "cluster.id": "c", "node.id": "8", "directory.id": "x", "kept": "1"}
    if found == "nothing":
        given = {}
    elif found == "no id":
        del given["directory.id"]
        known = {"of-this-one": path}
        checkpoints.write_properties(disk, f"{meta}/{directory_ids.FILE}", known)
    checkpoints.write_properties(disk, f"{path}/{layout.META_PROPERTIES}", given)
    message = {
        "another node": "belongs to node.id '8', not to '7'",
        "nothing": r"meta.properties is empty.*directory.id=\(any 22 characters",
        "no id": "meta.properties lacks directory.id: .*directory.id=of-this-one",
    }[found]
    with pytest.raises(DirectoryRefused, match=message):
        directory_ids.refuse_foreign(disk, meta, [path], node_id=7, alone=False)


def test_whose_the_metadata_is_is_noted_once():
    disk = SimulatedDisk()
    disk.ensure_directory("/meta")
    assert directory_ids.cluster_of(disk, "/meta") is None
    directory_ids.remember_cluster(disk, "/meta", 3, "c")
    calls = disk.calls
    directory_ids.remember_cluster(disk, "/meta", 3, "c")
    assert disk.calls == calls
    assert directory_ids.cluster_of(disk, "/meta") == "c"
