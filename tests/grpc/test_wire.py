"""What clients were generated from stays: names, numbers, kinds. New fields may join.

Made anew, when something joined, by ``python -m tests.grpc.test_wire > tests/golden/grpc_v1.json``.
"""

from __future__ import annotations

import json
from pathlib import Path

from kept.node.proto import broker_pb2

GOLDEN = Path(__file__).resolve().parents[1] / "golden" / "grpc_v1.json"


def described():
    """Every method and field of the public service."""
    found = {}
    file = broker_pb2.DESCRIPTOR
    for method in file.services_by_name["Broker"].methods:
        kind = "stream " if method.server_streaming else ""
        found[method.full_name] = (
            f"{method.input_type.full_name} -> {kind}{method.output_type.full_name}"
        )
    for message in file.message_types_by_name.values():
        for field in message.fields:
            presence = "optional" if field.has_presence else ""
            kind = f"{field.type}{'[]' if field.is_repeated else ''} {presence}".strip()
            found[field.full_name] = f"{field.number}: {kind}"
    return found


def test_what_is_on_the_wire_stays():
    known = json.loads(GOLDEN.read_text())
    now = described()
    assert {name: now.get(name) for name in known} == known
    assert set(now) == set(known), "say what joined in the golden file, too"


if __name__ == "__main__":
    print(json.dumps(described(), indent=1, sort_keys=True))
