"""``kept.Admin``: the operations of ``kept.node.admin.service`` over gRPC
(``node/proto/admin.proto``).

The messages have the names of the JSON that ``/api/v1/`` serves, and are made from the same values,
so the two faces cannot disagree.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Final

from google.protobuf import json_format

from kept.node.admin.service import DEFAULT_RECORDS, MAX_SEGMENTS
from kept.node.admin.service import Admin as Operations
from kept.node.grpc.status_codes import answering
from kept.node.proto import admin_pb2
from kept.storage.errors import InvalidRequest

# isort: split
import grpc

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kept.node.node import Node

NAME: Final = "kept.Admin"
MANY: Final = 100
"""Longer lists are made into messages in a thread."""


class Admin:
    """The service of one node."""

    def __init__(self, node: Node) -> None:
        self._node = node
        self._operations = Operations(node)

    def handlers(self) -> Any:
        """For a gRPC server."""
        methods = admin_pb2.DESCRIPTOR.services_by_name["Admin"].methods
        return grpc.method_handlers_generic_handler(
            NAME, {method.name: self._handler(method) for method in methods}
        )

    def _handler(self, method: Any) -> Any:
        """A method's operation has its name here, in small letters."""
        request = getattr(admin_pb2, method.input_type.name)
        reply = getattr(admin_pb2, method.output_type.name)
        operation = getattr(self, f"_{method.name.lower()}")

        async def handle(asked: Any, _context: Any) -> Any:
            found = await operation(asked)
            if any(isinstance(member, list) and len(member) > MANY for member in found.values()):
                return await self._node.in_pool(filled, reply, found)
            return filled(reply, found)

        return grpc.unary_unary_rpc_method_handler(
            answering(handle, request), None, reply.SerializeToString
        )

    async def _cluster(self, _: Any) -> Mapping[str, Any]:
        return await self._operations.cluster()

    async def _topics(self, _: Any) -> Mapping[str, Any]:
        return await self._operations.topics()

    async def _topic(self, asked: Any) -> Mapping[str, Any]:
        segments = _number(asked, "segments")
        return await self._operations.topic(
            _named(asked.name, "name"),
            leaders=asked.leaders,
            partition=_number(asked, "partition"),
            limit=_number(asked, "limit"),
            segments=MAX_SEGMENTS if segments is None else max(1, min(segments, MAX_SEGMENTS)),
        )

    async def _quorum(self, asked: Any) -> Mapping[str, Any]:
        return await self._operations.quorum(asked.local)

    async def _groups(self, asked: Any) -> Mapping[str, Any]:
        return await self._operations.groups(asked.name)

    async def _group(self, asked: Any) -> Mapping[str, Any]:
        return await self._operations.group(_named(asked.name, "name"))

    async def _records(self, asked: Any) -> Mapping[str, Any]:
        limit = _number(asked, "limit")
        return await self._operations.records(
            _named(asked.topic),
            _needed(asked, "partition"),
            offset=_number(asked, "offset"),
            timestamp=_number(asked, "timestamp"),
            limit=DEFAULT_RECORDS if limit is None else limit,
        )

    async def _key(self, asked: Any) -> Mapping[str, Any]:
        partition = _number(asked, "partition")
        return await self._operations.key(_named(asked.topic), partition, asked.key)

    async def _cleaner(self, _: Any) -> Mapping[str, Any]:
        return self._operations.cleaner()

    async def _passes(self, asked: Any) -> Mapping[str, Any]:
        return await self._operations.passes(_named(asked.topic), _needed(asked, "partition"))

    async def _history(self, asked: Any) -> Mapping[str, Any]:
        return self._operations.history(_named(asked.topic), _needed(asked, "partition"))

    async def _elect(self, asked: Any) -> Mapping[str, Any]:
        return await self._operations.elect(_named(asked.topic), _needed(asked, "partition"))

    async def _compaction(self, asked: Any) -> Mapping[str, Any]:
        return await self._operations.compaction(_given(asked, "topic"))

    async def _explain(self, asked: Any) -> Mapping[str, Any]:
        topic, partition = _named(asked.topic), _number(asked, "partition")
        return await self._operations.explain(topic, partition, _given(asked, "key"))

    async def _whymissing(self, asked: Any) -> Mapping[str, Any]:
        partition, offset = _needed(asked, "partition"), _needed(asked, "offset")
        return await self._operations.why_missing(
            _named(asked.topic), partition, offset, _given(asked, "key")
        )

    async def _compactnow(self, asked: Any) -> Mapping[str, Any]:
        topic, partition = _named(asked.topic), _number(asked, "partition")
        return await self._operations.compact_now(topic, partition, asked.wait)

    async def _retry(self, asked: Any) -> Mapping[str, Any]:
        return await self._operations.retry(_named(asked.topic), _needed(asked, "partition"))

    async def _replica(self, asked: Any) -> Mapping[str, Any]:
        return self._operations.replica(_named(asked.topic), _needed(asked, "partition"))

    async def _digests(self, asked: Any) -> Mapping[str, Any]:
        from kept.node.compaction.replica_digests import Wanted

        wanted = Wanted(
            _given(asked, "generation"),
            _needed(asked, "start"),
            _needed(asked, "end"),
            _number(asked, "parts"),
        )
        partition = _needed(asked, "partition")
        return await self._operations.digests(_named(asked.topic), partition, wanted)

    async def _lost(self, asked: Any) -> Mapping[str, Any]:
        topic = _given(asked, "topic")
        return await self._operations.lost(
            topic, _number(asked, "partition"), _number(asked, "offset")
        )

    async def _addvoter(self, asked: Any) -> Mapping[str, Any]:
        return await self._operations.add_voter(
            asked.node_id, _given(asked, "address"), allowed=False
        )

    async def _removevoter(self, asked: Any) -> Mapping[str, Any]:
        return await self._operations.remove_voter(asked.node_id, allowed=False)


def filled(message: Any, values: Mapping[str, Any]) -> Any:
    """A message from values as JSON has them; what it has no field for is left out."""
    return json_format.Parse(json.dumps(values), message(), ignore_unknown_fields=True)


def _given(asked: Any, field: str) -> Any:
    """An optional field; None when it is not set."""
    return getattr(asked, field) if asked.HasField(field) else None


def _number(asked: Any, field: str) -> int | None:
    """A number, 0 or more; None when it is optional and not set. Raises InvalidRequest."""
    if asked.DESCRIPTOR.fields_by_name[field].has_presence and not asked.HasField(field):
        return None
    value: int = getattr(asked, field)
    if value < 0:
        raise InvalidRequest(f"{field} must be a number, 0 or more")
    return value


def _needed(asked: Any, field: str) -> int:
    """A number that is not optional, 0 or more. Raises InvalidRequest."""
    value = _number(asked, field)
    assert value is not None
    return value


def _named(name: str, field: str = "topic") -> str:
    if not name:
        raise InvalidRequest(f"{field} is missing")
    return name
