"""A lone node pays nothing for the others that it does not have."""

import subprocess
import sys

LONE = """
import asyncio, sys
from kept.node.config.node_config import NodeConfig
from kept.node.node import Node
from kept.testing.ports import free_port

async def life():
    node = Node(NodeConfig.load(environ={}, port=free_port(), data_dir=sys.argv[1]))
    await node.start()
    await node.warmed_up()
    await node.stop()

asyncio.run(life())
print(sorted(name for name in sys.modules if name.split(".")[0] in ("grpc", "google")))
"""


def test_a_lone_node_never_imports_grpc_or_protobuf(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LONE, str(tmp_path / "data")],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert done.stdout.splitlines()[-1] == "[]"
