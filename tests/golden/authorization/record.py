"""Record what Apache Kafka answers to whom its StandardAuthorizer does not let do everything::

    .venv/bin/python -m tests.golden.authorization.record

It asks every request of :mod:`tests.golden.authorization.asked` in every version that kept serves,
with each of its cases of bindings, and writes ``authorization_4_3.json``.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

from kept.node.kafka.api import APIS
from kept.testing.ports import free_port
from tests.golden.authorization.asked import ASKED, CASES
from tests.golden.authorization.world import PASSWORD, World, fold, log_in
from tests.support.kafka_connection import Connection
from tests.tools import kafka_dist

GOLDEN = Path(__file__).parents[1] / "authorization_4_3.json"
PLAIN = "org.apache.kafka.common.security.plain.PlainLoginModule required"


def settings(port: int) -> dict[str, object]:
    """A listener without a login, whose clients are super users, and one with."""
    return {
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{port + 1},"
        f"OUT://127.0.0.1:{port + 2}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port},OUT://127.0.0.1:{port + 2}",
        "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,"
        "OUT:SASL_PLAINTEXT",
        "sasl.enabled.mechanisms": "PLAIN",
        "listener.name.out.plain.sasl.jaas.config": f'{PLAIN} user_bob="{PASSWORD}";',
        "authorizer.class.name": "org.apache.kafka.metadata.authorizer.StandardAuthorizer",
        "super.users": "User:ANONYMOUS",
        "auto.create.topics.enable": "false",
        "unstable.api.versions.enable": "false",
    }


def record() -> None:
    """Write the golden file."""
    ours = {int(api.key): (api.min_version, api.max_version) for api in APIS}
    answers: dict[tuple[str, int], dict[str, str]] = {}
    port = free_port(above=[1, 2])
    with (
        tempfile.TemporaryDirectory() as folder,
        kafka_dist.Broker(Path(folder), port, **settings(port)) as broker,
    ):
        host, _, _ = broker.bootstrap.rpartition(":")
        world = World(
            lambda: Connection(broker.bootstrap),
            lambda: log_in(Connection(f"{host}:{port + 2}"), "bob"),
        )
        for case in CASES:
            world.set(case)
            for asked in ASKED:
                low, high = world.served.get(asked.api, (0, -1))
                first, last = ours.get(asked.api, (0, 99))
                both = {asked.api: (max(low, first), min(high, last))}
                for version in asked.asked_in(both):
                    answer = world.answer(asked, version)
                    answers.setdefault((asked.name, version), {})[case] = answer
            print(case, flush=True)
        world.close()
    order = {asked.name: number for number, asked in enumerate(ASKED)}
    in_order = dict(sorted(answers.items(), key=lambda item: (order[item[0][0]], item[0][1])))
    GOLDEN.write_text(json.dumps(fold(in_order), indent=1) + "\n")


if __name__ == "__main__":
    record()
