"""What is attacked, and how one attempt at it goes: everything follows from ``random``."""

from __future__ import annotations

import base64
import binascii
import json
import ssl
import struct
from collections.abc import Awaitable, Callable
from contextlib import suppress
from itertools import islice
from random import Random
from typing import Any, Final

import jwt

from kept.client.admin.groups import decode_assignment, decode_subscription
from kept.client.protocol import messages as protocol
from kept.client.security.certificates import parse_certificate
from kept.client.security.distinguished_names import PrincipalMapper, distinguished_name
from kept.client.security.jaas import parse_jaas
from kept.client.security.pem import Place, key_store, trust_store
from kept.client.security.properties import parse_properties
from kept.client.security.scram import ScramClient
from kept.client.security.security import Security
from kept.client.security.tls import server_context, tls_config
from kept.node.config.bootstrap_scram import parse_bootstrap_scram
from kept.node.config.checks import parse_super_users
from kept.node.internode.frames import FrameKind, encode
from kept.node.internode.hello import PREFACE, packed
from kept.node.internode.protobuf_conversion import codecs
from kept.node.security.oauth.json_web_keys import parse_keys
from kept.storage.errors import KeptError
from tests.fuzz import node_messages, seeds
from tests.fuzz.exchange import Exchange, connected
from tests.fuzz.mutation import TEXTS, mutated, retyped
from tests.fuzz.site import ADMIN, EVE, FUZZ, PASSWORD, PLAINTEXT, SASL, SASL_SSL, SSL, Site

HANDSHAKE, AUTHENTICATE, API_VERSIONS = 17, 36, 18
FETCH, FOR_LEADER_EPOCH = 1, 23


async def frames(site: Site, random: Random) -> None:
    """Kafka's requests: whole ones between damaged ones, then whatever."""
    known = seeds.frames()
    async with connected(site.ports[PLAINTEXT], random) as exchange:
        for _ in range(random.randint(1, 4)):
            frame = random.choice(known)
            kind = random.random()
            if kind < 0.6:  # the length is right: what is in the frame is reached
                body = mutated(frame[4:], random, known)
                frame = struct.pack(">i", len(body)) + body
            elif kind < 0.8:
                frame = mutated(frame, random, known)
            await exchange.send(frame, random)
        await _leave(exchange, random)


async def sasl(site: Site, random: Random) -> None:
    """Logins by PLAIN: requests, tokens, and their order."""
    token = random.choice(
        (f"\0{EVE}\0{PASSWORD}", f"{EVE}\0{EVE}\0{PASSWORD}", "\0\0", f"\0{ADMIN}\0x")
    ).encode()
    mechanism = random.choice(("PLAIN", "SCRAM-SHA-256", "X"))
    version = random.randint(0, 2)
    parts = [
        seeds.request(HANDSHAKE, random.choice((0, 1, 1)), mechanism=mechanism),
        seeds.request(AUTHENTICATE, version, auth_bytes=_maybe(token, random)),
        seeds.request(API_VERSIONS, 0),
    ]
    if random.random() < 0.3:
        random.shuffle(parts)
    if random.random() < 0.2:
        parts[1] = struct.pack(">i", len(token)) + token
    async with connected(site.ports[SASL], random) as exchange:
        for part in parts:
            await exchange.send(_maybe(part, random), random)
            await exchange.read_some()
        await _leave(exchange, random)


async def scram(site: Site, random: Random) -> None:
    """Logins by SCRAM whose messages are damaged, reordered or another one's."""
    client = ScramClient("SCRAM-SHA-256", random.choice((EVE, EVE, "nobody")), PASSWORD)
    async with connected(site.ports[SASL], random) as exchange:
        await exchange.send(seeds.request(HANDSHAKE, 1, mechanism="SCRAM-SHA-256"), random)
        await exchange.read_frame()
        answer: bytes | None = None
        for _ in range(2):
            try:
                token = client.step(answer) or b""
            except KeptError:
                token = b"c=biws,r=x,p=eA=="
            token = random.choice((_keep, _keep, mutated, _shuffled, _text_into))(token, random)
            await exchange.send(seeds.request(AUTHENTICATE, 2, auth_bytes=token), random)
            frame = await exchange.read_frame()
            if not frame:
                return
            with suppress(KeptError, struct.error, IndexError, ValueError):
                answer = protocol.decode_response(AUTHENTICATE, 2, frame)[1].auth_bytes
        await exchange.send(random.choice(seeds.frames()), random)
        await _leave(exchange, random)


async def tokens(site: Site, random: Random) -> None:
    """Logins by access tokens, over Kafka's protocol and HTTP, whose parts are damaged before the
    issuer signs them, or after; and sets of keys.
    """
    members = {"use": "sig", "key_ops": ["verify"], "alg": "ES256"}
    key_set: Any = {"keys": [site.issuer.public("k1") | members]}
    for _ in range(random.choice((0, 1, 1, 2))):
        key_set = retyped(key_set, random)
    with suppress(ValueError):
        parse_keys(_maybe(json.dumps(key_set).encode(), random))
    token = _token(site, random)
    if random.random() < 0.3:
        head = b"GET /api/v1/cluster HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer "
        async with connected(site.ports[SASL], random) as exchange:
            await exchange.send(head + token + b"\r\n\r\n", random)
            await _leave(exchange, random)
        return
    message = _maybe(b"n,a=eve,\x01host=x\x01auth=Bearer " + token + b"\x01\x01", random)
    async with connected(site.ports[SASL], random) as exchange:
        await exchange.send(seeds.request(HANDSHAKE, 1, mechanism="OAUTHBEARER"), random)
        await exchange.read_frame()
        for data in (message, random.choice((b"\x01", message, b""))):
            await exchange.send(seeds.request(AUTHENTICATE, 2, auth_bytes=data), random)
            await exchange.read_some()
        await exchange.send(random.choice(seeds.frames()), random)
        await _leave(exchange, random)


def _token(site: Site, random: Random) -> bytes:
    header = _maybe(b'{"alg":"ES256","kid":"k1","typ":"JWT"}', random)
    claims = _maybe(b'{"sub":"eve","aud":["kafka"],"iat":1,"exp":4102444800,"scope":"a"}', random)
    signed = b".".join(base64.urlsafe_b64encode(one).rstrip(b"=") for one in (header, claims))
    key, algorithm = site.issuer.keys["k1"]
    signature: bytes = jwt.get_algorithm_by_name(algorithm).sign(signed, key)
    token = signed + b"." + base64.urlsafe_b64encode(signature).rstrip(b"=")
    return mutated(token, random) if random.random() < 0.3 else token


def _keep(data: bytes, _: Random) -> bytes:
    return data


def _shuffled(token: bytes, random: Random) -> bytes:
    fields = token.split(b",")
    random.shuffle(fields)
    return b",".join(fields)


def _text_into(token: bytes, random: Random) -> bytes:
    at = random.randint(0, len(token))
    return token[:at] + random.choice(TEXTS) + token[at:]


async def tls(site: Site, random: Random) -> None:
    """Handshakes of which a flight is damaged, and records behind a handshake that are."""
    port = site.ports[random.choice((SSL, SASL_SSL))]
    if random.random() < 0.5:
        hello = random.choice(seeds.client_hellos())
        async with connected(port, random) as exchange:
            await exchange.send(mutated(hello, random, seeds.client_hellos()), random)
            await exchange.read_some()
            if random.random() < 0.5:
                await exchange.send(random.randbytes(random.choice((1, 5, 300))), random)
            await _leave(exchange, random)
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(site.ca_path)
    if random.random() < 0.5:
        context.maximum_version = ssl.TLSVersion.TLSv1_2
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(incoming, outgoing, server_hostname="localhost")
    damage = random.randint(0, 3)
    """Which flight is damaged; 0 and 1 are the handshake's."""
    async with connected(port, random) as exchange:
        for flight in range(8):
            try:
                client.do_handshake()
                break
            except ssl.SSLWantReadError:
                pass
            except ssl.SSLError:
                return
            data = outgoing.read()
            await exchange.send(mutated(data, random) if flight == damage else data, random)
            answer = await exchange.read_some()
            if not answer:
                return
            incoming.write(answer)
        else:
            return
        for _ in range(random.randint(1, 3)):
            client.write(_maybe(random.choice(seeds.frames()), random))
            data = outgoing.read()
            await exchange.send(mutated(data, random) if damage >= 2 else data, random)
        await _leave(exchange, random)


async def http(site: Site, random: Random) -> None:
    """HTTP/1: damaged requests, and a whole one behind them."""
    known = seeds.http_requests()
    async with connected(site.ports[random.choice((PLAINTEXT, SASL))], random) as exchange:
        for _ in range(random.randint(1, 3)):
            await exchange.send(_maybe(random.choice(known), random), random)
        await _leave(exchange, random)


async def grpc(site: Site, random: Random) -> None:
    """HTTP/2: frames that are damaged, missing, repeated, in another order or another stream's."""
    parts = list(random.choice(seeds.grpc_calls()))
    for _ in range(random.choice((0, 1, 1, 3))):
        at = random.randrange(len(parts))
        change = random.randrange(5)
        if change == 0:
            parts[at] = mutated(parts[at], random)
        elif change == 1:
            parts.insert(at, random.choice(parts))
        elif change == 2 and len(parts) > 1:
            del parts[at]
        elif change == 3:
            random.shuffle(parts)
        else:
            kind, flags = random.randrange(12), random.randrange(256)
            stream = random.choice((0, 1, 2, 3, 2**31 - 1))
            parts.insert(
                at,
                seeds.h2_frame(kind, flags, stream, random.randbytes(random.choice((0, 4, 8, 50)))),
            )
    preface = seeds.PREFACE if random.random() < 0.9 else mutated(seeds.PREFACE, random)
    async with connected(site.ports[PLAINTEXT], random) as exchange:
        await exchange.send(preface + b"".join(parts), random)
        await _leave(exchange, random)


async def nodes(site: Site, random: Random) -> None:
    """The listener between nodes: Hellos, frames, messages of Raft, calls, snapshots."""
    own = node_messages.hello(site, random)
    async with connected(site.node_port, random) as exchange:
        greeting = packed(own)
        if random.random() < 0.1:
            greeting = mutated(greeting, random)
        await exchange.send(PREFACE + greeting, random)
        await exchange.read_some()
        opening = encode(FrameKind.OPEN, body=codecs().hello.to_bytes(own))
        if random.random() < 0.1:
            opening = node_messages.damaged(opening, mutated, random)
        await exchange.send(opening, random)
        await exchange.read_some()
        frames = node_messages.frames(site, own.node_id, random)
        for frame in islice(frames, random.randint(1, 12)):
            if random.random() < 0.6:
                frame = node_messages.damaged(frame, mutated, random)
            await exchange.send(frame, random)
        await _leave(exchange, random)


async def replicas(site: Site, random: Random) -> None:
    """Kafka's protocol on the listener between nodes: fetches of replicas that are none."""
    topic = site.parts.metadata.image.topics.get(FUZZ)
    partition = {
        "partition": 0,
        "current_leader_epoch": random.choice((-1, 0, 5)),
        "fetch_offset": random.choice((0, 1, 1 << 40)),
        "last_fetched_epoch": -1,
        "log_start_offset": 0,
        "partition_max_bytes": 1000,
    }
    replica = random.choice(node_messages.STRANGERS)
    fetch = {
        "max_wait": 50,
        "min_bytes": 1,
        "max_bytes": 1000,
        "isolation_level": 0,
        "session_id": 0,
        "session_epoch": random.choice((-1, 0)),
        "forgotten_topics_data": [],
        "rack_id": "",
        "cluster_id": None,
    }
    by_name = {"topics": [{"topic": FUZZ, "partitions": [partition]}]}
    frames = [seeds.request(FETCH, 12, replica_id=replica, **fetch, **by_name)]
    if topic is not None:
        by_id = {"topics": [{"topic_id": topic.topic_id, "partitions": [partition]}]}
        state = {"replica_id": replica, "replica_epoch": 1 << 62}
        frames.append(seeds.request(FETCH, 17, replica_state=state, **fetch, **by_id))
    asked = {"partition": 0, "current_leader_epoch": -1, "leader_epoch": random.choice((0, 1))}
    epochs = [{"topic": FUZZ, "partitions": [asked]}]
    frames.append(seeds.request(FOR_LEADER_EPOCH, 4, replica_id=replica, topics=epochs))
    async with connected(site.node_port, random) as exchange:
        for _ in range(random.randint(1, 4)):
            frame = random.choice(frames)
            if random.random() < 0.6:
                # What is behind the API's key: other requests are those of a node, who may do all.
                body = frame[4:8] + mutated(frame[8:], random)
                frame = struct.pack(">i", len(body)) + body
            await exchange.send(frame, random)
        await _leave(exchange, random)


async def properties(_: Site, random: Random) -> None:
    """Files and settings of text: a value, or the error that the reader says it raises."""
    for seed, read, raises in _READERS:
        data = mutated(seed, random)
        with suppress(raises):
            read(data.decode(random.choice(("latin-1", "utf-8")), "replace"))


def _security(text: str) -> Security:
    return Security(parse_properties(text, "x"))


def _mapped(text: str) -> str:
    mapper = PrincipalMapper(text)
    with suppress(ValueError):
        return mapper.name("CN=ada,OU=dev,O=Acme")
    return ""


_READERS: Final[tuple[tuple[bytes, Callable[[str], Any], type[Exception]], ...]] = (
    (seeds.PROPERTIES, _security, KeptError),
    (seeds.JAAS, parse_jaas, KeptError),
    (seeds.RULES, _mapped, KeptError),
    (seeds.SCRAM_USERS, parse_bootstrap_scram, ValueError),
    (b"User:a;User:CN=x\\;y,O=z; User:b", parse_super_users, ValueError),
)


async def certificates(site: Site, random: Random) -> None:
    """PEM stores and the certificates in them."""
    place = Place("ssl.keystore.location", "x")
    pem = mutated(site.keys_pem, random).decode("latin-1")
    with suppress(KeptError):
        key_store(pem, pem, "", place, place)
    with suppress(KeptError):
        trust_store(pem, place)
    with suppress(KeptError):
        server_context(tls_config({"ssl.keystore.key": pem, "ssl.keystore.certificate.chain": pem}))
    body = site.keys_pem.partition(b"BEGIN CERTIFICATE-----")[2].partition(b"-----END")[0]
    der = mutated(binascii.a2b_base64(body), random)
    with suppress(ValueError):
        distinguished_name(parse_certificate(der).subject)


async def group_metadata(_: Site, random: Random) -> None:
    """What members of a group write for each other, and whoever describes the group reads."""
    known = seeds.group_metadata()
    for decode in (decode_subscription, decode_assignment):
        with suppress(KeptError):
            decode(mutated(random.choice(known), random, known))


def _maybe(data: bytes, random: Random) -> bytes:
    return mutated(data, random) if random.random() < 0.6 else data


async def _leave(exchange: Exchange, random: Random) -> None:
    """Read what comes, or do not; end the stream, or break it off."""
    if random.random() < 0.3:
        exchange.end()
    if random.random() < 0.5:
        await exchange.read()


Attempt = Callable[[Site, Random], Awaitable[Any]]
TARGETS: Final[dict[str, Attempt]] = {
    attempt.__name__: attempt
    for attempt in (
        frames,
        sasl,
        scram,
        tokens,
        tls,
        http,
        grpc,
        nodes,
        replicas,
        properties,
        certificates,
        group_metadata,
    )
}
