"""Which Kafka APIs this node serves, in which versions, and by which handlers.

A handler is a class under ``kept.node.kafka.handlers`` with a method ``(context, request)`` for
each of its APIs; ``request`` is kio's typed object. Its constructor names its collaborators
(``kept.node.kafka.request_handlers`` holds them). Modules are imported at the first request, so
that an idle node stays small. Produce and Fetch have a codec of their own
(``kept.node.kafka.codec``).

What is advertised works (semantics.md, rule 39): a golden test compares versions with Apache Kafka
4.3's answer, and another calls up every handler.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Awaitable, Container, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from kept.client.protocol.api_keys import ApiKey
from kept.client.protocol.wire import read_uvarint, skip_tags, uvarint
from kept.cluster.controller.features import SUPPORTED, TRANSACTION_VERSION
from kept.cluster.security.acls import AclOperation as Op
from kept.cluster.security.acls import AclResourceType
from kept.node.kafka import acl_resources
from kept.node.runtime import error_codes
from kept.node.runtime.completable_future import CompletableFuture
from kept.node.security.access import (
    CLUSTER,
    Access,
    AuthorizedByHandler,
    AuthorizeEach,
    AuthorizeRequest,
    PermitAll,
)
from kept.node.security.session import ALL_GRANTED
from kept.steps import Steps

if TYPE_CHECKING:
    from uuid import UUID

    from kept.cluster.metadata.image import Image
    from kept.node.security.session import Session

PRODUCE: Final = ApiKey.PRODUCE
FETCH: Final = ApiKey.FETCH
API_VERSIONS: Final = ApiKey.API_VERSIONS
"""These are compared with the key of every request: an attribute of an enum costs more."""

SOFTWARE_NAME: Final = re.compile(rb"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")
"""What KIP-511 allows as a client's software name and version."""
LONGEST_SOFTWARE_NAME: Final = 32_768
"""A string of Kafka's is 32,767 bytes at most; as a varint's value that is one more."""

NO_LEVELS: Final[Mapping[str, int]] = {}

HandlerResult = Mapping[str, Any] | bytes | CompletableFuture[Any] | Awaitable[Any] | Steps[Any]
"""A response as values, one that is encoded already, or what comes to that: later, or by the steps
of a request of many entries (``kept.node.runtime.time_slices``)."""


class Api(NamedTuple):
    """One API: versions are inclusive; ``refused_below`` versions are advertised but not served.

    ``max_before``: the newest version below level 2 of transaction.version, where that matters.
    ``handler`` is the class, one of :data:`HANDLERS`, whose method of the API's name serves it;
    empty where the connection does. ``access`` is what is asked before, in order.
    """

    key: ApiKey
    min_version: int
    max_version: int
    handler: str
    flexible_from: int
    access: tuple[Access, ...]
    refused_below: int = 0
    max_before: int | None = None

    def newest(self, levels: Mapping[str, int]) -> int:
        """The newest version that is advertised at finalized ``levels`` of features."""
        if self.max_before is None or levels.get(TRANSACTION_VERSION, 0) >= 2:
            return self.max_version
        return self.max_before

    @property
    def name(self) -> str:
        """Its name in snake case: also that of its handler's method."""
        return self.key.name.lower()


class Cancellable(Protocol):
    """Something that waits for a client."""

    def cancel(self) -> None:
        """The client is gone."""


@dataclass(slots=True)
class RequestContext:
    """A request's header, and where it came from."""

    api_key: int
    api_version: int
    client_id: str | None
    session: Session
    """Who makes the request, from where, and on which listener."""
    tries: tuple[UUID, ...] = ()
    """Of a forwarded request: the ids of the attempts so far, this one's last."""
    parked: dict[Cancellable, None] | None = None
    """What is cancelled when the client's connection goes; None for a forwarded request."""
    connection: int | None = None
    """The ordinal of its connection in this process; None for a forwarded request."""
    questions: int = 0
    """How often it was asked whether the session may do something."""

    def may(
        self, operation: Op, resource_type: AclResourceType, name: str, *, audited: bool = True
    ) -> bool:
        """Whether whoever makes the request may do something with a resource."""
        self.questions += 1
        return self.session.may(operation, resource_type, name, audited=audited, api=self.api_name)

    @property
    def api_name(self) -> str:
        """The API's name, as the audit log has it: ``create_topics``."""
        return ApiKey(self.api_key).name.lower()

    def permitted(
        self,
        operation: Op,
        resource_type: AclResourceType,
        names: Iterable[str],
        *,
        cluster: Op | None = None,
        audited: bool = False,
    ) -> Steps[Container[object]]:
        """Those of ``names`` with which he may do it. Who may do ``cluster`` on the cluster may do
        it with all.
        """
        self.questions += 1
        if self.session.is_unrestricted or (
            cluster is not None and self.session.may(cluster, *CLUSTER, audited=False)
        ):
            return ALL_GRANTED
        permitted, api = set(), self.api_name
        for name in names:
            yield
            if self.session.may(operation, resource_type, name, audited=audited, api=api):
                permitted.add(name)
        return permitted


IN_TURN: Final = frozenset(
    {
        ApiKey.INIT_PRODUCER_ID,
        ApiKey.ADD_PARTITIONS_TO_TXN,
        ApiKey.ADD_OFFSETS_TO_TXN,
        ApiKey.END_TXN,
        ApiKey.TXN_OFFSET_COMMIT,
        ApiKey.SASL_AUTHENTICATE,
    }
)
"""The next request of a connection is served when such a one is answered, as Kafka does: librdkafka
sends several, and each one's transition would refuse the next one.
"""

FORWARDED: Final = frozenset(
    {
        ApiKey.CREATE_TOPICS,
        ApiKey.DELETE_TOPICS,
        ApiKey.DESCRIBE_ACLS,
        ApiKey.CREATE_ACLS,
        ApiKey.DELETE_ACLS,
        ApiKey.ALTER_CONFIGS,
        ApiKey.CREATE_PARTITIONS,
        ApiKey.ELECT_LEADERS,
        ApiKey.INCREMENTAL_ALTER_CONFIGS,
        ApiKey.ALTER_CLIENT_QUOTAS,
        ApiKey.ALTER_PARTITION_REASSIGNMENTS,
        ApiKey.LIST_PARTITION_REASSIGNMENTS,
        ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS,
        ApiKey.ALTER_USER_SCRAM_CREDENTIALS,
        ApiKey.DESCRIBE_QUORUM,
        ApiKey.UNREGISTER_BROKER,
        ApiKey.ADD_RAFT_VOTER,
        ApiKey.REMOVE_RAFT_VOTER,
    }
)
"""Requests that change metadata, or ask how it is kept: the active controller answers them,
whoever was asked.
"""

BEFORE_LOGIN: Final = frozenset(
    {ApiKey.API_VERSIONS, ApiKey.SASL_HANDSHAKE, ApiKey.SASL_AUTHENTICATE}
)
"""What is served on a SASL listener before a client has logged in."""

MUTATIONS: Final = frozenset({ApiKey.CREATE_TOPICS, ApiKey.DELETE_TOPICS, ApiKey.CREATE_PARTITIONS})
"""What ``controller_mutation_rate`` is for: their responses say how long to wait after it."""

GROUP_MEMBERS: Final = frozenset({ApiKey.JOIN_GROUP, ApiKey.SYNC_GROUP})
"""What of these waits is memory of groups (``kept.groups.max.bytes``)."""

NEVER: Final = 32767
"""``flexible_from`` of an API without flexible versions."""

_BY_HANDLER: Final = (AuthorizedByHandler(),)
_PERMIT_ALL: Final = (PermitAll(),)
_READ_GROUP: Final = (AuthorizeRequest(Op.READ, acl_resources.group),)
_DESCRIBE_GROUPS: Final = (AuthorizeEach(Op.DESCRIBE, acl_resources.group),)
_DELETE_GROUPS: Final = (AuthorizeEach(Op.DELETE, acl_resources.group),)
_DESCRIBE_TOPICS: Final = (AuthorizeEach(Op.DESCRIBE, acl_resources.topic),)
_EPOCHS: Final = (AuthorizeEach(Op.DESCRIBE, acl_resources.topic, cluster=Op.CLUSTER_ACTION),)
_CREATE_TOPICS: Final = (AuthorizeEach(Op.CREATE, acl_resources.topic, cluster=Op.CREATE),)
_ALTER_TOPICS: Final = (AuthorizeEach(Op.ALTER, acl_resources.topic),)
_DELETE_RECORDS: Final = (AuthorizeEach(Op.DELETE, acl_resources.topic),)
_READ_TOPICS: Final = (AuthorizeEach(Op.READ, acl_resources.topic),)
_DESCRIBE_CONFIGS: Final = (AuthorizeEach(Op.DESCRIBE_CONFIGS, acl_resources.configured),)
_ALTER_CONFIGS: Final = (AuthorizeEach(Op.ALTER_CONFIGS, acl_resources.configured),)
_DESCRIBE_IDS: Final = (AuthorizeEach(Op.DESCRIBE, acl_resources.transactional_id),)
_WRITE_ID: Final = (AuthorizeRequest(Op.WRITE, acl_resources.transactional_id),)
_MARK: Final = (AuthorizeRequest(Op.ALTER, otherwise=Op.CLUSTER_ACTION),)
_COMMIT: Final = (*_READ_GROUP, *_READ_TOPICS)
_DELETE_OFFSETS: Final = (AuthorizeRequest(Op.DELETE, acl_resources.group), *_READ_TOPICS)
_ADD_OFFSETS: Final = (*_WRITE_ID, *_READ_GROUP)
_TXN_COMMIT: Final = (*_WRITE_ID, *_READ_GROUP, *_READ_TOPICS)
_DESCRIBE_CLUSTER: Final = (AuthorizeRequest(Op.DESCRIBE),)
_ALTER_CLUSTER: Final = (AuthorizeRequest(Op.ALTER),)
_DESCRIBE_CLUSTER_CONFIGS: Final = (AuthorizeRequest(Op.DESCRIBE_CONFIGS),)
_ALTER_CLUSTER_CONFIGS: Final = (AuthorizeRequest(Op.ALTER_CONFIGS),)

HANDLERS: Final[Mapping[str, str]] = {
    "AclsHandler": "security.acls",
    "ClientQuotasHandler": "security.client_quotas",
    "ClusterHandler": "cluster.describe_cluster",
    "ConfigHandler": "topics.configs",
    "DeleteRecordsHandler": "records.delete_records",
    "DescribeGroupsHandler": "groups.describe_groups",
    "DescribeProducersHandler": "transactions.describe_producers",
    "GroupMembershipHandler": "groups.group_membership",
    "GroupOffsetsHandler": "groups.group_offsets",
    "ListOffsetsHandler": "records.list_offsets",
    "LogDirsHandler": "cluster.describe_log_dirs",
    "MetadataHandler": "cluster.metadata",
    "ProducerIdHandler": "transactions.init_producer_id",
    "QuorumHandler": "cluster.describe_quorum",
    "RaftVotersHandler": "cluster.raft_voters",
    "ReassignmentHandler": "topics.reassignments",
    "SaslHandler": "security.sasl",
    "ScramCredentialsHandler": "security.scram_credentials",
    "TopicsHandler": "topics.topics",
    "TransactionsHandler": "transactions.transactions",
    "WriteTxnMarkersHandler": "transactions.write_txn_markers",
}
"""Handlers' classes, and their modules below ``kept.node.kafka.handlers``."""

APIS: Final = (
    # Produce 0-2 are advertised for librdkafka (KAFKA-18659) and refused on use.
    Api(ApiKey.PRODUCE, 0, 13, "", 9, _BY_HANDLER, refused_below=3),
    Api(ApiKey.FETCH, 4, 18, "", 12, _BY_HANDLER),
    Api(ApiKey.LIST_OFFSETS, 1, 11, "ListOffsetsHandler", 6, _DESCRIBE_TOPICS),
    Api(ApiKey.METADATA, 0, 13, "MetadataHandler", 9, _BY_HANDLER),
    Api(ApiKey.OFFSET_COMMIT, 2, 10, "GroupOffsetsHandler", 8, _COMMIT),
    Api(ApiKey.OFFSET_FETCH, 1, 10, "GroupOffsetsHandler", 6, _BY_HANDLER),
    Api(ApiKey.FIND_COORDINATOR, 0, 6, "GroupMembershipHandler", 3, _BY_HANDLER),
    Api(ApiKey.JOIN_GROUP, 0, 9, "GroupMembershipHandler", 6, _READ_GROUP),
    Api(ApiKey.HEARTBEAT, 0, 4, "GroupMembershipHandler", 4, _READ_GROUP),
    Api(ApiKey.LEAVE_GROUP, 0, 5, "GroupMembershipHandler", 4, _READ_GROUP),
    Api(ApiKey.SYNC_GROUP, 0, 5, "GroupMembershipHandler", 4, _READ_GROUP),
    Api(ApiKey.DESCRIBE_GROUPS, 0, 6, "DescribeGroupsHandler", 5, _DESCRIBE_GROUPS),
    Api(ApiKey.LIST_GROUPS, 0, 5, "DescribeGroupsHandler", 3, _BY_HANDLER),
    Api(ApiKey.SASL_HANDSHAKE, 0, 1, "SaslHandler", NEVER, _PERMIT_ALL),
    Api(ApiKey.API_VERSIONS, 0, 4, "", 3, _PERMIT_ALL),  # answered below
    Api(ApiKey.CREATE_TOPICS, 2, 7, "TopicsHandler", 5, _CREATE_TOPICS),
    Api(ApiKey.DELETE_TOPICS, 1, 6, "TopicsHandler", 4, _BY_HANDLER),
    Api(ApiKey.DELETE_RECORDS, 0, 2, "DeleteRecordsHandler", 2, _DELETE_RECORDS),
    Api(ApiKey.INIT_PRODUCER_ID, 0, 5, "ProducerIdHandler", 2, _BY_HANDLER),
    Api(ApiKey.OFFSET_FOR_LEADER_EPOCH, 2, 4, "ListOffsetsHandler", 4, _EPOCHS),
    Api(ApiKey.ADD_PARTITIONS_TO_TXN, 0, 5, "TransactionsHandler", 3, _BY_HANDLER),
    Api(ApiKey.ADD_OFFSETS_TO_TXN, 0, 4, "TransactionsHandler", 3, _ADD_OFFSETS),
    Api(ApiKey.END_TXN, 0, 5, "TransactionsHandler", 3, _WRITE_ID, max_before=4),
    Api(ApiKey.WRITE_TXN_MARKERS, 1, 2, "WriteTxnMarkersHandler", 1, _MARK),
    Api(ApiKey.TXN_OFFSET_COMMIT, 0, 5, "GroupOffsetsHandler", 3, _TXN_COMMIT, max_before=4),
    Api(ApiKey.DESCRIBE_ACLS, 1, 3, "AclsHandler", 2, _DESCRIBE_CLUSTER),
    Api(ApiKey.CREATE_ACLS, 1, 3, "AclsHandler", 2, _ALTER_CLUSTER),
    Api(ApiKey.DELETE_ACLS, 1, 3, "AclsHandler", 2, _ALTER_CLUSTER),
    Api(ApiKey.DESCRIBE_CONFIGS, 1, 4, "ConfigHandler", 4, _DESCRIBE_CONFIGS),
    Api(ApiKey.ALTER_CONFIGS, 0, 2, "ConfigHandler", 2, _ALTER_CONFIGS),
    Api(ApiKey.DESCRIBE_LOG_DIRS, 1, 5, "LogDirsHandler", 2, _DESCRIBE_CLUSTER),
    Api(ApiKey.SASL_AUTHENTICATE, 0, 2, "SaslHandler", 2, _PERMIT_ALL),
    Api(ApiKey.CREATE_PARTITIONS, 0, 3, "TopicsHandler", 2, _ALTER_TOPICS),
    Api(ApiKey.DELETE_GROUPS, 0, 2, "DescribeGroupsHandler", 2, _DELETE_GROUPS),
    Api(ApiKey.ELECT_LEADERS, 0, 2, "ReassignmentHandler", 2, _ALTER_CLUSTER),
    Api(ApiKey.INCREMENTAL_ALTER_CONFIGS, 0, 1, "ConfigHandler", 1, _ALTER_CONFIGS),
    Api(ApiKey.ALTER_PARTITION_REASSIGNMENTS, 0, 1, "ReassignmentHandler", 0, _ALTER_CLUSTER),
    Api(ApiKey.LIST_PARTITION_REASSIGNMENTS, 0, 0, "ReassignmentHandler", 0, _DESCRIBE_CLUSTER),
    Api(ApiKey.OFFSET_DELETE, 0, 0, "GroupOffsetsHandler", NEVER, _DELETE_OFFSETS),
    Api(
        ApiKey.DESCRIBE_USER_SCRAM_CREDENTIALS,
        0,
        0,
        "ScramCredentialsHandler",
        0,
        _DESCRIBE_CLUSTER,
    ),
    Api(ApiKey.ALTER_USER_SCRAM_CREDENTIALS, 0, 0, "ScramCredentialsHandler", 0, _ALTER_CLUSTER),
    Api(ApiKey.DESCRIBE_CLIENT_QUOTAS, 0, 1, "ClientQuotasHandler", 1, _DESCRIBE_CLUSTER_CONFIGS),
    Api(ApiKey.ALTER_CLIENT_QUOTAS, 0, 1, "ClientQuotasHandler", 1, _ALTER_CLUSTER_CONFIGS),
    Api(ApiKey.DESCRIBE_QUORUM, 0, 2, "QuorumHandler", 0, _DESCRIBE_CLUSTER),
    Api(ApiKey.DESCRIBE_CLUSTER, 0, 2, "ClusterHandler", 0, _PERMIT_ALL),
    Api(ApiKey.DESCRIBE_PRODUCERS, 0, 0, "DescribeProducersHandler", 0, _READ_TOPICS),
    Api(ApiKey.UNREGISTER_BROKER, 0, 0, "ClusterHandler", 0, _ALTER_CLUSTER),
    Api(ApiKey.DESCRIBE_TRANSACTIONS, 0, 0, "TransactionsHandler", 0, _DESCRIBE_IDS),
    Api(ApiKey.LIST_TRANSACTIONS, 0, 2, "TransactionsHandler", 0, _BY_HANDLER),
    Api(ApiKey.DESCRIBE_TOPIC_PARTITIONS, 0, 0, "ClusterHandler", 0, _BY_HANDLER),
    Api(ApiKey.ADD_RAFT_VOTER, 0, 1, "RaftVotersHandler", 0, _ALTER_CLUSTER),
    Api(ApiKey.REMOVE_RAFT_VOTER, 0, 0, "RaftVotersHandler", 0, _ALTER_CLUSTER),
)


@cache
def served() -> dict[int, Api]:
    """The APIs of this node by key."""
    return {api.key: api for api in APIS}


def handler_class(api: Api) -> type[Any]:
    """The class that serves an API; imports its module."""
    module = import_module(f"kept.node.kafka.handlers.{HANDLERS[api.handler]}")
    cls: type[Any] = getattr(module, api.handler)
    return cls


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

    from kept.client.protocol import messages as protocol

    for key in _FIRST_ASKED:
        api = served()[key]
        handler_class(api)
        for version in {api.max_version, min(api.max_version, api.flexible_from)}:
            protocol.message_type(key, version, EntityType.request)
            protocol.message_type(key, version, EntityType.response)
    for name in (
        "compaction.cleaner",
        "http.routes",
        "metrics.definitions",
    ):
        import_module(f"kept.node.{name}")


def _compact(text: str) -> bytes:
    return uvarint(len(text) + 1) + text.encode()


def _tag(number: int, body: bytes) -> bytes:
    return uvarint(number) + uvarint(len(body)) + body


def _features(version: int, levels: Mapping[str, int], epoch: int) -> bytes:
    """The tagged fields: what this node supports (before v4 without what begins at 0, KIP-584), and
    what is finalized, as known at ``epoch``.
    """
    tags = []
    if version >= 4 and SUPPORTED:
        each = [
            _compact(feature.name) + struct.pack(">hh", 0, feature.max_level) + b"\0"
            for feature in SUPPORTED
        ]
        tags.append(_tag(0, uvarint(len(each) + 1) + b"".join(each)))
    if levels:
        each = [_compact(name) + struct.pack(">hh", at, at) + b"\0" for name, at in levels.items()]
        tags.append(_tag(1, struct.pack(">q", epoch)))
        tags.append(_tag(2, uvarint(len(each) + 1) + b"".join(each)))
    return uvarint(len(tags)) + b"".join(tags)


def _api_versions_body(
    version: int, error_code: int, levels: Mapping[str, int] = NO_LEVELS, epoch: int = -1
) -> bytes:
    """ApiVersionsResponse."""
    flexible = version >= 3
    apis = served().values()
    out = bytearray(error_code.to_bytes(2, "big"))
    out += uvarint(len(apis) + 1) if flexible else len(apis).to_bytes(4, "big")
    for api in apis:
        for value in (api.key, api.min_version, api.newest(levels)):
            out += value.to_bytes(2, "big")
        if flexible:
            out += b"\0"
    if version >= 1:
        out += bytes(4)
    if flexible:
        out += _features(version, levels, epoch)
    return bytes(out)


def api_versions_response(version: int, body: memoryview, image: Image) -> bytes:
    """The answer to ApiVersions, in the version asked for, with the features of ``image``, whose
    index is their epoch: producers look again at what is finalized when it has grown.

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
    return _answer(version, tuple(image.features.items()), image.index if image.features else -1)


@lru_cache(maxsize=8)
def _answer(version: int, levels: tuple[tuple[str, int], ...], epoch: int) -> bytes:
    return _api_versions_body(version, error_codes.NONE, dict(levels), epoch)
