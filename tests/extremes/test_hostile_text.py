"""Control characters in every text that a stranger can send: they reach neither a line of the log
nor a terminal.

The text that is planted clears the screen, sets the title, turns the direction and begins lines of
its own; it is a group's and a member's id, a client's name, a transactional id, a user, an ACL's
principal, the metadata of a commit, a record's key, value and headers, and every text of a request
of every API. Then all that shows any of it is looked at.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import sys
import urllib.request
from typing import Any

import pytest
from kio.static.constants import EntityType

from kept.client.client import OutRecord
from kept.client.protocol import messages as protocol
from kept.node.kafka import api
from tests.support.hostile import HOSTILE, NOT_TEXT, PRINTABLE, check, following, in_terminal
from tests.support.kafka_connection import Connection
from tests.support.made_requests import made

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

JOIN: dict[str, Any] = {
    "session_timeout": 600_000,
    "rebalance_timeout": 600_000,
    "member_id": "",
    "group_instance_id": HOSTILE,
    "protocol_type": HOSTILE,
    "protocols": [{"name": HOSTILE, "metadata": HOSTILE.encode()}],
    "reason": HOSTILE,
}


class Stranger:
    """Sends what it likes to one node."""

    def __init__(self, port: int) -> None:
        self.port = port

    def once(self, frame: bytes) -> None:
        """Send bytes on a connection of their own, and wait for an answer or the end."""
        with socket.create_connection(("127.0.0.1", self.port), 30) as sock:
            sock.sendall(frame)
            sock.settimeout(1)
            with contextlib.suppress(TimeoutError, ConnectionError):
                sock.recv(1)

    def everything(self) -> None:
        """Every API with the text in each of its fields, and with bytes that are no text."""
        for served in api.APIS:
            if served.key in (api.PRODUCE, api.API_VERSIONS):
                continue
            for version in {max(served.min_version, served.refused_below), served.max_version}:
                cls = protocol.message_type(served.key, version, EntityType.request)
                frame = protocol.encode_request(served.key, version, 7, HOSTILE, made(cls, HOSTILE))
                self.once(frame)
                marked = protocol.encode_request(
                    served.key, version, 7, "c" * len(NOT_TEXT), made(cls, "m" * len(NOT_TEXT))
                )
                for name in (b"c", b"m"):
                    marked = marked.replace(name * len(NOT_TEXT), NOT_TEXT)
                self.once(marked)
        named = protocol.encode_request(
            18,
            3,
            7,
            HOSTILE,
            {"client_software_name": "x" * 20, "client_software_version": "y" * 20},
        )
        self.once(named.replace(b"x" * 20, HOSTILE.encode()[:20]))
        self.once(HOSTILE.encode())

    def http(self) -> None:
        """Paths, queries, headers, bodies and a login."""
        raw = HOSTILE.replace("\r\n", " ").encode()
        quoted = "".join(f"%{byte:02x}" for byte in HOSTILE.encode())
        for head in (
            f"GET /{quoted} HTTP/1.1\r\nHost: localhost",
            f"GET /api/v1/groups/{quoted} HTTP/1.1\r\nHost: localhost",
            f"GET /api/v1/topics?{quoted}={quoted} HTTP/1.1\r\nHost: localhost",
            f"GET /api/v1/records?topic={quoted}&partition=0 HTTP/1.1\r\nHost: localhost",
            f"GET /api/v1/transactions/{quoted} HTTP/1.1\r\nHost: localhost",
        ):
            self.once(f"{head}\r\nConnection: close\r\n\r\n".encode())
        for header in (b"Host: ", b"X-Kept: ", b"Authorization: Basic ", b"User-Agent: "):
            self.once(b"GET /api/v1/cluster HTTP/1.1\r\n" + header + raw + b"\r\n\r\n")
        body = json.dumps({"topic": HOSTILE, "partition": 0, HOSTILE: HOSTILE}).encode()
        self.once(
            b"POST /api/v1/compaction/now HTTP/1.1\r\nHost: localhost\r\nX-Kept: 1\r\n"
            b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        )
        self.once(b"GET " + raw + b" HTTP/1.1\r\n\r\n")

    def state(self, topic: str) -> None:
        """A group with members and offsets, a transactional id, a user, an ACL, a quota."""
        with contextlib.closing(Connection(f"127.0.0.1:{self.port}")) as wire:
            self.plant_group(wire, topic)
            self.plant_transaction(wire, topic)
            self.plant_access(wire)

    def plant_group(self, wire: Connection, topic: str) -> None:
        """With a member, and offsets of another one."""
        for key_type in (0, 1):
            wire.ask(10, 4, key_type=key_type, coordinator_keys=[HOSTILE])
        first = wire.ask(11, 9, group_id=HOSTILE, **JOIN)
        member = {"group_id": HOSTILE, "member_id": first.member_id, "generation_id": 1}
        synced = wire.ask(
            14,
            5,
            **member,
            group_instance_id=HOSTILE,
            protocol_type=HOSTILE,
            protocol_name=HOSTILE,
            assignments=[{"member_id": first.member_id, "assignment": HOSTILE.encode()}],
        )
        assert synced.error_code.name == "none"
        commit = {
            "group_id": HOSTILE + "2",
            "generation_id_or_member_epoch": -1,
            "member_id": "",
            "group_instance_id": None,
            "topics": [
                {
                    "name": topic,
                    "partitions": [
                        {
                            "partition_index": 0,
                            "committed_offset": 1,
                            "committed_leader_epoch": -1,
                            "committed_metadata": HOSTILE,
                        }
                    ],
                }
            ],
        }
        committed = wire.ask(8, 8, **commit).topics[0].partitions[0]
        assert committed.error_code.name == "none"

    def plant_transaction(self, wire: Connection, topic: str) -> None:
        """With a partition in it."""
        made_id = wire.ask(
            22,
            4,
            transactional_id=HOSTILE,
            transaction_timeout=60_000,
            producer_id=-1,
            producer_epoch=-1,
        )
        assert made_id.error_code.name == "none"
        added = wire.ask(
            24,
            3,
            v3_and_below_transactional_id=HOSTILE,
            v3_and_below_producer_id=made_id.producer_id,
            v3_and_below_producer_epoch=made_id.producer_epoch,
            v3_and_below_topics=[{"name": topic, "partitions": [0]}],
        )
        (result,) = added.results_by_topic_v3_and_below[0].results_by_partition
        assert result.partition_error_code.name == "none"

    def plant_access(self, wire: Connection) -> None:
        """An ACL, a user and a quota."""
        created = wire.ask(
            30,
            3,
            creations=[
                {
                    "resource_type": 3,
                    "resource_name": HOSTILE,
                    "resource_pattern_type": 3,
                    "principal": f"User:{HOSTILE}",
                    "host": HOSTILE,
                    "operation": 3,
                    "permission_type": 3,
                }
            ],
        )
        assert created.results[0].error_code.name == "none"
        user = wire.ask(
            51,
            0,
            deletions=(),
            upsertions=[
                {
                    "name": HOSTILE,
                    "mechanism": 1,
                    "iterations": 4096,
                    "salt": b"salt",
                    "salted_password": bytes(32),
                }
            ],
        )
        assert user.results[0].error_code.name == "unacceptable_credential", "no name for a user"
        wire.ask(
            49,
            1,
            validate_only=False,
            entries=[
                {
                    "entity": [{"entity_type": "client-id", "entity_name": HOSTILE}],
                    "ops": [{"key": "request_percentage", "value": 100.0, "remove": False}],
                }
            ],
        )


@pytest.fixture
def site(kept_cluster):
    cluster = kept_cluster(
        authorizer_class_name="org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        super_users="User:ANONYMOUS",
        kept_audit="all",
        log_cleaner_backoff_ms=200,
    )
    topic = cluster.create_topic(config={"cleanup.policy": "compact"})
    text = HOSTILE.encode()
    with cluster.client() as client:
        record = OutRecord(text, text, headers=((HOSTILE, text),))
        client.produce(topic, [record, OutRecord(NOT_TEXT, NOT_TEXT), record])
    stranger = Stranger(cluster.port())
    stranger.everything()
    stranger.http()
    stranger.state(topic)
    return cluster, topic


def commands(topic: str, log_dir: str) -> list[tuple[str, ...]]:
    """What shows, or refuses, something of what was planted."""
    return [
        ("group", "list"),
        ("group", "list", "--json"),
        ("group", "describe", HOSTILE[:2]),
        ("group", "describe", "--all"),
        ("transaction", "list"),
        ("transaction", "list", "--json"),
        ("acl", "list"),
        ("user", "list"),
        ("quota", "list"),
        ("quota", "describe"),
        ("topic", "describe", topic),
        ("topic", "list"),
        ("cluster", "status"),
        ("consume", topic, "--from-beginning", "--until-end"),
        ("consume", topic, "--from-beginning", "--until-end", "--json"),
        ("consume", topic, "--from-beginning", "--until-end", "--headers"),
        ("consume", topic, "--from-beginning", "--until-end", "--value-only"),
        ("consume", topic, "--from-beginning", "--until-end", "--key-only"),
        ("consume", topic, "--from-beginning", "--until-end", "--format", "%k %v %h\\n"),
        ("log", "dump", log_dir),
        ("log", "dump", log_dir, "--json"),
        ("log", "check", log_dir),
        ("compact", "explain", f"{topic}:0"),
        ("compact", "status", topic),
        ("top", "groups", "--once"),
        ("top", "--once"),
        ("topic", "describe", "no\x1b[2J\u202esuch"),
        ("group", "describe", "no\x1b[2J\x9bsuch"),
        ("no\x1b[2Jcommand",),
        ("consume", "no\u202esuch", "--until-end"),
        ("topic", "create", "no\x1b[2Jname"),
        ("log", "dump", "/no\x1b[2J\u202esuch"),
    ]


def test_what_strangers_say_reaches_neither_logs_nor_terminals(site):
    cluster, topic = site
    logged = cluster.log()
    assert "Traceback" not in logged
    assert PRINTABLE in logged, "something of it is told"
    check("the log", logged)
    for line in logged.splitlines():
        assert line.startswith(("20", "{", "kept")), line[:200]
    for path in (
        "/api/v1/cluster",
        "/api/v1/topics",
        f"/api/v1/topics/{topic}",
        "/api/v1/groups",
        f"/api/v1/topics/{topic}/groups",
        "/api/v1/transactions",
        "/api/v1/compaction",
        f"/api/v1/records?topic={topic}&partition=0",
        f"/api/v1/search?topic={topic}",
        "/metrics",
    ):
        with urllib.request.urlopen(cluster.url() + path, timeout=60) as answer:
            shown = answer.read().decode()
        if path == "/metrics":
            lines = shown.removesuffix("\n").split("\n")  # labels are as they are, but for LF
            assert all(line.startswith(("#", "kept_", "process_")) for line in lines)
        else:
            check(path, shown)
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KEPT_")}
    environ |= {"KEPT_BOOTSTRAP": cluster.bootstrap, "TERM": "dumb", "COLUMNS": "200"}
    log_dir = os.path.join(cluster.log_dir(), f"{topic}-0")
    seen = 0
    for arguments in commands(topic, log_dir):
        command = [sys.executable, "-P", "-m", "kept", *arguments]
        shown = in_terminal(command, environ)
        assert shown.strip() and "Traceback" not in shown, (arguments, shown)
        check(" ".join(arguments), shown)
        seen += PRINTABLE in shown
    assert seen > 15, "what was planted is shown, spelled out"


def test_top_that_follows_shows_it_spelled_out(site):
    """Its screen is made of escapes of its own; those that were planted are not among them."""
    cluster, _ = site
    environ = {k: v for k, v in os.environ.items() if not k.startswith("KEPT_")}
    environ |= {
        "KEPT_BOOTSTRAP": cluster.bootstrap,
        "TERM": "xterm",
        "COLUMNS": "250",
        "LINES": "40",
    }
    command = [sys.executable, "-P", "-m", "kept", "top", "groups", "--interval", "0.5"]
    shown = following([*command, "--sort", "name"], environ, until=PRINTABLE + "\\u001b", key=b"q")
    for planted in ("\x1b]0;", "\x07", "\nlevel=", "\x08", "\x9b", "\u2028", "\u202e", "\u2066"):
        assert planted not in shown, repr(shown)
