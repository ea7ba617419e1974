"""What the check before nodes are taken away makes of a cluster that does not answer in time."""

from __future__ import annotations

import runpy
import subprocess
import sys

import pytest
import yaml

from tests.deploy.files import DEPLOY

CHART = DEPLOY / "helm" / "kept"


@pytest.mark.parametrize(
    "stderr", [b"kept: still trying \xff\n", "kept: still trying \ufffd\n", None]
)
@pytest.mark.parametrize("step", ["upgrade", "rollback"])
def test_no_answer_in_time(monkeypatch, capsys, step, stderr):
    limits = []

    def run(command, *, timeout, **_):
        limits.append(timeout)
        raise subprocess.TimeoutExpired(command, timeout, stderr=stderr)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["scale_down.py", step, "3", "kept:9092"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(str(CHART / "files" / "scale_down.py"))
    said = str(ended.value.code) if step == "upgrade" else capsys.readouterr().err
    assert (ended.value.code == 0) is (step == "rollback")
    first, then = said.splitlines()
    assert first == "kept: still trying \ufffd" if stderr else first.startswith("Command '['kept'")
    assert then.startswith("Without an answer it is not known what the nodes from 3 on hold.")

    text = (CHART / "templates" / "scale-down.yaml").read_text()
    (line,) = (x for x in text.splitlines() if "activeDeadlineSeconds" in x)
    deadline = yaml.safe_load(line)["activeDeadlineSeconds"]
    assert limits[0] + 180 <= deadline < 300, "there is time to pull the image, and Helm waits"
