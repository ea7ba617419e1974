"""What the check before nodes are taken away makes of a cluster that does not answer in time."""

from __future__ import annotations

import json
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


def checked(monkeypatch, capsys, step: str, replicas: int, **found) -> tuple[object, str]:
    """The exit code, or the message in its place, and what it printed."""
    nodes = [{"node_id": number, "replicas": 3 * (number < 3)} for number in range(4)]
    status = {"quorum_unknown": None, "voters": [0, 1, 2], "nodes": nodes, **found}

    def run(command, **_):
        return subprocess.CompletedProcess(command, 0, json.dumps(status), "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(sys, "argv", ["scale_down.py", step, str(replicas), "kept:9092"])
    try:
        runpy.run_path(str(CHART / "files" / "scale_down.py"))
    except SystemExit as ended:
        return ended.code, capsys.readouterr().err
    return None, capsys.readouterr().err


def test_a_node_that_holds_nothing_and_does_not_vote_may_go(monkeypatch, capsys):
    assert checked(monkeypatch, capsys, "upgrade", 3) == (None, "")
    said, _ = checked(monkeypatch, capsys, "upgrade", 2)
    assert "node 2 holds 3 replicas" in said and "kept cluster voter remove 2" in said


def test_who_votes_is_not_known_without_a_controller(monkeypatch, capsys):
    """``kept cluster status`` shows what the nodes knew before then, and no voters."""
    lost = {"quorum_unknown": "no leader", "voters": None}
    assert checked(monkeypatch, capsys, "upgrade", 4, **lost) == (None, ""), "none goes"
    said, _ = checked(monkeypatch, capsys, "upgrade", 3, **lost)
    assert said.startswith("no controller answers (no leader)\nWithout an answer it is not known")
    code, said = checked(monkeypatch, capsys, "rollback", 3, **lost)
    assert code == 0 and "The rollback goes on" in said
