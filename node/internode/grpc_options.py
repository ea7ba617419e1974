"""How gRPC is set up here: imported before ``grpc`` by everything that uses it.

grpc reads the environment when it is loaded: without fork support (workers are exec'ed, and it
would warn), and without lines of its own on stderr, since we say ourselves what went wrong.
"""

from __future__ import annotations

import os
from typing import Final

os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")
os.environ.setdefault("GRPC_VERBOSITY", "NONE")

KEEPALIVE_MS: Final = 10_000
"""A connection on which nothing comes for so long is asked for a sign of life."""
KEEPALIVE_TIMEOUT_MS: Final = 5_000
"""And is broken when none comes within this: the host is gone (a process leaves FIN or RST)."""
MAX_MESSAGE_BYTES: Final = 64 * 1024 * 1024
"""Largest message between nodes: some appended entries, or a forwarded request."""
HANDSHAKE_MS: Final = 5_000
"""A connection that speaks no HTTP/2 for so long is closed."""
IDLE_MS: Final = 60_000
"""A connection without a stream or call for so long is closed; a node's has its Raft stream."""
HELLO_S: Final = 5.0
"""A stream that does not begin with a Hello within this is ended."""
STREAM_S: Final = 60.0
"""A connection on which no stream with a Hello is open for so long is closed, whatever else it
does; a node's calls go over the connection of its Raft stream."""
MAX_STREAMS: Final = 1_000
"""RPCs of one connection at a time."""

_BOTH: Final = (
    ("grpc.keepalive_time_ms", KEEPALIVE_MS),
    ("grpc.keepalive_timeout_ms", KEEPALIVE_TIMEOUT_MS),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
CLIENT: Final = (
    *_BOTH,
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # each channel has a connection of its own
    ("grpc.enable_retries", 0),
)
SERVER: Final = (
    *_BOTH,
    ("grpc.http2.min_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.http2.min_recv_ping_interval_without_data_ms", KEEPALIVE_MS // 2),
    ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
    ("grpc.max_connection_idle_ms", IDLE_MS),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.so_reuseport", 0),
)

RAFT: Final = "/kept.node.v1.Peers/Raft"
SNAPSHOT: Final = "/kept.node.v1.Peers/Snapshot"
CONTROL: Final = "/kept.node.v1.Peers/Control"
CONTROLLER: Final = "kept.node.v1.Controller"
MANIFESTS: Final = "kept.node.v1.Manifests"

HELLO_KEY: Final = "kept-hello-bin"
"""Metadata of a unary call: the caller's Hello."""
ERROR_KEY: Final = "kept-error"
"""Trailing metadata of a failed call: the class of the error."""
LEADER_KEY: Final = "kept-leader"
"""Trailing metadata too: the leader that a NotController names."""
