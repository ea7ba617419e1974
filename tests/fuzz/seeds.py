"""What is damaged: requests, handshakes and texts that are right."""

from __future__ import annotations

import base64
import json
import ssl
import struct
from functools import cache
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlencode

import yaml
from kio.static.constants import EntityType

from kept.client.admin.groups import encode_assignment, encode_subscription
from kept.client.protocol import messages as protocol
from kept.client.security.jaas import PLAIN_MODULE, SCRAM_MODULE
from kept.node.http import route_table
from kept.node.kafka import api
from kept.node.proto import broker_pb2
from kept.storage.records import build_batch
from kept.storage.types import TopicPartition
from tests.fuzz.site import EVE, FUZZ, PASSWORD
from tests.support.made_requests import made

BATCH: Final = build_batch([(1, b"k", b"v" * 50, (("h", b"x"),))])


@cache
def frames() -> tuple[bytes, ...]:
    """A request of every API in its oldest and its newest version."""
    found = []
    for served in api.APIS:
        oldest = max(served.min_version, served.refused_below)
        for version in sorted({oldest, served.max_version}):
            cls = protocol.message_type(served.key, version, EntityType.request)
            values: dict[str, Any] = made(cls, FUZZ)
            if served.key == api.PRODUCE:
                for topic in values["topic_data"]:
                    for partition in topic["partition_data"]:
                        partition.update(index=0, records=BATCH)
            found.append(protocol.encode_request(served.key, version, 7, FUZZ, values))
    return tuple(found)


def request(key: int, version: int, **values: Any) -> bytes:
    """A frame of one request."""
    return protocol.encode_request(key, version, 7, FUZZ, values)


@cache
def group_metadata() -> tuple[bytes, ...]:
    """A subscription and an assignment of members of a consumer group."""
    partitions = [TopicPartition(topic, n) for topic in (FUZZ, "t") for n in range(3)]
    return encode_subscription([FUZZ, "t"]), encode_assignment(partitions)


@cache
def client_hellos() -> tuple[bytes, ...]:
    """First messages of TLS clients."""
    found = []
    for newest in (ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3):
        for alpn in ((), ("h2",), ("http/1.1", "h2")):
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.maximum_version = newest
            if alpn:
                context.set_alpn_protocols(alpn)
            outgoing = ssl.MemoryBIO()
            client = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="localhost")
            try:
                client.do_handshake()
            except ssl.SSLWantReadError:
                found.append(outgoing.read())
    return tuple(found)


_LOGIN: Final = base64.b64encode(f"{EVE}:{PASSWORD}".encode()).decode()


GIVEN: Final[dict[str, Any]] = {
    "topic": FUZZ,
    "group": FUZZ,
    "transactional_id": FUZZ,
    "name": FUZZ,
    "broker": "0",
    "partition": 0,
    "offset": 0,
    "start": 0,
    "end": 9,
    "limit": 3,
    "leaders": "true",
    "key": "k",
    "contains": "v",
    "header": "h=v",
    "newest": "true",
    "to": 4102444800000,
}
"""Values of parameters."""
BODIES: Final[dict[str, dict[str, Any]]] = {
    "compaction/now": {"topic": FUZZ, "partition": 0, "wait": True},
    "compaction/retry": {"topic": FUZZ, "partition": 0},
    "partitions/elect": {"topic": FUZZ, "partition": 0},
    "voters/add": {"node_id": 7, "address": "localhost:1"},
    "voters/remove": {"node_id": 7},
    "topics/create": {"topic": FUZZ, "partitions": 1, "config": {"retention.ms": "1"}},
    "topics/alter": {"topic": FUZZ, "set": {"retention.ms": "86400000"}, "delete": []},
    "topics/delete": {"topic": FUZZ},
    "produce": {"topic": FUZZ, "partition": 0, "key": "k", "value": "v", "headers": []},
    "groups/reset-offsets": {"group": FUZZ, "topic": FUZZ, "to": "earliest", "dry_run": True},
    "brokers/config": {"broker": 0, "set": {"log.cleaner.backoff.ms": "100"}, "delete": []},
}
"""What each route with POST takes."""


def _http(method: str, where: str, body: Any = None) -> bytes:
    lines = [f"{method} {where} HTTP/1.1", "Host: localhost", "X-Kept: 1"]
    lines.append(f"Authorization: Basic {_LOGIN}")
    data = "" if body is None else json.dumps(body)
    if data:
        lines.append(f"Content-Length: {len(data)}")
    return ("\r\n".join(lines) + "\r\n\r\n" + data).encode()


@cache
def api_requests() -> tuple[bytes, ...]:
    """One to every route of docs/openapi.yaml."""
    page = Path(__file__).resolve().parents[2] / "docs" / "openapi.yaml"
    api = yaml.load(page.read_text(encoding="utf-8"), yaml.CSafeLoader)
    known = api["components"]["parameters"]
    found = []
    for path, methods in api["paths"].items():
        for method, operation in methods.items():
            names = [
                known[given["$ref"].rpartition("/")[2]] if "$ref" in given else given
                for given in operation.get("parameters", ())
            ]
            query = {
                given["name"]: GIVEN[given["name"]]
                for given in names
                if given["in"] == "query" and given["name"] in GIVEN
            }
            where = path.format_map(GIVEN)
            if method == "get" and query:
                where = f"{where}?{urlencode(query)}"
            body = BODIES[path.removeprefix(route_table.API)] if method == "post" else None
            found.append(_http(method.upper(), where, body))
    return tuple(found)


@cache
def http_requests() -> tuple[bytes, ...]:
    """A request to every route that its handler takes, and some that are special."""
    found = [*api_requests()]
    for path, methods in route_table.ROUTES.items():
        if not path.startswith(route_table.API):
            found += [_http(method, path) for method in methods]
    chunked = b"POST /api/v1/compaction/now HTTP/1.1\r\nHost: localhost\r\nX-Kept: 1\r\n"
    chunked += b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"a":\r\n2\r\n1}\r\n0\r\n\r\n'
    upgrade = (
        b"GET / HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\r\n"
    )
    return (*found, chunked, upgrade, found[0] * 3)


PREFACE: Final = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST, SETTINGS, PING, GOAWAY, WINDOW, CONTINUATION = 0, 1, 3, 4, 6, 7, 8, 9
END_STREAM, END_HEADERS = 1, 4


def h2_frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """A frame of HTTP/2."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _headers(path: str) -> bytes:
    """Literals without indexing (RFC 7541, 6.2.2)."""
    pairs = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": "localhost",
        "content-type": "application/grpc",
        "te": "trailers",
        "grpc-timeout": "2S",
        "authorization": f"Basic {_LOGIN}",
    }
    return b"".join(
        b"\0" + bytes([len(name)]) + name.encode() + bytes([len(value)]) + value.encode()
        for name, value in pairs.items()
    )


@cache
def grpc_calls() -> tuple[tuple[bytes, ...], ...]:
    """Calls as frames: settings, headers, data and what ends a stream."""
    pb = broker_pb2
    calls = {
        "/broker.Broker/Produce": pb.ProduceRequest(topic=FUZZ, key=b"k", payload=b"v"),
        "/broker.Broker/Consume": pb.ConsumeRequest(topic=FUZZ, partition=0, offset=0),
        "/broker.Broker/CreateTopic": pb.CreateTopicRequest(topic="other", partitions=1),
        "/grpc.health.v1.Health/Check": pb.ConsumeRequest(),
        "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": pb.ConsumeRequest(
            topic="x"
        ),
        "/no.Such/Method": pb.ConsumeRequest(),
    }
    found = []
    for path, message in calls.items():
        data = message.SerializeToString()
        body = b"\0" + struct.pack(">I", len(data)) + data
        found.append(
            (
                h2_frame(SETTINGS, 0, 0),
                h2_frame(HEADERS, END_HEADERS, 1, _headers(path)),
                h2_frame(DATA, END_STREAM, 1, body),
                h2_frame(WINDOW, 0, 0, struct.pack(">I", 65536)),
                h2_frame(PING, 0, 0, bytes(8)),
                h2_frame(RST, 0, 1, struct.pack(">I", 8)),
            )
        )
    return tuple(found)


PROPERTIES: Final = f"""# a client's
security.protocol=SASL_SSL
sasl.mechanism : SCRAM-SHA-512
sasl.jaas.config={SCRAM_MODULE} required \\
    username="{EVE}" password="p\\u0041=;\\"x";
ssl.truststore.type PEM
ssl.truststore.location=/nowhere
!another = comment
""".encode()
JAAS: Final = (
    f'{PLAIN_MODULE} required username="a" password="b" user_a="b\\"c" user_{EVE}="d";'.encode()
)
RULES: Final = (
    rb"RULE:^CN=([a-z]+),OU=(.*?),.*$/$1@$2/L,RULE:^.*[Cc][Nn]=([^,]+).*$/x\/$1/U,DEFAULT"
)
SCRAM_USERS: Final = (
    b"SCRAM-SHA-256=[name=ada,iterations=4096,password=p],SCRAM-SHA-512=[name='b b',password=q]"
)
