"""A node with a listener where nobody is asked and one where clients log in by SASL."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from confluent_kafka import Consumer, Producer

from kept.client.security.jaas import PLAIN_MODULE, SCRAM_MODULE
from kept.testing import Cluster
from kept.testing.ports import free_port

READ_S = 60.0


class Secured(NamedTuple):
    """``open`` and ``bootstrap`` are host and port of the two listeners."""

    cluster: Cluster
    open: str
    bootstrap: str


@contextmanager
def secured(**settings: Any) -> Iterator[Secured]:
    """Such a node. All mechanisms are enabled; PLAIN takes the passwords of SCRAM's users."""
    ports = free_port(), free_port()
    settings.setdefault("sasl_enabled_mechanisms", "PLAIN,SCRAM-SHA-256,SCRAM-SHA-512")
    settings.setdefault("kept_sasl_plain_users", "scram")
    settings.setdefault("connection_failed_authentication_delay_ms", "0")
    listeners = f"PLAINTEXT://localhost:{ports[0]},SASL_PLAINTEXT://localhost:{ports[1]}"
    with Cluster(listeners=listeners, **settings) as cluster:
        yield Secured(cluster, f"localhost:{ports[0]}", f"localhost:{ports[1]}")


def properties(mechanism: str, user: str, password: str) -> dict[str, str]:
    """How a Java client, or ours, logs in as ``user``."""
    module = PLAIN_MODULE if mechanism == "PLAIN" else SCRAM_MODULE
    quoted = password.replace("\\", "\\\\").replace('"', '\\"')
    return {
        "security.protocol": "SASL_PLAINTEXT",
        "sasl.mechanism": mechanism,
        "sasl.jaas.config": f'{module} required username="{user}" password="{quoted}";',
    }


def properties_file(path: Path, mechanism: str, user: str, password: str) -> Path:
    """The same as a file that only this user may read."""
    lines = properties(mechanism, user, password).items()
    path.write_text("".join(f"{name}={value}\n" for name, value in lines).replace("\\", "\\\\"))
    path.chmod(0o600)
    return path


def librdkafka_goes_on(config: dict[str, Any], lasts_s: float) -> None:
    """Produce and consume for so long, whatever expires meanwhile: nothing fails, is lost or comes
    out of order.
    """
    topic = f"rd-{uuid.uuid4().hex[:8]}"
    producer = Producer(config)
    consumer = Consumer({**config, "group.id": topic, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    seen: list[bytes | None] = []
    failed: list[object] = []
    sent, end = 0, time.monotonic() + lasts_s
    while time.monotonic() < end:
        producer.produce(topic, b"%d" % sent, on_delivery=lambda e, _: e and failed.append(e))
        sent += 1
        producer.poll(0)
        seen += _values(consumer, 0.05)
    assert producer.flush(30) == 0
    deadline = time.monotonic() + READ_S
    while len(seen) < sent and time.monotonic() < deadline:
        seen += _values(consumer, 1.0)
    consumer.close()
    assert not failed
    assert seen == [b"%d" % number for number in range(sent)]


def _values(consumer: Consumer, wait_s: float) -> list[bytes | None]:
    return [m.value() for m in consumer.consume(100, wait_s) if m.error() is None]
