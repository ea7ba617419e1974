"""deploy/certificates.sh, with the rights that its container has in deploy/compose.secure.yaml."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from tests.deploy.files import DEPLOY
from tests.tools.needs import cannot_run

pytestmark = pytest.mark.openssl
OWNER = 10001


@pytest.fixture
def issue(tmp_path: Path) -> Callable[[], None]:
    """Runs the script for one node; ``/tls`` is ``tmp_path``."""
    if os.geteuid() or shutil.which("setpriv") is None:
        cannot_run("root", "not root, or no setpriv, to have the rights of the container")
    service = yaml.safe_load((DEPLOY / "compose.secure.yaml").read_text())["services"][
        "certificates"
    ]
    assert service["cap_drop"] == ["ALL"]
    rights = ",".join(["-all", *(f"+{right.lower()}" for right in service["cap_add"])])
    script = tmp_path / "certificates.sh"
    script.write_text((DEPLOY / "certificates.sh").read_text().replace("/tls/", f"{tmp_path}/"))
    for name in ("authority", "kept-0"):
        (tmp_path / name).mkdir()

    def run() -> None:
        command = ["setpriv", f"--bounding-set={rights}", "--inh-caps=-all", "--no-new-privs"]
        subprocess.run([*command, "sh", str(script), "kept-0"], check=True, capture_output=True)

    return run


def test_a_run_that_was_killed_does_not_stop_the_next_one(
    issue: Callable[[], None], tmp_path: Path
) -> None:
    issue()
    store = tmp_path / "kept-0"
    first = (store / "node.pem").read_text()
    for name in ("node.pem.new", "ca.pem.new"):  # as they are before they get their names
        (store / name).write_text("cut off")
        (store / name).chmod(0o600)
        os.chown(store / name, OWNER, OWNER)
    issue()
    assert sorted(os.listdir(store)) == ["ca.pem", "node.pem"]
    second = (store / "node.pem").read_text()
    assert second != first and "END CERTIFICATE" in second
    status = (store / "node.pem").stat()
    assert (status.st_uid, status.st_mode & 0o777) == (OWNER, 0o600)
