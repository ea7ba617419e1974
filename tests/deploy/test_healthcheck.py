"""deploy/healthcheck.py finds a node however it was told where to listen."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from contextlib import contextmanager

import pytest

from kept.testing import Cluster
from kept.testing.ports import free_port
from tests.deploy.files import DEPLOY

check = runpy.run_path(str(DEPLOY / "healthcheck.py"))
main, address, settings = (check[name] for name in ("main", "address", "settings"))


@contextmanager
def process(tmp_path, *words, **environ):
    """One whose command line ends like a node's; its pid."""
    script = "import sys; print(flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", script, *words],
        cwd=tmp_path,
        env={**os.environ, **environ},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as started:
        assert started.stdout is not None and started.stdin is not None
        started.stdout.readline()  # it has its own command line by now
        yield str(started.pid)
        started.stdin.close()


@pytest.mark.parametrize(
    ("words", "environ"),
    [
        (["serve", "--config-file", "kept.yaml"], {}),
        (["serve", "--config", "kept.yaml"], {}),
        (["serve", "--set=listeners=PLAINTEXT://localhost:7095"], {}),
        (["serve", "--port", "7095"], {}),
        (["serve"], {"KEPT_LISTENERS": "PLAINTEXT://localhost:7095"}),
        (["serve", "--port", "7095"], {"NAME": os.fsdecode(b"\xe9t\xe9")}),
    ],
)
def test_it_asks_where_the_process_listens(tmp_path, words, environ):
    (tmp_path / "kept.yaml").write_text("listeners: PLAINTEXT://localhost:7095\n")
    with process(tmp_path, *words, **environ) as pid:
        assert address(settings(pid)) == "127.0.0.1:7095"


def test_a_process_that_is_no_node_has_its_own_environment(monkeypatch, capsys):
    port = free_port()
    monkeypatch.setenv("KEPT_LISTENERS", f"PLAINTEXT://127.0.0.1:{port}")
    assert main("/healthz", str(os.getpid())) == 1
    assert capsys.readouterr().out.startswith(f"127.0.0.1:{port} does not answer")
    monkeypatch.setenv("KEPT_LISTENERS", "nonsense")
    assert main("/healthz", str(os.getpid())) == 1
    assert "KEPT_LISTENERS" in capsys.readouterr().out


def test_it_says_what_the_node_says(kept_broker, monkeypatch, capsys):
    monkeypatch.setenv("KEPT_LISTENERS", f"PLAINTEXT://127.0.0.1:{kept_broker.port()}")
    assert main("/readyz", str(os.getpid())) == 0
    assert capsys.readouterr().out == "ready\n"
    assert main("/nothing", str(os.getpid())) == 1
    assert "/nothing" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["SASL_SSL", "SSL"])
def test_over_tls_it_believes_the_certificate_of_the_node_alone(protocol, tmp_path, capsys):
    """Also where the listener asks for certificates, as it does with SSL here."""
    with Cluster(1, security=protocol) as node, Cluster(1, security=protocol) as other:
        assert main("/readyz", str(node.pid())) == 0
        assert capsys.readouterr().out == "ready\n"
        listeners = f"{protocol}://127.0.0.1:{other.port()}"
        keys = f"{os.path.dirname(node.ca_path)}/kept-node.pem"
        with process(
            tmp_path,
            "serve",
            KEPT_LISTENERS=listeners,
            KEPT_SSL_KEYSTORE_LOCATION=keys,
            KEPT_SASL_ENABLED_MECHANISMS="SCRAM-SHA-512",
        ) as pid:
            assert main("/readyz", pid) == 1
        assert "CERTIFICATE_VERIFY_FAILED" in capsys.readouterr().out


def test_tls_without_a_key_names_the_setting(tmp_path, capsys):
    with process(tmp_path, "serve", KEPT_LISTENERS="SSL://localhost:7095") as pid:
        assert main("/readyz", pid) == 1
    assert "ssl.keystore.location is not set" in capsys.readouterr().out
