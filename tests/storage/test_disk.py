"""The real disk, and that the simulated one is like it."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import shutil
import socket

import pytest

from kept.storage.disk import IOV_LIMIT, Disk, File, parent
from kept.storage.errors import MachineError
from tests.support.simulated_disk import SimulatedCrash, SimulatedDisk
from tests.tools.needs import cannot_run


@pytest.fixture(params=["real", "simulated"])
def both(request, tmp_path):
    if request.param == "real":
        return Disk({}), str(tmp_path)
    disk = SimulatedDisk()
    disk.mkdir("/d")
    return disk, "/d"


def test_files(both) -> None:
    disk, d = both
    file = disk.open_append(f"{d}/f")
    assert disk.writev(file, [b"abc", memoryview(b"def"), bytearray(b"gh")], 0) == 8
    assert disk.writev(file, [b"XY"], 1) == 2
    assert disk.pread(file, 0, 100) == b"aXYdefgh" and disk.pread(file, 50, 5) == b""
    assert disk.read(f"{d}/f") == b"aXYdefgh"
    many = [b"%d" % (i % 10) for i in range(IOV_LIMIT + 100)]
    disk.writev(file, many, 8)
    assert disk.pread(file, 8, 99999) == b"".join(many)
    disk.truncate(file, 3)
    assert disk.size(file) == disk.stat(f"{d}/f").size_bytes == 3
    disk.fsync(file)
    disk.fdatasync(file)
    disk.drop_cache(file, 0, 3)
    disk.fsync_dir(d)
    disk.set_mtime(f"{d}/f", 12345)
    assert disk.stat(f"{d}/f").mtime_ms == 12345


def test_names(both) -> None:
    disk, d = both
    with pytest.raises(FileNotFoundError):
        disk.open_read(f"{d}/none")
    disk.write_file(f"{d}/a", b"1")
    disk.write_file(f"{d}/a", b"")
    assert disk.read(f"{d}/a") == b""
    with pytest.raises(FileExistsError):
        disk.open_new(f"{d}/a")
    disk.open_new(f"{d}/b")
    disk.rename(f"{d}/b", f"{d}/a")
    assert disk.listdir(d) == ["a"]
    disk.write_atomic(f"{d}/a", b"new")
    assert disk.read(f"{d}/a") == b"new" and disk.listdir(d) == ["a"]
    disk.unlink(f"{d}/a")
    disk.unlink(f"{d}/a")
    with pytest.raises(FileNotFoundError):
        disk.stat(f"{d}/a")
    with pytest.raises(FileNotFoundError):
        disk.rename(f"{d}/a", f"{d}/b")
    disk.ensure_directory(f"{d}/x/y/z")
    disk.write_file(f"{d}/x/y/z/f", b"1")
    assert disk.stat(f"{d}/x/y").is_directory
    disk.remove_tree(f"{d}/x")
    disk.remove_tree(f"{d}/x")
    assert disk.listdir(d) == [] and disk.free_bytes(d) > 0


def test_an_open_file_outlives_its_name(both) -> None:
    disk, d = both
    disk.write_file(f"{d}/f", b"content")
    file = disk.open_read(f"{d}/f")
    disk.unlink(f"{d}/f")
    assert disk.pread(file, 0, 100) == b"content"


def test_a_descriptor_closes_with_its_last_reference(tmp_path) -> None:
    file = Disk({}).open_append(str(tmp_path / "f"))
    fd = file.fd
    os.fstat(fd)
    del file
    with pytest.raises(OSError):
        os.fstat(fd)


def test_errors_name_the_path_and_the_call(tmp_path) -> None:
    disk = Disk({})
    file = File(os.open(tmp_path, os.O_RDONLY), str(tmp_path))
    with pytest.raises(MachineError) as raised:
        disk.writev(file, [b"x"], 0)
    assert raised.value.path == str(tmp_path) and raised.value.operation == "write"
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(MachineError):
        disk.listdir(str(tmp_path / "file"))
    with pytest.raises(MachineError, match="rmdir"):
        disk.rmdir(str(tmp_path))


def test_a_directory_that_is_gone_is_a_failing_disk(tmp_path, monkeypatch) -> None:
    disk = Disk({})
    gone = tmp_path / "gone"
    with pytest.raises(MachineError, match="gone"):
        disk.fsync_dir(str(gone))
    with pytest.raises(MachineError, match="gone"):
        disk.write_atomic(f"{gone}/a", b"1")
    gone.mkdir()
    monkeypatch.setattr(disk, "fsync", lambda _: shutil.rmtree(gone))
    with pytest.raises(MachineError, match="gone"):
        disk.write_atomic(f"{gone}/a", b"1")


def test_a_lock_notices_that_another_file_has_its_name(tmp_path) -> None:
    path = tmp_path / ".lock"
    lock = Disk({}).lock(str(path))
    lock.verify()
    path.rename(tmp_path / "moved")
    with pytest.raises(MachineError, match="removed, moved, replaced"):
        lock.verify()
    path.touch()
    with pytest.raises(MachineError, match="removed, moved, replaced"):
        lock.verify()
    lock.release()


def test_a_full_device_is_a_machine_error() -> None:
    if not os.path.exists("/dev/full"):
        cannot_run("dev_full", "no /dev/full here")
    file = File(os.open("/dev/full", os.O_WRONLY), "/dev/full")
    with pytest.raises(MachineError) as raised:
        Disk({}).writev(file, [b"x", b"y"], 0)
    assert raised.value.cause.errno == errno.ENOSPC


def test_sendfile_and_residency(tmp_path) -> None:
    disk = Disk({})
    disk.write_file(str(tmp_path / "f"), b"0123456789")
    file = disk.open_read(str(tmp_path / "f"))
    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert disk.sendfile(ours.fileno(), file, 2, 5) == 5
        assert theirs.recv(100) == b"23456"
        theirs.close()
        with pytest.raises(ConnectionError):
            disk.sendfile(ours.fileno(), file, 0, 5)
    assert disk.preadv_nowait(file, 0, 4) in (b"0123", None)
    assert disk.resident(file, 0, 0)


def test_a_c_library_without_preadv2_cannot_tell(tmp_path, monkeypatch) -> None:
    """As musl before 1.2.5: what Python raises then is no failure of the disk."""

    def refuse(*_: object) -> int:
        raise RuntimeError("preadv2: flags unavailable on this platform")

    disk = Disk({})
    disk.write_file(str(tmp_path / "f"), b"0123456789")
    monkeypatch.setattr(os, "preadv", refuse)
    assert disk.preadv_nowait(disk.open_read(str(tmp_path / "f")), 0, 4) is None


def test_a_directory_in_a_files_place_is_a_failing_disk(tmp_path) -> None:
    with pytest.raises(MachineError, match="Is a directory"):
        Disk({}).read(str(tmp_path))


def test_fail_points_by_environment(tmp_path) -> None:
    disk = Disk({"KEPT_FAIL_POINT": "here=eio:2,there=enospc"})
    disk.reach("here")
    disk.reach("elsewhere")
    with pytest.raises(MachineError, match="here"):
        disk.reach("here")
    with pytest.raises(MachineError, match="there"):
        disk.reach("there")


@pytest.mark.parametrize(("path", "up"), [("/a/b", "/a"), ("/a", "/"), ("a", "."), ("a/b/", "a")])
def test_parents(path, up) -> None:
    assert parent(path) == up


def test_a_power_cut_takes_what_was_not_synced() -> None:
    outcomes = set()
    for seed in range(60):
        disk = SimulatedDisk()
        disk.ensure_directory("/d")
        file = disk.open_append("/d/f")
        disk.writev(file, [b"durable"], 0)
        disk.fsync(file)
        disk.fsync_dir("/d")
        disk.writev(file, [b"-lost?"], 7)
        disk.write_file("/d/unnamed", b"x")
        left = disk.after_power_loss(seed)
        content = left.read("/d/f")
        assert content[:7] == b"durable"
        outcomes.add((len(content), left.exists("/d/unnamed")))
    assert len(outcomes) > 4
    assert disk.after_kill().read("/d/f") == b"durable-lost?"


def test_a_start_makes_durable_what_a_killed_process_only_made() -> None:
    for call in range(1, 12):
        disk = SimulatedDisk()
        disk.crash_at(call)
        with contextlib.suppress(SimulatedCrash):
            disk.ensure_data_directory("/not/there/yet")
            disk.ensure_directory("/not/there/yet/topic-0")
        disk = disk.after_kill()
        disk.ensure_data_directory("/not/there/yet")
        names = disk.listdir("/not/there/yet")
        for seed in range(8):
            left = disk.after_power_loss(seed)
            assert left.listdir("/not/there/yet") == names, (call, seed)


@pytest.mark.parametrize("code", [errno.EACCES, errno.EPERM, errno.EROFS, errno.EINVAL])
def test_a_parent_that_cannot_be_ours_is_not_synced(code) -> None:
    disk = SimulatedDisk()
    disk.ensure_directory("/theirs/data")
    disk.fail("fsync_dir", "/theirs", code, skip=1)
    disk.ensure_data_directory("/theirs/data")
    assert not disk.injections


@pytest.mark.parametrize(("path", "code"), [("/data", errno.EIO), ("/data/log", errno.EACCES)])
def test_a_directory_that_fails_to_sync_is_an_error(path, code) -> None:
    disk = SimulatedDisk()
    disk.ensure_directory("/data/log")
    disk.fail("fsync_dir", path, code, skip=path == "/data")
    with pytest.raises(MachineError, match=f"{path}: fsync_dir failed"):
        disk.ensure_data_directory("/data/log")


def test_crashes_full_disks_and_rot_are_simulated() -> None:
    disk = SimulatedDisk()
    disk.capacity_bytes = 10
    file = disk.open_append("/f")
    with pytest.raises(MachineError, match="No space"):
        disk.writev(file, [b"x" * 20], 0)
    assert disk.free_bytes("/") <= 10
    disk.fail("fsync", "/f")
    with pytest.raises(MachineError):
        disk.fsync(file)
    disk.fsync(file)
    disk.flip_bit("/f", 0, 1)
    assert disk.read("/f")[:1] == b"z"
    disk.crash_at(disk.calls + 1)
    with pytest.raises(SimulatedCrash):
        disk.unlink("/f")
    assert disk.exists("/f")


def test_a_file_that_is_not_there_leaves_no_error_behind(tmp_path):
    disk, missing = Disk({}), str(tmp_path / "missing")
    gc.collect()
    gc.disable()
    try:
        for call in (disk.read, disk.listdir, lambda path: disk.rename(path, f"{path}-2")):
            with contextlib.suppress(FileNotFoundError):
                call(missing)
        left = [one for one in gc.get_objects() if isinstance(one, FileNotFoundError)]
    finally:
        gc.enable()
    assert not [one for one in left if one.filename == missing]
