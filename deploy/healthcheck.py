"""Ask the node of this container how it is: ``healthcheck.py PATH [CONFIG]``, status 0 or 1.

PATH is ``/healthz`` (the process answers) or ``/readyz`` (clients are served); CONFIG the file that
``kept serve --config`` was given, if any. Where the node listens is read as the node reads it: from
the environment and that file.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request

from kept.node.config import NodeConfig

TIMEOUT_S = 4.0


def address(config: NodeConfig) -> str:
    """host:port of the first listener that answers HTTP."""
    listener = config.listeners[0] if config.listeners else config.node_listener
    assert listener is not None  # a node without any was refused by NodeConfig
    host = listener.bind_hosts[0].replace("0.0.0.0", "127.0.0.1")
    return f"[{host}]:{listener.port}" if ":" in host else f"{host}:{listener.port}"


def main(path: str, file: str | None = None) -> int:
    """Print what the node answers; 0 when it says 200."""
    config = NodeConfig.load(file)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(f"http://{address(config)}{path}", timeout=TIMEOUT_S) as answer:
            print(answer.read().decode().strip())
    except urllib.error.HTTPError as refusal:
        print(refusal.read().decode().strip())
        return 1
    except OSError as error:
        print(f"{address(config)} does not answer: {error}")
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
