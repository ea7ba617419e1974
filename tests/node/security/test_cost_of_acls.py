"""What ACLs cost a producer, counted in calls: processor time on a busy machine says little of a
percent, and of the work that Python does for a request each step is a call.
"""

from __future__ import annotations

import asyncio
import sys
from collections import Counter
from collections.abc import Callable
from typing import Any
from uuid import UUID

from kept.client.protocol import messages as protocol
from kept.cluster.metadata.records import AclRecord
from kept.cluster.security.acls import (
    ANONYMOUS,
    AclBinding,
    AclOperation,
    AclPermission,
    AclResourceType,
    PatternType,
)
from kept.node.config.checks import STANDARD_AUTHORIZER
from kept.storage.records import build_batch
from tests.node.conftest import Lone
from tests.support.request_values import produce_values

PRODUCE = 0
ACLS = 10_000
REQUESTS = 50
BATCH = build_batch([(1, None, bytes(1000), ())])
FRAME = protocol.encode_request(PRODUCE, 9, 7, "a client", produce_values("t", BATCH))


def binding(number: int) -> AclBinding:
    kind = PatternType.PREFIXED if number % 3 else PatternType.LITERAL
    name, principal = f"team-{number % 300}.{number}", f"User:app-{number % 500}"
    operation = AclOperation.READ
    if not number:
        kind, name, principal, operation = PatternType.LITERAL, "t", ANONYMOUS, AclOperation.WRITE
    return AclBinding(
        AclResourceType.TOPIC, name, kind, principal, "*", operation, AclPermission.ALLOW
    )


def calls(lone: Lone) -> tuple[int, int]:
    """Calls that producing takes on a connection that has produced before, and decisions of the
    authorizer among them.
    """
    lone.create("t")
    counted: Counter[str] = Counter()

    def count(frame: Any, event: str, called: Any) -> None:
        if event == "call":
            counted[frame.f_code.co_qualname] += 1
        elif event == "c_call":
            counted[called.__qualname__] += 1

    async def scene() -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", lone.port)
        writer.write(FRAME)
        await reader.readexactly(4)
        (connection,) = lone.node.parts.listeners[0].connections
        for _ in range(REQUESTS):
            connection.get_buffer(-1)[: len(FRAME)] = FRAME
            sys.setprofile(count)
            try:
                connection.buffer_updated(len(FRAME))
            finally:
                sys.setprofile(None)
        writer.close()

    lone.run(asyncio.wait_for(scene(), 60))
    topic = lone.node.parts.table.by_name[b"t"]
    assert topic.partitions[0].partition.log.log_end_offset == REQUESTS + 1
    return counted.total(), counted["StandardAuthorizer.allows"]


def test_ten_thousand_acls_cost_a_producer_no_call(lone_node: Callable[..., Lone]) -> None:
    without, _ = calls(lone_node())
    guarded = lone_node(authorizer_class_name=STANDARD_AUTHORIZER, super_users="User:admin")
    acls = [AclRecord(UUID(int=number + 1), binding(number)) for number in range(ACLS)]
    guarded.run(guarded.node.parts.metadata.propose(acls))
    with_acls, decisions = calls(guarded)
    assert decisions == 0, "decided once, by the first request"
    assert with_acls <= without
