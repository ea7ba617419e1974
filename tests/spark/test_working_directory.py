"""Spark's Python workers run nothing that lies where ``kept spark`` is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from kept.client.client import OutRecord
from tests.support.shadowing import plant

pytestmark = [pytest.mark.slow, pytest.mark.spark, pytest.mark.timeout(900)]


def test_a_job_is_started_beside_planted_modules(kept_broker, tmp_path):
    """The workers read the topic: had they imported one, the job would have failed."""
    topic = kept_broker.create_topic()
    with kept_broker.client() as client:
        client.produce(topic, [OutRecord(b"a", b"1", (), 5)])
    trace = plant(tmp_path)
    environ = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    command = [sys.executable, "-P", "-m", "kept", "spark", "table", topic, "--json"]
    done = subprocess.run(
        [*command, "--bootstrap", kept_broker.bootstrap],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert [(r["key"], r["value"]) for r in json.loads(done.stdout)["rows"]] == [("a", "1")]
    assert not trace.exists()
