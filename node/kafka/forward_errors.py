"""The response to an admin request that failed as a whole, or that no controller has answered.

Clients are told so with REQUEST_TIMED_OUT, as Apache Kafka's brokers do, and ask again if they
like; a connection that breaks would tell them nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Final

from kept.client.protocol.api_keys import ApiKey
from kept.client.protocol.messages import Values
from kept.node.runtime.error_codes import error_values
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


def refusal(api_key: int, request: Any, error: BaseException) -> Values:
    """The response of one of ``api.FORWARDED``: everything in it failed."""
    late = RequestTimedOut(f"no controller has answered: {error}")
    failed = error_values(late)
    parts = _PARTS.get(api_key)
    return {**failed, **(_NOTHING if parts is None else parts(request, failed))}


_NOTHING: Final[Values] = {
    "topics": (),
    "responses": (),
    "nodes": (),
    "results": (),
    "replica_election_results": (),
}


def _created(request: Any, failed: Mapping[str, Any]) -> dict[str, Any]:
    none = {"topic_id": None, "num_partitions": -1, "replication_factor": -1, "configs": ()}
    return {"topics": [{"name": topic.name, **none, **failed} for topic in request.topics]}


def _deleted(request: Any, failed: Mapping[str, Any]) -> dict[str, Any]:
    names = getattr(request, "topic_names", None)
    topics = [(name, None) for name in names or ()]
    if names is None:
        topics = [(topic.name, topic.topic_id) for topic in request.topics]
    return {"responses": [{"name": n, "topic_id": topic_id, **failed} for n, topic_id in topics]}


def _altered(request: Any, failed: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "responses": [
            {
                "resource_type": resource.resource_type,
                "resource_name": resource.resource_name,
                **failed,
            }
            for resource in request.resources
        ]
    }


def _grown(request: Any, failed: Mapping[str, Any]) -> dict[str, Any]:
    return {"results": [{"name": topic.name, **failed} for topic in request.topics]}


def _elected(request: Any, failed: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "replica_election_results": [
            {
                "topic": topic.topic,
                "partition_result": [{"partition_id": n, **failed} for n in topic.partitions],
            }
            for topic in request.topic_partitions or ()
        ]
    }


def _users(request: Any, failed: Mapping[str, Any]) -> dict[str, Any]:
    users = dict.fromkeys(each.name for each in (*request.deletions, *request.upsertions))
    return {"results": [{"user": user, **failed} for user in users]}


_PARTS: Final[Mapping[int, Callable[[Any, Mapping[str, Any]], Values]]] = {
    ApiKey.CREATE_TOPICS: _created,
    ApiKey.DELETE_TOPICS: _deleted,
    ApiKey.ALTER_CONFIGS: _altered,
    ApiKey.CREATE_PARTITIONS: _grown,
    ApiKey.ELECT_LEADERS: _elected,
    ApiKey.INCREMENTAL_ALTER_CONFIGS: _altered,
    ApiKey.ALTER_USER_SCRAM_CREDENTIALS: _users,
}
"""Those in whose responses each part has an error of its own."""
