"""``kept spark`` as a process of its own, whose JVM or whole driver is killed in the middle."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kept.cli.commands.spark import DIED
from kept.client.client import OutRecord
from kept.pipeline import jobs
from kept.pipeline.connection import BadOption
from kept.pipeline.jobs import exports
from kept.testing import Cluster
from tests.spark.topics import eventually, fill

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(900)]


def driver(cluster: Cluster, *arguments: str) -> subprocess.Popen[str]:
    """A driver with its Spark."""
    where = ("--master", "local[1]", "--conf", "spark.ui.enabled=false")
    command = [sys.executable, "-m", "kept", "spark", *where, *arguments]
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*command, "--bootstrap", cluster.bootstrap], stdout=pipe, stderr=pipe, text=True
    )


def children(pid: int) -> list[int]:
    """The JVM of a driver."""
    return [int(n) for n in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def as_dict(frame: Any) -> dict[bytes, bytes]:
    return {bytes(row.key): bytes(row.value) for row in frame.collect()}


def test_an_export_whose_jvm_dies_says_so_and_is_none(spark, kept_broker, tmp_path):
    topic, path = kept_broker.create_topic(), tmp_path / "export"
    with kept_broker.client() as client:
        fill(client, topic, range(1000))
    process = driver(kept_broker, "export", topic, str(path))
    eventually((path / "_begun").exists)
    for jvm in children(process.pid):
        os.kill(jvm, signal.SIGKILL)
    printed, said = process.communicate(timeout=100)
    assert (process.returncode, printed) == (1, "")
    assert said.splitlines()[-1] == f"kept: {DIED}", said
    with pytest.raises(BadOption, match="is no export"):
        exports.load(spark, str(path))
    with pytest.raises(BadOption, match="being written, or was given up: delete it"):
        jobs.export(spark, kept_broker.bootstrap, topic, str(path))


def test_a_refresh_that_is_killed_leaves_the_old_table_or_the_new_one(spark, kept_broker, tmp_path):
    topic = kept_broker.create_topic(config={"cleanup.policy": "compact"})
    where, path = kept_broker.bootstrap, tmp_path / "table"
    with kept_broker.client() as client:
        fill(client, topic, range(5))
        jobs.refresh(spark, where, topic, str(path))
        old = as_dict(jobs.saved(spark, str(path)))
        client.produce(topic, [OutRecord(b"k1", b"new"), OutRecord(b"k2", None)])
    process = driver(kept_broker, "table", topic, "--refresh", str(path))
    eventually(lambda: list(path.glob("table-000002-*")))
    for one in (process.pid, *children(process.pid)):
        os.kill(one, signal.SIGKILL)
    process.communicate(timeout=100)
    new = {key: value for key, value in old.items() if key != b"k2"} | {b"k1": b"new"}
    assert as_dict(jobs.saved(spark, str(path))) in (old, new)
    for _ in range(2):
        jobs.refresh(spark, where, topic, str(path))
    assert as_dict(jobs.saved(spark, str(path))) == new
    assert not list(path.glob("table-000002-*"))
