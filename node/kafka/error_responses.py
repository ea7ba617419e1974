"""Responses that refuse a request, or some of its items, in the shape of their API.

Each part of a request that is answered by itself is refused by itself: clients read the error
there. Whoever was refused, because no controller has answered or because it is not allowed, is told
so over a connection that stays.
"""

from __future__ import annotations

from collections.abc import Awaitable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from kio.static.constants import EntityType
from msgspec import Struct

from kept.client.protocol import messages as protocol
from kept.client.protocol.api_keys import ApiKey
from kept.client.protocol.messages import Values
from kept.node.runtime.error_codes import error_values
from kept.steps import Steps
from kept.storage.errors import (
    NetworkException,
    NotController,
    PeerError,
    RequestTimedOut,
    RetriableError,
)


async def outcome(change: Awaitable[None]) -> Values:
    """The error fields of a response, after ``change``. Raises NotController, which sends the
    request on, and what is a bug of ours.
    """
    try:
        await change
    except NotController:
        raise
    except (PeerError, RetriableError) as error:
        return error_values(error)
    return error_values(None)


UNANSWERED: Final = (NotController, NetworkException, RequestTimedOut)
"""What a request that was sent on ends with when nobody has answered it."""


class Part(Struct, frozen=True):
    """An array of a request, ``request_field``, whose items are answered one by one in an array of
    the response, ``response_field``, by the same ``keys``: pairs of an item's field and its
    answer's. The field of an item that is a name or a number itself is "".
    """

    request_field: str
    response_field: str
    keys: tuple[tuple[str, str], ...]
    inside: Part | None = None
    """The array in these items that is answered likewise."""
    values: Values = MappingProxyType({})
    """What stands beside the error."""
    refused_whole: bool = True
    """Whether its items are refused one by one also where the whole request is."""

    def key(self, item: Any) -> dict[str, Any]:
        """The fields of an answer that say which item is answered."""
        return {
            answered: getattr(item, asked) if asked else item
            for asked, answered in self.keys
            if not asked or hasattr(item, asked)
        }

    def refused(self, element: Any, item: Any, failed: Values) -> Steps[Values]:
        """The answer, of the class ``element``, to an item that ``failed``."""
        yield
        values: dict[str, Any] = {
            **protocol.nothing(element),
            **self.values,
            **failed,
            **self.key(item),
        }
        if self.inside is not None:
            inner = protocol.array_element(element, self.inside.response_field)
            answers = []
            for part in getattr(item, self.inside.request_field) or ():
                answers.append((yield from self.inside.refused(inner, part, failed)))
            values[self.inside.response_field] = answers
        return values


def refusal(api_key: int, version: int, request: Any, failed: Values) -> Steps[Values]:
    """The response to a request all of which failed; ``failed`` are ``error_code`` and
    ``error_message``.
    """
    cls = protocol.message_type(api_key, version, EntityType.response)
    values: dict[str, Any] = {**protocol.nothing(cls), **failed}
    for part in PARTS.get(api_key, ()):
        items = getattr(request, part.request_field, None)
        if part.refused_whole and items is not None:
            element = protocol.array_element(cls, part.response_field)
            answers = list(values.get(part.response_field, ()))
            for item in _once(part, items, answers):
                answers.append((yield from part.refused(element, item, failed)))
            values[part.response_field] = answers
    return values


def _once(part: Part, items: Iterable[Any], answers: Sequence[Values]) -> Iterable[Any]:
    """``items`` without those that are answered, or named again, where an answer has no parts; all
    of them where an answer names no item.
    """
    if part.inside is not None or not part.keys:
        return items
    asked = {tuple(part.key(item).items()): item for item in items}
    done = {tuple((name, one.get(name)) for _, name in part.keys) for one in answers}
    return [item for key, item in asked.items() if key not in done]


def unanswered(error: BaseException) -> Values:
    """How a request failed that no controller has answered: as Apache Kafka's brokers say it, so
    that clients ask again if they like.
    """
    return error_values(RequestTimedOut(f"no controller has answered: {error}"))


def _part(asked: str, answered: str, *keys: str, inside: Part | None = None, **others: Any) -> Part:
    """``keys``: a field of both, or ``item's=answer's``."""
    pairs = tuple((a, b or a) for a, _, b in (key.partition("=") for key in keys))
    return Part(asked, answered, tuple(pairs), inside, **others)


_PARTITIONS: Final = _part("partitions", "partitions", "partition_index")
_INDEXES: Final = _part("partition_indexes", "partitions", "=partition_index")
_TOPICS: Final = _part("topics", "topics", "name", "topic_id", inside=_PARTITIONS)
_INDEXED: Final = _part("topics", "topics", "name", inside=_INDEXES)
_UNKNOWN_TRANSACTION: Final = {
    "transaction_timeout": 0,
    "transaction_start_time": 0,
    "producer_id": 0,
    "producer_epoch": 0,
}
_RESOURCE: Final = ("resource_type", "resource_name")

PARTS: Final[Mapping[int, tuple[Part, ...]]] = MappingProxyType(
    {
        ApiKey.LIST_OFFSETS: (_TOPICS,),
        ApiKey.OFFSET_COMMIT: (_TOPICS,),
        ApiKey.DESCRIBE_GROUPS: (_part("groups", "groups", "=group_id"),),
        ApiKey.CREATE_TOPICS: (_part("topics", "topics", "name", values={"configs": ()}),),
        ApiKey.DELETE_TOPICS: (
            _part("topics", "responses", "name", "topic_id"),
            _part("topic_names", "responses", "=name"),
        ),
        ApiKey.DELETE_RECORDS: (_TOPICS,),
        ApiKey.OFFSET_FOR_LEADER_EPOCH: (
            _part(
                "topics", "topics", "topic", inside=_part("partitions", "partitions", "partition")
            ),
        ),
        ApiKey.WRITE_TXN_MARKERS: (_part("markers", "markers", "producer_id", inside=_INDEXED),),
        ApiKey.TXN_OFFSET_COMMIT: (_TOPICS,),
        ApiKey.CREATE_ACLS: (_part("creations", "results"),),
        ApiKey.DELETE_ACLS: (_part("filters", "filter_results"),),
        ApiKey.DESCRIBE_CONFIGS: (_part("resources", "results", *_RESOURCE),),
        ApiKey.ALTER_CONFIGS: (_part("resources", "responses", *_RESOURCE),),
        ApiKey.CREATE_PARTITIONS: (_part("topics", "results", "name"),),
        ApiKey.DELETE_GROUPS: (_part("groups_names", "results", "=group_id"),),
        ApiKey.ELECT_LEADERS: (
            _part(
                "topic_partitions",
                "replica_election_results",
                "topic",
                inside=_part("partitions", "partition_result", "=partition_id"),
            ),
        ),
        ApiKey.INCREMENTAL_ALTER_CONFIGS: (_part("resources", "responses", *_RESOURCE),),
        ApiKey.ALTER_PARTITION_REASSIGNMENTS: (
            _part("topics", "responses", "name", inside=_PARTITIONS),
        ),
        ApiKey.LIST_PARTITION_REASSIGNMENTS: (_INDEXED,),
        ApiKey.ALTER_CLIENT_QUOTAS: (
            _part(
                "entries",
                "entries",
                inside=_part("entity", "entity", "entity_type", "entity_name"),
            ),
        ),
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS: (
            _part("deletions", "results", "name=user"),
            _part("upsertions", "results", "name=user"),
        ),
        ApiKey.OFFSET_DELETE: (
            _part("topics", "topics", "name", inside=_PARTITIONS, refused_whole=False),
        ),
        ApiKey.DESCRIBE_PRODUCERS: (_INDEXED,),
        ApiKey.DESCRIBE_TRANSACTIONS: (
            _part(
                "transactional_ids",
                "transaction_states",
                "=transactional_id",
                values=_UNKNOWN_TRANSACTION,
            ),
        ),
    }
)
"""The arrays of requests whose items are answered one by one; the first one is the one whose items
are asked about, where the API's access is by item."""
