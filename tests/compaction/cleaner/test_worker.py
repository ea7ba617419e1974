"""The worker as a process: same result as in-process, progress, errors, death with its parent or
stdin.
"""

import errno
import json
import os
import signal
import subprocess
import sys
import time

import pytest

from kept.compaction.cleaner import job as jobs
from kept.compaction.cleaner import worker
from kept.compaction.cleaner.cleaner_run import run_pass
from kept.compaction.manifest import manifest
from kept.storage.disk import Disk
from kept.storage.errors import DamagedData, MachineError, ResourceExhausted
from kept.storage.log.log import Log
from tests.support.installing import install


@pytest.fixture
def on_disk(kit, tmp_path, monkeypatch):
    """A world whose log is in a real directory."""
    directory = str(tmp_path / "t-0")
    monkeypatch.setitem(kit.World.open.__globals__, "DIRECTORY", directory)
    monkeypatch.setitem(kit.World.clean.__globals__, "DIRECTORY", directory)
    os.mkdir(directory)

    class RealDisk(Disk):
        now_ms = 0

    w = kit.World(disk=RealDisk(), segment_bytes=500)
    for i in range(30):
        w.append((b"k%d" % (i % 7), b"v%d" % i * 20))
    w.roll()
    return w


def run(job, **options):
    done = subprocess.run(
        worker.COMMAND,
        input=jobs.encode(job) + "\n",
        capture_output=True,
        text=True,
        timeout=200,
        **options,
    )
    return done, [json.loads(line) for line in done.stdout.splitlines()]


class Talking:
    """A worker with its stdin kept open."""

    def __init__(self, job):
        self.process = subprocess.Popen(
            worker.COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.process.stdin.write(jobs.encode(job) + "\n")
        self.process.stdin.flush()

    def messages(self):
        with self.process as process:
            return [json.loads(line) for line in process.stdout]


def test_a_job_survives_its_json(on_disk):
    job = on_disk.job(on_disk.plan())
    assert jobs.decode(jobs.encode(job)) == job


def test_the_process_does_what_the_twin_does(on_disk):
    w = on_disk
    made = w.plan()
    job = w.job(made)
    found = Talking(job).messages()
    result = worker.result_from(found[-1])
    assert result.records_removed == 23
    names = sorted(n for n in os.listdir(w.log.directory) if ".cleaned" in n or ".tmp" in n)
    theirs = {n: w.disk.read(f"{w.log.directory}/{n}") for n in names}
    for name in names:
        w.disk.unlink(f"{w.log.directory}/{name}")
    assert run_pass(job, w.disk) == result
    assert {n: w.disk.read(f"{w.log.directory}/{n}") for n in names} == theirs
    w.state = install(w.log, result, None, w.now)
    assert w.offsets() == list(range(23, 30))
    assert isinstance(w.log, Log)
    path = f"{w.log.directory}/manifest-0-1"
    assert manifest.decode(path, w.disk.read(path))[0].generation == result.generation


def test_errors_are_told_as_a_message(on_disk):
    job = on_disk.job(on_disk.plan(), dedupe_buffer_bytes=16)
    talking = Talking(job)
    *_, message = talking.messages()
    assert message["kind"] == "ConfigurationError"
    assert "log.cleaner.dedupe.buffer.size" in message["error"]
    assert talking.process.returncode == 1


@pytest.mark.parametrize(
    ("error", "told", "more"),
    [
        (
            MachineError("/d/t-0", "fsync", OSError(errno.EIO, "I/O error")),
            "fsync failed: I/O error; the node's log has the details",
            {"device": ["/d/t-0", "fsync", errno.EIO, "I/O error"]},
        ),
        (
            ResourceExhausted("/d/t-0", "open", OSError(errno.EMFILE, "Too many")),
            "open failed: Too many; the node's log has the details",
            {},
        ),
        (
            FileNotFoundError(errno.ENOENT, "No such file", "/d/t-0/0.log"),
            "FileNotFoundError: No such file; the node's log has the details",
            {"missing": "/d/t-0/0.log"},
        ),
        (DamagedData("/d/t-0/0.log", 5, -1, "torn"), "0.log: damaged at byte 5: torn", {}),
        (
            ImportError("no name x in y (/opt/y.py)"),
            "ImportError; the node's log has the details",
            {"error": "ImportError: no name x in y (/opt/y.py)"},
        ),
    ],
)
def test_clients_are_told_no_path_and_the_node_all(error, told, more):
    message = worker.error_message(error)
    expected = {"error": str(error), "kind": type(error).__name__, "client_message": told} | more
    assert message == expected


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EFBIG", "ENOMEM", "ENOBUFS"])
def test_a_want_of_room_or_memory_is_no_failure_of_the_device(name):
    """What a pass has written, nobody needs: the directory stays online."""
    shortage = MachineError("/d/t-0", "write", OSError(getattr(errno, name), "None left"))
    message = worker.error_message(shortage)
    assert message == {
        "error": "/d/t-0: write failed: None left",
        "kind": "MachineError",
        "client_message": "write failed: None left; the node's log has the details",
    }


def test_outputs_that_exist_are_never_touched(on_disk):
    w = on_disk
    job = w.job(w.plan())
    path = f"{w.log.directory}/{0:020d}.log.cleaned"
    w.disk.write_file(path, b"somebody else's")
    *_, message = Talking(job).messages()
    assert message["kind"] == "FileExistsError"
    assert w.disk.read(path) == b"somebody else's"


def slow_job(w):
    return jobs.Job(
        **{
            name: getattr(w.job(w.plan()), name)
            for name in jobs.Job.__slots__
            if name != "max_bytes_per_second"
        },
        max_bytes_per_second=1.0,
    )


def test_it_exits_when_its_stdin_ends(on_disk):
    done, found = run(slow_job(on_disk))  # which has a deadline; the throttled pass takes an hour
    assert done.returncode == 3 and not any("result" in m for m in found)


def test_it_ignores_ctrl_c_and_dies_with_its_parent(on_disk):
    job = jobs.encode(slow_job(on_disk))
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys, time\n"
            "p = subprocess.Popen(sys.argv[1:], stdin=subprocess.PIPE)\n"
            "p.stdin.write(sys.stdin.buffer.readline()); p.stdin.flush()\n"
            "print(p.pid, flush=True); time.sleep(60)",
            *worker.COMMAND,
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        parent.stdin.write(job + "\n")
        parent.stdin.flush()
        pid = int(parent.stdout.readline())
        stat = f"/proc/{pid}/stat"

        def field(index):
            with open(stat) as file:
                return file.read().rpartition(")")[2].split()[index]

        deadline = time.monotonic() + 60
        while field(16) != str(min(19, os.nice(0) + worker.NICENESS)):
            assert time.monotonic() < deadline
            time.sleep(0.01)

        def ignores_interrupts() -> bool:
            with open(f"/proc/{pid}/status") as file:
                mask = next(line for line in file if line.startswith("SigIgn:")).split()[1]
            return bool(int(mask, 16) & 1 << signal.SIGINT - 1)

        while not ignores_interrupts():
            assert time.monotonic() < deadline, "SIGINT is not ignored"
            time.sleep(0.01)
        parent.kill()
        parent.stdout.close()
        parent.wait()
        while os.path.exists(stat) and field(0) not in "ZX":
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_progress_is_told(on_disk, capsys):
    throttle = worker.Throttle(sys.stdout, 100, 1e12)
    throttle._said -= 10
    throttle(40)
    throttle(20)
    assert json.loads(capsys.readouterr().out) == {"progress": 40, "total": 100}
