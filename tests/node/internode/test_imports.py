"""A lone node pays nothing for nodes that it does not have, nor for clients that have not come."""

import subprocess
import sys

LONE = """
import sys
sys.modules["hypothesis"] = None  # as kept.cli.main does
before = set(sys.modules)

import asyncio
from kept.node.config.node_config import NodeConfig
from kept.node.node import Node

async def life():
    node = Node(NodeConfig.load(environ={}, port=0, data_dir=sys.argv[1]))
    await node.start()
    await node.warmed_up()
    print(*sorted(sys.modules.keys() - before), sep="\\n")
    await node.stop()

asyncio.run(life())
"""
UNUSED = {
    "between nodes": ("grpc", "google"),
    "gRPC": ("kept.node.grpc.callers", "kept.node.grpc.server", "kept.node.grpc.splice"),
    "TLS": (
        "kept.client.security.certificates",
        "kept.client.security.tls",
        "kept.node.kafka.tls_handshake",
        "kept.node.security.listener_tls",
    ),
    "logins": (
        "hashlib",
        "hmac",
        "kept.node.kafka.sasl_handshake",
        "kept.node.security.oauth.key_source",
        "kept.node.security.sasl_authenticator",
        "secrets",
    ),
    "codecs": ("cramjam", "crc32c", "lz4", "zstandard"),
    "files, tables and metrics": (
        "click",
        "importlib.resources",
        "prometheus_client",
        "rich",
        "shutil",
        "tempfile",
        "yaml",
    ),
}
"""What it is for: modules."""


def test_a_lone_node_at_rest_has_imported_nothing_that_it_may_never_use(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LONE, str(tmp_path / "data")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    loaded = set(done.stdout.split())
    assert "kept.node.kafka.listener" in loaded
    unused = {what: [n for n in names if n in loaded] for what, names in UNUSED.items()}
    assert unused == {what: [] for what in UNUSED}
