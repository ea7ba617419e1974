"""Ask the node of this container how it is: ``healthcheck.py PATH [PID]``, status 0 or 1.

PATH is ``/healthz`` (the process answers) or ``/readyz`` (clients are served). Where the node
listens is read as the node reads it: from the command line and the environment of its process, PID,
which is 1 in a container. Where that runs something else, this one's own environment has to do.
Over TLS it believes the node's own certificate and its trust store, under whatever name.
"""

from __future__ import annotations

import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path

from msgspec.structs import replace

from kept.cli.commands.serve import serve
from kept.cli.shell import pairs
from kept.client.security.pem import TrustStore
from kept.client.security.tls import client_context, tls_config
from kept.node.config.listeners import ListenerConfig
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


def first(config: NodeConfig) -> ListenerConfig:
    """The first listener that answers HTTP."""
    listener = config.listeners[0] if config.listeners else config.node_listener
    assert listener is not None  # a node without any was refused by NodeConfig
    return listener


def address(config: NodeConfig) -> str:
    """host:port of that listener."""
    listener = first(config)
    host = listener.bind_hosts[0].replace("0.0.0.0", "127.0.0.1")
    return f"[{host}]:{listener.port}" if ":" in host else f"{host}:{listener.port}"


def tls(config: NodeConfig) -> ssl.SSLContext:
    """How to speak TLS with that listener: it may ask for a certificate, and gets the node's own.

    Raises ConfigurationError.
    """
    own = tls_config(config.of_listener(first(config).name).tls_properties())
    if own.keys is None:
        raise ConfigurationError(f"listener {first(config).name}: ssl.keystore.location is not set")
    others = own.trust.certificates if own.trust else ""
    trust = TrustStore(own.keys.chain + others, own.keys.place)
    return client_context(replace(own, trust=trust, check_hostname=False))


def main(path: str, pid: str = "1") -> int:
    """Print what the node answers; 0 when it says 200."""
    handlers: list[urllib.request.BaseHandler] = [urllib.request.ProxyHandler({})]
    scheme = "http"
    try:
        config = settings(pid)
        where = address(config)
        if first(config).is_tls:
            scheme = "https"
            handlers.append(urllib.request.HTTPSHandler(context=tls(config)))
    except ConfigurationError as error:
        print(error)
        return 1
    opener = urllib.request.build_opener(*handlers)
    try:
        with opener.open(f"{scheme}://{where}{path}", timeout=TIMEOUT_S) as answer:
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
