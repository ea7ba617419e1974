"""Which Kafka APIs this node serves, in which versions, and who answers them.

A handler is a function ``handle(ctx, request)`` of a module under ``kept.node.kafka.handlers``,
named as the API in snake case; ``request`` is kio's typed object. It returns the response as plain
values (:data:`kept.client.protocol.Values`), a future or coroutine of that, or None for no
response. Modules are imported at the first request, so that an idle node stays small. Produce and
Fetch have a codec of their own (``kept.node.kafka.codec``) and are dispatched by the connection.

What is advertised works (semantics.md, rule 39): a golden test compares versions with Apache Kafka
4.3's answer, and another calls up every handler.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import cache, wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from kept.client.api_keys import ApiKey
from kept.client.wire import read_uvarint, skip_tags, uvarint
from kept.node.runtime import error_codes
from kept.node.runtime.yielding import Sliced, Steps

if TYPE_CHECKING:
    from uuid import UUID

    from kept.node.kafka.apis import KafkaApis
    from kept.node.kafka.connection import Connection

PRODUCE: Final = ApiKey.PRODUCE
FETCH: Final = ApiKey.FETCH
API_VERSIONS: Final = ApiKey.API_VERSIONS
"""These are compared with the key of every request: an attribute of an enum costs more."""

SOFTWARE_NAME: Final = re.compile(rb"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")
"""What KIP-511 allows as a client's software name and version."""
LONGEST_SOFTWARE_NAME: Final = 32_768
"""A string of Kafka's is 32,767 bytes at most; as a varint's value that is one more."""

Answer = Mapping[str, Any] | Awaitable[Mapping[str, Any] | None] | None
Handler = Callable[["RequestContext", Any], "Answer | Sliced[Answer]"]


class Api(NamedTuple):
    """One API: versions are inclusive; ``refused_below`` versions are advertised but not served."""

    key: ApiKey
    min_version: int
    max_version: int
    module: str
    flexible_from: int
    refused_below: int = 0

    @property
    def name(self) -> str:
        """Its name in snake case: also that of the handler in its module."""
        return self.key.name.lower()


@dataclass(slots=True)
class RequestContext:
    """Who asks for what. ``connection`` is None for a forwarded request; ``tries`` are then the ids
    of the attempts so far, this one's last (``kept.node.kafka.forwarding``)."""

    apis: KafkaApis
    connection: Connection | None
    api_key: int
    api_version: int
    correlation_id: int
    client_id: str | None
    listener_name: str
    client_host: str = ""
    tries: tuple[UUID, ...] = ()


def sliced(steps: Callable[[RequestContext, Any], Steps[Answer]]) -> Handler:
    """A handler whose work on a request of many entries is done in slices
    (``kept.node.runtime.yielding``): a generator that yields after each. What it returns is the
    answer, or an awaitable of it.
    """

    @wraps(steps)
    def handle(ctx: RequestContext, request: Any) -> Answer | Sliced[Answer]:
        answer: Answer | Sliced[Answer] = ctx.apis.runtime.slices.run(steps(ctx, request))
        return answer

    return handle


FORWARDED: Final = frozenset(
    {
        ApiKey.CREATE_TOPICS,
        ApiKey.DELETE_TOPICS,
        ApiKey.ALTER_CONFIGS,
        ApiKey.CREATE_PARTITIONS,
        ApiKey.ELECT_LEADERS,
        ApiKey.INCREMENTAL_ALTER_CONFIGS,
        ApiKey.ALTER_PARTITION_REASSIGNMENTS,
        ApiKey.LIST_PARTITION_REASSIGNMENTS,
        ApiKey.DESCRIBE_QUORUM,
        ApiKey.UNREGISTER_BROKER,
        ApiKey.ADD_RAFT_VOTER,
        ApiKey.REMOVE_RAFT_VOTER,
    }
)
"""Requests that change metadata, or ask how it is kept: the active controller answers them,
whoever was asked.
"""

NEVER: Final = 32767
"""``flexible_from`` of an API without flexible versions."""

APIS: Final = (
    # Produce 0-2 are advertised for librdkafka (KAFKA-18659) and refused on use.
    Api(ApiKey.PRODUCE, 0, 13, "produce", 9, refused_below=3),
    Api(ApiKey.FETCH, 4, 18, "fetch", 12),
    Api(ApiKey.LIST_OFFSETS, 1, 11, "list_offsets", 6),
    Api(ApiKey.METADATA, 0, 13, "metadata", 9),
    Api(ApiKey.OFFSET_COMMIT, 2, 10, "group_offsets", 8),
    Api(ApiKey.OFFSET_FETCH, 1, 10, "group_offsets", 6),
    Api(ApiKey.FIND_COORDINATOR, 0, 6, "group_membership", 3),
    Api(ApiKey.JOIN_GROUP, 0, 9, "group_membership", 6),
    Api(ApiKey.HEARTBEAT, 0, 4, "group_membership", 4),
    Api(ApiKey.LEAVE_GROUP, 0, 5, "group_membership", 4),
    Api(ApiKey.SYNC_GROUP, 0, 5, "group_membership", 4),
    Api(ApiKey.DESCRIBE_GROUPS, 0, 6, "describe_groups", 5),
    Api(ApiKey.LIST_GROUPS, 0, 5, "describe_groups", 3),
    Api(ApiKey.API_VERSIONS, 0, 4, "", 3),  # answered below
    Api(ApiKey.CREATE_TOPICS, 2, 7, "topics", 5),
    Api(ApiKey.DELETE_TOPICS, 1, 6, "topics", 4),
    Api(ApiKey.DELETE_RECORDS, 0, 2, "delete_records", 2),
    Api(ApiKey.INIT_PRODUCER_ID, 0, 5, "init_producer_id", 2),
    Api(ApiKey.OFFSET_FOR_LEADER_EPOCH, 2, 4, "list_offsets", 4),
    Api(ApiKey.DESCRIBE_ACLS, 1, 3, "describe_cluster", 2),
    Api(ApiKey.DESCRIBE_CONFIGS, 1, 4, "configs", 4),
    Api(ApiKey.ALTER_CONFIGS, 0, 2, "configs", 2),
    Api(ApiKey.DESCRIBE_LOG_DIRS, 1, 5, "describe_log_dirs", 2),
    Api(ApiKey.CREATE_PARTITIONS, 0, 3, "topics", 2),
    Api(ApiKey.DELETE_GROUPS, 0, 2, "describe_groups", 2),
    Api(ApiKey.ELECT_LEADERS, 0, 2, "reassignments", 2),
    Api(ApiKey.INCREMENTAL_ALTER_CONFIGS, 0, 1, "configs", 1),
    Api(ApiKey.ALTER_PARTITION_REASSIGNMENTS, 0, 1, "reassignments", 0),
    Api(ApiKey.LIST_PARTITION_REASSIGNMENTS, 0, 0, "reassignments", 0),
    Api(ApiKey.OFFSET_DELETE, 0, 0, "group_offsets", NEVER),
    Api(ApiKey.DESCRIBE_QUORUM, 0, 2, "describe_quorum", 0),
    Api(ApiKey.DESCRIBE_CLUSTER, 0, 2, "describe_cluster", 0),
    Api(ApiKey.UNREGISTER_BROKER, 0, 0, "describe_cluster", 0),
    Api(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, 0, "describe_cluster", 0),
    Api(ApiKey.ADD_RAFT_VOTER, 0, 1, "raft_voters", 0),
    Api(ApiKey.REMOVE_RAFT_VOTER, 0, 0, "raft_voters", 0),
)

_PACKAGE: Final = "kept.node.kafka.handlers."


@cache
def served() -> dict[int, Api]:
    """The APIs of this node by key."""
    return {api.key: api for api in APIS}


@cache
def handler(key: int) -> Handler:
    """The function that answers an API; imports its module."""
    api = served()[key]
    function: Handler = getattr(import_module(_PACKAGE + api.module), api.name)
    return function


_FIRST_ASKED: Final = (
    ApiKey.METADATA,
    ApiKey.LIST_OFFSETS,
    ApiKey.INIT_PRODUCER_ID,
    ApiKey.FIND_COORDINATOR,
    ApiKey.JOIN_GROUP,
    ApiKey.SYNC_GROUP,
    ApiKey.HEARTBEAT,
    ApiKey.OFFSET_COMMIT,
    ApiKey.OFFSET_FETCH,
)


def preload() -> None:
    """Import what almost every client asks for in its first second, and what the first scrape and
    the console would stop the loop for; takes ~0.4 s, in a thread.
    """
    from kio.static.constants import EntityType

    from kept.client import protocol

    for key in _FIRST_ASKED:
        api = served()[key]
        handler(key)
        for version in {api.max_version, min(api.max_version, api.flexible_from)}:
            protocol.message_type(key, version, EntityType.request)
            protocol.message_type(key, version, EntityType.response)
    for name in (
        "compaction.cleaner",
        "http.routes",
        "metrics.table",
    ):
        import_module(f"kept.node.{name}")


def _api_versions_body(version: int, error_code: int) -> bytes:
    """ApiVersionsResponse. Features are absent: none of Kafka's finalized ones is served (rule
    39).
    """
    flexible = version >= 3
    apis = served().values()
    out = bytearray(error_code.to_bytes(2, "big"))
    out += uvarint(len(apis) + 1) if flexible else len(apis).to_bytes(4, "big")
    for api in apis:
        for value in (api.key, api.min_version, api.max_version):
            out += value.to_bytes(2, "big")
        if flexible:
            out += b"\0"
    if version >= 1:
        out += bytes(4)
    if flexible:
        out += b"\0"
    return bytes(out)


def answer_api_versions(version: int, body: memoryview) -> bytes:
    """The answer to ApiVersions, in the version asked for.

    An unknown version gets a v0 answer with UNSUPPORTED_VERSION (KIP-511), from which the client
    learns what to ask; an illegal software name or version gets INVALID_REQUEST.
    """
    api = served()[API_VERSIONS]
    if not api.min_version <= version <= api.max_version:
        return _api_versions_body(0, error_codes.UNSUPPORTED_VERSION)
    if version >= 3:
        position = 0
        for _ in range(2):
            size, position = read_uvarint(body, position)
            name = body[position : position + max(size - 1, 0)]
            if size > LONGEST_SOFTWARE_NAME or not SOFTWARE_NAME.fullmatch(name):
                return _api_versions_body(version, error_codes.INVALID_REQUEST)
            position += size - 1
        skip_tags(body, position)
    return _answer(version)


@cache
def _answer(version: int) -> bytes:
    return _api_versions_body(version, error_codes.NONE)
