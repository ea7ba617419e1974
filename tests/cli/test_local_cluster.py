"""``kept local`` with three nodes."""

from __future__ import annotations

import socket

import pytest

from kept.node.config.local_cluster import NODE_PORT_OFFSET
from kept.testing.ports import free_port


def ports() -> int:
    """The first of three ports in a row, with those of the nodes above them."""
    return free_port(above=[n + more for n in range(3) for more in (0, NODE_PORT_OFFSET)])


@pytest.mark.slow
def test_three_nodes_from_up_to_down(offline, local_dir):
    port, directory = ports(), ("--dir", local_dir)
    ran = offline("local", "up", "--nodes", 3, "--port", port, *directory)
    assert [f"ready on localhost:{port + n}" in ran.lines[n] for n in range(3)] == [True] * 3
    roles = [node["role"] for node in offline("local", "status", "--json", *directory).json]
    assert sorted(roles) == ["broker", "broker", "controller"]
    shown = offline("local", "status", *directory).out
    assert (shown.count("broker,voter"), shown.count("voter,active controller")) == (3, 1)
    here = ("--bootstrap", f"localhost:{port + 1}")
    offline("topic", "create", "t", *here)
    described = offline("topic", "describe", "t", "--json", *here).json
    assert len(described["partitions"][0]["replicas"]) == 3
    active = roles.index("controller")
    offline("local", "kill", active, *directory)
    here = ("--bootstrap", f"localhost:{port + (active + 1) % 3}")
    offline("produce", "t", *here, stdin="still here\n")
    assert "ready on" in offline("local", "start", active, *directory).out
    down = offline("local", "down", "--purge", *directory).lines
    assert sum(line.startswith("removed") for line in down) == 3


def test_the_node_that_cannot_start_is_named_at_once(offline, local_dir):
    """Not node 0, which waits for it in vain. Nothing is left of both, so that other nodes may come
    in their place.
    """
    port, up = ports(), ("local", "up", "--dir", local_dir)
    with socket.create_server(("127.0.0.1", port + 1)):
        ran = offline(*up, "--nodes", 2, "--port", port, status=1)
    assert f"node 1 ended with status 1: port {port + 1} on 127.0.0.1 is in use" in ran.err
    assert ran.err.endswith("; no node was made; mend that and run it again\n")
    assert not list(local_dir.iterdir())
    assert "ready on" in offline(*up, "--port", port).out


def test_what_does_not_start_is_not_kept(offline, local_dir, tmp_path):
    """A setting that only a start finds wrong: the file that it names is missing."""
    up, down = (("local", name, "--dir", local_dir) for name in ("up", "down"))
    wrong = {
        "listener.security.protocol.map": "PLAINTEXT:SSL",
        "ssl.keystore.location": str(tmp_path / "gone.pem"),
    }
    given = [word for name, text in wrong.items() for word in ("--set", f"{name}={text}")]
    why = f"listener PLAINTEXT: ssl.keystore.location={tmp_path}/gone.pem: No such file"
    said = offline(*up, "--port", free_port(), *given, status=1).err
    assert f"node 0 ended with status 1: --set ssl.keystore.location: {why}" in said
    assert not list(local_dir.iterdir())
    offline(*up, "--port", free_port())
    offline(*down)
    config = local_dir / "node-0" / "kept.yaml"
    before = config.read_bytes()
    said = offline(*up, *given, status=1).err
    assert f"--set ssl.keystore.location: {why}" in said
    assert "every kept.yaml is as it was before" in said
    assert config.read_bytes() == before
    assert "ready on" in offline(*up).out, "with its data, and without what was wrong"
    offline(*down)
    lines = before.splitlines(keepends=True)
    written = before + b"".join(f"{name}: {text}\n".encode() for name, text in wrong.items())
    config.write_bytes(written)
    said = offline(*up, status=1).err
    assert f"{config} line {len(lines) + len(wrong)}: {why}" in said
    assert f"({config.parent}/kept.log has more); mend that and run it again" in said
    assert config.read_bytes() == written, "what was there before stays"
    said = offline("local", "start", 0, "--dir", local_dir, status=1).err
    assert f"{config} line {len(lines) + len(wrong)}: {why}" in said


def test_a_node_is_found_whatever_its_pid_file_says(offline, local_dir):
    directory = ("--dir", local_dir)
    offline("local", "up", "--nodes", 2, "--port", ports(), *directory)
    (local_dir / "node-0" / "kept.pid").write_text("1\n")
    (local_dir / "node-1" / "kept.pid").unlink()
    before = offline("local", "status", "--json", *directory).json
    assert [node["state"] for node in before] == ["running", "running"]
    assert "runs already" in offline("local", "start", 1, *directory, status=1).err
    ran = offline("local", "kill", 1, 7, 0, *directory, status=1)
    assert ran.lines == ["node 1 killed", "node 0 killed"]
    assert f"kept: 7: no node 7 in {local_dir}" in ran.err
    assert len(offline("local", "start", 0, 1, *directory).lines) == 2, "they wait for each other"
    assert offline("local", "down", *directory).lines == ["node 0 stopped", "node 1 stopped"]
    after = offline("local", "status", "--json", *directory).json
    assert [node["state"] for node in after] == ["stopped", "stopped"]


@pytest.mark.slow
@pytest.mark.parametrize("nodes", [1, 3])
def test_secure_nodes_know_their_users_and_stay_secure(offline, local_dir, nodes):
    port, directory = ports(), ("--dir", local_dir)
    up = ("local", "up", "--port", port, *directory)
    said = offline(*up, "--nodes", nodes, "--secure").lines
    assert [line.split(" ")[0] for line in said[nodes:]] == ["admin", "ada", "bob"]
    here = ("--bootstrap", f"localhost:{port}", "--command-config")
    admin, ada = (str(local_dir / "security" / f"{user}.properties") for user in ("admin", "ada"))
    offline("topic", "create", "t", *here, admin)
    refused = offline("produce", "t", *here, ada, stdin="from ada\n", status=1).err
    assert "User:ada lacks IdempotentWrite on the cluster, or Write on a topic" in refused
    offline("acl", "add", "User:ada", "write", "topic:t", *here, admin)
    offline("produce", "t", *here, ada, stdin="from ada\n")
    assert offline("consume", "t", "--from-beginning", "--until-end", *here, admin).lines
    offline("local", "down", *directory)
    assert "connects with" in offline(*up).out, "the same certificates and passwords"
    assert [row["name"] for row in offline("topic", "list", "--json", *here, ada).json] == ["t"]
    offline("local", "down", "--purge", *directory)
    assert not (local_dir / "security").exists()
    offline(*up)
    offline("local", "down", *directory)
    assert "are not secure" in offline("local", "up", "--secure", *directory, status=1).err


def test_what_is_not_of_kept_local_stays(offline, tmp_path):
    """A project's own folders may be named as ours: ``--dir .`` neither takes nor removes them."""
    port, directory = free_port(), ("--dir", tmp_path)
    for name in ("security", "node-18"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").write_text("mine")
    secure = offline("local", "up", "--secure", "--port", port, *directory, status=1).err
    assert f"{tmp_path}/security is there, and not of kept local" in secure
    offline("local", "up", "--port", port, *directory)
    assert [node["node"] for node in offline("local", "status", "--json", *directory).json] == [0]
    offline("produce", "t", "--create", "--bootstrap", f"localhost:{port}", stdin="x\n")
    offline("local", "down", "--purge", *directory)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["node-18", "security"]
    assert (tmp_path / "security" / "mine").read_text() == "mine"


@pytest.mark.parametrize("command", [("up",), ("start", 0)])
def test_a_variable_that_would_give_all_nodes_one_address_is_refused(offline, local_dir, command):
    offline.environ["KEPT_LISTENERS"] = "PLAINTEXT://localhost:1"
    said = offline("local", *command, "--dir", local_dir, status=1).err
    assert "$KEPT_LISTENERS is set: kept local sets listeners itself; unset it" in said
