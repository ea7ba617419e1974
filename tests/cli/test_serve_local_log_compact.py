"""``kept serve``, ``kept local``, ``kept log`` and ``kept compact`` with processes of their own."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import pytest

from kept.client.client import OutRecord
from kept.node.config.local_cluster import NODE_PORT_OFFSET
from kept.node.config.node_config import NodeConfig
from kept.testing.ports import free_port


@pytest.mark.parametrize("with_signal", [signal.SIGTERM, signal.SIGINT])
def test_serve_alone_is_a_whole_cluster(offline, tmp_path, with_signal):
    port = free_port()
    here, whole = ("--bootstrap", f"localhost:{port}"), {"stderr": subprocess.STDOUT, "text": True}
    with offline.started("serve", "--port", port, cwd=tmp_path, **whole) as process:
        line = process.stdout.readline()
        assert line.startswith("kept 0.")
        assert line.endswith(f" node 0 ready on localhost:{port}, data in ./data\n")
        offline("topic", "create", "t", *here)
        offline("produce", "t", *here, stdin="hello\n")
        ran = offline("consume", "t", "--from-beginning", "--until-end", "--value-only", *here)
        assert ran.out == "hello\n"
        process.send_signal(with_signal)
        rest, _ = process.communicate(timeout=200)
    assert process.returncode == 0
    assert "Traceback" not in rest
    assert (tmp_path / "data" / "log" / "t-0").is_dir()
    assert (tmp_path / "data" / "meta").is_dir()


def test_check_says_what_is_wrong(offline, tmp_path):
    file = tmp_path / "kept.yaml"
    file.write_text("log.segment.bytes: 1048576\nnum.partitions: 3\n")
    assert "settings are right" in offline("serve", "--config-file", file, "--check").out
    assert not (tmp_path / "data").exists()
    file.write_text("log.segmnt.bytes: 1048576\n")
    assert "log.segment.bytes" in offline("serve", "--config-file", file, "--check", status=1).err
    file.write_text("a: [1\n")
    offline("serve", "--config-file", file, "--check", status=1)
    offline("serve", "--config-file", tmp_path / "none.yaml", "--check", status=1)
    for wrong in (
        ["--set", "nope=1"],
        ["--set", "log.segment.bytes=much"],
        ["--port", "9", "--set", "listeners=PLAINTEXT://localhost:8"],
        ["--data-dir", "x", "--set", "log.dirs=y"],
    ):
        offline("serve", "--check", *wrong, status=1)


def test_a_port_in_use_is_named(offline, kept_broker, tmp_path):
    port = kept_broker.port()
    ran = offline("serve", "--port", port, "--data-dir", tmp_path / "d", status=1)
    assert str(port) in ran.err


def test_a_data_directory_in_use_is_refused(offline, kept_broker):
    ran = offline("serve", "--port", free_port(), "--data-dir", kept_broker.data_dir(), status=1)
    assert kept_broker.data_dir() in ran.err


def test_local_from_up_to_down(offline, local_dir):
    port = free_port()
    directory = ("--dir", local_dir)
    assert "no nodes" in offline("local", "status", *directory, status=1).err
    ran = offline("local", "up", "--port", port, "--set", "num.partitions=4", *directory)
    assert f"ready on localhost:{port}" in ran.out
    node = local_dir / "node-0"
    assert {p.name for p in node.iterdir()} == {"kept.yaml", "kept.pid", "kept.log", "data"}
    assert "runs already" in offline("local", "up", "--port", port, *directory, status=1).err
    here = ("--bootstrap", f"localhost:{port}")
    offline("topic", "create", "t", *here)
    assert len(offline("topic", "describe", "t", "--json", *here).json["partitions"]) == 4
    (status,) = offline("local", "status", "--json", *directory).json
    assert (status["state"], status["role"], status["port"]) == ("running", "controller", port)
    assert status["roles"] == ["broker", "voter", "controller"]
    assert "broker,voter,active controller" in offline("local", "status", *directory).out
    assert "has 1 node, not 3" in offline("local", "up", "--nodes", 3, *directory, status=1).err
    os.kill(status["pid"], signal.SIGSTOP)
    (stalled,) = offline("local", "status", "--json", *directory).json
    assert (stalled["state"], stalled["role"]) == ("stalled", None)
    os.kill(status["pid"], signal.SIGCONT)
    assert status["pid"] == int((node / "kept.pid").read_text())

    assert offline("local", "kill", 0, *directory).out == "node 0 killed\n"
    assert offline("local", "status", "--json", *directory).json[0]["state"] == "stopped"
    assert "does not run" in offline("local", "stop", 0, *directory, status=1).err
    assert "ready on" in offline("local", "start", 0, *directory).out
    assert "t" in [t["name"] for t in offline("topic", "list", "--json", *here).json]
    assert offline("local", "stop", 0, *directory).out == "node 0 stopped\n"
    assert "ready on" in offline("local", "start", 0, *directory).out
    assert offline("local", "down", *directory).out == "node 0 stopped\n"
    assert (node / "data").is_dir()
    (node / "kept.pid").write_text(f"{os.getpid()}\n")  # another process has that id now
    assert offline("local", "status", "--json", *directory).json[0]["state"] == "stopped"
    assert f"removed {node}" in offline("local", "down", "--purge", *directory).out
    assert not node.exists()
    assert "no node 7" in offline("local", "start", 7, *directory, status=1).err


def test_local_writes_what_makes_nodes_a_cluster(local_dir, monkeypatch, capsys):
    from kept.cli.commands import local
    from kept.cli.run import run

    started = []
    monkeypatch.setattr(local, "_start", lambda members: started.extend(members) or [])
    port = free_port()
    arguments = ["local", "up", "--nodes", "3", "--port", str(port), "--dir", str(local_dir)]
    assert run([*arguments, "--set", "min.insync.replicas=1"]) == 0
    assert [node.number for node in started] == [0, 1, 2]
    for number in range(3):
        config = NodeConfig.load(str(local_dir / f"node-{number}" / "kept.yaml"), {}, {})
        assert (config.node_id, config.listeners[0].port) == (number, port + number)
        assert config.node_listener.port == port + 1000 + number
        assert [voter.node_id for voter in config.controller_quorum_voters] == [0, 1, 2]
        assert config.default_replication_factor == 3
        assert config.min_insync_replicas == 1, "what is given wins"
    assert run([*arguments[:2], "--nodes", "2", "--dir", str(local_dir)]) == 1
    assert "has 3 nodes, not 2" in capsys.readouterr().err
    assert run([*arguments[:2], "--nodes", "3", "--port", "65000", "--dir", str(local_dir)]) == 2


def test_up_again_keeps_ports_and_what_kept_yaml_says(local_dir, monkeypatch, capsys):
    from kept.cli.commands import local
    from kept.cli.run import run

    monkeypatch.setattr(local, "_start", lambda members: [])
    paths = [local_dir / f"node-{number}" / "kept.yaml" for number in range(3)]

    def up(*arguments: object) -> list[NodeConfig]:
        assert run(["local", "up", "--dir", str(local_dir), *map(str, arguments)]) == 0
        return [NodeConfig.load(str(path), {}, {}) for path in paths]

    def ports_of(configs: list[NodeConfig]) -> tuple[list[int], list[int]]:
        clients = [config.listeners[0].port for config in configs]
        voters = [voter.port for voter in configs[0].controller_quorum_voters]
        return clients, [port - NODE_PORT_OFFSET for port in voters]

    first = free_port()
    there = [first, first + 1, first + 2]
    up("--nodes", 3, "--port", first, "--set", "num.partitions=4")
    with open(paths[1], "a") as config:
        config.write("# mine\nlog.retention.hours: 2\nmin.insync.replicas: 1\n")
    written = paths[1].read_text().replace("min.insync.replicas: '2'\n", "")
    paths[1].write_text(written)
    again = up()
    assert ports_of(again) == (there, there), "not at 9092"
    assert paths[1].read_text() == written, "not even a comment goes"
    moved = up("--port", first + 10, "--set", "num.partitions=5")
    assert ports_of(moved) == ([port + 10 for port in there],) * 2
    assert [config.num_partitions for config in moved] == [5, 5, 5]
    assert (moved[1].log_retention_hours, moved[1].min_insync_replicas) == (2, 1)
    assert moved[0].min_insync_replicas == 2
    port = str(moved[1].listeners[0].port)
    paths[0].write_text(paths[0].read_text().replace(f":{first + 10}", f":{port}", 1))
    capsys.readouterr()
    assert run(["local", "up", "--dir", str(local_dir)]) == 1
    assert (
        f"two nodes in {local_dir} have port {port} in their kept.yaml" in capsys.readouterr().err
    )
    for damage, why in (
        (b"a: [", "not YAML"),
        (b"- 1\n", "not a mapping of names to values"),
        (b"log.dirs: \xff\n", "not YAML: unacceptable character #x00ff"),
    ):
        paths[0].write_bytes(damage)
        assert run(["local", "up", "--dir", str(local_dir)]) == 1
        assert f"kept: {paths[0]}: {why}" in capsys.readouterr().err
        assert paths[0].read_bytes() == damage


def test_up_writes_no_setting_that_keeps_nodes_from_starting(local_dir, monkeypatch, capsys):
    from kept.cli.commands import local
    from kept.cli.run import run

    monkeypatch.setattr(local, "_start", lambda members: [])
    up = ["local", "up", "--dir", str(local_dir)]
    wrong = [*up, "--set", "log.retention.ms=abc"]
    assert run([*wrong, "--nodes", "2", "--secure"]) == 1
    assert "kept: --set log.retention.ms: Invalid value abc" in capsys.readouterr().err
    assert not (local_dir / "node-0").exists() and not (local_dir / "security").exists()
    assert run([*up, "--nodes", "2"]) == 0
    paths = [local_dir / f"node-{number}" / "kept.yaml" for number in range(2)]
    before = [path.read_text() for path in paths]
    assert run(wrong) == 1
    assert [path.read_text() for path in paths] == before
    with open(paths[1], "a") as config:  # what the second one has is wrong with what is given
        config.write("num.io.threads: many\n")
    capsys.readouterr()
    assert run([*up, "--set", "num.partitions=3"]) == 1
    assert f"{paths[1]} line " in capsys.readouterr().err
    assert paths[0].read_text() == before[0]


@pytest.mark.parametrize("error", [BrokenPipeError, KeyboardInterrupt])
def test_nodes_that_are_up_stay_when_nobody_reads_that_they_are(local_dir, monkeypatch, error):
    from kept.cli.commands import local
    from kept.cli.run import run

    def echo(message):
        raise error(message)

    monkeypatch.setattr(local.LocalNode, "launch", lambda node: None)
    monkeypatch.setattr(local, "_await_ready", lambda started: ["ready"] * len(started))
    monkeypatch.setattr(local, "_await_cluster", lambda members: None)
    up = ["local", "up", "--dir", str(local_dir)]
    with monkeypatch.context() as unread:
        unread.setattr(local, "echo", echo)
        run([*up, "--nodes", "2", "--secure"])
        assert {path.name for path in local_dir.iterdir()} == {"node-0", "node-1", "security"}
        run([*up, "--set", "num.partitions=5"])
    for number in range(2):
        config = NodeConfig.load(str(local_dir / f"node-{number}" / "kept.yaml"), {}, {})
        assert config.num_partitions == 5


def test_a_node_without_a_majority_is_not_waited_for(offline, local_dir, monkeypatch, capsys):
    from kept.cli.commands import local
    from kept.cli.run import run

    launched = []
    monkeypatch.setattr(local, "_start", lambda members: [])
    assert run(["local", "up", "--nodes", "3", "--dir", str(local_dir)]) == 0
    monkeypatch.setattr(local.LocalNode, "launch", lambda node: launched.append(node.number))
    assert run(["local", "start", "1", "--dir", str(local_dir)]) == 0
    assert launched == [1]
    assert "once a majority of the nodes runs: 1 of 3 now" in capsys.readouterr().out


def test_local_says_why_a_node_does_not_start(offline, kept_broker, local_dir):
    port = kept_broker.port()
    ran = offline("local", "up", "--port", port, "--dir", local_dir, status=1)
    assert f"node 0 ended with status 1: port {port} on 127.0.0.1 is in use" in ran.err


@pytest.fixture
def compacted(kept, kept_broker):
    """A compacted topic with three generations of ten keys."""
    topic = kept_broker.create_topic(config={"cleanup.policy": "compact"})
    for generation in range(3):
        stdin = "".join(f"k{n}:{generation}\n" for n in range(10))
        kept("produce", topic, "--key-separator", ":", stdin=stdin)
    return topic


def test_compaction_from_the_command_line(kept, compacted):
    before = kept("compact", "status", compacted, "--json").json["partitions"][0]
    assert (before["topic"], before["partition"]) == (compacted, 0)
    assert compacted in kept("compact", "status", compacted).out
    assert compacted in kept("compact", "status").out
    told = kept("compact", "explain", compacted, "--key", "k1").lines
    assert told[0].startswith(f"{compacted}:0: 3 records of this key: ")
    assert [line.split()[0] for line in told[2:]] == ["OFFSET", "1", "11", "21"]
    verbose = kept("compact", "explain", compacted, "--key", "k1", "--verbose").out
    assert "\n  clean bytes: 0 B\n" in verbose and ": -\n" not in verbose.split("OFFSET")[0]
    plan = kept("compact", "explain", compacted).lines
    assert plan[0].split()[:6] == ["TOPIC", "PARTITION", "DUE", "OFFSETS", "RECORDS", "REMOVED"]
    assert len(plan) == 2
    assert "no record of this key" in kept("compact", "explain", compacted, "--key", "k99").out

    ran = kept("compact", "now", compacted, "--wait", "--json")
    assert ran.json["partitions"][0]["records_removed"] == 20
    left = kept("consume", compacted, "--from-beginning", "--until-end", "--json").lines
    assert len(left) == 10
    after = kept("topic", "describe", compacted, "--json").json["partitions"][0]
    assert after["dirty_ratio"] == 0.0
    assert after["last_compaction_ms"] > 0
    gone = kept("compact", "why-missing", compacted, 0, 5, "--key", "k5", "--json").json
    assert gone["reason"] == "superseded"
    assert gone["winner"]["offset"] == 25
    for place in ((f"{compacted}:0",), (compacted, 0)):
        why = kept("compact", "why-missing", *place, 5, "--key", "k5").lines
        assert why[0].startswith(f"{compacted}:0 offset 5: removed in generation ")
        assert "  offset: 25" in why
    again = kept("compact", "now", f"{compacted}:0", "--wait")
    assert again.lines[0].split()[:3] == ["TOPIC", "PARTITION", "DONE"] and len(again.lines) == 2
    assert f"compacting {compacted}:0" in kept("compact", "now", compacted).out
    assert "not uncleanable" in kept("compact", "retry", f"{compacted}:0", status=1).err
    assert f"there is no {compacted}:7" in kept("compact", "now", f"{compacted}:7", status=1).err


def test_compaction_of_what_is_not_compacted(kept, kept_broker):
    topic = kept_broker.create_topic()
    assert "not compacted" in kept("compact", "status", topic, status=1).err
    assert "no topic nope" in kept("compact", "now", "nope", status=1).err


def test_several_topics_are_compacted_and_what_fails_is_told(kept, kept_broker, compacted):
    plain, wrong = kept_broker.create_topic(), f"{compacted}x"
    near = f"kept: {wrong}: no topic {wrong}; did you mean {compacted}?"
    for command in ("explain", "now", "verify"):
        ran = kept("compact", command, wrong, f"{compacted}:0", "--json", status=1)
        assert near in ran.err or near.replace(f"kept: {wrong}: ", "kept: ") in ran.err
        (partitions,) = ran.json.values()
        assert [p["topic"] for p in partitions] == [compacted]
    ran = kept("compact", "now", plain, f"{compacted}:4", compacted, "--wait", status=1, errors=2)
    assert f"kept: {plain}: " in ran.err and "is not compacted" in ran.err
    assert f"kept: {compacted}:4: there is no {compacted}:4" in ran.err
    assert [line.split()[:2] for line in ran.lines[1:]] == [[compacted, "0"]]
    ran = kept("compact", "retry", f"{compacted}:0", f"{wrong}:0", status=1, errors=2)
    assert "there is nothing to try again" in ran.err and f"no topic {wrong}" in ran.err
    assert "names no partition" in kept("compact", "retry", compacted, status=2).err


def test_internal_topics_are_shown_with_internal_only(kept, compacted):
    kept("consume", compacted, "--group", f"g-{compacted}", "--from-beginning", "--max", 1)
    for shown, option in ((False, ()), (True, ("--internal",))):
        listed = kept("compact", "status", *option, "--json").json["partitions"]
        assert any(p["topic"] == "__consumer_offsets" for p in listed) is shown


def test_log_dump_and_check(kept, compacted, kept_broker):
    directory = Path(kept_broker.log_dir()) / f"{compacted}-0"
    segment = directory / "00000000000000000000.log"
    assert "k1" in kept("log", "dump", segment).out
    both = kept("log", "dump", segment, directory / "leader-epoch-checkpoint").lines
    assert both[0] == f"Dumping {segment}"
    assert "no such file" in kept("log", "dump", directory / "none.log", status=1).err
    assert "nothing damaged" in kept("log", "check", directory).out
    assert kept("log", "check", directory, "--json").json == []
    assert "no such directory" in kept("log", "check", directory / "none", status=1).err


def test_log_check_finds_damage(offline, kept_cluster):
    cluster = kept_cluster()
    topic = cluster.create_topic(config={"segment.bytes": "1024"})
    with cluster.client() as client:
        for _ in range(3):
            client.produce(topic, [OutRecord(b"k", b"v" * 800)])
    cluster.stop()
    segment = Path(cluster.log_dir()) / f"{topic}-0" / "00000000000000000000.log"
    data = bytearray(segment.read_bytes())
    data[100] ^= 0xFF
    segment.write_bytes(data)
    ran = offline("log", "check", cluster.log_dir(), status=1)
    assert str(segment) in ran.out
    assert "1 place damaged" in ran.err
    nothing = offline("log", "check", segment.parent.parent.parent / "meta").lines
    assert nothing[0].endswith("meta: nothing damaged")
    for directory in (cluster.log_dir(), cluster.data_dir()):
        ran = offline("log", "check", directory, "--json", status=1)
        assert [f["path"] for f in ran.json if f["damaged"]] == [str(segment)]
    assert [f["damaged"] for f in ran.json if f["path"] == str(segment)] == [True]


def test_compact_says_when_the_other_side_is_not_kept(offline):
    import socket
    import threading

    listener = socket.create_server(("127.0.0.1", 0))

    def serve_garbage() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(1000)

    thread = threading.Thread(target=serve_garbage)
    thread.start()
    port = listener.getsockname()[1]
    ran = offline("compact", "status", "--bootstrap", f"127.0.0.1:{port}", status=1)
    thread.join()
    listener.close()
    assert "is it a node of kept?" in ran.err
