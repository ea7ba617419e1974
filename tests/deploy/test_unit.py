"""deploy/kept.service, as systemd judges it."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys

import pytest

from kept.cli.commands.serve import serve
from kept.node.config.node_config import NodeConfig
from tests.deploy.files import DEPLOY

UNIT = DEPLOY / "kept.service"
EXPOSURE_LIMIT = 15
"""In tenths; a service without any restriction has 96, systemd's own resolver 21."""


def settings():
    """Name -> values of the section of the service."""
    text = UNIT.read_text().partition("[Service]\n")[2].partition("[Install]")[0]
    found = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", text, re.M):
        found.setdefault(name, []).append(value)
    return found


def test_its_command_is_one_that_kept_has():
    command, word, *options = shlex.split(settings()["ExecStart"][0])
    assert (command, word) == ("/opt/kept/bin/kept", "serve")
    given = serve.make_context("serve", options).params
    assert given["file"] == "/etc/kept/kept.yaml" and given["data_dir"] == "/var/lib/kept"
    assert settings()["StateDirectory"] == ["kept"]


def test_it_waits_for_a_stop_for_longer_than_the_node_takes():
    defaults = NodeConfig.load(None, {}, {})
    assert int(settings()["TimeoutStopSec"][0]) * 1000 > defaults.shutdown_timeout_ms
    assert settings()["Type"] == ["notify"] and int(settings()["WatchdogSec"][0]) >= 60


def analyze(tmp_path, *arguments):
    unit = tmp_path / "kept.service"
    unit.write_text(UNIT.read_text().replace("/opt/kept/bin/kept", sys.executable))
    return subprocess.run(
        ["systemd-analyze", "--no-pager", *arguments, str(unit)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )


@pytest.mark.systemd
def test_systemd_knows_every_setting(tmp_path):
    done = analyze(tmp_path, "verify")
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.systemd
def test_systemd_finds_little_that_it_may_do(tmp_path):
    limit = ("--offline=true", f"--threshold={EXPOSURE_LIMIT}")
    done = analyze(tmp_path, "security", *limit)
    assert done.returncode == 0, done.stdout[-3000:]
