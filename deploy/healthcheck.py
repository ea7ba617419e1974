"""Ask the node of this container how it is: ``healthcheck.py PATH [PID]``, status 0 or 1.

PATH is ``/healthz`` (the process answers) or ``/readyz`` (clients are served). Where the node
listens is read as the node reads it: from the command line and the environment of its process, PID,
which is 1 in a container. Where that runs something else, this one's own environment has to do.
"""

from __future__ import annotations

import os
import sys
import urllib.error
import urllib.request
from pathlib import Path

from kept.cli.serve import serve
from kept.cli.shell import pairs
from kept.node.config.node_config import NodeConfig
from kept.storage.errors import ConfigurationError

TIMEOUT_S = 4.0


def settings(pid: str) -> NodeConfig:
    """What the process was started with. Raises ConfigurationError."""
    try:
        words = os.fsdecode(Path(f"/proc/{pid}/cmdline").read_bytes()).split("\0")[:-1]
        lines = os.fsdecode(Path(f"/proc/{pid}/environ").read_bytes()).split("\0")
    except OSError:
        words, lines = [], []
    if "serve" not in words:
        return NodeConfig.load(None, {}, os.environ)
    given = serve.make_context("serve", words[words.index("serve") + 1 :]).params
    file = given["file"]
    return NodeConfig.load(
        file and os.path.join(f"/proc/{pid}/cwd", file),
        pairs("--set", given["settings"]),
        dict(line.split("=", 1) for line in lines if "=" in line),
        port=given["port"],
        data_dir=given["data_dir"],
        node_id=given["node_id"],
    )


def address(config: NodeConfig) -> str:
    """host:port of the first listener that answers HTTP."""
    listener = config.listeners[0] if config.listeners else config.node_listener
    assert listener is not None  # a node without any was refused by NodeConfig
    host = listener.bind_hosts[0].replace("0.0.0.0", "127.0.0.1")
    return f"[{host}]:{listener.port}" if ":" in host else f"{host}:{listener.port}"


def main(path: str, pid: str = "1") -> int:
    """Print what the node answers; 0 when it says 200."""
    try:
        where = address(settings(pid))
    except ConfigurationError as error:
        print(error)
        return 1
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{where}{path}", timeout=TIMEOUT_S) as answer:
            print(answer.read().decode().strip())
    except urllib.error.HTTPError as refusal:
        print(refusal.read().decode().strip())
        return 1
    except OSError as error:
        print(f"{where} does not answer: {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
