"""What is made of log directories that are broken when they are opened, or marked as in use."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from kept.node.parts.metadata import directory_ids
from kept.node.replicas import log_dirs
from kept.storage import checkpoints, layout
from kept.storage.disk import Disk
from kept.storage.errors import DirectoryRefused, MachineError


def failure(path: str) -> MachineError:
    return MachineError(path, "open", OSError(5, "EIO"))


@pytest.mark.parametrize(
    ("paths", "broken", "refused"),
    [("ab", "", ""), ("ab", "b", ""), ("ab", "ba", "a"), ("", "", ""), ("a", "a", "a")],
)
def test_a_node_starts_while_one_directory_is_left(monkeypatch, paths, broken, refused) -> None:
    def check(_: object, path: str) -> None:
        if path in broken:
            raise failure(path)

    monkeypatch.setattr(log_dirs, "refuse_kafka", check)
    disk: Any = None
    if refused:
        with pytest.raises(MachineError) as caught:
            log_dirs.look(disk, list(paths))
        assert caught.value.path == refused
    else:
        assert sorted(log_dirs.look(disk, list(paths))) == sorted(broken)


def test_every_directory_that_works_is_marked_as_in_use() -> None:
    marked, failed = [], []

    def directory(name: str, offline: str | None = None) -> Any:
        async def run(mark: Any, epoch: int) -> None:
            mark(name, epoch)

        def mark(name: str, epoch: int) -> None:
            marked.append((name, epoch))
            if name == "breaks":
                raise failure(name)

        return SimpleNamespace(
            name=name, offline=offline, pool=SimpleNamespace(run=run),
            directory=SimpleNamespace(mark_running=mark),
        )  # fmt: skip

    several = [directory("breaks"), directory("offline", "it broke"), directory("works")]
    replica_manager = SimpleNamespace(
        directories=several, fail=lambda one, error: failed.append((one.name, error.path))
    )
    node: Any = SimpleNamespace(replica_manager=replica_manager)
    asyncio.run(log_dirs.mark_running(node, 7))
    assert marked == [("breaks", 7), ("works", 7)]
    assert failed == [("breaks", "breaks")]


@pytest.mark.parametrize("probe", ["read", "not in memory", "fails"])
def test_whether_files_are_read_from_memory_is_found_out_where_they_are(monkeypatch, probe) -> None:
    closed = []
    opened = SimpleNamespace(close=lambda *, clean: closed.append(clean))
    monkeypatch.setattr(log_dirs.LogDirectory, "open", lambda *_, **__: opened)

    def read(file: str, position: int, size: int) -> bytes | None:
        assert (file, position, size) == ("/d/meta.properties", 0, 1)
        if probe == "fails":
            raise failure("/d")
        return b"v" if probe == "read" else None

    disk = SimpleNamespace(open_read=lambda path: path, preadv_nowait=read)
    node: Any = SimpleNamespace(
        disk=disk, cluster_id="c", node_id=1, new_id=int, now_ms=int, reads_in_memory=False
    )
    if probe == "fails":
        with pytest.raises(MachineError):
            log_dirs._open(node, "/d")
    else:
        assert log_dirs._open(node, "/d") is opened
    assert node.reads_in_memory is (probe == "not in memory")
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
