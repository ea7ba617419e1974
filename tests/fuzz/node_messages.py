"""What a node that is none says on the listener between nodes: messages that are right, but for who
sends them.

The sender names the cluster and an id that no broker has, so that what it sends is reached; nothing
of it may change the cluster: it is no voter, and no broker that was registered. What a node could
rightly change for everybody (who votes, other brokers' registrations) is not among it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from random import Random
from typing import Any, Final
from uuid import UUID

from crc32c import crc32c
from kio.static.constants import EntityType

from kept.client.protocol import messages as protocol
from kept.client.protocol.api_keys import ApiKey
from kept.cluster.controller.brokers import RegisterRequest
from kept.cluster.controller.heartbeats import HeartbeatRequest, ReplicaLog
from kept.cluster.metadata.records import Endpoint
from kept.cluster.metadata.voters import Voter as RaftVoter
from kept.cluster.metadata.wal import Entry
from kept.cluster.raft import messages as raft
from kept.node.config.listeners import ConfiguredVoter
from kept.node.internode import controller_rpc as rpc
from kept.node.internode import manifest_rpc
from kept.node.internode import protobuf_conversion as conversion
from kept.node.internode.frames import CHUNK_BYTES, MORE, FrameKind, LongBody, encode
from kept.node.internode.identity import Hello
from kept.node.internode.snapshot_chunks import Piece
from kept.node.kafka import api
from kept.replication.manifests_events import ManifestRef
from kept.storage.types import Generation
from tests.fuzz.site import EVE, FUZZ, Site
from tests.support.made_requests import made

OWN_ID: Final = 0
"""Of the node that is attacked."""
STRANGERS: Final = range(3, 8)
"""Ids that senders give themselves."""
ABSENT: Final = 200
"""An id that nobody has, also not by a flipped bit."""
DISK: Final = UUID(int=7)
_HEAD_BYTES: Final = 11
"""Of a frame before its body."""


def hello(site: Site, random: Random) -> Hello:
    """How a sender presents itself: mostly as one of this cluster."""
    cluster_id = site.parts.identity.cluster_id
    return Hello(
        cluster_id if random.random() < 0.9 else random.choice(("", "another")),
        random.choice(STRANGERS),
        UUID(int=random.getrandbits(128)),
        voters=random.choice(((), (ConfiguredVoter(OWN_ID, "localhost", site.node_port),))),
        has_log=random.random() < 0.5,
        directory_id=DISK,
        wanted=random.choice((None, OWN_ID)),
    )


def frames(site: Site, sender: int, random: Random) -> Iterator[bytes]:
    """Frames of one connection, in any order and number."""
    topic = site.parts.metadata.image.topics.get(FUZZ)
    topic_id = DISK if topic is None else topic.topic_id
    messages = _raft_messages(sender, site.parts.metadata.raft_node.term + random.randint(-1, 2))
    calls = _calls(sender, topic_id)
    number = 0
    while True:
        number += 1
        kind = random.random()
        if kind < 0.4:
            yield encode(FrameKind.MESSAGE, body=random.choice(messages))
        elif kind < 0.8:
            method, body = random.choice(calls)
            yield encode(FrameKind.REQUEST, number, conversion.METHODS[method], body)
        elif kind < 0.9:
            yield encode(random.choice(tuple(FrameKind)), random.choice((0, 1, number)))
        elif kind < 0.95:
            yield from _snapshot(sender, random)
        else:
            yield from _long(number, random)


def damaged(frame: bytes, mutate: Any, random: Random) -> bytes:
    """A frame with damage: of its body, whose length is right then, or of whatever is in it."""
    if random.random() < 0.75 and len(frame) > _HEAD_BYTES:
        body = mutate(frame[_HEAD_BYTES:], random)[:CHUNK_BYTES]
        size = len(body) + _HEAD_BYTES - 4
        return size.to_bytes(4, "big") + frame[4:_HEAD_BYTES] + body
    damaged_frame: bytes = mutate(frame, random)
    return damaged_frame


def _raft_messages(sender: int, term: int) -> list[bytes]:
    head: dict[str, Any] = {
        "term": max(term, 0),
        "sender": sender,
        "to": OWN_ID,
        "directory_id": DISK,
    }
    end = {"last_index": 9, "last_term": 0}
    known = [
        raft.PreVote(**head, **end, suspect=OWN_ID),
        raft.PreVoteReply(**head, granted=True),
        raft.Vote(**head, **end, transfer=True),
        raft.VoteReply(**head, granted=True),
        raft.AppendEntries(
            **head, prev_index=0, prev_term=0, entries=(Entry(0, 1, b"x"),), round=3
        ),
        raft.AppendEntries(**head, prev_index=9, prev_term=0, commit_index=1 << 40, acknowledged=7),
        raft.AppendEntriesReply(**head, accepted=True, match_index=1 << 40, round=3),
        raft.AppendEntriesReply(**head, accepted=False, match_index=0, hint_index=5, hint_term=1),
        raft.InstallSnapshot(
            **head, **end, image_bytes=b"none", voters=(RaftVoter(sender, DISK, "localhost", 1),)
        ),
        raft.SnapshotReply(**head, match_index=9, round=3),
        raft.TimeoutNow(**head),
        raft.Observe(**head, **end),
        raft.LeaderHint(
            **head, leader_id=sender, last_index=1 << 40, voters=(sender,), cluster_id="another"
        ),
    ]
    return [conversion.encode_raft(message) for message in known]


_FORWARDED: Final = (
    ApiKey.CREATE_TOPICS,
    ApiKey.DELETE_TOPICS,
    ApiKey.CREATE_PARTITIONS,
    ApiKey.CREATE_ACLS,
    ApiKey.DELETE_ACLS,
    ApiKey.INCREMENTAL_ALTER_CONFIGS,
    ApiKey.ALTER_CLIENT_QUOTAS,
)


@cache
def _forwarded() -> tuple[tuple[int, int, bytes], ...]:
    """Key, version and body of requests of clients that nodes send on."""
    found = []
    for key in _FORWARDED:
        version = api.served()[key].max_version
        cls = protocol.message_type(key, version, EntityType.request)
        body = protocol.encode(protocol.build(cls, made(cls, FUZZ)))
        found.append((int(key), version, body))
    return tuple(found)


def _calls(sender: int, topic_id: UUID) -> list[tuple[str, bytes]]:
    ref = ManifestRef(Generation(0, 3), 100)
    pull = manifest_rpc.ManifestPull(topic_id, 0, 0, 1, ref, ref, True, 5, (ref,))
    change = rpc.IsrChange(topic_id, 0, 0, 0, (rpc.IsrMember(sender, 5),))
    log = ReplicaLog(topic_id, 0, 0, 1 << 30, 1 << 62)
    requests: list[tuple[str, Any]] = [
        ("Heartbeat", HeartbeatRequest(sender, 5, 1 << 40, logs=(log,))),
        ("AlterPartitions", rpc.AlterPartitionsRequest(sender, 5, (change,))),
        ("AllocateProducerIds", rpc.AllocateProducerIdsRequest(sender, 5)),
        ("Confirm", rpc.ConfirmRequest(sender, 5)),
        ("ChangeVoters", rpc.ChangeVotersRequest(True, ABSENT, DISK, "localhost", 1)),
        ("ChangeVoters", rpc.ChangeVotersRequest(False, ABSENT, DISK)),
        ("PullManifests", manifest_rpc.PullManifestsRequest(sender, 5, (pull, pull))),
        ("ManifestChunk", manifest_rpc.ManifestChunkRequest(topic_id, 0, 0, ref, 1 << 40)),
        (
            "ManifestNews",
            manifest_rpc.ManifestNewsRequest(sender, (manifest_rpc.ManifestNews(topic_id, 0, 0),)),
        ),
        (
            # It stays fenced: no heartbeat has its epoch.
            "Register",
            RegisterRequest(sender, DISK, (Endpoint("NONE", "PLAINTEXT", "localhost", 1),)),
        ),
    ]
    requests += [
        (
            "Forward",
            rpc.ForwardRequest(
                key, version, body, "PLAINTEXT", FUZZ, "10.0.0.1", (DISK,), f"User:{EVE}", "PLAIN"
            ),
        )
        for key, version, body in _forwarded()
    ]
    requests += [
        ("PeerHttp", rpc.PeerHttpRequest("GET", f"/api/v1/{path}", json.dumps(query), "{}"))
        for path, query in (
            ("topics", {}),
            (f"topics/{FUZZ}", {"limit": "3"}),
            ("pulse", {"topic": FUZZ, "partition": "0"}),
            ("records", {"topic": FUZZ, "partition": "0", "offset": "0"}),
        )
    ]
    codecs = conversion.codecs()
    return [(method, codecs.calls[method][0].to_bytes(request)) for method, request in requests]


def _snapshot(sender: int, random: Random) -> Iterator[bytes]:
    """The head of a large snapshot, and pieces of which some do not fit."""
    image = random.randbytes(3000)
    message = raft.InstallSnapshot(
        term=1,
        sender=sender,
        to=OWN_ID,
        directory_id=DISK,
        last_index=9,
        last_term=1,
        image_bytes=image,
        voters=(RaftVoter(sender, DISK, "localhost", 1),),
    )
    yield encode(FrameKind.SNAPSHOT_HEAD, body=conversion.encode_snapshot_head(message))
    for position in random.sample((0, 1000, 2000, 1 << 40), 3):
        data = image[position : position + 1000]
        piece = Piece(position, data, crc32c(data))
        yield encode(FrameKind.SNAPSHOT_CHUNK, body=conversion.encode_snapshot_chunk(piece))


def _long(number: int, random: Random) -> Iterator[bytes]:
    """A body in several frames, which may lack its last one."""
    method = random.choice(tuple(conversion.METHODS.values()))
    rest = LongBody(FrameKind.REQUEST, number, method, bytes(3 * CHUNK_BYTES))
    while rest.rest_bytes:
        frame = rest.next_frame()
        if frame[4] & MORE or random.random() < 0.5:
            yield frame
