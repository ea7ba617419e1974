"""Nodes end with the process that started them, even when that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from kept.testing import Cluster, reaper
from kept.testing.reaper import processes_in

PROGRAM = """
import sys, threading, time
from kept.testing import Cluster

started = []
def start():
    cluster = Cluster()
    cluster.__enter__()
    started.append(cluster)

thread = threading.Thread(target=start)
thread.start()
thread.join()
if len(sys.argv) > 1:
    started[0].pause()
print(started[0].directory, flush=True)
time.sleep(600)
"""
LOCAL = """
import sys, time
from kept.testing import reaper

reaper.watch(sys.argv[1])
print(sys.argv[1], flush=True)
time.sleep(600)
"""
DEADLINE_S = 60


def until(condition, what):
    end = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("number", "more"),
    [(signal.SIGKILL, []), (signal.SIGTERM, []), (signal.SIGKILL, ["stalled"])],
)
def test_nodes_and_their_files_go_with_the_test_process(number, more):
    command = [sys.executable, "-c", PROGRAM, *more]
    test = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    with test:
        directory = test.stdout.readline().strip()
        assert len(list(processes_in(directory))) >= 1, "the thread is gone, the node is not"
        test.send_signal(number)
    until(lambda: not list(processes_in(directory)), "the node is still there")
    until(lambda: not os.path.exists(directory), "its files are still there")


def test_what_others_started_in_a_watched_directory_goes_too(tmp_path):
    inner = tmp_path / "node-0"
    inner.mkdir()
    node = subprocess.Popen(["sleep", "600"], cwd=inner)
    test = subprocess.Popen(
        [sys.executable, "-c", LOCAL, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    with test:
        test.stdout.readline()
        test.kill()
    assert node.wait(DEADLINE_S) == -signal.SIGKILL
    assert inner.exists()


GIVEN = """
import sys, time
from kept.testing import Cluster

cluster = Cluster(directory=sys.argv[1])
cluster.__enter__()
print(sys.argv[1], flush=True)
time.sleep(600)
"""


def test_what_works_beside_the_nodes_in_a_directory_of_the_callers_lives_on(tmp_path):
    """Such as the shell that started the test, for Cluster(directory=".")."""
    with subprocess.Popen(["sleep", "600"], cwd=tmp_path) as shell:
        command = [sys.executable, "-c", GIVEN, str(tmp_path)]
        test = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        with test:
            test.stdout.readline()
            assert len(list(processes_in(str(tmp_path)))) > 1
            test.kill()
        until(lambda: not list(processes_in(str(tmp_path / "node-0"))), "the node is still there")
        assert shell.poll() is None
        shell.kill()


def test_a_cluster_that_was_never_started_watches_nothing_of_the_callers(tmp_path, monkeypatch):
    watched: list[str] = []
    monkeypatch.setattr(reaper, "watch", watched.append)
    Cluster(directory=tmp_path).close()
    assert watched == []


def test_a_closed_cluster_is_forgotten(tmp_path):
    with Cluster(directory=tmp_path / "mine"):
        pass
    assert list(processes_in(str(tmp_path))) == []
    assert (tmp_path / "mine").exists()
