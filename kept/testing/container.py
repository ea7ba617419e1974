"""A node of kept in a container, for tests with testcontainers-python.

::

    from kept.testing.container import KeptContainer

    with KeptContainer(log_segment_bytes=1 << 20) as kept:
        producer = confluent_kafka.Producer({"bootstrap.servers": kept.bootstrap})

Wants the extra ``containers`` and an image made with deploy/Dockerfile. Where Python is at hand
anyway, :class:`kept.testing.Cluster` starts faster and needs no Docker.
"""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from typing import Final, Self

from testcontainers.core.container import DockerContainer

import kept
from kept.node.config.sources import variable
from kept.testing.cluster import START_DEADLINE_S, NodeFailed, setting_text

IMAGE: Final = f"kept:{kept.__version__}"
PORT: Final = 9092
INSIDE_PORT: Final = 19092
_TOLD: Final = "/var/lib/kept/advertised"
_POLL_S: Final = 0.05
_TAIL: Final = 3000

# The port on the host is known only once the container runs, and a node must tell it to clients.
_START: Final = (
    f"until [ -s {_TOLD} ]; do sleep 0.02; done; "
    f'KEPT_ADVERTISED_LISTENERS="$(cat {_TOLD})" exec kept serve'
)


class KeptContainer(DockerContainer):
    """One node, alone a whole cluster, on a port of the host that Docker chooses.

    ``settings`` are Kafka's names with underscores for dots, as for ``kept.testing.Cluster``.
    Entering starts it and waits until it serves; leaving removes it with its data. Methods of
    DockerContainer that are called before (``with_network``, ``with_name``) work as usual.
    """

    def __init__(self, image: str = IMAGE, **settings: object) -> None:
        super().__init__(image)
        self.with_exposed_ports(PORT)
        self.with_kwargs(entrypoint=["sh", "-c", _START])
        self.with_env("KEPT_LISTENERS", f"OUTSIDE://:{PORT},INSIDE://:{INSIDE_PORT}")
        self.with_env("KEPT_LISTENER_SECURITY_PROTOCOL_MAP", "OUTSIDE:PLAINTEXT,INSIDE:PLAINTEXT")
        for name, value in settings.items():
            self.with_env(variable(name.replace("_", ".")), setting_text(value))

    def start(self) -> Self:
        """Start it and wait until it is ready. Raises NodeFailed with the end of its log."""
        super().start()
        listeners = f"OUTSIDE://{self.bootstrap},INSIDE://{self.inside}"
        self.copy_into_container(listeners.encode(), _TOLD)
        end = time.monotonic() + START_DEADLINE_S
        while (why := self._unready()) is not None:
            if self.status == "exited" or time.monotonic() > end:
                tail = b"".join(self.get_logs()).decode(errors="replace")[-_TAIL:].strip()
                self.stop()
                raise NodeFailed(f"the container of {self.image} is not ready ({why}):\n{tail}")
            time.sleep(_POLL_S)
        return self

    @property
    def bootstrap(self) -> str:
        """``host:port`` for clients on the host."""
        return f"{self.get_container_host_ip()}:{self.get_exposed_port(PORT)}"

    @property
    def inside(self) -> str:
        """``host:port`` for clients in containers on the same (user-defined) network."""
        return f"{self.get_wrapped_container().short_id}:{INSIDE_PORT}"

    def get_bootstrap_server(self) -> str:
        """The same as :attr:`bootstrap`, by the name that testcontainers' Kafka has for it."""
        return self.bootstrap

    def _unready(self) -> str | None:
        """Why clients are not served yet, None when they are."""
        self.reload()
        try:
            with urllib.request.urlopen(f"http://{self.bootstrap}/readyz", timeout=5):
                return None
        except urllib.error.HTTPError as error:
            return error.read().decode(errors="replace").strip()
        except OSError as error:
            return str(error)
