"""Code comes from where kept is installed, never from the directory where a process starts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.shadowing import plant
from tests.support.wire_cleaner import CONFIG, fill


def test_the_planted_modules_would_run(tmp_path):
    trace = plant(tmp_path)
    done = subprocess.run(
        [sys.executable, "-m", "kept.compaction.cleaner.worker"],
        cwd=tmp_path,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 77 and trace.read_text()


def test_a_node_and_its_workers_run_nothing_that_lies_where_they_are_started(kept_cluster, connect):
    cluster = kept_cluster(log_cleaner_backoff_ms=100)
    where = Path(cluster.directory) / "node-0"
    cluster.stop()
    trace = plant(where)
    cluster.start()
    assert Path(f"/proc/{cluster.pid()}/cwd").resolve() == where.resolve()
    topic = cluster.create_topic(config=CONFIG)
    fill(connect(cluster.port()), topic)
    cluster.wait_until(lambda: 'event="log cleaned"' in cluster.log(), "a worker cleaned the log")
    assert explained(cluster, topic)
    assert not trace.exists()


def explained(cluster, topic):
    """What a dry run, a process of its own, says."""
    from kept.client.json_api import request_any

    return request_any(
        cluster.bootstrap, lambda api: api.get("compaction/explain", topic=topic, partition=0)
    )


@pytest.mark.parametrize("how", [["-m", "kept"], ["-P", "-m", "kept"]])
def test_a_checkout_that_runs_itself_has_its_children_find_it(tmp_path, how):
    """Only ``python -m kept`` says that code in the working directory is wanted."""
    root = tmp_path / "checkout"
    package = root / "kept"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "cli.py").write_text(
        "import json, os, subprocess, sys\n"
        "def main():\n"
        "    child = [sys.executable, '-P', '-c', 'import kept; print(kept.__file__)']\n"
        "    print(json.dumps(subprocess.check_output(child, text=True).strip()))\n"
    )
    from kept import __main__

    (package / "__main__.py").write_text(Path(__main__.__file__).read_text())
    done = subprocess.run(
        [sys.executable, *how, "--version"], cwd=root, capture_output=True, text=True, check=True
    )
    from_here = how[0] != "-P"
    if from_here:
        assert json.loads(done.stdout) == str(package / "__init__.py")
    else:
        assert str(package) not in done.stdout
