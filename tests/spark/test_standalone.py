"""A Spark cluster of its own: a master and two workers, each a process; kept is sent along."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from kept.client.client import OutRecord
from kept.testing import Cluster
from kept.testing.ports import free_port
from tests.spark.topics import eventually

ROOT = Path(__file__).resolve().parent.parent.parent
pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(900)]

JOB = """
import json, sys
from pyspark.sql import SparkSession
from kept.pipeline import jobs
bootstrap, topic = sys.argv[1:]
spark = SparkSession.builder.appName("job").getOrCreate()

def where(_):
    import os, kept
    return kept.__file__, os.environ.get("SPARK_EXECUTOR_DIRS") or os.getcwd()

found = spark.sparkContext.parallelize(range(8), 8).map(where).collect()
jobs.table(spark, bootstrap, topic)
another = jobs.table(spark.newSession(), bootstrap, topic)  # the zip is not found by itself
rows = another.selectExpr("string(key) key", "string(value) value")
table = {row.key: row.value for row in rows.collect()}
print("FOUND", json.dumps({"kept": sorted({f for f, _ in found}), "table": table,
      "executors": len({d for _, d in found})}))
spark.stop()
"""


@pytest.fixture
def master(tmp_path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """The master's URL, and the environment of whoever talks to it."""
    import pyspark

    home = Path(pyspark.__file__).parent
    environ = {
        **os.environ,
        "SPARK_HOME": str(home),
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_DAEMON_MEMORY": "256m",
        "SPARK_WORKER_DIR": str(tmp_path / "work"),
        "SPARK_LOCAL_IP": "127.0.0.1",
        "PYTHONPATH": "",
    }
    port, log = free_port(), tmp_path / "master.log"
    url, processes = f"spark://127.0.0.1:{port}", []

    def start(name: str, *arguments: str) -> None:
        command = [str(home / "bin" / "spark-class"), f"org.apache.spark.deploy.{name}"]
        with open(log, "ab") as out:
            processes.append(
                subprocess.Popen(
                    [*command, "--host", "127.0.0.1", "--webui-port", str(free_port()), *arguments],
                    env=environ,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            )

    try:
        start("master.Master", "--port", str(port))
        for _ in range(2):
            start("worker.Worker", "--cores", "1", "--memory", "512m", url)
        eventually(lambda: log.read_bytes().count(b"Registering worker") >= 2)
        yield url, environ
    finally:
        for process in processes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def zipped(path: Path) -> Path:
    """kept as plain Python: the kernels have twins."""
    with zipfile.ZipFile(path, "w") as file:
        for at, _, names in os.walk(ROOT / "kept", followlinks=True):
            for name in names:
                if name.endswith(".py"):
                    file.write(Path(at, name), Path(at, name).relative_to(ROOT))
    return path


def test_two_workers_make_a_table(
    kept_broker: Cluster, master: tuple[str, dict[str, str]], tmp_path: Path
) -> None:
    url, environ = master
    topic = kept_broker.create_topic(partitions=4)
    with kept_broker.client() as client:
        for value in (b"1", b"2"):
            client.produce(topic, [OutRecord(b"k%d" % n, value) for n in range(20)])
    expected = {f"k{n}": "2" for n in range(20)}
    job = tmp_path / "job.py"
    job.write_text(JOB)
    small = [
        "--conf",
        "spark.executor.memory=512m",
        "--conf",
        "spark.driver.memory=512m",
        "--conf",
        "spark.ui.enabled=false",
    ]
    submit = [str(Path(environ["SPARK_HOME"]) / "bin" / "spark-submit"), "--master", url]
    done = subprocess.run(
        [
            *submit,
            *small,
            "--py-files",
            str(zipped(tmp_path / "kept.zip")),
            str(job),
            kept_broker.bootstrap,
            topic,
        ],
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(one for one in done.stdout.splitlines() if one.startswith("FOUND "))
    found = json.loads(line.removeprefix("FOUND "))
    assert found["table"] == expected
    assert found["executors"] == 2
    assert all("kept.zip" in file for file in found["kept"]), found["kept"]
